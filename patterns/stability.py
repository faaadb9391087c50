"""Hand-written softmaxes that are none where all logits of a row are far below zero, or masked.

``exp(x) / sum(exp(x))`` is 0 / 0 where every exponential vanishes, and ``exp(x - logsumexp(x))`` is 1 for every key where
``log(n)`` drowns in a large fill. A softmax, and code that first takes the row's own maximum off, averages such a row instead.
So the forms without that shift are only matched where no row can be so: fills that are -inf (NaN either way) or small, or a mask
that is proven to leave every row a key. A sink that is added to the sum makes a row whose logits are all -inf zero, but not where
the row's maximum is taken off before, which makes it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fa_inductor.bounds import Facts, row_always_has_key
from fa_inductor.expr import FLOAT, SCORE, Call, Const, Expr, Load
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
