"""Integer expressions as linear forms, their bounds over a box of indices, and proofs that they are not negative.

Everything here is exact or says "unknown" (None, False): integers do not round, floor division is Python's and torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fa_inductor.expr import INT, KV_LEN, Q_IDX, Q_LEN, Call, Const, Expr, Load, Sym, call, substitute

#: Inclusive bounds of a symbol or expression; None is "unbounded as far as we know".
Bounds = tuple[Expr | None, Expr | None]

ZERO, ONE = Const(0), Const(1)


@dataclass(frozen=True)
class Linear:
    """``const + sum(coefficient * term)``, coefficients integer, terms being expressions that are not linear
    themselves."""

    terms: Mapping[Expr, int]
    const: int

    def coefficient(self, term: Expr) -> int:
        return self.terms.get(term, 0)

    def without(self, term: Expr) -> Linear:
        return Linear({t: c for t, c in self.terms.items() if t != term}, self.const)

    def scaled(self, factor: int) -> Linear:
        return Linear({t: c * factor for t, c in self.terms.items() if factor}, self.const * factor)

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        terms = dict(self.terms)
        for t, c in other.terms.items():
            terms[t] = terms.get(t, 0) + sign * c
        return Linear({t: c for t, c in terms.items() if c}, self.const + sign * other.const)

    def expr(self) -> Expr:
        """The form as an expression; equal forms give equal expressions."""
        out: Expr | None = None
        for t, c in sorted(self.terms.items(), key=lambda item: (item[1] < 0, str(item[0]))):
            size = t if abs(c) == 1 else call("mul", t, Const(abs(c)))
            if out is None:
                out = size if c > 0 else call("neg", size)
            else:
                out = call("add" if c > 0 else "sub", out, size)
        if out is None:
            return Const(self.const)
        return call("add", out, Const(self.const)) if self.const >= 0 else call("sub", out, Const(-self.const))


def linear(e: Expr) -> Linear:
    """The linear form of an integer expression."""
    if isinstance(e, Const):
        return Linear({}, int(e.value))
    if isinstance(e, Call):
        if e.fn in ("add", "sub"):
            return linear(e.args[0]).plus(linear(e.args[1]), 1 if e.fn == "add" else -1)
        if e.fn == "neg":
            return linear(e.args[0]).scaled(-1)
        if e.fn == "mul":
            x, y = linear(e.args[0]), linear(e.args[1])
            if not x.terms or not y.terms:
                return y.scaled(x.const) if not x.terms else x.scaled(y.const)
        if e.fn == "floordiv" and isinstance(e.args[1], Const) and int(e.args[1].value) > 0:
            divisor, x = int(e.args[1].value), linear(e.args[0])
            if all(c % divisor == 0 for c in x.terms.values()):
                return Linear({t: c // divisor for t, c in x.terms.items()}, x.const // divisor)
            return Linear({call("floordiv", x.expr(), e.args[1]): 1}, 0)
    return Linear({e: 1}, 0)


def bounds(e: Expr, box: Mapping[Expr, Bounds], free: frozenset[Expr] = frozenset()) -> Bounds:
    """Inclusive bounds of an integer expression whose symbols range over ``box``.

    Symbols outside the box stand for themselves in the result. A captured load is unknown unless it is in ``free``, the
    loads that the caller can evaluate. With numbers for every symbol the bounds fold to numbers.
    """
    form = linear(e)
    low: Expr | None = Const(form.const)
    high: Expr | None = Const(form.const)
    for term, c in form.terms.items():
        lo, hi = _term_bounds(term, box, free)
        if c < 0:
            lo, hi = hi, lo
        low = None if low is None or lo is None else linear(call("add", low, call("mul", lo, Const(c)))).expr()
        high = None if high is None or hi is None else linear(call("add", high, call("mul", hi, Const(c)))).expr()
    return low, high


def _term_bounds(t: Expr, box: Mapping[Expr, Bounds], free: frozenset[Expr]) -> Bounds:
    if isinstance(t, Sym):
        return box.get(t, (t, t))
    if isinstance(t, Load):
        return (t, t) if t in free else (None, None)
    if not isinstance(t, Call):
        return None, None
    if t.fn in ("minimum", "maximum"):
        return _extreme(t.fn, bounds(t.args[0], box, free), bounds(t.args[1], box, free))
    if t.fn == "where" and t.kind == INT:
        (a, b), (c, d) = bounds(t.args[1], box, free), bounds(t.args[2], box, free)
        low = None if a is None or c is None else call("minimum", a, c)
        return low, None if b is None or d is None else call("maximum", b, d)
    if t.fn in ("floordiv", "mod") and isinstance(t.args[1], Const) and int(t.args[1].value) > 0:
        if t.fn == "mod":
            return ZERO, Const(int(t.args[1].value) - 1)
        lo, hi = bounds(t.args[0], box, free)
        return tuple(None if x is None else call("floordiv", x, t.args[1]) for x in (lo, hi))  # type: ignore[return-value]
    if t.fn == "cast_int" and t.args[0].kind == "bool":
        return ZERO, ONE
    return (ZERO, None) if t.fn == "abs" else (None, None)


def _extreme(fn: str, x: Bounds, y: Bounds) -> Bounds:
    """Bounds of min or max: one known side is enough on the side that the function caps."""

    def both(a: Expr | None, b: Expr | None) -> Expr | None:
        return None if a is None or b is None else call(fn, a, b)

    def either(a: Expr | None, b: Expr | None) -> Expr | None:
        return (b if a is None else a) if a is None or b is None else call(fn, a, b)

    return (both(x[0], y[0]), either(x[1], y[1])) if fn == "minimum" else (either(x[0], y[0]), both(x[1], y[1]))


@dataclass(frozen=True)
class Facts:
    """What is known of the sizes in a proof. None: q_len and kv_len are at least 1, the others may be anything."""

    q_len: int | None = None
    kv_len: int | None = None
    sizes: tuple[int | None, ...] = ()

    def table(self) -> dict[Expr, Expr]:
        named = [(Q_LEN, self.q_len), (KV_LEN, self.kv_len), *((Sym(f"n{i}"), s) for i, s in enumerate(self.sizes))]
        return {sym: Const(value) for sym, value in named if value is not None}


def never_negative(e: Expr, facts: Facts) -> bool:
    """Whether ``e >= 0`` is proven for every query row, 0 <= q_idx < q_len, and all sizes that fit ``facts``."""
    form = linear(substitute(e, facts.table()))
    for term, c in form.terms.items():
        if isinstance(term, Call) and term.fn == "floordiv" and isinstance(term.args[1], Const):
            # d * (x // d) lies in [x - d + 1, x] for d > 0.
            d = int(term.args[1].value)
            if d <= 0 or c % d:
                return False
            least = linear(term.args[0]).scaled(c // d).plus(Linear({}, c // d * (1 - d) if c > 0 else 0))
            return never_negative(form.without(term).plus(least).expr(), facts)
    if any(t not in (Q_IDX, Q_LEN, KV_LEN) for t in form.terms):
        return False
    row, rows, cols = (form.coefficient(t) for t in (Q_IDX, Q_LEN, KV_LEN))
    low = form.const
    if row < 0:  # least at the last row, q_len - 1
        low -= row
        if facts.q_len is not None:
            low += row * facts.q_len
        else:
            rows += row
    # What is left counts up from its least value, 1; sizes that are known are numbers by now.
    return rows >= 0 and cols >= 0 and low + rows + cols >= 0
