"""A grammar of attention functions: :func:`generate` turns choices into the source of a function and its inputs.

Choices come from a :class:`Chooser`, which hypothesis or a plain random generator implements; the simplest option is always
the first. The source names the model's dtype ``DT``, the wide softmax dtype ``WIDE`` and fills by name, so the same text run
with ``DT = WIDE = torch.float64`` is the exact reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F

T = TypeVar("T")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FILLS = ("-math.inf", "FMIN", "-1e9", "-1e4", "-5.0", "0.0")


class Chooser(Protocol):
    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``."""


def turn(choose: Chooser, meaning: bool) -> None:
    """Says what the next choices are about: what is computed (``meaning``), or how it is written.

    A chooser that cares has a method of this name; it can so draw many spellings of one attention.
    """
    told = getattr(choose, "turn", None)
    if told is not None:
        told(meaning)


@dataclass(frozen=True)
class Input:
    """One tensor argument: ``fill`` names how it is made (see :func:`make_inputs`)."""

    name: str
    shape: tuple[int, ...]
    fill: str = "normal"
    dtype: str = "DT"
    grad: bool = False
    low: int = 0
    high: int = 2


@dataclass
class Example:
    """A runnable function and what it should become."""

    lines: list[str] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    dynamic: bool = False
    full: bool = False
    must_match: bool = True
    why_not: str = ""

    @property
    def source(self) -> str:
        names = ", ".join(i.name for i in self.inputs)
        return "\n".join([f"def f({names}):", *(f"    {line}" for line in self.lines)]) + "\n"

    def placed(self, device: str) -> Example:
        """The same, with the tensors that the function itself makes on ``device``."""
        return self if device == "cpu" else replace(self, lines=[_placed(line, device) for line in self.lines])

    def function(self, dtype: torch.dtype | None = None) -> Any:
        """The function, in ``dtype`` throughout where one is given."""
        wide = torch.float32 if self.dtype.itemsize < 8 else torch.float64
        scope = {
            "torch": torch, "F": F, "math": math, "DT": dtype or self.dtype, "WIDE": dtype or wide,
            "FMIN": torch.finfo(self.dtype).min,
        }  # fmt: skip
        exec(compile(self.source, "<fuzz>", "exec"), scope)
        return scope["f"]

    def repro(self, seed: int) -> str:
        """A script that runs the example again."""
        return (
            f"# dynamic={self.dynamic}, full={self.full}, must_match={self.must_match} {self.why_not}\n"
            f"{self.source}"
            f"from tests.fuzz.generate import Example, Input\nfrom tests.fuzz.running import run\nimport torch\n"
            f"run(Example({self.lines!r}, {self.inputs!r}, {self.dtype}, {self.dynamic}, {self.full}, "
            f"{self.must_match}, {self.why_not!r}), seed={seed})\n"
        )

    def refuse(self, why: str) -> None:
        """This spelling need not be matched (and often must not)."""
        self.must_match, self.why_not = False, self.why_not or why


_MADE = re.compile(r"\btorch\.(arange|ones|zeros|eye|full|tensor)\(")


def _placed(line: str, device: str) -> str:
    """``line`` with the device as a last argument of every call that makes a tensor."""
    for found in reversed(list(_MADE.finditer(line))):
        at, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[at], 0)
            at += 1
        line = f"{line[: at - 1]}, device={device!r}{line[at - 1 :]}"
    return line


def make_inputs(example: Example, seed: int) -> list[torch.Tensor]:
    """The arguments of one call."""
    gen = torch.Generator("cpu").manual_seed(seed)
    return [_make(i, example, gen) for i in example.inputs]


