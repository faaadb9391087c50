"""Captured tensors of the scores' size, laid out so that a tile of scores is a tile of theirs, or as small as they really are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from fa_inductor.diagonal import COLUMN, ROW, ROWS
from fa_inductor.emitter import DIAGONALS, Emitter
from fa_inductor.expr import KV_IDX, Q_IDX, Const, Expr, Load, call, substitute
from fa_inductor.patterns import AttentionMatch
from fa_inductor.patterns.diagonal import Lookup, Number, Offset, Plan, Pointwise, Whole, plan
from fa_inductor.patterns.terms import shape, size
from fa_inductor.spec import AttentionSpec

aten = torch.ops.aten
log = logging.getLogger("fa_inductor")

#: TMA wants rows of a multiple of 16 bytes.
_MULTIPLE = 8


def arrange(em: Emitter, match: AttentionMatch, spec: AttentionSpec, captures: list[fx.Node]) -> AttentionSpec:
    """Replace tensors in ``captures`` by what a kernel reads best; returns the spec that reads them so."""
    spec = _diagonals(em, match, _unflattened(em, match, spec, captures), captures)
    for slot in range(len(captures)):
        spec = _keys_side_by_side(em, slot, spec, captures)
    return spec


def _unflattened(em: Emitter, match: AttentionMatch, spec: AttentionSpec, captures: list[fx.Node]) -> AttentionSpec:
    """Give captures whose one dimension runs over queries and keys, ``[q_idx * kv_len + kv_idx, ...]``, a dimension for each:
    then a tile of scores is a tile of theirs. Returns the spec that reads them so."""
    queries, keys = (match.extent(match.groups[name]) for name in ("query", "key"))
    if not (queries.is_Integer and keys.is_Integer):
        return spec
    both = call("add", call("mul", Q_IDX, Const(int(keys))), KV_IDX)
    for slot, node in enumerate(captures):
        loads = [x for x in spec.loads() if x.slot == slot]
        if len(loads) != 1 or loads[0].index.count(both) != 1:
            continue
        at = loads[0].index.index(both)
        if str(node.meta["example_value"].shape[at]) != str(queries * keys):
            continue
        captures[slot] = em.call(torch.Tensor.unflatten, node, at, (int(queries), int(keys)))
        index = (*loads[0].index[:at], Q_IDX, KV_IDX, *loads[0].index[at + 1 :])
        spec = replace(spec, score=substitute(spec.score, {loads[0]: replace(loads[0], index=index)}))
    return spec


def _diagonals(em: Emitter, match: AttentionMatch, spec: AttentionSpec, captures: list[fx.Node]) -> AttentionSpec:
    """Replace in ``captures`` what is proven to be the same along every diagonal; returns the spec that reads it so."""
    body = em.view.bodies[match.place.path]
    if sum(b is body for b in em.view.bodies.values()) > 1:
        return spec  # the proof goes beyond the captures, to what this one call hands to the sub-graph
    for slot, node in enumerate(match.captures):
        loads = [x for x in spec.loads() if x.slot == slot]
        if len(loads) != 1 or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        (load,) = loads
        lengths = captures[slot].meta["example_value"].shape
        dims = [size(n) for n in lengths]
        order = _dimensions(load, dims, match)
        if order is None or not _worthwhile(lengths[order[0]], lengths[order[1]]):
            continue
        query, key, others = order
        made: dict[Any, fx.Node | None] = em.view.shared(DIAGONALS, dict)
        at = (match.place.path, em.grad, node, query, key)
        # Sites come in the order of their softmax; that of their results, where the nodes are put, may differ.
        tensor = made.get(at)
        if at not in made or (tensor is not None and not tensor < em.anchor):
            found = plan(node, dims, query, key, match.place)
            made[at] = tensor = None if found is None else _built(em, found, dims, query, key)
        if tensor is not None:
            captures[slot] = tensor
            new = replace(load, index=(*(load.index[i] for i in others), ROW, COLUMN))
            spec = replace(spec, score=substitute(spec.score, {load: new}))
    return spec


def _keys_side_by_side(em: Emitter, slot: int, spec: AttentionSpec, captures: list[fx.Node]) -> AttentionSpec:
    """Copy a tensor of the scores' size where neighbouring keys lie apart: every tile would gather it element by element.

    Relative position tables are looked up as [queries, keys, heads] and permuted; layers that share one share the copy.
    """
    capture = captures[slot]
    t = capture.meta["example_value"]
    loads = [x for x in spec.loads() if x.slot == slot]
    found = [x for x in loads if x.depends_on(KV_IDX) and x.depends_on(Q_IDX)]
    keys = {d for x in found for d, i in enumerate(x.index) if i.depends_on(KV_IDX)}
    if len(keys) != 1 or not isinstance(t, torch.Tensor):
        return spec
    (key,) = keys
    sizes, strides = [size(n) for n in t.shape], [size(n) for n in t.stride()]
    spread = any(s == 0 and n != 1 for s, n in zip(strides, sizes, strict=True))
    if strides[key] == 1 or sizes[key] == 1 or spread:
        return spec
    order = [d for d in range(t.dim()) if d != key] + [key]
    if len(loads) == 1 and loads[0].index.count(Q_IDX) == 1:
        # Tiles of the last two dimensions can be loaded whole.
        query = loads[0].index.index(Q_IDX)
        order = [d for d in order if d not in (query, key)] + [query, key]
        captures[slot] = em.call(torch.Tensor.contiguous, em.call(torch.permute, capture, order))
        moved = replace(loads[0], index=tuple(loads[0].index[d] for d in order))
        return replace(spec, score=substitute(spec.score, {loads[0]: moved}))
    copied = em.call(torch.Tensor.contiguous, em.call(torch.permute, capture, order))
    captures[slot] = em.call(torch.permute, copied, [order.index(d) for d in range(t.dim())])
    return spec


def _built(em: Emitter, found: Plan, dims: Sequence[sympy.Expr], query: int, key: int) -> fx.Node | None:
    """The tensor of a plan; None, and no nodes, where it cannot be built here: the site can do without."""
    before = len(em.made)
    try:
        return _Builder(em, dims, query, key).tensor(found)
    except Exception:
        log.debug("a tensor along diagonals could not be built", exc_info=True)
        em.discard(before)
        return None


def _dimensions(load: Load, dims: Sequence[sympy.Expr], match: AttentionMatch) -> tuple[int, int, list[int]] | None:
    """(query, key, other dimensions) of a tensor of the scores' size."""

    def of(index: Expr) -> list[int]:
        return [i for i, e in enumerate(load.index) if e.depends_on(index)]

    queries, keys = of(Q_IDX), of(KV_IDX)
    if len(queries) != 1 or len(keys) != 1 or (load.index[queries[0]], load.index[keys[0]]) != (Q_IDX, KV_IDX):
        return None
    rows, columns = dims[queries[0]], dims[keys[0]]
    whole = (match.extent(match.groups["query"]), match.extent(match.groups["key"]))
    if any(sympy.expand(a - b) != 0 for a, b in zip((rows, columns), whole, strict=True)):
        return None
    return queries[0], keys[0], [i for i in range(len(dims)) if i not in (queries[0], keys[0])]


