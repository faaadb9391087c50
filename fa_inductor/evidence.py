"""Evidence that the kernels of a report's fused sites run: one call under torch's profiler.

The graph holds one op for each fused site. It runs as a generated Triton kernel, whose name holds the op's, or as an eager
op, which the profiler names; either way one event of a forward pass for each site, in the order of the sites.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .report import FusionReport

_KERNEL = re.compile(r"triton_tem_fused_\w*(flash|fp8|fp8_projected)_attention(?!_backward)")
_OP = re.compile(r"fa_inductor::((flash|plain|hopper)_attention|(hopper_)?fp8(_projected)?_attention)$")


def profiled(report: FusionReport, call: Callable[[], Any]) -> FusionReport:
    """`report` with the evidence and the milliseconds of its fused sites filled in from one run of `call`.

    Where the profiler sees another number of our kernels than there are fused sites (a graph ran twice or not at all, a
    kernel is under a C++ wrapper), no time can be said to be a site's: the sites stay as they are and a note says so.
    """
    if not report.fused:
        call()
        return report
    times = _times(call)
    if len(times) != len(report.fused):
        seen = f"the profiler saw {len(times)} attention kernels for {len(report.fused)} fused sites"
        return replace(report, notes=[*report.notes, f"{seen}: their times are not given to sites"])
    of_site = iter(times)
    sites = [
        replace(s, evidence="profiler shows its time", milliseconds=next(of_site)) if s.status == "fused" else s
        for s in report.sites
    ]
    return replace(report, sites=sites)


def _times(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of every attention kernel of the forward passes in `call`, in the order in which they ran."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        call()  # what compiles at the first call does not count
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found: list[tuple[float, float]] = []
    for event in profiler.events() or ():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu and _KERNEL.match(event.name):
            found.append((event.time_range.start, event.time_range.elapsed_us()))
        elif not on_gpu and _OP.match(event.name):
            # Of an op that launches kernels the time of those, of one on the CPU its own.
            found.append((event.time_range.start, event.device_time_total or event.cpu_time_total))
    return [us / 1e3 for _, us in sorted(found)]
