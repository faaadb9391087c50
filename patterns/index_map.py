"""Index maps of view-like ATen ops: the element of the input that an element of the output is."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import sympy
import torch
from torch import fx

from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.terms import Index, Unsupported, shape, size, value_of

aten = torch.ops.aten

_RESHAPE = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}
_IDENTITY = {
    aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
}  # fmt: skip
_SQUEEZE = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}


def _hint(e: sympy.Expr) -> float:
    """A number to decide which side of a reshape to extend next; correctness never rests on it."""
    return float(e) if e.is_number else float(e.subs(dict.fromkeys(e.free_symbols, 7919)))


def unview(prover: Prover, index: Sequence[sympy.Expr], new: list[sympy.Expr], old: list[sympy.Expr]) -> Index:
    """Index into shape ``old`` of the element at ``index`` of shape ``new`` (same elements in row-major order)."""
    key = (tuple(index), tuple(new), tuple(old))
    if key not in prover.unviewed:
        prover.unviewed[key] = _unview(prover, index, new, old)
    return prover.unviewed[key]


def _unview(prover: Prover, index: Sequence[sympy.Expr], new: list[sympy.Expr], old: list[sympy.Expr]) -> Index:
    out: list[sympy.Expr] = [sympy.Integer(0)] * len(old)
    i, j = len(new) - 1, len(old) - 1
    while i >= 0 or j >= 0:
        if i >= 0 and new[i] == 1:
            i -= 1
            continue
        if j >= 0 and old[j] == 1:
            j -= 1
            continue
        if i < 0 or j < 0:
            raise Unsupported("reshape of an unknown kind")
        gi, gj, pi, pj = [i], [j], new[i], old[j]
        while sympy.expand(pi - pj) != 0:
            grow_new = _hint(pi) < _hint(pj)
            group, dims = (gi, new) if grow_new else (gj, old)
            if group[-1] == 0:
                raise Unsupported("reshape whose sizes cannot be compared")
            group.append(group[-1] - 1)
            if grow_new:
                pi = sympy.expand(pi * dims[group[-1]])
            else:
                pj = sympy.expand(pj * dims[group[-1]])
        linear, stride = sympy.Integer(0), sympy.Integer(1)
        for k in gi:
            linear += index[k] * stride
            stride *= new[k]
        linear = prover.recombine(sympy.expand(linear))
        for k in gj[:-1]:
            out[k] = prover.mod(linear, old[k])
            linear = prover.floordiv(linear, old[k])
        out[gj[-1]] = linear
        i, j = gi[-1] - 1, gj[-1] - 1
    return tuple(out)


def broadcast(index: Sequence[sympy.Expr], dims: list[sympy.Expr]) -> Index:
    """Index into an operand of shape ``dims`` that broadcasts to the indexed shape."""
    tail = index[len(index) - len(dims) :]
    return tuple(sympy.Integer(0) if d == 1 else i for d, i in zip(dims, tail, strict=True))


def _bound(arg: object, default: sympy.Expr, extent: sympy.Expr, prover: Prover) -> sympy.Expr:
    """A slice bound as a non-negative position; Python's clamping is resolved only where it is proven."""
    if arg is None:
        return default
    e = size(arg)
    if e.is_number and e >= 2**62:
        return extent
    if e.is_number and e < 0:
        e = sympy.expand(e + extent)
    if not prover.holds(e):
        raise Unsupported("slice bound of unknown sign")
    if prover.holds(extent - e):
        return e
    if prover.holds(e - extent):
        return extent
    raise Unsupported("slice bound that may exceed the dimension")


def slice_start(node: fx.Node, prover: Prover) -> tuple[int, sympy.Expr, sympy.Expr]:
    """(dim, start, step) of an ``aten.slice`` node."""
    args = list(node.args) + [None] * (5 - len(node.args))
    src = shape(args[0])  # type: ignore[arg-type]
    dim = int(args[1] or 0) % len(src)  # type: ignore[call-overload]
    step = size(args[4]) if args[4] is not None else sympy.Integer(1)
    return dim, _bound(args[2], sympy.Integer(0), src[dim], prover), step