def _worthwhile(rows: int | torch.SymInt, columns: int | torch.SymInt) -> bool:
    """Whether a tensor of diagonals is much smaller: few queries among many keys, as in decoding, would make it many times
    larger. Lengths that are one number at run time may grow together, and while they are small so is the tensor."""
    if isinstance(rows, torch.SymInt) and isinstance(columns, torch.SymInt) and size(rows) == size(columns):
        return True
    m, n = _typical(rows), _typical(columns)
    return m is not None and n is not None and m * n > 2 * ROWS * (m + n)


def _typical(n: int | torch.SymInt) -> int | None:
    """A length, or the one that the graph was captured with where it is known at run time only; None where there is none."""
    if isinstance(n, int):
        return n
    return int(n.node.hint) if n.node.has_hint() else None


class _Builder:
    """Builds the nodes of a plan: every value has axis 0 for d and one for each other dimension, 1 where it does not vary."""

    def __init__(self, em: Emitter, dims: Sequence[sympy.Expr], query: int, key: int):
        self.em, self.rows, self.columns = em, dims[query], dims[key]
        self.others = [n for i, n in enumerate(dims) if i not in (query, key)]
        self.rank = 1 + len(self.others)

    def tensor(self, found: Plan) -> fx.Node:
        """[*others, ROWS, columns], contiguous."""
        em, count = self.em, sympy.expand(self.rows + self.columns - 1)
        x = em.call(torch.Tensor.expand, self._with_axes(self.value(found)), [em.size(n) for n in (count, *self.others)])
        x = em.call(torch.Tensor.contiguous, em.call(torch.movedim, x, 0, -1))
        width = em.size(sympy.expand(_MULTIPLE * FloorDiv(count + _MULTIPLE - 1, _MULTIPLE)))
        across = em.call(torch.arange, width, device=em.device)
        down = em.call(torch.unsqueeze, em.call(torch.arange, ROWS, device=em.device), 1)
        at = em.call(torch.sub, across, down)
        shift = sympy.expand(self.rows - 1 - ROWS * FloorDiv(self.rows - 1, ROWS))
        at = em.call(torch.add, at, em.size(shift)) if shift != 0 else at
        at = em.call(torch.clamp, at, 0, em.size(sympy.expand(count - 1)))
        dtype = x.meta["example_value"].dtype
        half = dtype.is_floating_point and dtype.itemsize < 4
        # The gradients of the rows are summed up: in float32.
        x = em.call(torch.Tensor.to, x, torch.float32) if half else x
        x = em.call(aten.index.Tensor, x, [None] * len(self.others) + [at])
        x = em.call(torch.Tensor.to, x, dtype) if half else x
        return em.call(torch.Tensor.contiguous, x)

    def value(self, p: Plan) -> fx.Node:
        em = self.em
        if isinstance(p, Whole):
            return self._whole(em.value(p.node), p.axes)
        if isinstance(p, Offset):
            return self._offset(p)
        if isinstance(p, Number):
            return em.call(torch.full, [] if p.scalar else [1] * self.rank, p.value, dtype=p.dtype, device=em.device)
        if isinstance(p, Pointwise):
            args = [self._operand(a, x) if isinstance(a, Plan) else a for a, x in zip(p.args, p.node.args, strict=True)]
            x = self._same_dtype(em.call(p.node.target, *args, **p.node.kwargs), p.node)  # type: ignore[arg-type]
            want = p.node.meta["val"].dtype
            # The nodes may lie in an autocast region that the user's code does not: some functions of halves become float32.
            return em.call(torch.Tensor.to, x, want) if want.is_floating_point and want.itemsize < 4 else x
        assert isinstance(p, Lookup)
        where = self._with_axes(self.value(p.positions))
        rows = where if p.node.target is aten.embedding.default else [where]
        x = em.call(p.node.target, em.value(p.table), rows, *p.node.args[2:])  # type: ignore[arg-type]
        for i, axis in reversed(list(enumerate(p.axes))):
            if axis is not None:
                x = em.call(torch.transpose, x, axis, self.rank + i)
            x = em.call(torch.select, x, self.rank + i, 0)
        return self._same_dtype(x, p.node)

    def _operand(self, p: Plan, node: fx.Node) -> fx.Node:
        """As :meth:`value`, without dimensions exactly where the user's operand has none: it then has less say in a result's
        dtype, and in the one that a comparison is made in."""
        x = self.value(p)
        if shape(node):
            return self._with_axes(x)
        return self.em.call(torch.reshape, x, []) if x.meta["example_value"].dim() else x

    def _with_axes(self, x: fx.Node) -> fx.Node:
        return x if x.meta["example_value"].dim() else self.em.call(torch.reshape, x, [1] * self.rank)

    def _whole(self, x: fx.Node, axes: Sequence[int | None]) -> fx.Node:
        if not axes:
            return x
        for i, axis in reversed(list(enumerate(axes))):
            if axis is None:
                x = self.em.call(torch.select, x, i, 0)
        have = [a for a in axes if a is not None]
        if have != sorted(have):
            x = self.em.call(torch.permute, x, sorted(range(len(have)), key=have.__getitem__))
        for axis in range(self.rank):
            if axis not in have:
                x = self.em.call(torch.unsqueeze, x, axis)
        return x

    def _offset(self, p: Offset) -> fx.Node:
        em = self.em
        x = em.call(torch.arange, em.size(sympy.expand(1 - self.rows)), em.size(self.columns), device=em.device)
        x = em.call(torch.mul, x, p.slope) if p.slope != 1 else x
        x = em.call(torch.add, x, em.size(p.start)) if p.start != 0 else x
        x = em.call(torch.Tensor.to, x, p.dtype) if p.dtype != torch.int64 else x
        return em.call(torch.reshape, x, [-1] + [1] * (self.rank - 1))

    @staticmethod
    def _same_dtype(x: fx.Node, node: fx.Node) -> fx.Node:
        have, want = x.meta["example_value"].dtype, node.meta["val"].dtype
        if have != want:
            raise ValueError(f"{node.name} of diagonals has {have} for {want}")
        return x
