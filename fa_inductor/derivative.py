"""Derivatives of score expressions, as score expressions: what a backward kernel multiplies the logit's gradient with.

The values are those of torch's own backward formulas (``tools/autograd/derivatives.yaml``): sgn for abs, half each at a
tie of minimum and maximum, 0 for relu at 0, no gradient through comparisons, floor and integers. One difference is
meant: the branch that ``where`` does not take contributes 0 here, where torch multiplies 0 by the branch's derivative,
which is NaN when that is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fa_inductor.errors import ProgramError
from fa_inductor.expr import FLOAT, SCORE, Call, Const, Expr, Load, call

_ZERO, _ONE, _HALF, _MINUS_ONE = Const(0.0), Const(1.0), Const(0.5), Const(-1.0)
_LN2 = Const(math.log(2.0))
_TWO_OVER_SQRT_PI = Const(2.0 / math.sqrt(math.pi))


def d_score(expr: Expr) -> Expr:
    """The derivative of ``expr`` in the raw score, at the same (b, h, q_idx, kv_idx)."""
    return derivative(expr, SCORE)


def d_load(expr: Expr, load: Load) -> Expr:
    """The derivative of ``expr`` in the element that ``load`` reads, at the same (b, h, q_idx, kv_idx).

    The gradient of the captured tensor sums, over all entries, this times the logit's gradient into the element each
    reads.
    """
    if load.kind != FLOAT:
        raise ProgramError(f"{load} is not a float and has no derivative")
    return derivative(expr, load)


def derivative(expr: Expr, term: Expr) -> Expr:
    """The derivative of a float expression in ``term``, SCORE or a float load; other loads are held constant."""
    if expr.kind != FLOAT:
        raise ProgramError(f"an expression of kind {expr.kind} has no derivative: {expr}")
    known: dict[Expr, Expr] = {term: _ONE}
    for node in expr.walk():
        if node not in known:
            known[node] = _of_call(node, known) if isinstance(node, Call) and node.kind == FLOAT else _ZERO
    return known[expr]


def _of_call(e: Call, known: dict[Expr, Expr]) -> Expr:
    if e.fn == "cast_float":
        return known[e.args[0]]  # a float cast to float is folded away, so this is 0
    if e.fn == "where":
        return call("where", e.args[0], known[e.args[1]], known[e.args[2]])
    inner = [known[a] for a in e.args]
    if all(d == _ZERO for d in inner):
        return _ZERO
    if len(e.args) == 1:
        outer = _outer(e)
        return times(inner[0], outer if e.fn == "relu" else number(outer))
    return _binary(e, *inner)


def times(d: Expr, factor: Expr) -> Expr:
    """``d * factor``, where a derivative of exactly 0 or 1 is structure, not a number to multiply by.

    So is the 0 of ``where(c, x, 0)``, which differentiating a mask gives: it stays the outermost, for who multiplies by the
    derivative selects there (a NaN of a masked entry does not pass, as in autograd's formula for ``where``). What multiplies
    in eager code as well is wrapped by :func:`number`.
    """
    if _ZERO in (d, factor):
        return _ZERO
    if d == _ONE:
        return factor
    if factor == _ONE:
        return d
    return _inside(d, lambda x: times(x, factor)) or _inside(factor, lambda x: times(d, x)) or call("mul", d, factor)


def number(e: Expr) -> Expr:
    """``e`` as a number: a value that happens to be a choice with a 0, as of a mask of 0 and 1, is not to select by.

    The cast does nothing, and :func:`~fa_inductor.expr.call` would fold it away.
    """
    return Call("cast_float", (e,), FLOAT) if selects(e) else e


def _inside(d: Expr, of: Callable[[Expr], Expr]) -> Expr | None:
    """``of`` applied inside of a ``where`` with a 0, or of the sum of such; None where ``d`` is neither."""
    if not isinstance(d, Call) or not selects(d):
        return None
    if d.fn == "where":
        condition, x, y = d.args
        return call("where", condition, *(z if z == _ZERO else of(z) for z in (x, y)))
    return call("add", *(of(x) for x in d.args))


def selects(d: Expr) -> bool:
    """Whether a derivative is ``where(c, x, 0)``, or has such a branch or term: not a number alone, but a choice."""
    if not isinstance(d, Call):
        return False
    if d.fn == "where":
        return any(x == _ZERO or selects(x) for x in d.args[1:])
    return d.fn == "add" and any(map(selects, d.args))


def _plus(x: Expr, y: Expr) -> Expr:
    return y if x == _ZERO else x if y == _ZERO else call("add", x, y)


def _binary(e: Call, dx: Expr, dy: Expr) -> Expr:
    x, y = e.args
    if e.fn == "add":
        return _plus(dx, dy)
    if e.fn == "sub":
        return _plus(dx, _negated(dy))
    if e.fn == "mul":
        return _plus(times(dx, number(y)), times(dy, number(x)))
    if e.fn == "div":
        return _plus(_over(dx, y), _negated(_over(times(dy, number(e)), y)))
    if e.fn in ("minimum", "maximum"):
        above, below = (dx, dy) if e.fn == "maximum" else (dy, dx)
        tie = _plus(dx, dy)
        # Not inside of a where: what is shared with the other branches stays shared.
        tie = tie if tie == _ZERO else call("mul", tie, _HALF)
        return call("where", call("gt", x, y), above, call("where", call("lt", x, y), below, tie))
    if e.fn == "pow":
        return _plus(times(dx, _pow_in_base(x, y)), times(dy, _pow_in_exponent(x, y, e)))
    raise ProgramError(f"no derivative is known for {e.fn}: {e}")


def _negated(d: Expr) -> Expr:
    return _ZERO if d == _ZERO else _inside(d, _negated) or call("neg", d)


def _over(d: Expr, y: Expr) -> Expr:
    return _ZERO if d == _ZERO else _inside(d, lambda x: _over(x, y)) or call("div", d, y)


def _pow_in_base(x: Expr, y: Expr) -> Expr:
    if isinstance(y, Const):
        p = float(y.value)
        return _ZERO if p == 0 else times(Const(p), number(x)) if p == 2 else times(call("pow", x, Const(p - 1.0)), Const(p))
    slope = call("mul", call("pow", x, call("sub", y, _ONE)), y)
    return call("where", call("eq", y, _ZERO), _ZERO, slope)


def _pow_in_exponent(x: Expr, y: Expr, e: Expr) -> Expr:
    at_zero = call("and_", call("eq", x, _ZERO), call("ge", y, _ZERO))
    return call("where", at_zero, _ZERO, call("mul", e, call("log", x)))


def _outer(e: Call) -> Expr:
    """The derivative of a function of one argument, in terms of the argument and of its own value ``e``."""
    (x,) = e.args
    fn = e.fn
    if fn == "neg":
        return _MINUS_ONE
    if fn == "abs":
        return call("where", call("gt", x, _ZERO), _ONE, call("where", call("lt", x, _ZERO), _MINUS_ONE, _ZERO))
    if fn == "exp":
        return e
    if fn == "exp2":
        return call("mul", e, _LN2)
    if fn == "expm1":
        return call("add", e, _ONE)
    if fn == "log":
        return call("reciprocal", x)
    if fn == "log2":
        return call("reciprocal", call("mul", x, _LN2))
    if fn == "log1p":
        return call("reciprocal", call("add", x, _ONE))
    if fn == "sqrt":
        return call("div", _HALF, e)
    if fn == "rsqrt":
        return call("mul", call("mul", e, call("mul", e, e)), Const(-0.5))
    if fn == "tanh":
        return call("sub", _ONE, call("mul", e, e))
    if fn == "sigmoid":
        return call("mul", e, call("sub", _ONE, e))
    if fn == "sin":
        return call("cos", x)
    if fn == "cos":
        return call("neg", call("sin", x))
    if fn == "erf":
        return call("mul", call("exp", call("neg", call("mul", x, x))), _TWO_OVER_SQRT_PI)
    if fn == "relu":
        return call("where", call("gt", x, _ZERO), _ONE, _ZERO)
    if fn == "floor":
        return _ZERO
    if fn == "reciprocal":
        return call("neg", call("mul", e, e))
    raise ProgramError(f"no derivative is known for {fn}: {e}")
