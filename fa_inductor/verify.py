"""``options={"verify": True}``: the first call of a compiled graph is compared with the unfused graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fa_inductor.errors import VerificationError
from fa_inductor.graph_pass import PassResult

log = logging.getLogger("fa_inductor")

# Rounding of the fused and the unfused path each, in units of the dtype's epsilon, over a model's depth. In low precision
# most sums still run in float32, so that only the few roundings in between count.
_ROUNDINGS = {torch.float64: 256, torch.float32: 256, torch.float16: 32, torch.bfloat16: 16}


def tolerance(t: torch.Tensor, in_fp8: bool = False) -> float:
    """Largest absolute difference that rounding explains for values as large as those of ``t``."""
    finite = t[torch.isfinite(t)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    unit = _ROUNDINGS.get(t.dtype, 16) * torch.finfo(t.dtype).eps
    # FP8 rounds four operands of each sum, whose terms round independently of each other.
    return max(unit, 2 * torch.finfo(torch.float8_e4m3fn).eps if in_fp8 else 0.0) * max(largest, 1e-6)


def checked(original: fx.GraphModule, compiled: Callable, result: PassResult) -> Callable:
    """``compiled``, whose first call also runs ``original`` and raises :class:`VerificationError` where they differ.

    Fused and unfused code draw different random numbers (for dropout, say), so a graph that draws any is not compared.
    """
    sites = [s for s in result.sites if s.status == "fused"]
    in_fp8 = any(s.fp8 and not s.fp8.startswith("not ") for s in sites)
    pending = True

    def run(*args: Any) -> Any:
        nonlocal pending
        if not pending:
            return compiled(*args)
        pending = False
        expected, random = _unfused(original, args)
        got = compiled(*args)
        if random:
            log.warning("verify: the graph draws random numbers, fused and unfused path cannot be compared")
        else:
            _compare(expected, got, sites, in_fp8)
        return got

    return run


def _unfused(original: fx.GraphModule, args: Sequence[Any]) -> tuple[Any, bool]:
    """(what ``original`` gives on copies of ``args``, whether it drew random numbers); generators are put back."""
    devices = sorted({a.device.index or 0 for a in args if isinstance(a, torch.Tensor) and a.is_cuda})

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]

    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        before = states()
        copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        expected = original(*copies)
        return expected, not all(map(torch.equal, before, states()))


def _compare(expected: Any, got: Any, sites: Sequence[object], in_fp8: bool) -> None:
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    for e, g in pairs:
        if not (isinstance(e, torch.Tensor) and isinstance(g, torch.Tensor) and e.is_floating_point()):
            continue
        g = g.detach()
        limit = tolerance(e, in_fp8)
        same = (e == g) | (torch.isnan(e) & torch.isnan(g))
        error = torch.where(same, 0.0, (e.double() - g.double()).abs())
        worst = float("inf") if bool(torch.isnan(error).any()) else error.max().item() if error.numel() else 0.0
        if worst > limit:
            raise VerificationError(sites[0] if len(sites) == 1 else [str(s) for s in sites], worst, limit)
