"""Softmax in every spelling: where the scores become probabilities.

``_softmax`` and ``_safe_softmax``, ``exp(x) / sum(exp(x))`` with or without a maximum taken off, ``exp(x - logsumexp(x))``,
``exp(log_softmax(x))``, and the deferred division ``(exp(x) @ v) / sum(exp(x))``. Each is verified by index maps, so a sum over
another axis or another tensor does not pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch import fx

from fa_inductor.expr import Call
from fa_inductor.patterns.index_map import aten, pull_view
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.terms import Elem, Index, Unsupported, dtype, shape


@dataclass(frozen=True)
class Softmax:
    """``node = softmax(logits, dim)``; with ``total`` set, ``node`` is the exponential and is divided by ``total`` later.

    ``stable`` is False for code that exponentiates without the care of a softmax op (see :mod:`.stability`).
    """

    node: fx.Node
    logits: fx.Node
    dim: int
    dead_rows: str = "nan"
    total: fx.Node | None = None
    stable: bool = True


def fresh_index(node: fx.Node, prefix: str) -> tuple[Index, Prover]:
    """One symbol a dimension, 0 where the size is 1, and a prover that knows their ranges."""
    ranges: dict[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]] = {}
    index: list[sympy.Expr] = []
    for i, d in enumerate(shape(node)):
        if d == 1:
            index.append(sympy.Integer(0))
            continue
        s = sympy.Symbol(f"{prefix}{i}", integer=True, nonnegative=True)
        ranges[s] = (sympy.Integer(0), d - 1)
        index.append(s)
    return tuple(index), Prover(ranges)


def is_rearrangement(node: fx.Node) -> bool:
    """A view, copy or float cast: same elements, perhaps elsewhere."""
    if op_name(node) in ("_to_copy", "convert_element_type"):
        return True
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    try:
        index, prover = fresh_index(node, "i")
        return pull_view(node, index, prover) is not None
    except Unsupported:
        return False


def reached(start: fx.Node, targets: set, limit: int = 64) -> Iterator[fx.Node]:
    """Users of ``start`` with an op in ``targets``, looking through rearrangements."""
    todo, seen = [start], {start}
    while todo and limit:
        limit -= 1
        n = todo.pop(0)
        for u in n.users:
            if u in seen:
                continue
            seen.add(u)
            if u.target in targets:
                yield u
            elif is_rearrangement(u):
                todo.append(u)


_DIV = {aten.div.Tensor, aten.true_divide.Tensor} if hasattr(aten, "true_divide") else {aten.div.Tensor}
_SUM = {aten.sum.dim_IntList}
MATMULS = {aten.bmm.default, aten.mm.default, aten.baddbmm.default}


def find_softmaxes(graph: fx.Graph) -> list[Softmax]:
    """Every softmax of the graph in graph order."""
    found: list[Softmax] = []
    for n in graph.nodes:
        name = op_name(n)
        if name in ("_softmax", "_safe_softmax"):
            rank = len(shape(n))
            if rank:
                dead = "zero" if name == "_safe_softmax" else "nan"
                found.append(Softmax(n, n.args[0], int(n.args[1]) % rank, dead))
        elif name == "exp":
            try:
                found.extend(_from_exp(n))
            except Unsupported:
                continue
    return found


def _from_exp(exp: fx.Node) -> Iterator[Softmax]:
    source = exp.args[0]
    assert isinstance(source, fx.Node)
    if not dtype(exp).is_floating_point or not shape(exp):
        return
    if op_name(source) == "_log_softmax":
        yield Softmax(exp, source.args[0], int(source.args[1]) % len(shape(exp)))  # type: ignore[arg-type]
        return
    normalised = _minus_logsumexp(exp, source)
    if normalised is not None:
        yield normalised
        return
    for total in reached(exp, _SUM):
        dims = total.args[1]
        if not isinstance(dims, (list, tuple)) or len(dims) != 1 or not dtype(total).is_floating_point:
            continue
        dim = _axis_of_sum(exp, total)
        if dim is None:
            continue
        quotients = [d for d in reached(total, _DIV) if isinstance(d.args[1], fx.Node)]
        plain = [d for d in quotients if _divides(d, exp, total, dim)]
        yield from (Softmax(d, source, dim, stable=False) for d in plain)
        if not plain:
            yield Softmax(exp, source, dim, total=total, stable=False)


def _axis_of_sum(exp: fx.Node, total: fx.Node) -> int | None:
    """The axis of ``exp`` that ``total`` sums over, or None when it sums something else."""
    src = total.args[0]
    assert isinstance(src, fx.Node)
    index, prover = fresh_index(src, "t")
    axis = int(total.args[1][0]) % len(index)  # type: ignore[index, arg-type]
    e = Puller(prover, lambda n, i: Elem(n, i) if n is exp else None).element(src, index)
    if not (isinstance(e, Elem) and e.node is exp):
        return None
    where = [k for k, i in enumerate(e.index) if i == index[axis]]
    if index[axis] == 0 or len(where) != 1 or any(i.has(index[axis]) for k, i in enumerate(e.index) if k != where[0]):
        return None
    return where[0] if shape(src)[axis] == shape(exp)[where[0]] else None


def _divides(div: fx.Node, exp: fx.Node, total: fx.Node, dim: int) -> bool:
    """``div`` is elementwise ``exp / total`` with the total of the same row."""
    index, prover = fresh_index(div, "t")
    puller = Puller(prover, lambda n, i: Elem(n, i) if n in (exp, total) else None)
    try:
        top = puller.operand(div.args[0], index)
        bottom = puller.operand(div.args[1], index)
    except Unsupported:
        return False
    if not (isinstance(top, Elem) and top.node is exp and isinstance(bottom, Elem) and bottom.node is total):
        return False
    return total_index(total, exp, top.index, dim) == bottom.index


def total_index(total: fx.Node, exp: fx.Node, at: Index, dim: int) -> Index | None:
    """Index into ``total = sum(exp, dim)`` of the row that holds element ``at`` of ``exp``; None if its layout differs."""
    src = total.args[0]
    assert isinstance(src, fx.Node)
    index, prover = fresh_index(src, "u")
    e = Puller(prover, lambda n, i: Elem(n, i) if n is exp else None).element(src, index)
    if not isinstance(e, Elem):
        return None
    table = {s: a for s, a in zip(e.index, at, strict=True) if s.is_Symbol}
    if any(not (s.is_Symbol or s == 0) for s in e.index):
        return None
    axis = int(total.args[1][0]) % len(index)  # type: ignore[index, arg-type]
    keep = len(total.args) > 2 and bool(total.args[2])
    row = [table.get(i, sympy.Integer(0)) for i in index]
    return (*row[:axis], sympy.Integer(0), *row[axis + 1 :]) if keep else (*row[:axis], *row[axis + 1 :])


def _minus_logsumexp(exp: fx.Node, source: fx.Node) -> Softmax | None:
    """``exp(x - logsumexp(x, dim))``."""
    if op_name(source) != "sub" or not isinstance(source.args[1], fx.Node):
        return None
    todo, lse = source.args[1], None
    while isinstance(todo, fx.Node):
        if op_name(todo) == "logsumexp":
            lse = todo
            break
        if not is_rearrangement(todo):
            return None
        todo = todo.args[0]
    if lse is None or len(lse.args[1]) != 1:  # type: ignore[arg-type]
        return None
    x = lse.args[0]
    assert isinstance(x, fx.Node)
    index, prover = fresh_index(exp, "t")
    axis = int(lse.args[1][0]) % len(shape(x))  # type: ignore[index, arg-type]
    puller = Puller(prover, lambda n, i: Elem(n, i) if n in (x, lse) else None)
    e = puller.element(source, index)
    if not (isinstance(e, Call) and e.fn == "sub" and all(isinstance(a, Elem) for a in e.args)):
        return None
    a, b = e.args
    assert isinstance(a, Elem)
    assert isinstance(b, Elem)
    keep = len(lse.args) > 2 and bool(lse.args[2])
    row = a.index[:axis] + ((sympy.Integer(0),) if keep else ()) + a.index[axis + 1 :]
    if a.node is not x or b.node is not lse or b.index != row or len(shape(x)) != len(shape(exp)):
        return None
    return Softmax(exp, x, axis, stable=False)
