"""What the text of a score program takes from its launch: captured tensors, their strides and sizes, run-time sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Captured:
    """The values of ``names`` (CAP<slot>, CAP<slot>_S<dim>, CAP<slot>_N<dim>, SIZE<i>) for tensors shaped as ``captures``."""

    def __init__(self, names: Sequence[str], captures: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self._values = [_value(name, captures, sizes) for name in names]

    def __call__(self, captures: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple(captures[slot] if number is None else number for slot, number in self._values)


def _value(name: str, captures: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, int | None]:
    """(slot, None) of a tensor, else (0, number)."""
    if name.startswith("SIZE"):
        return 0, sizes[int(name[4:])]
    slot, _, which = name[3:].partition("_")
    if not which:
        return int(slot), None
    t, dim = captures[int(slot)], int(which[1:])
    return 0, t.stride(dim) if which[0] == "S" else t.shape[dim]


def layout_of(captures: Sequence[Tensor]) -> tuple[Any, ...]:
    """What of captured tensors a prepared launch depends on: pointers of one alignment launch one compiled kernel."""
    return tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in captures)
