"""Mask algebra: what a score expression excludes.

:func:`split_mask` turns any nest of ``where`` masks and additive masks into (keep, live, fill). What is not understood
stays part of the live logit, so the split is always exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fa_inductor.expr import BOOL, FALSE, FLOAT, SCORE, TRUE, Call, Const, Expr, call, substitute

#: An added constant at or below this is taken for a mask's fill, above it for a bias (Swin adds -100, which is one).
MASK_FILL = -1e3

_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class MaskedScore:
    """A logit as ``where(keep, live, fill)``, or ``where(keep, live, live + fill)`` when ``additive``.

    Attributes:
        keep: bool expression; ``TRUE`` where nothing is masked.
        live: the logit of kept entries.
        fill: float expression free of ``score``; None where nothing is masked. A bias added to a fill of -inf is taken
            to leave it -inf.
        additive: the fill is added to the logit of excluded entries instead of replacing it. An additive -inf replaces.
    """

    keep: Expr
    live: Expr
    fill: Expr | None = None
    additive: bool = False

    @property
    def fill_value(self) -> float | None:
        """The fill where it is one number, else None."""
        return float(self.fill.value) if isinstance(self.fill, Const) else None


@lru_cache(maxsize=2048)
def split_mask(score: Expr) -> MaskedScore:
    """``score`` with its masks taken out, outermost first; a term that is not understood stays in ``live``."""
    if isinstance(score, Call):
        if score.fn == "where" and score.kind == FLOAT:
            return _split_where(score)
        if score.fn in ("add", "sub"):
            return _split_sum(score)
        if score.fn == "mul" and isinstance(score.args[1], Const):
            return _split_scaled(score, float(score.args[1].value))
    return MaskedScore(TRUE, score)


def _split_where(e: Call) -> MaskedScore:
    cond, x, y = e.args
    if y.depends_on(SCORE):
        cond, x, y = negate(cond), y, x
    if y.depends_on(SCORE) or not x.depends_on(SCORE):
        return MaskedScore(TRUE, e)
    inner = split_mask(x)
    if inner.fill is None:
        return MaskedScore(cond, inner.live, y)
    if inner.additive:
        return MaskedScore(cond, x, y)
    fill = y if y == inner.fill else call("where", cond, inner.fill, y)
    return MaskedScore(call("and_", cond, inner.keep), inner.live, fill)


def _split_sum(e: Call) -> MaskedScore:
    x, term = e.args
    if e.fn == "sub":
        if term.depends_on(SCORE):
            return MaskedScore(TRUE, e)
        term = call("neg", term) if not isinstance(term, Const) else Const(-term.value)
    elif term.depends_on(SCORE):
        x, term = term, x
    if term.depends_on(SCORE):
        return MaskedScore(TRUE, e)
    inner = split_mask(x)
    mask = _as_additive_mask(term)
    if mask is None:
        live = call("add", inner.live, term)
        if inner.fill is None or inner.additive:
            return MaskedScore(inner.keep, live, inner.fill, inner.additive)
        return MaskedScore(inner.keep, live, _shifted(inner.fill, term))
    cond, value = mask
    keep = call("and_", inner.keep, cond)
    if value == -math.inf:
        if inner.fill is None or inner.fill_value == -math.inf:
            return MaskedScore(keep, inner.live, Const(-math.inf))
        if not inner.additive:
            return MaskedScore(keep, inner.live, call("where", cond, inner.fill, Const(-math.inf)))
        return MaskedScore(cond, x, Const(-math.inf))
    if inner.fill is None:
        return MaskedScore(keep, inner.live, Const(value), additive=True)
    if inner.fill_value == -math.inf:
        # -inf + value is -inf; where only the additive mask excludes, the entry is live + value, hence not masked.
        return MaskedScore(inner.keep, call("add", inner.live, term), Const(-math.inf))
    if inner.additive:
        own = call("where", inner.keep, Const(0.0), inner.fill)
        return MaskedScore(keep, inner.live, call("add", own, term), additive=True)
    return MaskedScore(inner.keep, call("add", inner.live, term), _shifted(inner.fill, term))


def _split_scaled(e: Call, factor: float) -> MaskedScore:
    inner = split_mask(e.args[0])
    value = inner.fill_value
    if inner.fill is None or value is None or not factor > 0 or not math.isfinite(factor):
        return MaskedScore(TRUE, e)
    return MaskedScore(inner.keep, call("mul", inner.live, e.args[1]), Const(value * factor), inner.additive)


def _shifted(fill: Expr, term: Expr) -> Expr:
    if isinstance(fill, Const) and fill.value == -math.inf:
        return fill
    return call("add", fill, term)


def _as_additive_mask(term: Expr) -> tuple[Expr, float] | None:
    """(cond, value) when ``term`` is 0 where cond holds and ``value`` <= MASK_FILL elsewhere, else None."""
    term = _joined_casts(term)
    conds = _outermost_bools(term)
    if len(conds) != 1:
        return None
    (cond,) = conds
    sides = [_refold(substitute(term, {cond: truth})) for truth in (TRUE, FALSE)]
    if not all(isinstance(s, Const) for s in sides):
        return None
    kept, excluded = (float(s.value) for s in sides)  # type: ignore[attr-defined]
    if excluded == 0:
        cond, kept, excluded = negate(cond), excluded, kept
    return (cond, excluded) if kept == 0 and excluded <= MASK_FILL else None


def _joined_casts(e: Expr) -> Expr:
    """``cast_float(a) * cast_float(b)`` written as ``cast_float(a & b)``, anywhere in ``e``."""
    if not isinstance(e, Call):
        return e
    args = [_joined_casts(a) for a in e.args]
    if e.fn == "mul" and all(isinstance(a, Call) and a.fn == "cast_float" and a.args[0].kind == BOOL for a in args):
        return call("cast_float", call("and_", *(a.args[0] for a in args)))  # type: ignore[attr-defined]
    return call(e.fn, *args)


def _outermost_bools(e: Expr) -> set[Expr]:
    if e.kind == BOOL:
        return set() if isinstance(e, Const) else {e}
    if isinstance(e, Call):
        return set().union(*(_outermost_bools(a) for a in e.args))
    return set()


def _refold(e: Expr) -> Expr:
    """``e`` built again bottom up, so that constants that meet only now are folded."""
    return call(e.fn, *(_refold(a) for a in e.args)) if isinstance(e, Call) else e


def negate(cond: Expr) -> Expr:
    """``not cond`` with the negation pushed down to comparisons of integers and to loads."""
    if isinstance(cond, Call):
        if cond.fn in ("and_", "or_"):
            return call("or_" if cond.fn == "and_" else "and_", *(negate(a) for a in cond.args))
        # A comparison of floats is not turned: with NaN both it and its opposite are False.
        if cond.fn in _NEGATED and cond.args[0].kind != FLOAT:
            return call(_NEGATED[cond.fn], *cond.args)
    return call("not_", cond)


def normalise(cond: Expr) -> Expr:
    """``cond`` with every negation pushed down and boolean ``where`` written as and/or."""
    if not isinstance(cond, Call):
        return cond
    if cond.fn == "not_":
        inner = normalise(cond.args[0])
        turned = negate(inner)
        return turned if turned == call("not_", inner) else normalise(turned)
    if cond.fn in ("and_", "or_"):
        return call(cond.fn, *(normalise(a) for a in cond.args))
    if cond.fn == "where" and cond.kind == BOOL:
        c, x, y = (normalise(a) for a in cond.args)
        return call("or_", call("and_", c, x), call("and_", normalise(negate(c)), y))
    return cond


def conjuncts(cond: Expr) -> tuple[Expr, ...]:
    """The terms that ``cond`` is the conjunction of; empty for ``TRUE``."""
    if isinstance(cond, Call) and cond.fn == "and_":
        return conjuncts(cond.args[0]) + conjuncts(cond.args[1])
    return () if cond == TRUE else (cond,)


def disjuncts(cond: Expr) -> tuple[Expr, ...]:
    """The terms that ``cond`` is the disjunction of."""
    if isinstance(cond, Call) and cond.fn == "or_":
        return disjuncts(cond.args[0]) + disjuncts(cond.args[1])
    return (cond,)
