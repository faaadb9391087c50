"""Gradients of sinks from the statistics of the rows, against float64."""

from __future__ import annotations

import pytest
import torch

from fa_inductor import reference
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.sm90.sinks import sink_gradients


@pytest.mark.parametrize(
    "program",
    [
        "score=where(kv_idx <= q_idx, score * 0.1, -inf), sinks=[f0[h]]",
        "score=score * 0.1, sinks=[f0[h] * 2.0, f1[b, q_idx]]",
        "score=where(kv_idx <= q_idx - 9, score * 0.1, -inf), sinks=[f0[h]], dead_rows='zero'",
    ],
)
def test_gradients(program: str) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec.parse(f"attention({program})")
    q, k, v, grad = (torch.randn(2, h, 50, 16, dtype=torch.float64) for h in (4, 2, 2, 4))
    captures = [torch.randn(4), torch.randn(2, 50)][: 1 + ("f1" in program)]
    if "zero" in program:
        captures[0][1] = -torch.inf  # some rows are left with nothing
    doubles = [c.double() for c in captures]
    out, lse = reference.attention(q, k, v, doubles, [], spec)
    wanted = [True] * len(captures)
    want = reference.attention_grads(grad, q, k, v, doubles, [], spec, [False] * 3 + wanted)[3:]
    found = sink_gradients(lse.float(), (out * grad).sum(-1).float(), 50, captures, [], spec, wanted)
    for ours, true in zip(found, want, strict=True):
        assert ours is not None
        assert true is not None
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5)
    assert sink_gradients(lse.float(), lse.float(), 50, captures, [], spec, [False] * len(captures)) == [None] * len(captures)
