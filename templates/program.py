"""What a kernel needs to know about a score program before its text is printed.

* :func:`pull_scale` finds the positive number that the whole logit is multiplied with. It is folded with log2(e) into one
  multiply-add per score.
* :func:`may_be_huge` tells programs whose logits may be large for other reasons than the scores, such as ``-1e9`` or
  ``finfo.min`` fills and additive masks. There ``logit * log2(e)`` may overflow and ``log(sum(exp(logit)))`` rounds to the fill, so
  the kernels subtract the maximum before scaling and the backward keeps maximum and sum apart.
* :func:`pull_factor` finds the number that the derivative is multiplied with; it is applied once to the accumulated gradient.
"""

from __future__ import annotations

import math

from fa_inductor.expr import BOOL, FLOAT, INT, Call, Const, Expr, Load, Score, call

LOG2E = math.log2(math.e)

#: Logits below this magnitude keep 2^-10 absolute accuracy in float32, so that exp() of a difference keeps a relative
#: accuracy of 2^-10 and the base-2 forms are safe.
HUGE = 8192.0

_BOUNDED = frozenset({"tanh", "sigmoid", "sin", "cos", "erf", "log", "log2", "log1p", "sqrt", "rsqrt"})
_LIKE_ARGUMENTS = frozenset({"add", "sub", "minimum", "maximum", "neg", "abs", "relu", "floor"})


def may_be_huge(e: Expr) -> bool:
    """Whether ``|e|`` may pass :data:`HUGE` for another reason than large scores, large indices or large scales.

    A float load is taken as unbounded where it is added, and as a moderate factor where it multiplies.
    """
    if isinstance(e, Load):
        return e.kind == FLOAT
    if isinstance(e, Const):
        return math.isfinite(e.value) and abs(e.value) > HUGE
    if not isinstance(e, Call) or e.kind in (BOOL, INT) or e.fn in _BOUNDED:
        return False
    if e.fn == "where":
        return may_be_huge(e.args[1]) or may_be_huge(e.args[2])
    if e.fn in _LIKE_ARGUMENTS:
        return any(may_be_huge(a) for a in e.args)
    if e.fn in ("mul", "div"):
        return any(may_be_huge(a) for a in e.args if not isinstance(a, Load))
    return not e.fn.startswith("cast_")


def pull_scale(e: Expr) -> tuple[Expr, float]:
    """``(body, c)`` with ``e == body * c``, c a positive finite number, as large a factor as the structure shows."""
    if isinstance(e, Call):
        if e.fn == "mul" and isinstance(e.args[1], Const) and e.kind == FLOAT:
            c = float(e.args[1].value)
            if math.isfinite(c) and c != 0.0:
                body, inner = pull_scale(e.args[0])
                if math.isfinite(c * inner) and abs(c * inner) > 1e-30:
                    return (body, c * inner) if c > 0 else (call("neg", body), -c * inner)
        if e.fn == "where":
            condition, x, y = e.args
            if y == Const(-math.inf):
                body, c = pull_scale(x)
                return call("where", condition, body, y), c
            if x == Const(-math.inf):
                body, c = pull_scale(y)
                return call("where", condition, x, body), c
    return e, 1.0


def pull_factor(e: Expr) -> tuple[Expr, float]:
    """``(rest, c)`` with ``e == rest * c``, c a finite non-zero number of either sign."""
    if isinstance(e, Const) and e.kind == FLOAT and math.isfinite(e.value) and e.value not in (0.0, 1.0):
        return Const(1.0), float(e.value)
    if isinstance(e, Call):
        if e.fn == "mul" and isinstance(e.args[1], Const):
            c = float(e.args[1].value)
            if math.isfinite(c) and c != 0.0:
                rest, inner = pull_factor(e.args[0])
                if math.isfinite(c * inner) and abs(c * inner) > 1e-30:
                    return rest, c * inner
        if e.fn == "neg":
            rest, c = pull_factor(e.args[0])
            return rest, -c
        if e.fn == "where":
            condition, x, y = e.args
            if y == Const(0.0):
                rest, c = pull_factor(x)
                return call("where", condition, rest, y), c
            if x == Const(0.0):
                rest, c = pull_factor(y)
                return call("where", condition, x, rest), c
    return e, 1.0


def uses_score(e: Expr) -> bool:
    return any(isinstance(n, Score) for n in e.walk())
