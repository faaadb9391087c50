"""Three attentions with three outcomes on a CPU: one fused, one declined, one rejected.

Report: ``cd examples && python -m fa_inductor explain three_attentions:model``
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


# --8<-- [start:functions]
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (50.0 * torch.tanh(scores / 50.0)).softmax(-1) @ v


def over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


# --8<-- [end:functions]


def three(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return causal(q, k, v), softcapped(q, k, v), over_the_queries(q, k, v)


def model() -> tuple[object, tuple[Tensor, ...]]:
    """What ``explain`` takes: (function or module, its arguments). q, k and v are [batch, heads, tokens, head_dim]."""
    return three, tuple(torch.randn(1, 4, 512, 32) for _ in range(3))
