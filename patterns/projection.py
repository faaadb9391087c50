"""The projections that make q, k and v: linear layers of the same hidden states, seen through the views between."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fa_inductor.patterns.operands import Axes, Extents, Operand, levels, radix
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.site import AttentionMatch
from fa_inductor.patterns.terms import Index
from fa_inductor.view import slicing
from fa_inductor.view.aliasing import is_inplace, storages, writes_after

_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)


@dataclass(frozen=True)
class Projection:
    """``rows`` rows of a linear layer's weight, from ``first`` on, as nodes of the Dynamo graph; no bias: None."""

    weight: fx.Node
    bias: fx.Node | None
    first: int
    rows: int


@dataclass(frozen=True)
class Projections:
    """q, k and v as projections of ``hidden`` [batch, length, features], a node of the Dynamo graph, by heads and features."""

    hidden: fx.Node
    q: Projection
    k: Projection
    v: Projection


class _NoProjection(Exception):
    pass


def find(match: AttentionMatch) -> Projections | str:
    """The projections of a match, or why it has none that nothing else uses."""
    g = match.groups
    features = (
        ("q", match.q, "query", "heads", "qk"),
        ("k", match.k, "key", "kv_heads", "qk"),
        ("v", match.v, "key", "kv_heads", "v"),
    )
    made: dict[str, Projection] = {}
    hidden: set[fx.Node] = set()
    views: set[fx.Node] = set()
    try:
        for name, operand, length, heads, feature in features:
            linear, first, passed = _linear_of(match, operand, (g["batch"], g[length], (*g[heads], *g[feature])), name)
            rows = match.extent((*g[heads], *g[feature]))
            if not rows.is_Integer:
                raise _NoProjection("the number of heads is a run-time size")
            x, weight, bias = _arguments(linear, match.dtype, name)
            made[name] = Projection(weight, bias, first, int(rows))
            hidden.add(x)
            views.update(passed)
            # What is taken of a list of views leads over the list.
            views.update(n.args[0] for n in passed if n.target is operator.getitem and isinstance(n.args[0], fx.Node))
        if len(hidden) != 1:
            raise _NoProjection("q, k and v are projections of different hidden states")
        if len({p.bias is None for p in made.values()}) != 1:
            raise _NoProjection("some of the projections have a bias and some have none")
        _check_users(match, views)
    except _NoProjection as e:
        return str(e)
    (x,) = hidden
    return Projections(x, **made)


def _linear_of(
    match: AttentionMatch, operand: Operand, want: tuple[Axes, Axes, Axes], name: str
) -> tuple[fx.Node, int, list[fx.Node]]:
    """(Dynamo node of the linear layer, first row of its weight, view nodes from it to the product)."""
    extents: Extents = match.extents
    ranges = {a: (sympy.Integer(0), e - 1) for a, e in extents.items()}
    index: Index = tuple(_merge(d, extents) for d in operand.dims)
    reached = operand.node
    for level in levels(operand.node, index, Prover(ranges), scales=False):
        reached = level.node
        held = match.place.holder(level.node)
        if held is None or held.node.target not in _LINEAR:
            continue
        if held.node in match.place.view.erased:
            raise _NoProjection(f"the projection of {name} went with another attention")
        if len(level.index) != 3:
            raise _NoProjection(f"the projection of {name} has {len(level.index)} dimensions, not batch, length and features")
        last = sympy.expand(level.index[2])
        first = last.as_coeff_Add()[0]
        found = (*(radix(i, extents) for i in level.index[:2]), radix(last - first, extents))
        if found != want or not first.is_Integer:
            raise _NoProjection(f"the features of the projection of {name} are not heads of neighbouring features")
        return held.node, int(first), [*operand.passed, *level.passed, level.node]
    raise _NoProjection(f"between {name} and a linear layer lies {slicing.name_of(match.place.view.origin[reached].node)}")


def _merge(axes: Axes, extents: Extents) -> sympy.Expr:
    out = sympy.Integer(0)
    for a in axes:
        out = out * extents[a] + a
    return out


def _arguments(linear: fx.Node, dtype: torch.dtype, name: str) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Hidden states, weight and bias, which nothing writes after the layer."""
    bound = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | dict(linear.kwargs)
    found = [bound.get(k) for k in ("input", "weight", "bias")]
    later = writes_after(linear, is_inplace)
    for a in found:
        if a is None:
            continue
        t = a.meta.get("example_value") if isinstance(a, fx.Node) else None
        if not isinstance(a, fx.Node) or not isinstance(t, torch.Tensor) or t.dtype != dtype:
            raise _NoProjection(f"the projection of {name} is not of {str(dtype).removeprefix('torch.')} tensors")
        if storages(a) & later:
            raise _NoProjection(f"{a.name} is written in place after the projection of {name}")
    x, weight, bias = found
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        raise _NoProjection(f"the projection of {name} has no input or weight")
    return x, weight, bias if isinstance(bias, fx.Node) else None


def _check_users(match: AttentionMatch, views: set[fx.Node]) -> None:
    live = slicing.live_nodes(match.place.view.graph, lambda n: False)
    inside = views | set(match.region)
    for n in views:
        if any(u in live and u not in inside for u in n.users):
            raise _NoProjection(f"{slicing.name_of(match.place.view.origin[n].node)} is used by more than the attention")
