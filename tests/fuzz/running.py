"""Runs one example of the grammar through the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz.generate import Example, make_inputs
from tests.fuzz.oracle import Compiled, call, check, copy_args


def arguments(example: Example, seed: int = 0, device: str = "cpu") -> list[Tensor]:
    """The arguments of one call, on ``device``."""
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in make_inputs(example, seed)]


def valid(example: Example, device: str = "cpu") -> bool:
    """Whether eager runs it: in-place writes may meet what autograd has saved."""
    try:
        call(example.placed(device).function(), copy_args(arguments(example, 0, device)))
    except RuntimeError:
        return False
    return True


def run(example: Example, seed: int = 0, made: Compiled | None = None, device: str = "cpu", dynamo: bool = True) -> int:
    """Checks one example; returns how many attentions fused. ``dynamo`` as :func:`tests.fuzz.oracle.check` has it."""
    placed = example.placed(device)
    made = check(
        placed.function(),
        arguments(example, seed, device),
        exact_fn=placed.function(torch.float64),
        dtype=example.dtype,
        dynamic=example.dynamic,
        full=example.full,
        made=made,
        dynamo=dynamo,
        draw=lambda i: arguments(example, seed + 1000 * i, device),
    )
    for site in made.sites:
        if site.reason.startswith(("analysis failed", "the graph could not be read")):
            raise AssertionError(site.reason)
    return made.fused
