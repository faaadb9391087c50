"""Weights changed after the softmax, a row at a time: the safe-softmax guard, rows known to be empty, factors; masked keys.

``where(dead, 0, softmax(s))`` with ``dead`` the same for every key of a row zeroes whole rows of the output. Where ``dead`` is
the test "every logit is -inf" of the same logits, that is the op's own rule for dead rows; any other row condition becomes a
``where`` on the output. ``nan_to_num(softmax(s))`` and ``where(isnan(p), 0, p)`` zero the rows without keys and those with a NaN
or infinite score, which are the rows whose logsumexp is not finite. ``where(mask, 0, softmax(where(mask, -inf, s)))`` repeats the
mask, which only shows in a row that is masked as a whole.

``(softmax(s) * g) @ v`` with ``g`` the same for every key of a row is ``(softmax(s) @ v) * g``: the factor goes to the output. The
two differ where ``g`` is infinite: 0 * inf is NaN, in the weights or on the way back to V, and inf - inf in the product with V. So
a factor that is computed by what makes infinite numbers of finite ones (``1 / count``) stays where it is, and what zeroes weights
or replaces NaN must not stand behind one that may come infinite from outside, or overflow float16.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fa_inductor.expr import Call, Const, Expr, call
from fa_inductor.patterns.anchor import Softmax, fresh_index
from fa_inductor.patterns.index_map import broadcast, pull_view
from fa_inductor.patterns.operands import Operand
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.terms import Elem, Index, Unsupported, dtype, shape, value_of
from fa_inductor.view import OPAQUE


@dataclass(frozen=True)
class Guard:
    """``cond`` at ``index`` decides per row; the weight is 0 where it equals ``zero_when``."""

    cond: fx.Node
    index: Index
    zero_when: bool


@dataclass(frozen=True)
class Factor:
    """``by`` at ``index``, or the number ``by``, multiplies every weight of a row."""

    by: fx.Node | float
    index: Index = ()
    half: bool = False

    @property
    def may_be_infinite(self) -> bool:
        """Whether the weights may be NaN or infinite behind it; numbers, and tensors of bool and integers, also as floats, are not.

        In float16 (``half``) what is not 0 or 1 may overflow.
        """
        node = self.by
        if self.half and isinstance(node, float):
            return abs(node) > 1.0
        while isinstance(node, fx.Node):
            if not dtype(node).is_floating_point:
                return self.half and dtype(node) != torch.bool
            if op_name(node) not in ("_to_copy", "convert_element_type"):
                return True
            node = node.args[0]  # type: ignore[assignment]
        return False


@dataclass(frozen=True)
class RowStep:
    """What is done to a row of the output: zeroed where ``by`` equals ``zero_when``, multiplied by it where that is None."""

    by: Operand | float
    zero_when: bool | None = None


def is_zero(e: Expr) -> bool:
    """Whether an expression is the number 0.0."""
    return isinstance(e, Const) and e.kind == "float" and e.value == 0.0


def replaces_nan(node: fx.Node) -> bool:
    """Whether ``nan_to_num`` turns NaN into 0; weights are at most 1, so infinities do not matter."""
    return op_name(node) == "nan_to_num" and (node.args[1:2] or (None,))[0] in (None, 0, 0.0) and not node.kwargs.get("nan")


def guard_chain(weights: fx.Node, softmax: fx.Node, below: set[fx.Node]) -> set[fx.Node]:
    """Nodes that lead from the operand of the product with V to the softmax while nothing else reads the probabilities.

    A guard on this chain holds for every weight; one on a branch (``where(c, guarded, p)``, a slice written back) does not.
    """
    chain: set[fx.Node] = set()
    n = weights
    while n is not softmax and n in below and n not in chain:
        chain.add(n)
        inner = {*below, softmax}
        taken = {"where": slice(1, 3), "mul": slice(2)}.get(op_name(n), slice(1))
        branches = [a for a in n.args[taken] if isinstance(a, fx.Node) and a in inner]
        values = [a for a in n.all_input_nodes if a in inner and a not in branches]
        if len(branches) != 1 or (values and op_name(n) != "where"):
            break
        n = branches[0]
    return chain


def tests_nan(e: Expr, weight: Expr) -> bool:
    """Whether the condition is ``isnan(weight)``."""
    if isinstance(e, Call) and e.fn == "ne":
        return e.args == (weight, weight)
    return isinstance(e, Call) and e.fn == "isnan" and e.args[0] == weight


#: Fills at or below this leave no weight beside any score that is not itself an overflow.
_VANISHING = -1e30
#: Numbers up to here, as terms or (inverted) as divisors, keep scores far from such fills.
_MODEST = 1e4


def plainly_finite(e: Expr, product: fx.Node) -> bool:
    """Whether an expression is the product, scaled, shifted or capped by modest numbers: finite, and far from any fill, for
    every score that does not overflow itself."""
    if isinstance(e, Const):
        return e.kind == "float" and abs(e.value) <= _MODEST
    if isinstance(e, Elem):
        return e.node is product
    if not isinstance(e, Call) or e.fn not in ("add", "sub", "mul", "div", "neg", "tanh"):
        return False
    divisor = e.args[1] if e.fn == "div" else None
    if divisor is not None and not (isinstance(divisor, Const) and abs(divisor.value) >= 1 / _MODEST):
        return False
    return all(plainly_finite(x, product) for x in e.args)


def masked_again(logit: Expr, cond: Expr, keep: Expr, product: fx.Node) -> Expr | None:
    """``where(cond, -inf, live)`` where ``logit`` is ``where(cond, fill, live)`` and the fill leaves no weight; else None.

    ``keep`` is the negation of ``cond``; a logit ``where(keep, live, fill)`` is the same.

    ``live`` must be made of the scores and modest numbers alone: a mask in it could leave a row no other key.
    """
    if not (isinstance(logit, Call) and logit.fn == "where" and logit.args[0] in (cond, keep)):
        return None
    fill, live = logit.args[1:] if logit.args[0] == cond else logit.args[:0:-1]
    if not (isinstance(fill, Const) and fill.kind == "float" and fill.value <= _VANISHING and plainly_finite(live, product)):
        return None
    return call("where", cond, Const(-math.inf), live)


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


def row_factor(node: fx.Node, index: Index, inner: set[fx.Node], key: sympy.Expr, prover: Prover) -> tuple[fx.Node, Factor] | None:
    """(weights, factor) where ``node`` multiplies weights, which are in ``inner``, by the same for every key of a row.

    A division is one by a number: 0 / 0 in a masked weight is no product of the output.

    Raises:
        Unsupported: a factor that may be infinite where what it is computed from is finite.
    """
    name = op_name(node)
    if name not in ("mul", "div") or node.kwargs.get("rounding_mode") or not dtype(node).is_floating_point:
        return None
    a, by = node.args[:2]
    if name == "mul" and isinstance(by, fx.Node) and by in inner:
        a, by = by, a
    if not isinstance(a, fx.Node) or a not in inner or by in inner:
        return None
    half = dtype(node) == torch.float16
    if isinstance(by, (int, float)):
        number = float(by) if name == "mul" else 1.0 / by if by else math.inf
        return (a, Factor(number, half=half)) if abs(number) <= torch.finfo(dtype(node)).max else None
    if name == "div" or not isinstance(by, fx.Node) or not isinstance(value_of(by), torch.Tensor):
        return None
    at = broadcast(index, shape(by))
    try:
        while any(i.has(key) for i in at if key != 0):
            pulled = pull_view(by, at, prover)
            if pulled is None:
                return None
            by, at = pulled
    except Unsupported:
        return None
    source = infinite_source(by)
    if source is not None:
        name = op_name(source) or source.name
        raise Unsupported(f"the probabilities are multiplied by a factor that may be infinite: {name}", source)
    return a, Factor(by, tuple(at), half)


#: Functions whose values are bounded, and those that are finite where their operands are; views and casts are too.
_BOUNDED = frozenset({"sigmoid", "tanh", "sin", "cos", "erf", "_softmax", "softmax", "bernoulli", "rand", "rand_like"})
_KEEPS_FINITE = frozenset({
    "mul", "add", "sub", "neg", "abs", "relu", "gelu", "silu", "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "where",
    "mm", "addmm", "bmm", "baddbmm", "sum", "mean", "amax", "amin", "full", "full_like", "scalar_tensor", "_to_copy",
    "convert_element_type", "alias", "clone", "detach", "expand", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze",
    "permute", "transpose", "t", "select", "slice", "index", "index_select", "gather", "embedding", "cat", "stack",
    "native_layer_norm", "native_dropout", "repeat", "flip", "roll", "unbind", "split", "split_with_sizes", "chunk", "diagonal",
    "unfold", "lift_fresh_copy", "cumsum", "sort", "topk", "square", "hardsigmoid", "hardtanh", "hardswish", "elu",
    "leaky_relu", "mish", "softplus", "log_sigmoid_forward", "log_sigmoid",
})  # fmt: skip


def infinite_source(node: fx.Node) -> fx.Node | None:
    """The node that makes the values of ``node`` infinite or NaN, though what comes from outside be finite; None where none may.

    Overflow of sums and products of moderate numbers does not count, as nowhere here. A layer that the view does not look into
    counts as finite.
    """
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        name = op_name(n) if n.op == "call_function" else ""
        value = value_of(n)
        exact = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
        if n.op != "call_function" or n.target is OPAQUE or name in _BOUNDED or exact:
            continue
        operands, numbers = n.all_input_nodes, [a for a in n.args if isinstance(a, float)]
        if name in ("div", "reciprocal"):
            by = n.args[-1] if name == "div" else n.args[0]
            if not _is_positive(by):
                return n
        elif name == "pow":
            if not isinstance(n.args[1], (int, float)) or n.args[1] < 0 or not float(n.args[1]).is_integer():
                return n
        elif (name not in _KEEPS_FINITE and n.target is not operator.getitem) or not all(math.isfinite(a) for a in numbers):
            return n
        todo += [a for a in operands if a not in seen]
        seen.update(operands)
    return None


def _is_positive(by: object) -> bool:
    """Whether a divisor is a number other than 0, or bounded below by one above it."""
    cast = False
    while isinstance(by, fx.Node) and by.op == "call_function" and op_name(by) in ("_to_copy", "convert_element_type"):
        by, cast = by.args[0], True
    if isinstance(by, (int, float)):
        return by != 0 and math.isfinite(1.0 / by)
    if not isinstance(by, fx.Node) or by.op != "call_function" or op_name(by) not in ("clamp", "clamp_min"):
        return False
    if cast and dtype(by).is_floating_point:
        return False  # 1e-9 is 0 in float16 and as an integer
    least = by.args[1] if len(by.args) > 1 else by.kwargs.get("min")
    return isinstance(least, (int, float)) and least > 0 and math.isfinite(1.0 / least)
