"""Softmax in every spelling: where the scores become probabilities.

``_softmax`` and ``_safe_softmax``, ``exp(x) / sum(exp(x))`` with or without a maximum taken off, ``exp(x - logsumexp(x))``,
``exp(log_softmax(x))``, and the deferred division ``(exp(x) @ v) / sum(exp(x))``. The sum may have ``exp(t)`` or a number added
(a sink), and the base may be 2. Each is verified by index maps, so a sum over another axis or another tensor does not pass.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fa_inductor.expr import Call, Const, Expr
from fa_inductor.patterns.arithmetic import rounded
from fa_inductor.patterns.index_map import aten, pull_view
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.terms import Elem, Index, Unsupported, dtype, shape


@dataclass(frozen=True)
class Sink:
    """What is added to the sum of the exponentials: the number ``value``, or ``base ** node`` at ``index`` for element ``at``."""

    value: float = 0.0
    node: fx.Node | None = None
    index: Index = ()
    at: Index = ()

    def position(self, at: Index) -> Index:
        """Index into ``node`` for the row that holds element ``at`` of the exponentials."""
        table = {s: a for s, a in zip(self.at, at, strict=True) if s.is_Symbol}
        return tuple(sympy.expand(i.subs(table, simultaneous=True)) for i in self.index)


@dataclass(frozen=True)
class Softmax:
    """``node = softmax(logits, dim)``; with ``total`` set, ``node`` is the exponential and is divided by ``total`` later.

    ``stable`` is False for code that exponentiates without the care of a softmax op (see :mod:`.stability`); ``base`` is what
    is raised to the logits, ``also`` other nodes computed from the scores that the softmax is made of; ``refused`` says why the
    exponential ``node`` of what looks like attention is no softmax.
    """

    node: fx.Node
    logits: fx.Node
    dim: int
    dead_rows: str = "nan"
    total: fx.Node | None = None
    stable: bool = True
    base: float = math.e
    sink: Sink | None = None
    also: tuple[fx.Node, ...] = ()
    refused: str = ""


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
_ADD = {aten.add.Tensor}
_NORMALISERS = {"sum", "linalg_vector_norm", "norm", "logsumexp"}
_BASES = {"exp": math.e, "exp2": 2.0}
#: Products that add a tensor to the result; their operands are the second and the third argument.
ADDING = {aten.baddbmm.default, aten.addmm.default}
MATMULS = {aten.bmm.default, aten.mm.default, *ADDING}


def find_softmaxes(graph: fx.Graph, with_grad: Callable[[fx.Node], bool] = lambda n: True) -> list[Softmax]:
    """Every softmax of the graph in graph order; ``with_grad`` tells whether a node ran with gradients enabled."""
    found: list[Softmax] = []
    exps: list[fx.Node] = []
    for n in graph.nodes:
        name = op_name(n)
        if name in ("_softmax", "_safe_softmax"):
            rank = len(shape(n))
            if rank:
                dead = "zero" if name == "_safe_softmax" else "nan"
                found.append(Softmax(n, n.args[0], int(n.args[1]) % rank, dead))
        elif name in _BASES and dtype(n).is_floating_point and shape(n):
            exps.append(n)
            with contextlib.suppress(Unsupported):
                found.extend(_from_exp(n, with_grad))
    return [*found, *_refused(exps, {s.node for s in found})]


def _refused(exps: list[fx.Node], known: set[fx.Node]) -> Iterator[Softmax]:
    """Exponentials that are normalised, but not as a softmax does, and belong to none of the ``known`` softmaxes."""
    reason = "exp is not divided by the sum of its row alone, so this is no softmax"
    for exp in exps:
        quotient = _normalised(exp)
        if quotient is not None and quotient not in known and exp not in known:
            yield Softmax(exp, exp.args[0], len(shape(exp)) - 1, refused=reason)  # type: ignore[arg-type]


def _normalised(exp: fx.Node, limit: int = 32) -> fx.Node | None:
    """The quotient of the exponential, on its way to the next product, and something made of a sum or norm."""
    todo, seen = [exp], {exp}
    while todo and limit:
        limit -= 1
        for u in todo.pop(0).users:
            if u in seen or u.target in MATMULS:
                continue
            seen.add(u)
            todo.append(u)
            if u.target in _DIV and isinstance(u.args[1], fx.Node) and _made_of_sum(u.args[1]):
                return u
    return None


def _made_of_sum(node: fx.Node, depth: int = 6) -> bool:
    if op_name(node) in _NORMALISERS:
        return True
    return depth > 0 and node.target not in MATMULS and any(_made_of_sum(a, depth - 1) for a in node.all_input_nodes)


def _from_exp(exp: fx.Node, with_grad: Callable[[fx.Node], bool]) -> Iterator[Softmax]:
    source, base = exp.args[0], _BASES[op_name(exp)]
    assert isinstance(source, fx.Node)
    if base == math.e and op_name(source) == "_log_softmax":
        yield Softmax(exp, source.args[0], int(source.args[1]) % len(shape(exp)))  # type: ignore[arg-type]
        return
    normalised = _minus_logsumexp(exp, source) if base == math.e else None
    if normalised is not None:
        yield normalised
        return
    exps = [n for n in exp.graph.nodes if n.target == exp.target and _same(n, exp, with_grad)]  # written twice, computed once
    for total in {t: None for e in exps for t in reached(e, _SUM)}:
        dims = total.args[1]
        if not isinstance(dims, (list, tuple)) or len(dims) != 1 or not dtype(total).is_floating_point:
            continue
        dim = _axis_of_sum(exps, total)
        if dim is None:
            continue
        quotients = [d for t in (total, *reached(total, _ADD)) for d in reached(t, _DIV) if isinstance(d.args[1], fx.Node)]
        plain = {d: s for d in quotients if (s := _divides(d, exps, total, dim)) is not None}
        # The quotient of each spelling counts once: for the exponential that it divides.
        for d, (top, sink) in plain.items():
            if top is not exp:
                continue
            also = {e.args[0]: None for e in exps if e.args[0] is not source}
            also.update({sink.node: None} if sink.node is not None else {})
            present = sink if sink.value or sink.node is not None else None
            yield Softmax(d, source, dim, stable=False, base=base, sink=present, also=tuple(also))  # type: ignore[arg-type]
        if not plain and exp in _summed(total, exps):
            yield Softmax(exp, source, dim, total=total, stable=False, base=base)


def _same(a: Any, b: Any, with_grad: Callable[[fx.Node], bool], depth: int = 8) -> bool:
    """Whether two ATen values are computed by the same ops from the same values; none of them random or cut off from autograd."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (type(a) is type(b) and repr(a) == repr(b))  # -0.0 is not 0.0 here
    if not depth or a.op != "call_function" or a.target != b.target or len(a.args) != len(b.args) or a.kwargs != b.kwargs:
        return False
    if with_grad(a) != with_grad(b):
        return False
    if not isinstance(a.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in a.target.tags:
        return a.target is operator.getitem and a.args[1] == b.args[1] and _same(a.args[0], b.args[0], with_grad, depth - 1)
    return all(_same(x, y, with_grad, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _summed(total: fx.Node, exps: list[fx.Node]) -> set[fx.Node]:
    """Which of ``exps`` the sum is taken of, through rearrangements."""
    return {e for e in exps if any(t is total for t in reached(e, _SUM))}


def _axis_of_sum(exps: list[fx.Node], total: fx.Node) -> int | None:
    """The axis of the exponentials that ``total`` sums over, or None when it sums something else."""
    src = total.args[0]
    assert isinstance(src, fx.Node)
    index, prover = fresh_index(src, "t")
    axis = int(total.args[1][0]) % len(index)  # type: ignore[index, arg-type]
    e = Puller(prover, lambda n, i: Elem(n, i) if n in exps else None).element(src, index)
    if not (isinstance(e, Elem) and e.node in exps):
        return None
    where = [k for k, i in enumerate(e.index) if i == index[axis]]
    if index[axis] == 0 or len(where) != 1 or any(i.has(index[axis]) for k, i in enumerate(e.index) if k != where[0]):
        return None
    return where[0] if shape(src)[axis] == shape(exps[0])[where[0]] else None


def _divides(div: fx.Node, exps: list[fx.Node], total: fx.Node, dim: int) -> tuple[fx.Node, Sink] | None:
    """(the exponential, what is added to its total) where ``div`` is elementwise ``exp / (total + ...)``, both of one row."""
    index, prover = fresh_index(div, "t")
    ends = {*exps, total}
    puller = Puller(prover, lambda n, i: Elem(n, i) if n in ends or n.target == exps[0].target else None)
    try:
        top = puller.operand(div.args[0], index)
        bottom = puller.operand(div.args[1], index)
    except Unsupported:
        return None
    # Element by element: a quotient of rearranged exponentials is another tensor's softmax.
    if not (isinstance(top, Elem) and top.node in exps and top.index == index and shape(top.node) == shape(div)):
        return None
    sink: Sink | None = Sink()
    if isinstance(bottom, Call) and bottom.fn == "add":
        parts = sorted(bottom.args, key=lambda e: isinstance(e, Elem) and e.node is total)
        sink, bottom = _sink(parts[0], top.index, dtype(total)), parts[1]
    if sink is None or not (isinstance(bottom, Elem) and bottom.node is total):
        return None
    return (top.node, sink) if total_index(total, exps, top.index, dim) == bottom.index else None


def _sink(e: Expr, at: Index, dt: torch.dtype) -> Sink | None:
    if isinstance(e, Const):
        value = rounded(float(e.value), dt)  # a number that vanishes in the sum's dtype is none
        return Sink(value=value) if 0 <= value < math.inf else None
    if isinstance(e, Elem) and op_name(e.node) in _BASES:
        return Sink(node=e.node.args[0], index=e.index, at=at)  # type: ignore[arg-type]
    return None


def total_index(total: fx.Node, exps: Collection[fx.Node], at: Index, dim: int) -> Index | None:
    """Index into ``total = sum(exp, dim)`` of the row that holds element ``at`` of ``exp``; None if its layout differs."""
    src = total.args[0]
    assert isinstance(src, fx.Node)
    index, prover = fresh_index(src, "u")
    e = Puller(prover, lambda n, i: Elem(n, i) if n in exps else None).element(src, index)
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
    if a.node is not x or a.index != index or b.node is not lse or b.index != row or shape(x) != shape(exp):
        return None
    return Softmax(exp, x, axis, stable=False)
