"""Operands by index maps: which tensor already holds q, k or v, and how its dimensions become [batch, heads, length, head_dim].

The element of a matmul operand is followed down its chain of views. At every level the index of each dimension is an
expression of the site's axes; where each is a row-major merge of distinct axes, the level can serve as the operand. The
deepest such level that the rewritten graph can reach is taken, which finds un-repeated K and V for grouped queries, tensors
before a transpose, and einsum operands alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.patterns.index_map import pull_view
from fa_inductor.patterns.provenance import Place
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import op_name
from fa_inductor.patterns.terms import Index, Unsupported, dtype, quotient, shape, tensor_of

Axes = tuple[sympy.Symbol, ...]
Extents = dict[sympy.Symbol, sympy.Expr]


@dataclass(frozen=True)
class Operand:
    """A held (or re-emittable) ATen value and, for each of its dimensions, the axes it merges in row-major order."""

    node: fx.Node
    dims: tuple[Axes, ...]
    dtype: torch.dtype
    scale: float = 1.0
    passed: tuple[fx.Node, ...] = ()

    @property
    def axes(self) -> set[sympy.Symbol]:
        return {a for d in self.dims for a in d}


@dataclass(frozen=True)
class Level:
    """A value on the way down an operand's views; ``scale`` is the product of constant factors passed so far."""

    node: fx.Node
    index: Index
    scale: float
    passed: tuple[fx.Node, ...]


def radix(e: sympy.Expr, extents: Extents) -> Axes | None:
    """Axes whose row-major merge is ``e``, as ``h * 4 + r`` is (h, r) when r runs to 4; None when it is no such merge."""
    e = sympy.expand(e)
    if e == 0:
        return ()
    terms: list[tuple[sympy.Expr, sympy.Symbol]] = []
    for t in sympy.Add.make_args(e):
        axes = [s for s in t.free_symbols if s in extents]
        if len(axes) != 1:
            return None
        c = quotient(t, axes[0])
        if c is None or c.has(axes[0]) or c.is_negative:
            return None
        terms.append((c, axes[0]))
    out: list[sympy.Symbol] = []
    stride = sympy.Integer(1)
    while terms:
        step = next((t for t in terms if sympy.expand(t[0] - stride) == 0), None)
        if step is None:
            return None
        terms.remove(step)
        out.append(step[1])
        stride = sympy.expand(stride * extents[step[1]])
    if len(set(out)) != len(out):
        return None
    return tuple(reversed(out))


def _constant_factor(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, c) for ``x * c`` or ``x / c`` with a finite Python number c != 0."""
    name = op_name(node)
    if name not in ("mul", "div") or node.kwargs.get("rounding_mode") or not isinstance(node.args[0], fx.Node):
        return None
    c = node.args[1]
    if not isinstance(c, (int, float)) or isinstance(c, bool) or c == 0 or c != c or abs(c) == float("inf"):
        return None
    if dtype(node.args[0]) != dtype(node):
        return None
    return node.args[0], float(c) if name == "mul" else 1.0 / float(c)


def _may_pass_cast(src: torch.dtype, to: torch.dtype, outermost: torch.dtype) -> bool:
    """Whether the rewrite reproduces a float cast: it casts to the outermost dtype, so rounding elsewhere must not be passed."""
    if not (src.is_floating_point and to.is_floating_point):
        return False
    old, new = torch.finfo(src), torch.finfo(to)
    return to is outermost or (new.max >= old.max and new.eps <= old.eps)


def is_moved(node: fx.Node, src: fx.Node) -> bool:
    """Whether ``node`` is a copy of ``src`` on another device: a kernel cannot read what it was copied from."""
    return tensor_of(node).device != tensor_of(src).device


def levels(node: fx.Node, index: Index, prover: Prover, scales: bool) -> Iterator[Level]:
    """``node`` and what it is a rearrangement (or, with ``scales``, a constant multiple) of, outermost first."""
    level = Level(node, index, 1.0, ())
    while True:
        yield level
        n = level.node
        try:
            pulled = pull_view(n, level.index, prover)
        except Unsupported:
            return
        scale = level.scale
        if pulled is None and op_name(n) in ("_to_copy", "convert_element_type"):
            src = n.args[0]
            if not isinstance(src, fx.Node) or is_moved(n, src) or not _may_pass_cast(dtype(src), dtype(n), dtype(node)):
                return
            pulled = src, level.index
        if pulled is None and scales:
            factor = _constant_factor(n)
            if factor is not None and abs(scale * factor[1]) <= torch.finfo(torch.float32).max:
                pulled, scale = (factor[0], level.index), scale * factor[1]
        if pulled is None:
            return
        level = Level(pulled[0], tuple(pulled[1]), scale, (*level.passed, n))


def merged_axes(level: Level, extents: Extents) -> tuple[Axes, ...] | None:
    """Axes per dimension of a level that holds exactly the operand's elements; None when it holds others or more."""
    dims: list[Axes] = []
    for i, d in zip(level.index, shape(level.node), strict=True):
        axes = radix(i, extents)
        if axes is None:
            return None
        total = sympy.Integer(1)
        for a in axes:
            total = total * extents[a]
        if sympy.expand(total - d) != 0:
            return None
        dims.append(axes)
    flat = [a for d in dims for a in d]
    return tuple(dims) if len(set(flat)) == len(flat) else None


