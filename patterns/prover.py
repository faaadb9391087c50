"""Exact reasoning about index inequalities and the booleans made of them.

A comparison of known integers becomes the atom ``e >= 0`` or ``e == 0`` with ``e`` a sympy expression; :class:`Prover` decides
atoms from the ranges of the index symbols (sizes are at least 1) and simplifies conjunctions and disjunctions. It never
guesses: what it cannot decide stays an atom. sympy's own relationals are not used, their automatic rewriting is slow and not
stable between versions.
"""

from __future__ import annotations

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.expr import BOOL, FALSE, TRUE, Call, Const, Expr, call
from fa_inductor.patterns.terms import Elem, Lin, RowValue, quotient

ZERO = Lin(sympy.Integer(0))


def _atom(fn: str, e: sympy.Expr) -> Call:
    return Call(fn, (Lin(e), ZERO), BOOL)


def flatten(fn: str, e: Expr) -> list[Expr]:
    """Operands of a nested ``and_`` or ``or_``."""
    if isinstance(e, Call) and e.fn == fn:
        return [x for a in e.args for x in flatten(fn, a)]
    return [e]


class Prover:
    """Facts about index symbols: ``ranges[symbol] = (lowest, highest)``, both inclusive."""

    def __init__(self, ranges: dict[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]]):
        self.ranges = dict(ranges)
        self._memo: dict[sympy.Expr, Expr] = {}
        self.unviewed: dict[tuple, tuple[sympy.Expr, ...]] = {}  # reshapes solved under these ranges

    # -- atoms
    def ge0(self, e: sympy.Expr) -> Expr:
        """``e >= 0`` as TRUE, FALSE or an atom."""
        e = sympy.expand(e)
        found = self._memo.get(e)
        if found is None:
            found = TRUE if self._surely_nonnegative(e) else FALSE if self._surely_nonnegative(-e - 1) else _atom("ge", e)
            self._memo[e] = found
        return found

    def holds(self, e: sympy.Expr) -> bool:
        """Whether ``e >= 0`` is proven."""
        return self.ge0(e) == TRUE

    def eq0(self, e: sympy.Expr) -> Expr:
        e = sympy.expand(e)
        if e == 0:
            return TRUE
        if self._surely_nonnegative(e - 1) or self._surely_nonnegative(-e - 1):
            return FALSE
        if self._surely_nonnegative(e) and self._surely_nonnegative(-e):
            return TRUE
        return _atom("eq", -e if e.could_extract_minus_sign() else e)

    def _surely_nonnegative(self, e: sympy.Expr) -> bool:
        if e.is_number:
            return bool(e >= 0)
        low = self._lowest(sympy.expand(e))
        if low is None:
            return False
        return self._size_nonnegative(low)

    def _lowest(self, e: sympy.Expr) -> sympy.Expr | None:
        """A lower bound of ``e`` over the index ranges as an expression of sizes; None when ``e`` is not linear in them."""
        for v in [s for s in e.free_symbols if s in self.ranges]:
            c = e.coeff(v)
            rest = sympy.expand(e - c * v)
            if rest.has(v):
                bound = self._bound_nonlinear(e, v)
                if bound is None:
                    return None
                e = bound
                continue
            if any(s in self.ranges for s in c.free_symbols):
                return None
            low, high = self.ranges[v]
            if c.is_nonnegative or self._size_nonnegative(c):
                e = sympy.expand(rest + c * low)
            elif c.is_nonpositive or self._size_nonnegative(-c):
                e = sympy.expand(rest + c * high)
            else:
                return None
        return e

    def _bound_nonlinear(self, e: sympy.Expr, v: sympy.Symbol) -> sympy.Expr | None:
        """Replace floor divisions and remainders that hold ``v`` by their own lowest or highest value."""
        for atom in e.atoms(FloorDiv, Mod):
            if not atom.has(v):
                continue
            c = e.coeff(atom)
            rest = sympy.expand(e - c * atom)
            if rest.has(atom) or not c.is_number:
                return None
            base, div = atom.args
            if not (div.is_number and div > 0):
                return None
            if isinstance(atom, Mod):
                return sympy.expand(rest + (0 if c >= 0 else c * (div - 1)))
            edge = self._lowest(base) if c >= 0 else self._negated_highest(base)
            if edge is None or not edge.is_number:
                return None
            return sympy.expand(rest + c * (edge // div))
        return None

    def _negated_highest(self, e: sympy.Expr) -> sympy.Expr | None:
        low = self._lowest(sympy.expand(-e))
        return None if low is None else -low

    @staticmethod
    def _size_nonnegative(c: sympy.Expr) -> bool:
        """Whether an expression of sizes is surely not negative; a size is at least 1 only if the shape environment says so."""
        table = {}
        for s in c.free_symbols:
            if not s.is_nonnegative:
                return False
            table[s] = sympy.Dummy(integer=True, nonnegative=True) + (1 if s.is_positive else 0)
        return bool(sympy.expand(c.subs(table)).is_nonnegative)

    # -- integer division
    @staticmethod
    def _take_multiples(a: sympy.Expr, b: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """(w, r) with ``a = w * b + r``: the terms of ``a`` that are integer multiples of ``b``, and the others."""
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(a)):
            q = quotient(term, b)
            if q is not None:
                whole += q
            elif term.is_Integer and b.is_Integer and b > 0:
                whole += term // b
                rest += term % b
            else:
                rest += term
        return whole, rest

    def floordiv(self, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
        """``a // b`` for ``b > 0``, multiples of ``b`` taken out."""
        if b == 1:
            return a
        whole, rest = self._take_multiples(a, b)
        if rest == 0 or (self.holds(rest) and self.holds(b - 1 - rest)):
            return sympy.expand(whole)
        return sympy.expand(whole) + FloorDiv(rest, b)

    def mod(self, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
        """``a % b`` (Python's sign rule) for ``b > 0``."""
        if b == 1:
            return sympy.Integer(0)
        _, rest = self._take_multiples(a, b)
        if rest == 0 or (self.holds(rest) and self.holds(b - 1 - rest)):
            return sympy.expand(rest)
        # torch's Mod is defined for non-negative operands only
        return Mod(rest, b) if self.holds(rest) else sympy.expand(rest - b * FloorDiv(rest, b))

    @staticmethod
    def recombine(e: sympy.Expr) -> sympy.Expr:
        """``e`` with ``(a // b) * b + a % b`` put together again as ``a``."""
        for m in e.atoms(Mod):
            a, b = m.args
            c, d = e.coeff(m), FloorDiv(a, b)
            if c != 0 and isinstance(d, FloorDiv) and sympy.expand(e.coeff(d) - c * b) == 0:
                e = sympy.expand(e - c * m - c * b * d + c * a)
        return e

    # -- booleans
    def compare(self, fn: str, a: sympy.Expr, b: sympy.Expr) -> Expr:
        d = a - b
        if fn in ("eq", "ne"):
            e = self.eq0(d)
            return e if fn == "eq" else self.not_(e)
        return self.ge0({"ge": d, "gt": d - 1, "le": -d, "lt": -d - 1}[fn])

    def not_(self, e: Expr) -> Expr:
        if isinstance(e, Call):
            if e.fn == "ge" and isinstance(e.args[0], Lin):
                return self.ge0(-e.args[0].value - 1)
            if e.fn == "and_":
                return self.or_(*(self.not_(x) for x in flatten("and_", e)))
            if e.fn == "or_":
                return self.and_(*(self.not_(x) for x in flatten("or_", e)))
        return call("not_", e)

    def and_(self, *terms: Expr) -> Expr:
        return self._junction("and_", terms)

    def or_(self, *terms: Expr) -> Expr:
        return self._junction("or_", terms)

    def _junction(self, fn: str, terms: tuple[Expr, ...]) -> Expr:
        conj = fn == "and_"
        absorbing, neutral = (FALSE, TRUE) if conj else (TRUE, FALSE)
        out: list[Expr] = []
        for t in terms:
            for x in flatten(fn, t):
                if x == absorbing:
                    return absorbing
                if x != neutral and x not in out:
                    out.append(x)
        atoms = [x for x in out if isinstance(x, Call) and x.fn == "ge" and isinstance(x.args[0], Lin)]
        for x in atoms:
            for y in atoms:
                if x is y or x not in out or y not in out:
                    continue
                ex, ey = x.args[0].value, y.args[0].value  # type: ignore[attr-defined]
                gap = sympy.expand(ey - ex)
                if not self._indexed(gap) and self.holds(gap):  # x implies y
                    out.remove(y if conj else x)
                    continue
                both = sympy.expand(ex + ey)
                if not self._indexed(both) and (self.holds(-both - 1) if conj else self.holds(both + 1)):
                    return absorbing
        for x in out:
            if call("not_", x) in out:
                return absorbing
        if not out:
            return neutral
        result = out[0]
        for x in out[1:]:
            result = Call(fn, (result, x), BOOL)
        return result

    def _indexed(self, e: sympy.Expr) -> bool:
        return any(s in self.ranges for s in e.free_symbols)

    def where(self, cond: Expr, a: Expr, b: Expr) -> Expr:
        if a.kind == BOOL and b.kind == BOOL and not isinstance(cond, Const):
            return a if a == b else self.or_(self.and_(cond, a), self.and_(self.not_(cond), b))
        return call("where", cond, a, b)

    # -- substitution
    def pinned(self, cond: Expr) -> tuple[sympy.Symbol, sympy.Expr] | None:
        """The symbol that ``cond`` fixes to its lowest value, as in ``0 - i >= 0``."""
        if not (isinstance(cond, Call) and cond.fn == "ge" and isinstance(cond.args[0], Lin)):
            return None
        e = cond.args[0].value
        for v, (low, _) in self.ranges.items():
            if e.coeff(v) == -1:
                rest = sympy.expand(e + v)
                if not self._indexed(rest) and self.holds(low - rest):
                    return v, low
        return None

    def substitute(self, e: Expr, v: sympy.Symbol, by: sympy.Expr) -> Expr:
        """``e`` with the symbol ``v`` replaced everywhere, atoms decided anew."""
        if isinstance(e, Lin):
            return Lin(sympy.expand(e.value.subs(v, by)))
        if isinstance(e, Call):
            args = [self.substitute(a, v, by) for a in e.args]
            if e.fn in ("ge", "eq") and isinstance(args[0], Lin) and isinstance(args[1], Lin):
                d = args[0].value - args[1].value
                return self.ge0(d) if e.fn == "ge" else self.eq0(d)
            if e.fn in ("and_", "or_"):
                return self._junction(e.fn, tuple(args))
            if e.fn == "not_":
                return self.not_(args[0])
            if e.fn == "where":
                return self.where(*args)
            return call(e.fn, *args)
        if isinstance(e, Elem):
            return Elem(e.node, tuple(sympy.expand(i.subs(v, by)) for i in e.index), e.kind)
        if isinstance(e, RowValue):
            return RowValue(e.node, tuple(sympy.expand(i.subs(v, by)) for i in e.index), e.detached)
        return e
