"""Captured tensors that are the same along every diagonal, as relative position biases are.

``bias[q, k] = table[bucket(k - q)]`` has a number for every pair of a query and a key, but only one for every difference of
their positions. :func:`plan` proves that of a captured value, walking from it towards its inputs, and says how the numbers
are computed once for each difference ``d = k - q``;
:mod:`fa_inductor.capture_layout` builds the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fa_inductor.expr import Const
from fa_inductor.patterns.index_map import broadcast, pull_view
from fa_inductor.patterns.provenance import RANDOM, Place
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller
from fa_inductor.patterns.terms import Index, Lin, Unsupported, dtype, shape, value_of

aten = torch.ops.aten

_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_CAST_OPTIONS = {"dtype", "device", "layout", "memory_format", "non_blocking"}


@dataclass(frozen=True)
class Whole:
    """A value that differs along no diagonal: ``axes[i]`` is the axis of its dimension i, None where element 0 is taken."""

    node: fx.Node
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Offset:
    """The integers ``slope * d + start``."""

    slope: int
    start: sympy.Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class Number:
    """The same number everywhere."""

    value: float | int | bool
    dtype: torch.dtype
    scalar: bool


@dataclass(frozen=True)
class Pointwise:
    """``node``'s op; plans stand for its tensor arguments, everything else is as it was."""

    node: fx.Node
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Lookup:
    """Rows of ``table`` at ``positions``; ``axes`` of the dimensions behind the row, as in :class:`Whole`."""

    node: fx.Node
    table: fx.Node
    positions: Plan
    axes: tuple[int | None, ...]


Plan = Whole | Offset | Number | Pointwise | Lookup


def plan(node: fx.Node, dims: Sequence[sympy.Expr], query: int, key: int, place: Place) -> Plan | None:
    """How ``node``'s elements follow from ``d``, the index of dimension ``key`` less that of ``query``; None where they are not
    proven to. Axis 0 of the result is d, axis i the i-th of the other dimensions (the sizes of these are unchanged).

    Args:
        dims: ``node``'s sizes; or those with the dimensions ``query`` and ``key = query + 1`` where it has one of both.
    """
    names = [sympy.Symbol(f"t{i}", integer=True) for i in range(len(dims))]
    index = tuple(names)
    if len(shape(node)) < len(dims):
        index = (*names[:query], names[query] * dims[key] + names[key], *names[key + 1 :])
    walk = _Walk(place, names, dims, query, key)
    try:
        found = walk.value(node, index)
    except Unsupported:
        return None
    if isinstance(found, (Whole, Number)) or place.gradient_barrier(walk.visited) is not None:
        return None
    return found


class _Walk:
    def __init__(self, place: Place, names: Sequence[sympy.Symbol], dims: Sequence[sympy.Expr], query: int, key: int):
        self.place = place
        self.q, self.k = names[query], names[key]
        others = [i for i in range(len(names)) if i not in (query, key)]
        self.axes = {names[i]: 1 + at for at, i in enumerate(others)}
        self.sizes = {names[i]: dims[i] for i in others}
        self.prover = Prover({s: (sympy.Integer(0), n - 1) for s, n in zip(names, dims, strict=True)})
        self.puller = Puller(self.prover)
        self.visited: set[fx.Node] = set()

    def value(self, node: fx.Node, index: Index) -> Plan:
        self.visited.add(node)
        moving = {self.q, self.k}
        if not any(moving & i.free_symbols for i in index) and self.place.emittable(node):
            return Whole(node, self._axes(index, shape(node)))
        settled = self._settled(node, index)
        if settled is not None:
            return settled
        pulled = pull_view(node, index, self.prover) if node.op == "call_function" else None
        if pulled is not None:
            return self.value(*pulled)
        if node.target in (aten.embedding.default, aten.index.Tensor):
            return self._lookup(node, index)
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target in _CASTS or torch.Tag.pointwise in node.target.tags
        ):
            return self._pointwise(node, index)
        raise Unsupported(f"{node.name} is not known to be the same along diagonals", node)

    def _settled(self, node: fx.Node, index: Index) -> Plan | None:
        """A number, or an integer that the difference of the positions alone decides."""
        try:
            e = self.puller.element(node, index)
        except Unsupported:
            return None
        if isinstance(e, Const):
            return Number(e.value, dtype(node), not index)
        if not isinstance(e, Lin) or dtype(node).is_floating_point:
            return None
        value = sympy.expand(e.value)
        slope = value.coeff(self.k)
        start = sympy.expand(value - slope * (self.k - self.q))
        if not slope.is_Integer or start.free_symbols & {self.q, *self.axes, self.k}:
            return None
        return Offset(int(slope), start, dtype(node))

    def _pointwise(self, node: fx.Node, index: Index) -> Plan:
        name = str(node.target)
        if any(w in name for w in RANDOM) or any(isinstance(a, fx.Node) for a in node.kwargs.values()):
            raise Unsupported(f"{node.name} is not computed from its arguments alone", node)
        if node.target in _CASTS and set(node.kwargs) - _CAST_OPTIONS:
            raise Unsupported(f"{node.name} casts in an unknown way", node)
        args: list[Any] = []
        for a in node.args:
            if not isinstance(a, fx.Node):
                if isinstance(a, (list, tuple)) and any(isinstance(x, fx.Node) for x in a):
                    raise Unsupported(f"{node.name} takes a list of tensors", node)
                args.append(a)
            elif isinstance(value_of(a), torch.Tensor):
                args.append(self.value(a, broadcast(index, shape(a))))
            else:
                raise Unsupported(f"{node.name} takes a run-time number", node)
        return Pointwise(node, tuple(args))

    def _lookup(self, node: fx.Node, index: Index) -> Plan:
        table, positions = node.args[0], node.args[1]
        if node.target is aten.index.Tensor:
            if not isinstance(positions, (list, tuple)) or len(positions) != 1 or positions[0] is None:
                raise Unsupported(f"{node.name} looks up more than rows", node)
            (positions,) = positions
        elif any(node.args[3:]) or node.kwargs:
            raise Unsupported(f"{node.name} weighs gradients by frequency", node)
        assert isinstance(table, fx.Node)
        assert isinstance(positions, fx.Node)
        if dtype(positions) in (torch.bool, torch.uint8) or not self.place.emittable(table):
            raise Unsupported(f"{node.name} looks up what cannot be had here", node)
        self.visited.add(table)
        rank = len(shape(positions))
        where = self.value(positions, index[:rank])
        return Lookup(node, table, where, self._axes(index[rank:], shape(table)[1:]))

    def _axes(self, index: Sequence[sympy.Expr], dims: Sequence[sympy.Expr]) -> tuple[int | None, ...]:
        axes: list[int | None] = []
        for i, n in zip(index, dims, strict=True):
            if i == 0:
                axes.append(None)
            elif i in self.axes and self.sizes[i] == n and self.axes[i] not in axes:
                axes.append(self.axes[i])
            else:
                raise Unsupported(f"an index {i} into a dimension of {n}")
        return tuple(axes)
