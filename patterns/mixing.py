"""Products over heads around a softmax, as talking heads have them: the reason for such an attention to be left alone.

Consulted where no match was found. A product mixes scores when it carries their key axis through and sums over one that the
product of queries and keys had as a batch axis: ``scores[b, h, q, k] * mix[h, g]`` before the softmax, ``weights[b, h, q, k] *
mix[h, g]`` between it and the product with V. It may be a matmul, an einsum or a linear layer; the last is opaque to the view,
so the Dynamo graph is asked what lies on its other side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import sympy
import torch
from torch import fx

from fa_inductor.patterns.anchor import ADDING, MATMULS, Softmax, fresh_index, is_rearrangement
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller
from fa_inductor.patterns.terms import Elem, Index, Unsupported, dtype, kind_of, shape, value_of
from fa_inductor.view import OPAQUE, AtenView, Path, slicing

#: (path, Dynamo node, reason) of a product in the way.
Mixing = tuple[Path, fx.Node, str]

_BEFORE = "{by} mixes the scores over {axis} between the product of queries and keys and the softmax"
_AFTER = "{by} mixes the probabilities over {axis} between the softmax and the product with V"
LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
_PERMUTING = ("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "rearrange", "mT")
_POINTWISE = ("add", "iadd", "sub", "isub", "imul", "itruediv", "neg", "masked_fill", "where", "dropout")
#: Nodes looked at on the way to the next product.
_NEAR = 32


def find_mixing(view: AtenView, softmax: Softmax, live: set[fx.Node]) -> list[Mixing]:
    """The products over heads between a softmax and the two products of its attention, in graph order; none where unsure."""
    if softmax.refused or softmax.total is not None:
        return []
    try:
        before = _before(view, softmax)
        after = _after(view, softmax, live, before is not None)
    except Unsupported:
        return []
    return [m for m in (before, after) if m is not None]


# ------------------------------------------------------------------------------------------------------------- before
def _before(view: AtenView, softmax: Softmax) -> Mixing | None:
    index, prover = fresh_index(softmax.logits, "t")
    key = index[softmax.dim]
    for node in _sources(softmax.logits):
        origin = view.origin.get(node)
        found = _elements(softmax.logits, index, node, prover)
        if key == 0 or origin is None or len(found) != 1:
            continue
        (at,) = found
        new = None
        if node.target in MATMULS:
            new = _new_axis(view, node, at, key, prover)
        elif origin.node.target in LINEAR and not at[-1].has(key) and _is_applied_to_scores(origin.node):
            new = at[-1]
        axes = [d for d, i in enumerate(index) if new is not None and i != 0 and new.has(i)]
        if len(axes) == 1:
            reason = _BEFORE.format(by=slicing.name_of(origin.node), axis=_axis(softmax, axes[0]))
            return origin.path, origin.node, reason
    return None


def _new_axis(view: AtenView, node: fx.Node, at: Index, key: sympy.Expr, prover: Prover) -> sympy.Expr | None:
    """Where one operand of a matmul holds rows and columns of another product and is summed over a batch axis of that: the
    index of the other operand's free axis, in the softmax's symbols. None else."""
    a, b = node.args[1:3] if node.target in ADDING else node.args[:2]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    over = sympy.Symbol("c", integer=True, nonnegative=True)
    inner = Prover({**prover.ranges, over: (sympy.Integer(0), shape(a)[-1] - 1)})
    *batch, row, column = at
    for operand, own, free, other in ((a, (*batch, row, over), column, row), (b, (*batch, over, column), row, column)):
        if free.has(key) or not other.has(key):
            continue
        for source in _sources(operand):
            origin = view.origin.get(source)
            if origin is None or not (source.target in MATMULS or origin.node.target in slicing.MATMULS):
                continue
            for e in _elements(operand, own, source, inner):
                queries = {s for i in e[-2:] for s in i.free_symbols} - {key}
                if _has(e[-2:], key) and not _has(e[-2:], over) and queries and _has(e[:-2], over):
                    return free
    return None


def _is_applied_to_scores(linear: fx.Node) -> bool:
    """Whether a linear layer's input is a product [.., rows, columns] whose dimensions were only put in another order, beside
    what is pointwise. A layer on hidden states takes them in the order, or with the dimensions merged, that their product gave."""
    first = linear.args[0] if linear.args else linear.kwargs.get("input")
    dims = _dims(first)
    if not isinstance(first, fx.Node) or len(dims) < 3:
        return False
    todo, seen = [(first, False)], {first}
    while todo and len(seen) < _NEAR:
        n, permuted = todo.pop(0)
        if n.target in slicing.MATMULS:
            ordered = permuted or (slicing.name_of(n) == "einsum" and len(dims) > 3)
            if ordered and sorted(_dims(n)) == sorted(dims) and not _of_probabilities(n):
                return True
        elif _passes(n):
            new = [a for a in n.all_input_nodes if a not in seen]
            seen.update(new)
            todo += [(a, permuted or _permutes(n)) for a in new]
    return False


def follows_scores(linear: fx.Node) -> bool:
    """Whether the nearest product that a linear layer's input is made of, with nothing in between but what is pointwise, has no
    softmax among its operands and batch axes on both sides: scores, and no hidden states."""
    first = linear.args[0] if linear.args else linear.kwargs.get("input")
    while isinstance(first, fx.Node) and first.target not in slicing.MATMULS:
        inputs = first.all_input_nodes
        if not _passes(first) or not inputs or _dims(inputs[0]) != _dims(first):
            return False
        first = inputs[0]
    if not isinstance(first, fx.Node) or _of_probabilities(first):
        return False
    # A product with a matrix is a layer's.
    return min((len(_dims(a)) for a in first.all_input_nodes), default=0) > 2


def _of_probabilities(product: fx.Node) -> bool:
    """Whether an operand of a product is a softmax, with nothing in between but what is pointwise or rearranges: no scores."""
    todo, seen = [product], {product}
    while todo and len(seen) < _NEAR:
        new = [a for a in todo.pop(0).all_input_nodes if a not in seen]
        if any(a.target in slicing.SOFTMAXES for a in new):
            return True
        seen.update(new)
        todo += [a for a in new if _passes(a)]
    return False


def _permutes(n: fx.Node) -> bool:
    name = slicing.name_of(n)
    return name in _PERMUTING or (name == "getattr" and n.args[1] in ("T", "mT"))


def _dims(n: object) -> list[str]:
    value = n.meta.get("example_value") if isinstance(n, fx.Node) else None
    return [str(d) for d in value.shape] if isinstance(value, torch.Tensor) else []


# -------------------------------------------------------------------------------------------------------------- after
def _after(view: AtenView, softmax: Softmax, live: set[fx.Node], mixed_before: bool) -> Mixing | None:
    for path, by, operand, axis in _consumers(view, softmax, live):
        index, prover = fresh_index(operand, "t")
        found = _elements(operand, index, softmax.node, prover)
        axes = [d for d, i in enumerate(found[0]) if i.has(index[axis])] if len(found) == 1 and index[axis] != 0 else []
        if len(axes) != 1 or axes[0] == softmax.dim or not _reaches_product(by):
            continue
        if _of_heads(softmax, axes[0]) if mixed_before else _of_batch(softmax, axes[0]):
            return path, by, _AFTER.format(by=slicing.name_of(by), axis=_axis(softmax, axes[0]))
    return None


def _consumers(view: AtenView, softmax: Softmax, live: set[fx.Node]) -> Iterator[tuple[Path, fx.Node, fx.Node, int]]:
    """(path, Dynamo node, ATen operand, axis of it that is summed over) of each product that the probabilities go into."""
    todo, seen = [softmax.node], {softmax.node}
    while todo and len(seen) < 2 * _NEAR:
        n = todo.pop(0)
        for (path, holder), _ in view.holders(n):
            for u in holder.users:
                if u.target in LINEAR and (u.args[0] if u.args else u.kwargs.get("input")) is holder:
                    yield path, u, n, -1
        for u in n.users:
            if u.target in MATMULS and u in view.origin:
                first, second = u.args[1:3] if u.target in ADDING else u.args[:2]
                if first is not second and n in (first, second):
                    yield view.origin[u].path, view.origin[u].node, n, -1 if n is first else -2
            elif u in live and u not in seen and u.op == "call_function":
                seen.add(u)
                todo.append(u)


def _of_batch(softmax: Softmax, axis: int) -> bool:
    """Whether an axis of the probabilities is a batch axis of the product that the scores are, whose keys they are of."""
    index, prover = fresh_index(softmax.logits, "t")
    return any(
        _has(e[-2:], index[softmax.dim]) and _has(e[:-2], index[axis]) and not _has(e[-2:], index[axis])
        for node in _sources(softmax.logits)
        if node.target in MATMULS
        for e in _elements(softmax.logits, index, node, prover)
    )


def _reaches_product(node: fx.Node) -> bool:
    """Whether a product follows a Dynamo node, with nothing in between but what is pointwise or rearranges."""
    todo, seen = [node], {node}
    while todo and len(seen) < _NEAR:
        for u in todo.pop(0).users:
            if u.target in slicing.MATMULS:
                return True
            if u not in seen and _passes(u):
                seen.add(u)
                todo.append(u)
    return False


def opaque_consumer(view: AtenView, softmax: Softmax) -> tuple[Path, fx.Node, bool] | None:
    """(path, Dynamo node, whether a product follows) of what the view leaves out and the probabilities go into; None without."""
    todo, seen = [softmax.node], {softmax.node}
    while todo and len(seen) < 2 * _NEAR:
        n = todo.pop(0)
        for (path, holder), _ in view.holders(n):
            for u in holder.users:
                if slicing.is_heavy(u):
                    return path, u, _reaches_product(u)
        new = [u for u in n.users if u not in seen and u.op == "call_function" and u.target not in MATMULS]
        seen.update(new)
        todo += new
    return None


# ------------------------------------------------------------------------------------------------------------- common
def _passes(n: fx.Node) -> bool:
    return n.op.startswith("call") and (slicing.is_rearrangement(n) or slicing.name_of(n) in _POINTWISE)


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Matmuls and opaque values that ``node`` is a pointwise function or a rearrangement of, nearest first."""
    todo, seen = [node], {node}
    while todo and len(seen) < 2 * _NEAR:
        n = todo.pop(0)
        if n.target in MATMULS or (n.target is operator.getitem and n.args[0].target is OPAQUE):  # type: ignore[union-attr]
            yield n
            continue
        pointwise = isinstance(n.target, torch._ops.OpOverload) and torch.Tag.pointwise in n.target.tags
        if pointwise or is_rearrangement(n):
            new = [a for a in n.all_input_nodes if a not in seen and isinstance(value_of(a), torch.Tensor)]
            seen.update(new)
            todo += new


def _elements(start: fx.Node, index: Index, end: fx.Node, prover: Prover) -> list[Index]:
    """Where ``end`` is read for the element of ``start`` at ``index``."""
    puller = Puller(prover, lambda n, i: Elem(n, i, kind_of(dtype(n))) if n is end else None, dropout=True)
    return list({e.index: None for e in puller.element(start, index).walk() if isinstance(e, Elem) and e.node is end})


def _has(index: Iterable[sympy.Expr], symbol: sympy.Expr) -> bool:
    return symbol != 0 and any(i.has(symbol) for i in index)


def _of_heads(softmax: Softmax, axis: int) -> bool:
    """Whether an axis is where heads are in scores [batch, heads, queries, keys]."""
    rank = len(shape(softmax.node))
    return softmax.dim == rank - 1 and 0 < axis < rank - 2


def _axis(softmax: Softmax, axis: int) -> str:
    place = f"axis {axis} of [{', '.join(map(str, shape(softmax.node)))}]"
    return f"heads ({place})" if _of_heads(softmax, axis) else place
