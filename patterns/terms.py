"""Terms that exist only while a region is analysed; a finished :class:`~fa_inductor.spec.AttentionSpec` has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from fa_inductor.expr import BOOL, FLOAT, INT, Expr

Index = tuple[sympy.Expr, ...]

_INTEGRAL = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
)  # fmt: skip


@dataclass(frozen=True)
class Lin(Expr):
    """An integer known as a sympy expression of index and size symbols."""

    value: sympy.Expr
    kind = INT

    def __str__(self) -> str:
        return f"[{self.value}]"


@dataclass(frozen=True)
class Elem(Expr):
    """One element of the ATen value ``node``."""

    node: fx.Node
    index: Index
    kind: str = FLOAT

    def __str__(self) -> str:
        return f"{self.node.name}{list(self.index)}"


@dataclass(frozen=True)
class RowValue(Expr):
    """A reduction of the scores over the key axis: the same number for every key of a row.

    ``detached``: no gradient flows through this use of it.
    """

    node: fx.Node
    index: Index
    detached: bool = False
    kind = FLOAT

    def __str__(self) -> str:
        return f"row:{self.node.name}{list(self.index)}"


@dataclass(frozen=True)
class Dropped(Expr):
    """A softmax weight after dropout with probability ``p``."""

    inner: Expr
    p: float
    kind = FLOAT

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.inner,)

    def __str__(self) -> str:
        return f"dropout({self.inner}, {self.p})"


class Unsupported(Exception):
    """An ATen node that the analysis does not see through; ``node`` is where it stopped."""

    def __init__(self, reason: str, node: fx.Node | None = None):
        super().__init__(reason)
        self.reason, self.node = reason, node


def value_of(node: fx.Node) -> object:
    """The fake result of an ATen node, None where it has none."""
    return node.meta.get("val")


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of an ATen node; raises :class:`Unsupported` where it is none."""
    v = value_of(node)
    if not isinstance(v, torch.Tensor):
        raise Unsupported(f"{node.name} is not a tensor", node)
    return v


def size(d: object) -> sympy.Expr:
    """A dimension (int, SymInt or the node of one) as a sympy expression."""
    if isinstance(d, fx.Node):
        d = value_of(d)
    if isinstance(d, torch.SymInt):
        return _divided(d.node.expr)
    return sympy.Integer(d)


@lru_cache(maxsize=4096)
def _divided(e: sympy.Expr) -> sympy.Expr:
    """``e`` with divisions carried out that leave no rest: equal sizes share a symbol, and a reshape may yield (s * s) // s."""
    for atom in e.atoms(FloorDiv):
        exact = quotient(sympy.expand(atom.args[0]), atom.args[1])
        if exact is not None:
            e = e.subs(atom, exact)
    return e


def shape(node: fx.Node) -> list[sympy.Expr]:
    """Sizes of an ATen node's tensor, as sympy has them."""
    return [size(d) for d in tensor_of(node).shape]


def dtype(node: fx.Node) -> torch.dtype:
    """The dtype of an ATen node's tensor."""
    return tensor_of(node).dtype


def kind_of(dt: torch.dtype) -> str:
    """The program's kind for values of a dtype; raises `Unsupported` for complex numbers and the like."""
    if dt is torch.bool:
        return BOOL
    if dt in _INTEGRAL:
        return INT
    if not dt.is_floating_point:
        raise Unsupported(f"values of {dt}")
    return FLOAT


def numel(dims: Sequence[sympy.Expr]) -> sympy.Expr:
    """The product of sizes."""
    out = sympy.Integer(1)
    for d in dims:
        out = out * d
    return out


def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """``a / b`` when it is an integer expression without a denominator, else None. ``a`` is a monomial or expanded sum."""
    if b == 1:
        return a
    parts = []
    for term in sympy.Add.make_args(a):
        if b.is_Integer:
            c, rest = term.as_coeff_Mul()
            if not c.is_Integer or c % b:
                return None
            parts.append(c // b * rest)
            continue
        q = term / b  # monomials cancel by themselves; sympy.cancel would build polynomials for each
        if any((x.is_Pow and x.exp.is_negative) or (x.is_Rational and not x.is_Integer) for x in sympy.Mul.make_args(q)):
            return None
        parts.append(q)
    return sympy.Add(*parts)