def pull_view(node: fx.Node, index: Index, prover: Prover) -> tuple[fx.Node, Index] | None:
    """(input node, its index) when ``node`` only rearranges the elements of one input; None otherwise.

    Raises:
        Unsupported: a view whose index map could not be derived.
    """
    if node.op != "call_function":
        return None
    t, a = node.target, node.args
    if t in _IDENTITY:
        return a[0], index  # type: ignore[return-value]
    if t is operator.getitem:
        return _pull_getitem(node, index)
    if not (a and isinstance(a[0], fx.Node)):
        return None
    src = a[0]
    if t in _RESHAPE:
        return src, unview(prover, index, shape(node), shape(src))
    if t is aten.expand.default:
        return src, broadcast(index, shape(src))
    if t is aten.permute.default:
        out: list[sympy.Expr] = [sympy.Integer(0)] * len(index)
        for i, d in enumerate(a[1]):  # type: ignore[arg-type]
            out[int(d) % len(index)] = index[i]
        return src, tuple(out)
    if t is aten.transpose.int:
        n = len(index)
        flipped = list(index)
        i, j = int(a[1]) % n, int(a[2]) % n  # type: ignore[arg-type]
        flipped[i], flipped[j] = flipped[j], flipped[i]
        return src, tuple(flipped)
    if t is aten.unsqueeze.default:
        d = int(a[1]) % len(index)  # type: ignore[arg-type]
        return src, index[:d] + index[d + 1 :]
    if t in _SQUEEZE:
        dims = shape(src)
        listed = range(len(dims)) if len(a) == 1 else a[1] if isinstance(a[1], (list, tuple)) else [a[1]]
        gone = {int(d) % len(dims) for d in listed if dims[int(d) % len(dims)] == 1}  # type: ignore[arg-type]
        it = iter(index)
        return src, tuple(sympy.Integer(0) if i in gone else next(it) for i in range(len(dims)))
    if t is aten.select.int:
        dims = shape(src)
        d = int(a[1]) % len(dims)  # type: ignore[arg-type]
        pos = size(a[2])
        if pos.is_number and pos < 0:
            pos = sympy.expand(pos + dims[d])
        if not prover.holds(pos):
            raise Unsupported("select at an index of unknown sign", node)
        return src, (*index[:d], pos, *index[d:])
    if t is aten.slice.Tensor:
        d, start, step = slice_start(node, prover)
        moved = list(index)
        moved[d] = sympy.expand(start + step * index[d])
        return src, tuple(moved)
    if t is aten.repeat.default:
        dims = shape(src)
        tail = index[len(index) - len(dims) :]
        return src, tuple(prover.mod(i, d) if d != 1 else sympy.Integer(0) for i, d in zip(tail, dims, strict=True))
    if t is aten.flip.default:
        dims, flipped = shape(src), list(index)
        for d in a[1]:  # type: ignore[union-attr]
            k = int(d) % len(dims)  # type: ignore[arg-type]
            flipped[k] = sympy.expand(dims[k] - 1 - index[k])
        return src, tuple(flipped)
    return None


def _pull_getitem(node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """Pieces of split and unbind."""
    multi, which = node.args
    if not isinstance(multi, fx.Node) or multi.op != "call_function" or not isinstance(which, int):
        return None
    if multi.target is aten.unbind.int:
        src = multi.args[0]
        d = (int(multi.args[1]) if len(multi.args) > 1 else 0) % len(shape(src))  # type: ignore[arg-type]
        return src, (*index[:d], sympy.Integer(which), *index[d:])  # type: ignore[return-value]
    if multi.target in (aten.split.Tensor, aten.split_with_sizes.default):
        src = multi.args[0]
        dims = shape(src)  # type: ignore[arg-type]
        d = (int(multi.args[2]) if len(multi.args) > 2 else 0) % len(dims)  # type: ignore[arg-type]
        pieces = value_of(multi)
        start = sympy.Integer(0)
        for piece in pieces[:which]:  # type: ignore[index]
            start += size(piece.shape[d])
        moved = list(index)
        moved[d] = sympy.expand(index[d] + start)
        return src, tuple(moved)  # type: ignore[return-value]
    return None
