"""The gradient of a trained factor of the scores in Triton's interpreter, where softmaxes are nearly or wholly saturated.

A program of its own because TRITON_INTERPRET must be set before triton is first imported. Prints one line of JSON for each factor:
the errors of ours and of eager code against float64, each the largest of a dozen draws.

q is a multiple of k, so the largest score of a row is its own, and the factor's gradient sum(dS * S) has dS = p * (dP - delta) of
rounded sums times scores of 16 to 130.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fa_inductor.reference import attention_grads
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import direct
from fa_inductor.templates.configs import TileConfig

SPEC = AttentionSpec.parse("attention(score=score)")
#: Log-sum-exps of 16 to 42, 24 to 63, 48 to 126.
FACTORS = (0.5, 0.75, 1.5)
_TILE = TileConfig(32, 16, 4, 1)
_CONFIGS = direct.Configs(_TILE, TileConfig(16, 32, 4, 1), _TILE, _TILE)


def errors(factor: float, seed: int) -> tuple[float, float]:
    """(ours, eager code's)."""
    g = torch.Generator().manual_seed(seed)
    k, grad_out = torch.randn(2, 1, 1, 64, 64, generator=g)
    q, v = k * factor, k

    def of_factor(grad: torch.Tensor) -> float:
        return float((grad.double() * k.double()).sum())

    out, lse = direct.forward(q, k, v, [], (), SPEC, _CONFIGS)
    dq = direct.backward(grad_out, q, k, v, out, lse, [], (), SPEC, [True] * 3, _CONFIGS)[0]
    exact = attention_grads(grad_out.double(), q.double(), k.double(), v.double(), [], (), SPEC, [True] * 3, torch.float64)[0]
    leaf = q.clone().requires_grad_()
    (eager,) = torch.autograd.grad(torch.softmax(leaf @ k.mT, -1) @ v, leaf, grad_out)
    assert dq is not None
    assert exact is not None
    return abs(of_factor(dq) - of_factor(exact)), abs(of_factor(eager) - of_factor(exact))


if __name__ == "__main__":
    for factor in FACTORS:
        ours, eager = (max(x) for x in zip(*(errors(factor, seed) for seed in range(12)), strict=True))
        print(json.dumps({"factor": factor, "ours": ours, "eager": eager}), flush=True)
