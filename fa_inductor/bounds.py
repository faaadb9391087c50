"""Which keys a block of query rows can see, read out of a mask, and proofs that a row always keeps one.

:class:`KvBounds` reads key ranges out of the ``keep`` of :func:`fa_inductor.masks.split_mask`;
:func:`row_always_has_key` proves that no row is left without a key, which is what makes skipping tiles right under a
finite fill. Nothing is guessed: what is not understood gives no bound and no proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

from fa_inductor.expr import FLOAT, KV_IDX, KV_LEN, Q_IDX, B, Call, Const, Expr, H, Load, call, substitute
from fa_inductor.intervals import ONE, ZERO, Bounds, Facts, Linear, bounds, linear, never_negative
from fa_inductor.masks import MaskedScore, conjuncts, disjuncts, normalise, split_mask

__all__ = ["Facts", "KvBounds", "MaskedScore", "block_range", "key_loads", "row_always_has_key", "split_mask"]

#: Above this many alternatives a disjunction of masks is not analysed further.
MAX_ALTERNATIVES = 32

_COMPARISONS = ("lt", "le", "gt", "ge", "eq")
_NO_FACTS = Facts()


@dataclass(frozen=True)
class KvBounds:
    """Key ranges read out of a mask: ``keep`` implies ``lower <= kv_idx < upper`` for every entry of the two.

    Attributes:
        lower, upper: integer expressions free of kv_idx: of q_idx, sizes, b, h and loads that do not depend on the key.
        rest: the conjuncts that the bounds do not express in full; without any, keep is exactly what the bounds say.
    """

    lower: tuple[Expr, ...] = ()
    upper: tuple[Expr, ...] = ()
    rest: tuple[Expr, ...] = ()

    @staticmethod
    @lru_cache(maxsize=2048)
    def of(keep: Expr) -> KvBounds:
        """The bounds of a mask expression."""
        lower: list[Expr] = []
        upper: list[Expr] = []
        rest: list[Expr] = []
        for atom in conjuncts(normalise(keep)):
            lo, hi, exact = _atom_bounds(atom)
            lower += [x for x in lo if x not in lower]
            upper += [x for x in hi if x not in upper]
            if not exact:
                rest.append(atom)
        return KvBounds(tuple(lower), tuple(upper), tuple(rest))

    def block(self, m0: Expr | int, m1: Expr | int, free: frozenset[Expr] = frozenset()) -> Bounds:
        """(lo, hi) with ``lo <= kv_idx < hi`` for every key that any row of [m0, m1) keeps, clamped to [0, kv_len).

        The ends are expressions of m0, m1, sizes, and of the loads in ``free``; numbers where all of those are numbers.
        """
        box = _row_box(m0, m1)
        low: Expr = ZERO
        high: Expr = KV_LEN
        for e in self.lower:
            x = bounds(e, box, free)[0]
            low = low if x is None else call("maximum", low, x)
        for e in self.upper:
            x = bounds(e, box, free)[1]
            high = high if x is None else call("minimum", high, x)
        return low, high

    def block_full(self, m0: Expr | int, m1: Expr | int, free: frozenset[Expr] = frozenset()) -> Bounds | None:
        """(lo, hi) of the keys that every row of [m0, m1) keeps, so that no mask is needed there.

        None where ``rest`` is not empty or an end is unknown. The range may be empty (hi <= lo).
        """
        if self.rest:
            return None
        box = _row_box(m0, m1)
        low: Expr = ZERO
        high: Expr = KV_LEN
        for e in self.lower:
            x = bounds(e, box, free)[1]
            if x is None:
                return None
            low = call("maximum", low, x)
        for e in self.upper:
            x = bounds(e, box, free)[0]
            if x is None:
                return None
            high = call("minimum", high, x)
        return low, high


def _row_box(m0: Expr | int, m1: Expr | int) -> dict[Expr, Bounds]:
    first = Const(m0) if isinstance(m0, int) else m0
    end = Const(m1) if isinstance(m1, int) else m1
    # b and h are not in the box: they stand for the caller's own batch and head.
    return {Q_IDX: (first, call("sub", end, ONE))}


_Atom = tuple[tuple[Expr, ...], tuple[Expr, ...], bool]
_NOTHING: _Atom = ((), (), False)


def _atom_bounds(atom: Expr) -> _Atom:
    """(lowers, uppers, exact) of one conjunct."""
    if not isinstance(atom, Call):
        return _NOTHING
    if atom.fn == "or_":
        return _hull(disjuncts(atom))
    if atom.fn not in _COMPARISONS or atom.args[0].kind == FLOAT:
        return _NOTHING
    x, y = atom.args
    if atom.fn == "eq":
        a, b = _difference_bounds(x, y), _difference_bounds(y, x)
        return a[0] + b[0], a[1] + b[1], a[2] and b[2]
    if atom.fn in ("lt", "le"):
        x, y = y, x  # now the atom is x > y or x >= y
    return _difference_bounds(x, call("add", y, ONE) if atom.fn in ("lt", "gt") else y)


def _difference_bounds(x: Expr, y: Expr) -> _Atom:
    """Bounds on kv_idx from ``x - y >= 0``."""
    form = linear(x).plus(linear(y), -1)
    keyed = [t for t in form.terms if t.depends_on(KV_IDX)]
    if len(keyed) != 1:
        return _NOTHING
    (term,) = keyed
    c = form.terms[term]
    rest = form.without(term)  # c * term + rest >= 0
    if c > 0:
        return _term_at_least(term, _ceil_div(rest.scaled(-1), c))
    return _term_at_most(term, _floor_div(rest, -c))


def _floor_div(form: Linear, by: int) -> Expr:
    return form.expr() if by == 1 else call("floordiv", form.expr(), Const(by))


def _ceil_div(form: Linear, by: int) -> Expr:
    return _floor_div(form if by == 1 else form.plus(Linear({}, by - 1)), by)


def _is_division(term: Expr) -> TypeGuard[Call]:
    """Whether ``term`` is a floor division by a positive number."""
    if not (isinstance(term, Call) and term.fn == "floordiv"):
        return False
    divisor = term.args[1]
    return isinstance(divisor, Const) and int(divisor.value) > 0


def _term_at_least(term: Expr, low: Expr) -> _Atom:
    """``term >= low`` as bounds on kv_idx."""
    if term == KV_IDX:
        return (low,), (), True
    if _is_division(term):
        return _difference_bounds(term.args[0], call("mul", low, term.args[1]))
    if isinstance(term, Call) and term.fn == "minimum":
        return _both(_difference_bounds(term.args[0], low), _difference_bounds(term.args[1], low))
    return _NOTHING


def _term_at_most(term: Expr, high: Expr) -> _Atom:
    """``term <= high`` as bounds on kv_idx."""
    if term == KV_IDX:
        return (), (linear(call("add", high, ONE)).expr(),), True
    if _is_division(term):
        # x // d <= h  <=>  x <= (h + 1) * d - 1
        end = call("mul", call("add", high, ONE), term.args[1])
        return _difference_bounds(call("sub", end, ONE), term.args[0])
    if isinstance(term, Call) and term.fn == "abs":
        x = term.args[0]
        return _both(_difference_bounds(high, x), _difference_bounds(call("add", high, x), ZERO))
    if isinstance(term, Call) and term.fn == "maximum":
        return _both(_difference_bounds(high, term.args[0]), _difference_bounds(high, term.args[1]))
    return _NOTHING


def _both(x: _Atom, y: _Atom) -> _Atom:
    return x[0] + y[0], x[1] + y[1], x[2] and y[2]


def _hull(branches: Sequence[Expr]) -> _Atom:
    """Bounds that hold in every branch of a disjunction: the least lower and the greatest upper end."""
    lows: list[Expr] | None = []
    highs: list[Expr] | None = []
    for branch in branches:
        found = KvBounds.of(branch)
        if lows is not None:
            lows = [*lows, _fold("maximum", found.lower)] if found.lower else None
        if highs is not None:
            highs = [*highs, _fold("minimum", found.upper)] if found.upper else None
    return ((_fold("minimum", lows),) if lows else (), (_fold("maximum", highs),) if highs else (), False)


def _fold(fn: str, items: Sequence[Expr]) -> Expr:
    out = items[0]
    for e in items[1:]:
        out = out if e == out else call(fn, out, e)
    return out


def block_range(
    keep: Expr, m0: int, m1: int, q_len: int, kv_len: int, sizes: Sequence[int], batch: int = 1, heads: int = 1
) -> tuple[int, int]:
    """(n_lo, n_hi): every key that any row of [m0, m1) keeps, in any batch and head, lies in n_lo <= kv_idx < n_hi.

    Loads are not read: what depends on them gives no bound. The range is within [0, kv_len] and may be empty.
    """
    table = Facts(q_len, kv_len, tuple(sizes)).table()
    box: dict[Expr, Bounds] = {
        Q_IDX: (Const(m0), Const(m1 - 1)),
        B: (ZERO, Const(max(batch - 1, 0))),
        H: (ZERO, Const(max(heads - 1, 0))),
    }
    found = KvBounds.of(keep)
    low, high = 0, kv_len
    for e in found.lower:
        x = bounds(substitute(e, table), box)[0]
        low = max(low, int(x.value)) if isinstance(x, Const) else low
    for e in found.upper:
        x = bounds(substitute(e, table), box)[1]
        high = min(high, int(x.value)) if isinstance(x, Const) else high
    return min(low, kv_len), max(min(high, kv_len), 0)


def row_always_has_key(keep: Expr, facts: Facts = _NO_FACTS) -> bool:
    """Whether every query row is proven to keep a key, for all sizes that fit ``facts`` and any captured values."""
    alternatives = _alternatives(normalise(keep))
    return alternatives is not None and any(_interval_never_empty(a, facts) for a in alternatives)


def _alternatives(keep: Expr) -> list[tuple[Expr, ...]] | None:
    """``keep`` as a disjunction of conjunctions, None when there are too many."""
    result: list[tuple[Expr, ...]] = [()]
    for atom in conjuncts(keep):
        branches: list[tuple[Expr, ...]] = []
        for d in disjuncts(atom):
            inner = _alternatives(d) if len(disjuncts(d)) > 1 or len(conjuncts(d)) > 1 else [conjuncts(d)]
            if inner is None:
                return None
            branches += inner
        result = [r + b for r in result for b in branches]
        if len(result) > MAX_ALTERNATIVES:
            return None
    return result


def _interval_never_empty(atoms: tuple[Expr, ...], facts: Facts) -> bool:
    lowers: list[Expr] = [ZERO]
    uppers: list[Expr] = [KV_LEN]
    for atom in atoms:
        if isinstance(atom, Call) and not atom.depends_on(KV_IDX) and atom.fn in ("lt", "le", "gt", "ge"):
            if atom.args[0].kind == FLOAT or not _row_condition_holds(atom, facts):
                return False
            continue
        lo, hi, exact = _atom_bounds(atom)
        if not exact:
            return False
        lowers += lo
        uppers += hi
    # The keys of one alternative form an interval, so it is not empty iff each lower end lies below each upper end.
    return all(never_negative(call("sub", call("sub", u, lo), ONE), facts) for lo in lowers for u in uppers)


def _row_condition_holds(atom: Call, facts: Facts) -> bool:
    x, y = atom.args
    if atom.fn in ("lt", "le"):
        x, y = y, x
    gap = call("sub", x, y)
    return never_negative(call("sub", gap, ONE) if atom.fn in ("lt", "gt") else gap, facts)


def key_loads(keep: Expr) -> frozenset[Expr]:
    """The loads in a mask's key ranges that depend on neither the query nor the key: one number for each (b, h)."""
    found = KvBounds.of(keep)
    return frozenset(
        n
        for e in (*found.lower, *found.upper)
        for n in e.walk()
        if isinstance(n, Load) and not n.depends_on(Q_IDX, KV_IDX)
    )
