"""What a form is, and the inputs that forms share: tensors are [B, H, M, D] unless a form says otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 10, 14, 8
INF = float("inf")


class Draw:
    """Random inputs of one form; floats are float64 and get rounded to the dtype under test by the caller."""

    def __init__(self, seed: int = 0):
        self.g = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.g)

    def qkv(self, rows: int = ROWS, keys: int = KEYS, kv_heads: int = HEADS, v_dim: int = DIM) -> tuple[Tensor, ...]:
        q = self.normal(BATCH, HEADS, rows, DIM)
        return q, self.normal(BATCH, kv_heads, keys, DIM), self.normal(BATCH, kv_heads, keys, v_dim)

    def keep(self, *shape: int) -> Tensor:
        """A bool mask that keeps most keys, and the first of every row."""
        mask = torch.rand(shape, generator=self.g) < 0.7
        mask[..., 0] = True
        return mask


def qkv(d: Draw) -> tuple[Tensor, ...]:
    return d.qkv()


@dataclass(frozen=True)
class Form:
    """``make()`` gives the function or module, ``draw`` its inputs; floats get gradients but those in ``frozen``.

    ``fused`` is the number of attentions in it.
    """

    name: str
    make: Callable[[], Callable]
    draw: Callable[[Draw], tuple[Any, ...]] = qkv
    fused: int = 1
    frozen: tuple[int, ...] = ()


FORMS: dict[str, Form] = {}


def form(draw: Callable[[Draw], tuple[Any, ...]] = qkv, **more: Any) -> Callable[[Callable], Callable]:
    """Registers a function as a form of its name."""

    def register(fn: Callable) -> Callable:
        make = fn if isinstance(fn, type) else lambda: fn
        FORMS[fn.__name__] = Form(fn.__name__, make, draw, **more)
        return fn

    return register


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
