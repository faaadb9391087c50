"""Gradients of what a program's sinks read, from the statistics of the rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.spec import AttentionSpec


def sink_gradients(
    lse: Tensor, delta: Tensor, keys: int, captures: Sequence[Tensor], sizes: Sequence[int], spec: AttentionSpec,
    wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The gradient of each captured tensor that is wanted, as far as sinks read it; None for the others.

    A sink has no value, so only the normalisation passes a gradient: its weight exp(sink - lse) times -delta.

    Args:
        lse: [B, Hq, M] float32; delta: the same, sum_d out * grad_out. keys: number of keys.
    """
    slots = [i for i, want in enumerate(wanted) if want]
    grads: list[Tensor | None] = [None] * len(captures)
    if not slots:
        return grads
    shape = (*lse.shape, keys)

    def values(*leaves: Tensor) -> tuple[Tensor, ...]:
        tensors = list(captures)
        for slot, leaf in zip(slots, leaves, strict=True):
            tensors[slot] = leaf
        env = reference.Env.full(shape, tensors, sizes, lse.device, torch.float32)
        return tuple(reference.evaluate(s, env).expand(*lse.shape, 1).squeeze(-1) for s in spec.sinks)

    sinks, pull = torch.func.vjp(values, *(captures[i].detach().float() for i in slots))
    if spec.dead_rows == "zero":
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
    # A sink is part of its row's sum; where rounding hides that, it must not make up a weight above 1.
    found = pull(tuple(-delta * torch.exp((s - lse).clamp_max(0.0)) for s in sinks))
    for slot, grad in zip(slots, found, strict=True):
        grads[slot] = grad.to(captures[slot].dtype)
    return grads