def _same_gradient(held: Operand | None, other: Operand, below: Level, place: Place) -> bool:
    """Whether gradient flows to ``other``, computed here from the level ``below``, as it does to what the graph holds."""
    cut = place.gradient_barrier(below.passed) is not None
    return not cut and (held is None or place.requires_grad(held.node) == place.requires_grad(other.node))


def choose(node: fx.Node, index: Index, prover: Prover, place: Place, extents: Extents, need: set, scales: bool) -> Operand:
    """The deepest usable level of a matmul operand.

    Args:
        need: axes that the operand must vary with (its length and feature axes).

    Raises:
        Unsupported: no level can serve.
    """
    best: Operand | None = None
    # What the heads of a group share, as a view of a held value: the part of a cache that is read after it was written.
    shared: Operand | None = None
    stale = False
    for level in levels(node, index, prover, scales):
        dims = merged_axes(level, extents)
        held = place.holder(level.node) is not None
        if shared is not None and (level.scale, dtype(level.node)) != (shared.scale, dtype(shared.node)):
            shared = None
        if shared is not None and held:
            best, shared = (shared if _same_gradient(best, shared, level, place) else best), None
        if dims is None or not need <= {a for d in dims for a in d}:
            continue
        stale = stale or (not held and any(h[0] == place.path for h, _ in place.view.holders(level.node)))
        if held or (best is None and place.emittable(level.node)):
            if level.passed and place.gradient_barrier(level.passed) is not None:
                break
            best = Operand(level.node, dims, dtype(node), level.scale, level.passed)
        elif best is not None and {a for d in dims for a in d} < best.axes and place.emittable(level.node):
            shared = Operand(level.node, dims, dtype(node), level.scale, level.passed)
    if best is None and stale:
        raise Unsupported(f"operand {node.name} is overwritten in place before the product with V", node)
    if best is None:
        raise Unsupported(f"operand {node.name} is not a rearrangement of a tensor at hand", node)
    return best


def split_points(node: fx.Node, index: Index, prover: Prover, splittable: set, extents: Extents) -> tuple | None:
    """(axis, inner extent) where a level divides a batch axis, as grouped heads and folded batch-heads do; None without."""
    for level in levels(node, index, prover, scales=True):
        point = split_of_index(level.index, splittable, extents)
        if point is not None:
            return point
    return None


def split_of_index(index: Iterable[sympy.Expr], splittable: set, extents: Extents) -> tuple | None:
    """(axis, inner extent) of the first floor division or remainder of a splittable axis in ``index``; None without."""
    for i in index:
        for atom in sorted(i.atoms(FloorDiv, Mod), key=str):
            axis, inner = atom.args
            if axis in splittable and axis.is_Symbol and not inner.free_symbols & set(extents):
                outer = quotient(extents[axis], inner)
                if outer is not None and outer != 1 and inner != 1:
                    return axis, inner
    return None
