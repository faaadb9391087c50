"""The table of look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.patterns.forms import HEADS, Draw

LOOKALIKES: dict[str, Lookalike] = {}

Inputs = Callable[[Draw], tuple[Any, ...]]


#: The reason where the softmax is over another axis than that of the keys.
OTHER_AXIS = "softmax is not taken over the axis that the product with V sums over"


@dataclass(frozen=True)
class Lookalike:
    """A function that must keep its own meaning; ``reason`` is part of what the report says of it, None for nothing."""

    fn: Callable
    reason: str | None
    draw: Inputs


def square(d: Draw) -> tuple[Tensor, ...]:
    """As many queries as keys as features: a wrong axis has the right size."""
    return tuple(d.normal(2, HEADS, 8, 8) for _ in range(3))


def plus(*shape: int) -> Inputs:
    """q, k, v and one more float tensor."""
    return lambda d: (*square(d), d.normal(*shape))


def lookalike(reason: str | None, draw: Inputs = square) -> Callable[[Callable], Callable]:
    """Registers a function by its name."""

    def register(fn: Callable) -> Callable:
        LOOKALIKES[fn.__name__] = Lookalike(fn, reason, draw)
        return fn

    return register
