"""Rows set to zero after the softmax: the safe-softmax guard, and rows that the user knows to be empty.

``where(dead, 0, softmax(s))`` with ``dead`` the same for every key of a row zeroes whole rows of the output. Where ``dead`` is
the test "every logit is -inf" of the same logits, that is the op's own rule for dead rows; any other row condition becomes a
``where`` on the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
from torch import fx

from fa_inductor.expr import Call, Const, Expr
from fa_inductor.patterns.anchor import Softmax, fresh_index
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.terms import Elem, Index, shape


@dataclass(frozen=True)
class Guard:
    """``cond`` at ``index`` decides per row; the weight is 0 where it equals ``zero_when``."""

    cond: fx.Node
    index: Index
    zero_when: bool


def is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.kind == "float" and e.value == 0.0


def tests_dead_row(guard: Guard, softmax: Softmax) -> bool:
    """Whether the guard zeroes exactly the rows of ``softmax`` whose logits are all -inf."""
    node, negated = guard.cond, not guard.zero_when
    while op_name(node) in ("logical_not", "bitwise_not") and isinstance(node.args[0], fx.Node):
        node, negated = node.args[0], not negated
    name = op_name(node)
    if name not in ("any", "all") or len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return False
    # zero where all(x == -inf), or where not any(x != -inf)
    if negated != (name == "any"):
        return False
    tested = node.args[0]
    dims = shape(softmax.logits)
    if shape(tested) != dims or int(node.args[1]) % len(dims) != softmax.dim:  # type: ignore[call-overload]
        return False
    if not (len(node.args) > 2 and node.args[2]):
        return False
    index, prover = fresh_index(tested, "t")
    e = Puller(prover, lambda n, i: Elem(n, i) if n is softmax.logits else None).element(tested, index)
    inner_negated = False
    while isinstance(e, Call) and e.fn == "not_":
        e, inner_negated = e.args[0], not inner_negated
    if not (isinstance(e, Call) and e.fn in ("eq", "ne")):
        return False
    equal = (e.fn == "eq") != inner_negated
    values = [a for a in e.args if isinstance(a, Const) and a.value == -math.inf]
    elements = [a for a in e.args if isinstance(a, Elem) and a.node is softmax.logits and a.index == index]
    return len(values) == 1 and len(elements) == 1 and equal == (name == "all")


def row_index(guard: Guard, key: sympy.Expr) -> bool:
    """Whether the condition is the same for every key of a row."""
    return key == 0 or not any(i.has(key) for i in guard.index)