def _make(i: Input, example: Example, gen: torch.Generator) -> torch.Tensor:
    dtype = {"DT": example.dtype, "WIDE": torch.float32 if example.dtype.itemsize < 8 else torch.float64}.get(i.dtype)
    dtype = dtype or getattr(torch, i.dtype)
    if i.fill == "int":
        return torch.randint(i.low, i.high, i.shape, generator=gen).to(dtype)
    if i.fill == "sorted":
        return torch.randint(i.low, i.high, i.shape, generator=gen).sort(-1).values.to(dtype)
    if i.fill == "bool":  # key 0 is kept in most rows, so that most rows have a key
        keep = torch.rand(i.shape, generator=gen) > 0.35
        if keep.dim() and torch.rand((), generator=gen) > 0.3:
            keep[..., 0] = True
        return keep
    if i.fill == "padding":  # 1 up to a length, then 0
        lengths = torch.randint(1, i.shape[-1] + 1, i.shape[:-1], generator=gen)
        return (torch.arange(i.shape[-1]) < lengths[..., None]).to(dtype)
    if i.fill == "inf":
        off = torch.rand(i.shape, generator=gen) < 0.3
        return torch.zeros(i.shape).masked_fill(off, -math.inf).to(dtype)
    x = torch.randn(i.shape, generator=gen, dtype=torch.float64)
    if i.fill == "positive":
        x = x.abs() + 0.2
    return x.to(dtype).requires_grad_(i.grad)


@dataclass
class Shapes:
    """Sizes of one example: ``lead`` are the batch dimensions of the score matrix, heads last."""

    lead: tuple[int, ...]
    kv_lead: tuple[int, ...]
    m: int
    n: int
    d: int
    dv: int
    group: int = 1

    @property
    def scores(self) -> tuple[int, ...]:
        return (*self.lead, self.m, self.n)


class Writer:
    """Collects lines and inputs of an example while the grammar runs."""

    def __init__(self, choose: Chooser, example: Example, shapes: Shapes, grads: bool):
        self.pick, self.example, self.shapes, self.grads = choose.pick, example, shapes, grads
        self.choose = choose
        self.count = 0

    def line(self, text: str) -> None:
        self.example.lines.append(text)

    def flag(self, one_in: int) -> bool:
        return self.pick([False] * (one_in - 1) + [True])

    def input(self, stem: str, shape: Sequence[int], fill: str = "normal", dtype: str = "DT", low: int = 0, high: int = 2) -> str:
        self.count += 1
        name = f"{stem}{self.count}"
        trainable = fill in ("normal", "positive") and self.grads and self.pick([True, True, False])
        self.example.inputs.append(Input(name, tuple(shape), fill, dtype, trainable, low, high))
        return name


def generate(choose: Chooser) -> Example:
    """One example."""
    from tests.fuzz import grammar

    pick = choose.pick
    turn(choose, meaning=True)
    example = Example(dtype=pick([torch.float32] * 4 + list(DTYPES)))
    grads = pick([True, True, False])
    writer = Writer(choose, example, _shapes(choose), grads)
    grammar.attention(writer)
    example.dynamic = pick([False] * 19 + [True])
    example.full = pick([False] * 7 + [True])
    if 1 in (writer.shapes.m, writer.shapes.n, writer.shapes.d, writer.shapes.dv):
        example.refuse("sizes of 1 make products that are none")
    return example


def _shapes(choose: Chooser) -> Shapes:
    pick = choose.pick
    lengths = [5, 2, 3, 4, 6, 7, 8, 9, 13, 1]
    m = pick(lengths)
    n = pick([m, m, *lengths])
    d = pick([4, 2, 3, 5, 7, 8, 16, 33, m, 1])
    dv = pick([d, d, d, 3, 8, n, 16, 1])
    turn(choose, meaning=False)
    batch, heads = pick([2, 1, 3]), pick([2, 1, 4])
    turn(choose, meaning=True)
    rank = pick([4, 4, 4, 3, 5])
    group = pick([1, 1, 1, 2, 4]) if rank == 4 else 1
    lead = {3: (batch,), 4: (batch, heads * group), 5: (batch, pick([3, 1, 2]), heads)}[rank]
    return Shapes(lead, (*lead[:-1], heads) if rank == 4 else lead, m, n, d, dv, group)
