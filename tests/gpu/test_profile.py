"""``explain(model, profile=True)`` on the GPU: the profiler's time of every kind of kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fa_inductor
from fa_inductor.templates import select

pytestmark = pytest.mark.gpu


def two_kinds(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias is for the general template; a causal mask over long sequences for the architecture's own kernel, if any."""
    q = torch.softmax(q @ k.mT * 0.125 + bias, -1) @ v
    at = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.mT * 0.125).masked_fill(at[None, :] > at[:, None], float("-inf"))
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("trained", [False, True])
def test_each_site_has_its_time(trained: bool) -> None:
    q, k, v = (torch.randn(2, 16, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=trained) for _ in range(3))
    bias = torch.randn(16, 4096, 4096, device="cuda", dtype=torch.bfloat16)
    report = fa_inductor.explain(two_kinds, profile=True)(q, k, v, bias)
    assert [s.status for s in report.sites] == ["fused", "fused"], str(report)
    if torch.cuda.get_device_capability() == (9, 0):
        assert [s.template == select.HOPPER for s in report.sites] == [False, True], str(report)
    assert [s.evidence for s in report.sites] == ["profiler shows its time"] * 2, str(report)
    for site in report.sites:
        # 2 x 16 heads of 4096 x 4096 x 128: half of 0.27 TFLOP at 1 PFLOP/s is 0.14 ms.
        assert site.milliseconds is not None
        assert 0.1 < site.milliseconds < 1000


@pytest.mark.parametrize("options", [{"fp8": "e4m3"}, {"fp8": "int8-e4m3"}])
def test_fp8(options: dict[str, str]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 tensor cores")
    q, k, v = (torch.randn(1, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        report = fa_inductor.explain(lambda q, k, v: torch.softmax(q @ k.mT * 0.1, -1) @ v, profile=True, options=options)(q, k, v)
    (site,) = report.fused
    assert site.fp8 == options["fp8"], str(report)
    assert site.evidence == "profiler shows its time", str(report)
