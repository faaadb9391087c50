"""The lowerings on a machine without a GPU: they install, and the op's own kernel runs inside a compiled graph."""

from __future__ import annotations

import pytest
import torch

from fa_inductor import lowering, ops, reference
from tests.templates import families


@pytest.mark.parametrize("kernel", ["triton", "reference"])
@pytest.mark.parametrize("name", ["causal", "alibi", "dropout"])
def test_cpu_runs_the_eager_kernel(name: str, kernel: str) -> None:
    lowering.register()
    lowering.register()
    family = families.BY_NAME[name]
    o = families.draw(family, torch.float32, "cpu")
    leaves = [t.requires_grad_(need) for t, need in zip([o.q, o.k, o.v, *o.captures], o.needs_grad, strict=True)]

    @torch.compile
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *captures: torch.Tensor) -> torch.Tensor:
        return ops.flash_attention(q, k, v, list(captures), [], family.program, kernel)[0] * 2.0

    out = run(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(out, wanted, o.grad_out)
    expected = reference.attention(*leaves[:3], leaves[3:], [], family.spec())[0] * 2.0
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, wanted, o.grad_out), strict=True):
        torch.testing.assert_close(ours, theirs)
