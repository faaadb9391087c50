"""The way from the softmax to the product with V: what of it belongs to the output's rows or to the masks is taken aside."""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch import fx

from fa_inductor.expr import Const, Expr
from fa_inductor.patterns.anchor import Softmax
from fa_inductor.patterns.guards import (
    Factor,
    Guard,
    RowStep,
    guard_chain,
    is_zero,
    replaces_nan,
    row_factor,
    row_index,
    tests_dead_row,
    tests_nan,
)
from fa_inductor.patterns.index_map import broadcast
from fa_inductor.patterns.operands import Operand
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.site import Reject
from fa_inductor.patterns.terms import Elem, Index, Unsupported, shape

_NO_TEST = "rows are zeroed by a condition on the scores that is no test for a row without keys"
_BEHIND = "rows are zeroed behind a factor of the probabilities that may be infinite"
_OF_SCORES = "the probabilities are multiplied by what is computed from the scores"


class Weights:
    """Stops ``puller`` at the probabilities, and at what zeroes or multiplies weights on the chain that leads to them.

    ``below``: nodes between the softmax ``anchor`` and the product with V, whose operand is ``first``; ``key``: its contraction.

    Attributes:
        steps: conditions and factors of whole rows, innermost first. remasked: conditions on keys.
        finite_rows: whether rows without keys, or with a NaN or infinite score, are zero.
        taken_aside: the nodes of the factors.
    """

    def __init__(self, puller: Puller, anchor: fx.Node, below: set[fx.Node], first: fx.Node, key: sympy.Expr):
        self.puller, self.anchor, self.below, self.key = puller, anchor, below, key
        self.steps: list[Guard | Factor] = []
        self.remasked: list[Guard] = []
        self.finite_rows = False
        self.taken_aside: set[fx.Node] = set()
        self._chain = guard_chain(first, anchor, below)
        self._plain = Puller(puller.prover, lambda node, index: Elem(node, index) if node is anchor else None)
        puller.stop = self._stop

    @property
    def changed(self) -> bool:
        return bool(self.steps or self.remasked or self.finite_rows)

    def _stop(self, node: fx.Node, index: Index) -> Expr | None:
        if node is self.anchor:
            return Elem(node, index)
        if node not in self._chain:
            return None
        if replaces_nan(node):
            return self._nan_is_zero(self.puller.operand(node.args[0], index))
        multiplied = row_factor(node, index, {*self.below, self.anchor}, self.key, self.puller.prover)
        if multiplied is not None:
            weight = self.puller.operand(multiplied[0], index)
            self.steps.append(multiplied[1])
            self.taken_aside.add(node)
            return weight
        if op_name(node) != "where" or not isinstance(node.args[0], fx.Node):
            return None
        return self._guarded(node, node.args[0], index)

    def _guarded(self, node: fx.Node, cond: fx.Node, index: Index) -> Expr | None:
        """The weight that ``where`` keeps, with the condition that zeroes it set aside; None where it is no such guard."""
        a, b = (self.puller.operand(x, index) for x in node.args[1:3])
        guard = Guard(cond, broadcast(index, shape(cond)), is_zero(a))
        if is_zero(a) == is_zero(b):
            return None
        weight = b if guard.zero_when else a
        if cond in self.below:
            test = self._plain.element(guard.cond, guard.index)
            tested = self._plain.operand(node.args[2 if guard.zero_when else 1], index)
            found = tests_nan(test if guard.zero_when else self.puller.prover.not_(test), tested)
            return self._nan_is_zero(weight) if found else None
        if self._never_holds(guard):
            return weight
        if row_index(guard, self.key):
            self.steps.append(guard)
        elif _unbounded(self.steps):
            return None
        else:
            self.remasked.append(guard)
        return weight

    def _never_holds(self, guard: Guard) -> bool:
        """Whether a condition of positions alone is proven to zero nothing, as that of ``tril`` over a single key is."""
        try:
            test = self._plain.element(guard.cond, guard.index)
        except Unsupported:
            return False
        return isinstance(test, Const) and bool(test.value) != guard.zero_when

    def _nan_is_zero(self, weight: Expr) -> Expr | None:
        """The weight itself, with the rule for rows without keys; None where it is no plain weight."""
        if not (isinstance(weight, Elem) and weight.node is self.anchor) or _unbounded(self.steps):
            return None
        self.finite_rows = True
        return weight

    def row_steps(
        self, softmax: Softmax, row: Index, operand: Callable[[fx.Node, Index, str], Operand]
    ) -> tuple[str, tuple[RowStep, ...]]:
        """(rule for dead rows, what zeroes or multiplies rows of the output).

        ``row``: index of the softmax at its first key. ``operand`` finds where to read a tensor from, or refuses with the reason.
        """
        dead_rows, kept = "zero" if self.finite_rows or self.remasked else softmax.dead_rows, []
        for i, step in enumerate(self.steps):
            if isinstance(step, Factor):
                kept.append(RowStep(step.by if isinstance(step.by, float) else operand(step.by, step.index, _OF_SCORES)))
                continue
            if _unbounded(self.steps[:i]):
                raise Reject(_BEHIND, step.cond)
            if tests_dead_row(step, softmax) and step.index == row:
                dead_rows = "zero"
            else:
                kept.append(RowStep(operand(step.cond, step.index, _NO_TEST), step.zero_when))
        return dead_rows, tuple(kept)


def _unbounded(steps: list[Guard | Factor]) -> bool:
    """Whether the weights have been multiplied by what may be infinite or NaN."""
    return any(isinstance(x, Factor) and x.may_be_infinite for x in steps)
