"""Hand-written softmaxes that are none where all logits of a row are far below zero, or masked.

``exp(x) / sum(exp(x))`` is 0 / 0 where every exponential vanishes, and ``exp(x - logsumexp(x))`` is 1 for every key where
``log(n)`` drowns in a large fill. A softmax, and code that first takes the row's own maximum off, averages such a row instead.
So the forms without that shift are only matched where no row can be so: fills that are -inf (NaN either way) or small, or a mask
that is proven to leave every row a key. A sink that is added to the sum makes a row whose logits are all -inf zero, but not where
the row's maximum is taken off before, which makes it NaN.

The other way, ``exp`` without that shift is infinite where a number of the program lifts a logit far above zero, as ``1 - s`` does
to a masked score: eager code then has ``inf / inf``, whatever else the row holds, so such a program is not matched at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fa_inductor.bounds import Facts, row_always_has_key
from fa_inductor.expr import BOOL, FLOAT, SCORE, Call, Const, Expr, Load
from fa_inductor.masks import split_mask

#: exp of anything closer to zero than this is a normal float32 and keeps log(n) when added to it.
_SMALL = 50.0


def may_vanish(logit: Expr, is_mask: Callable[[Load], bool], facts: Facts) -> bool:
    """Whether all logits of a row may be finite and huge.

    Args:
        is_mask: whether the elements that a float load reads may be those of a mask.
    """
    return _may_be(lambda x: math.isfinite(x) and abs(x) > _SMALL, logit, is_mask, facts)


def may_be_dead(logit: Expr, is_mask: Callable[[Load], bool], facts: Facts) -> bool:
    """Whether all logits of a row may be -inf; arguments as for :func:`may_vanish`."""
    return _may_be(lambda x: x == -math.inf, logit, is_mask, facts)


def may_overflow(logit: Expr, is_mask: Callable[[Load], bool]) -> bool:
    """Whether a number in ``logit``, or a mask that it reads, may lift it so far that exp is infinite.

    Scores, other loads and index arithmetic are taken for small: data may overflow any exp, and then does so in a softmax that
    somebody wrote without the shift on purpose. ``is_mask`` as for :func:`may_vanish`.
    """
    return _range(logit, is_mask)[1] > _SMALL


_Range = tuple[float, float]
_UNIT: _Range = (-1.0, 1.0)


def _range(e: Expr, is_mask: Callable[[Load], bool]) -> _Range:
    """Least and largest value of a float expression, data being within one of zero and masks anywhere below."""
    if isinstance(e, Const):
        return float(e.value), float(e.value)
    if isinstance(e, Load):
        return (-math.inf, 1.0) if e.kind == FLOAT and is_mask(e) else _UNIT
    if not isinstance(e, Call) or e.kind != FLOAT:
        return _UNIT
    if e.fn == "cast_float":
        return (0.0, 1.0) if e.args[0].kind == BOOL else _UNIT
    if e.fn == "where":
        (a, b), (c, d) = (_range(x, is_mask) for x in e.args[1:])
        return min(a, c), max(b, d)
    if e.fn in ("mul", "div"):
        # a tensor that is multiplied with something is a scale, or a mask of zeros and ones
        x, y = ((0.0, 1.0) if isinstance(a, Load) else _range(a, is_mask) for a in e.args)
        if e.fn == "div":
            y = (1 / y[0], 1 / y[1]) if y[0] == y[1] != 0 else _UNIT
        return _hull([a * b for a in x for b in y])
    parts = [_range(a, is_mask) for a in e.args]
    (a, b), (c, d) = parts[0], parts[-1]
    if e.fn in ("add", "sub"):
        return _hull([a + c, b + d] if e.fn == "add" else [a - d, b - c])
    if e.fn in ("minimum", "maximum"):
        pick = min if e.fn == "minimum" else max
        return pick(a, c), pick(b, d)
    if e.fn in ("neg", "relu"):
        return (-b, -a) if e.fn == "neg" else (max(a, 0.0), max(b, 0.0))
    if e.fn in ("tanh", "sigmoid", "erf", "sin", "cos"):
        return _UNIT
    if e.fn == "exp":
        return math.exp(min(a, 700.0)), math.exp(min(b, 700.0))
    largest = max(abs(x) for part in parts for x in part)
    return -largest, largest


def _hull(ends: list[float]) -> _Range:
    """0 times infinity, and infinity less infinity, is anything."""
    return (-math.inf, math.inf) if any(map(math.isnan, ends)) else (min(ends), max(ends))


def _may_be(number: Callable[[float], bool], logit: Expr, is_mask: Callable[[Load], bool], facts: Facts) -> bool:
    if not _has(number, logit, is_mask):
        return False
    masked = split_mask(logit)
    if masked.fill is None or _has(number, masked.live, is_mask):
        return True
    return not row_always_has_key(masked.keep, facts)


def _has(number: Callable[[float], bool], e: Expr, is_mask: Callable[[Load], bool]) -> bool:
    if isinstance(e, Const):
        return e.kind == FLOAT and number(float(e.value))
    if isinstance(e, Load):
        return e.kind == FLOAT and is_mask(e)
    if not isinstance(e, Call) or e.kind != FLOAT:
        return False
    if e.fn == "where":
        return any(_has(number, a, is_mask) for a in e.args[1:])
    if e.fn in ("mul", "div"):
        # a factor of the score is a scale; masks made by multiplication have their fill as a number
        return any(_has(number, a, is_mask) for a in e.args if not (isinstance(a, Load) and e.depends_on(SCORE)))
    return any(_has(number, a, is_mask) for a in e.args)
