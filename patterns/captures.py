"""Operands beside the scores: computed in the kernel from indices, loaded from small tensors, or captured whole.

A mask that follows from positions alone costs nothing in a kernel; a bias of a few numbers is loaded; what depends on both
the query and the key through data is captured as the tensor that the user's code already has.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from fa_inductor.expr import BOOL, FLOAT, Call, Const, Expr
from fa_inductor.patterns.provenance import Place
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.terms import Elem, Index, Lin, Unsupported, dtype, kind_of, value_of

# A kernel evaluates the expression once per score. These bounds keep it cheap beside the two products of a tile; an expression
# beyond them is left to the code that computes it today, once, and its result is captured.
_MAX_CALLS, _MAX_LOADS, _MAX_CALLS_WITH_GRAD = 48, 6, 6

_SPLITTABLE = {
    "add", "sub", "mul", "div", "where", "bitwise_and", "logical_and", "bitwise_or", "logical_or", "minimum", "maximum",
    "masked_fill",
}  # fmt: skip
_STEPS = {"lt", "le", "gt", "ge", "eq", "ne", "floor", "cast_int", "cast_bool", "isnan"}


def calls_in(e: Expr) -> int:
    """How many functions and operators an expression has."""
    return sum(isinstance(x, Call) for x in e.walk())


def elems(e: Expr) -> list[Elem]:
    """All elements of tensors that an expression reads."""
    return [x for x in e.walk() if isinstance(x, Elem)]


def _is_step(e: Expr) -> bool:
    """Whether a small error in an argument can change the value a lot: comparisons and conversions of floats."""
    if not isinstance(e, Call) or not any(a.kind == FLOAT for a in e.args):
        return False
    return e.fn in _STEPS


def exact(e: Expr, prover: Prover) -> bool:
    """Whether float32 holds ``e`` exactly as the user's code has it; kernels compute in it, whatever dtypes a mask was made in."""
    if e.kind != FLOAT or isinstance(e, Const):
        return True
    if isinstance(e, Elem):
        v = value_of(e.node)
        return not isinstance(v, torch.Tensor) or v.dtype is not torch.float64
    if not isinstance(e, Call):
        return False
    if e.fn == "cast_float":
        return _small(e.args[0], prover)
    if e.fn in ("where", "minimum", "maximum", "neg", "abs"):
        return all(exact(a, prover) for a in e.args if a.kind == FLOAT)
    return False


def _small(e: Expr, prover: Prover) -> bool:
    """Whether the integer or boolean ``e`` is proven to be one that float32 holds."""
    if isinstance(e, Lin):
        return prover.holds(2**24 - e.value) and prover.holds(e.value + 2**24)
    if isinstance(e, Elem):
        v = value_of(e.node)
        return isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16)
    return e.kind == BOOL or isinstance(e, Const)


class SideOperands:
    """Evaluates operands that do not depend on the scores."""

    def __init__(self, prover: Prover, place: Place, query: frozenset[sympy.Symbol], key: sympy.Symbol | None):
        self.prover, self.place, self.query, self.key = prover, place, query, key

    def dense(self, e: Elem) -> bool:
        """Whether the element varies with both the query and the key position."""
        symbols = {s for i in e.index for s in i.free_symbols}
        return self.key in symbols and bool(symbols & self.query)

    def __call__(self, node: fx.Node, index: Index) -> Expr:
        whole = Elem(node, index, kind_of(dtype(node)))
        deep = self._deep(node, index, whole)
        if deep is not None:
            return deep
        split = self._split(node, index, whole)
        if split is not None:
            return split
        if not self.place.emittable(node):
            raise Unsupported(f"{node.name} cannot be had where the fused op would go", node)
        return whole

    def _deep(self, node: fx.Node, index: Index, whole: Elem) -> Expr | None:
        key = ("deep", tuple(self.prover.ranges.items()), node, index)
        e, visited = self.place.view.shared(key, lambda: self._pull(node, index))
        stale = frozenset(x.node for x in elems(e) if not self._at_hand(x.node)) if e is not None else frozenset()
        if stale:
            cut = self._held_above(node, stale)
            e, visited = self.place.view.shared((*key, cut), lambda: self._pull(node, index, cut))
        if e is None or (e == whole and not self.place.emittable(node)):
            return None
        return e if self._acceptable(e, whole) and self.place.gradient_barrier(visited) is None else None

    def _at_hand(self, node: fx.Node) -> bool:
        return isinstance(value_of(node), torch.SymFloat) or self.place.emittable(node)

    def _held_above(self, node: fx.Node, stale: frozenset[fx.Node]) -> frozenset[fx.Node]:
        """The last values at hand on the way from ``node`` to ``stale`` ones, which were overwritten after they were read.

        A static cache counts its keys in place; the positions that were computed of the count are still there.
        """
        clean: dict[fx.Node, bool] = dict.fromkeys(stale, False)
        found: set[fx.Node] = set()

        def visit(n: fx.Node) -> bool:
            """Whether ``n`` can do without stale values, by itself or through what it is computed from."""
            if n not in clean:
                clean[n] = True
                inputs = [visit(i) for i in n.all_input_nodes]
                if not all(inputs):
                    clean[n] = self.place.holder(n) is not None
                    found.update({n} if clean[n] else ())
            return clean[n]

        visit(node)
        return frozenset(found)

    def _pull(
        self, node: fx.Node, index: Index, cut: frozenset[fx.Node] = frozenset()
    ) -> tuple[Expr | None, frozenset[fx.Node]]:
        puller = Puller(self.prover, lambda n, i: Elem(n, i, kind_of(dtype(n))) if n in cut else None)
        try:
            e = puller.element(node, index)
        except Unsupported:
            return None, frozenset()
        return e, frozenset(puller.visited)

    def _acceptable(self, e: Expr, whole: Elem) -> bool:
        leaves = elems(e)
        dense = [x for x in leaves if self.dense(x)]
        if len({x.node for x in leaves}) > _MAX_LOADS or calls_in(e) > _MAX_CALLS:
            return False
        if len(dense) > (1 if self.dense(whole) else 0):
            return False
        if not all(self._at_hand(x.node) for x in leaves):
            return False
        if not all(exact(a, self.prover) for c in e.walk() if _is_step(c) for a in c.children):
            return False
        trained = any(isinstance(value_of(x.node), torch.Tensor) and self.place.requires_grad(x.node) for x in leaves)
        return not trained or calls_in(e) <= _MAX_CALLS_WITH_GRAD

    def _split(self, node: fx.Node, index: Index, whole: Elem) -> Expr | None:
        """``op(a, b)`` with each operand evaluated on its own, when that captures no more dense data than the whole would."""
        if op_name(node) not in _SPLITTABLE or self.place.gradient_barrier([node]) is not None:
            return None
        puller = Puller(self.prover, lambda n, i: None if n is node else self(n, i))
        try:
            e = puller.element(node, index)
        except Unsupported:
            return None
        return e if self._acceptable(e, whole) else None
