"""Arithmetic of element expressions in the dtypes that torch computes in.

Integers that follow from positions stay sympy expressions as long as their dtype provably holds them, comparisons of them are
decided, choices between numbers are moved outside, and a float operation or cast is taken for the real one only where that
cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.expr import BOOL, FLOAT, INT, Call, Const, Expr, call
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.terms import Dropped, Elem, Lin, Unsupported, kind_of, value_of

#: Integers up to here are exact in a float dtype.
EXACT_INTEGER = {torch.float32: 2**24, torch.float64: 2**53}


def is_float(dt: torch.dtype) -> bool:
    """Whether values of the dtype are rounded."""
    return dt.is_floating_point


def rounded(value: float, dt: torch.dtype) -> float:
    """``value`` as the dtype holds it (finfo.min of a wide type is -inf in a narrow one)."""
    return float(torch.tensor(value, dtype=torch.float64).to(dt)) if is_float(dt) else value


_HALF, _SINGLE = float(torch.finfo(torch.float16).max), float(torch.finfo(torch.float32).max)


def summands(a: Expr, b: Expr, dt: torch.dtype) -> tuple[Expr, Expr]:
    """Both sides of a sum in ``dt``; in float16 the largest numbers in them leave as little of the other side as they do there.

    ``s + finfo.min`` is ``finfo.min`` again, for the spacing of float16 is 32 there. The op adds in float32, where 65504 leaves all
    of s; so rows with nothing but masked keys would not weigh them alike. The largest float32 absorbs s, and two of them
    overflow, as two of the largest float16 do.
    """
    if dt is not torch.float16 or (is_choice_of_numbers(a) and is_choice_of_numbers(b)):
        return a, b
    return _absorbing(a), _absorbing(b)


def _absorbing(e: Expr) -> Expr:
    if isinstance(e, Const) and e.kind == FLOAT and abs(float(e.value)) == _HALF:
        return Const(math.copysign(_SINGLE, float(e.value)))
    if not isinstance(e, Call) or e.kind != FLOAT or e.fn not in ("where", "mul", "neg", "add", "sub"):
        return e
    first = e.fn == "where"
    args = (*e.args[:first], *map(_absorbing, e.args[first:]))
    return e if args == e.args else call(e.fn, *args)


class Arithmetic:
    """Conversions and pointwise building blocks under what a prover knows."""

    prover: Prover

    def convert(self, e: Expr, kind: str) -> Expr:
        if e.kind == kind:
            return e
        if kind == BOOL:
            return self.compare("ne", e, Lin(sympy.Integer(0)) if e.kind == INT else Const(0.0))
        if e.kind == BOOL:
            one, zero = (Const(1.0), Const(0.0)) if kind == FLOAT else (Lin(sympy.Integer(1)), Lin(sympy.Integer(0)))
            return self.prover.where(e, one, zero)
        if isinstance(e, Lin) and e.value.is_number and kind == FLOAT:
            return Const(float(e.value))
        if isinstance(e, Const) and kind == INT:
            v = float(e.value)
            if not math.isfinite(v):
                raise Unsupported("cast of a non-finite number to an integer")
            return Lin(sympy.Integer(int(v)))
        return self._lift(lambda x: call(f"cast_{kind}", x), e) if settled(e) else Call(f"cast_{kind}", (e,), kind)

    def _lift(self, fn: Callable[..., Expr], *args: Expr) -> Expr:
        """``fn`` applied under the conditions of its arguments: f(where(c, a, b)) = where(c, f(a), f(b))."""
        for i, a in enumerate(args):
            if isinstance(a, Call) and a.fn == "where":
                cond, x, y = a.args
                then = [*args[:i], x, *args[i + 1 :]]
                pin = self.prover.pinned(cond)
                if pin is not None:
                    then = [self.prover.substitute(t, *pin) for t in then]
                return self.prover.where(cond, self._lift(fn, *then), self._lift(fn, *args[:i], y, *args[i + 1 :]))
        return fn(*args)

    def compare(self, fn: str, a: Expr, b: Expr) -> Expr:
        """A comparison; integers known as expressions are decided or become atoms."""
        if a.kind != b.kind:
            a, b = self._common(a, b)
        if a.kind == BOOL:
            a, b = self.convert(a, INT), self.convert(b, INT)
        if settled(a) and settled(b):
            return self._lift(lambda x, y: self._compare(fn, x, y), a, b)
        return self._compare(fn, a, b)

    def _common(self, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        kind = FLOAT if FLOAT in (a.kind, b.kind) else INT
        return self.convert(a, kind), self.convert(b, kind)

    def _compare(self, fn: str, a: Expr, b: Expr) -> Expr:
        if b == Const(0.0) and isinstance(a, Call) and a.fn == "sub" and any(is_finite(x) for x in a.args):
            a, b = a.args  # x - y has the sign of the comparison of x with y, in every precision
        a, b = as_integers(a, b)
        if isinstance(a, Lin) and isinstance(b, Lin):
            return self.prover.compare(fn, a.value, b.value)
        if isinstance(a, Call) and a.fn == "abs" and isinstance(a.args[0], Lin) and isinstance(b, Lin):
            x, lim = a.args[0].value, b.value
            if fn in ("le", "lt"):
                lim = lim if fn == "le" else lim - 1
                return self.prover.and_(self.prover.ge0(lim - x), self.prover.ge0(lim + x))
            if fn in ("gt", "ge"):
                return self.prover.not_(self._compare("le" if fn == "gt" else "lt", a, b))
        return call(fn, a, b)

    def arithmetic(self, fn: str, a: Expr, b: Expr, dt: torch.dtype) -> Expr:
        """``add sub mul div minimum maximum floordiv mod pow`` in the result's dtype."""
        kind = kind_of(dt)
        a, b = self.convert(a, kind), self.convert(b, kind)
        if kind == INT:
            return self._lift(lambda x, y: self._int_arithmetic(fn, x, y), a, b)
        if is_choice_of_numbers(a) and is_choice_of_numbers(b):
            return self._lift(lambda x, y: self._float_arithmetic(fn, x, y, dt), a, b)
        return self._float_arithmetic(fn, a, b, dt)

    def _int_arithmetic(self, fn: str, a: Expr, b: Expr) -> Expr:
        if isinstance(a, Lin) and isinstance(b, Lin):
            x, y = a.value, b.value
            if fn in ("add", "sub", "mul"):
                return Lin(sympy.expand({"add": x + y, "sub": x - y, "mul": x * y}[fn]))
            if fn in ("floordiv", "mod"):
                if not self.prover.holds(y - 1):
                    raise Unsupported("integer division by a value of unknown sign")
                return Lin(self.prover.floordiv(x, y) if fn == "floordiv" else self.prover.mod(x, y))
            if fn == "minimum":
                return self.prover.where(self.prover.ge0(y - x), a, b)
            if fn == "maximum":
                return self.prover.where(self.prover.ge0(x - y), a, b)
        if fn == "div":
            raise Unsupported("true division of integers")
        return call(fn, a, b)

    def _float_arithmetic(self, fn: str, a: Expr, b: Expr, dt: torch.dtype) -> Expr:
        x, y = as_integers(a, b)
        if isinstance(x, Lin) and isinstance(y, Lin) and fn in ("add", "sub", "mul"):
            # floats that hold integers: exact as long as no intermediate exceeds the mantissa
            return self._exact_float(
                sympy.expand({"add": x.value + y.value, "sub": x.value - y.value, "mul": x.value * y.value}[fn]), dt
            )
        r = call(fn, a, b)
        return Const(rounded(float(r.value), dt)) if isinstance(r, Const) else r

    def _exact_float(self, e: sympy.Expr, dt: torch.dtype) -> Expr:
        if e.is_number:
            return Const(rounded(float(e), dt))
        limit = EXACT_INTEGER.get(dt)
        if limit is None:
            raise Unsupported(f"index arithmetic in {dt}")
        if not (dt is torch.float64 or (self.prover.holds(limit - e) and self.prover.holds(limit + e))):
            raise Unsupported(f"index arithmetic in {dt} that may not be exact")
        return Call("cast_float", (Lin(e),), FLOAT)


#: Sizes are taken to stay below this where an int32 index could otherwise not be proven to be one.
_SIZE_LIMIT = 2**27


def fits(e: Expr, dt: torch.dtype, prover: Prover) -> bool:
    """Whether the integer ``e`` is proven to lie in the range of ``dt``, so that no step of its computation wrapped around."""
    if dt is torch.int64:
        return True
    info = torch.iinfo(dt)
    if isinstance(e, Lin):
        return _bounded(e.value, info.min, info.max, prover, dt is torch.int32)
    if isinstance(e, Const):
        return info.min <= e.value <= info.max
    if isinstance(e, Elem):
        own = value_of(e.node)
        if not isinstance(own, torch.Tensor) or own.dtype is torch.bool or own.dtype.is_floating_point:
            return False
        return info.min <= torch.iinfo(own.dtype).min and torch.iinfo(own.dtype).max <= info.max
    if isinstance(e, Call) and e.fn in ("where", "minimum", "maximum"):
        return all(fits(a, dt, prover) for a in e.args[-2:])
    return False


def _bounded(e: sympy.Expr, low: int, high: int, prover: Prover, sizes: bool) -> bool:
    if prover.holds(e - low) and prover.holds(high - e):
        return True
    # Small multiples of single indices and sizes: no tensor of attention is as long as it takes to leave int32.
    total = 0
    for t in sympy.Add.make_args(sympy.expand(e)):
        c, rest = t.as_coeff_Mul()
        if not c.is_Integer or not (rest == 1 or rest.is_Symbol or isinstance(rest, (FloorDiv, Mod))):
            return False
        total += abs(int(c)) * (1 if rest == 1 else _SIZE_LIMIT)
    return sizes and total <= high


def common_dtype(args: Sequence[Any]) -> torch.dtype:
    """The dtype in which torch compares two operands."""
    values = [value_of(a) if isinstance(a, fx.Node) else a for a in args]
    # Any number of the kind will do; to read a run-time one would fix it with a guard.
    plain = [1.0 if isinstance(v, torch.SymFloat) else 1 if isinstance(v, torch.SymInt) else v for v in values]
    return torch.result_type(*plain)


def narrowed(e: Expr, src: torch.dtype, dt: torch.dtype, own: set[fx.Node]) -> Expr | None:
    """The float ``e`` cast from ``src`` to ``dt``; None where dropping the cast could show.

    A cast to fewer bits only rounds, which a fused op need not repeat, unless it turns large numbers into infinity, or is
    so coarse that it is meant as quantisation, or rounds a tensor that is not among the op's ``own`` values: then the
    rounded tensor is at hand.
    """
    old, new = torch.finfo(src), torch.finfo(dt)
    if new.max >= old.max and new.eps <= old.eps:
        return e
    if isinstance(e, Const):
        return Const(rounded(float(e.value), dt))
    if dt.itemsize < 2:
        return None
    if isinstance(e, Elem):
        return e if e.node in own else None
    if isinstance(e, Dropped):
        inner = narrowed(e.inner, src, dt, own)
        return e if inner == e.inner and 1.0 / (1.0 - e.p) <= new.max else None
    if not isinstance(e, Call):
        return None
    if e.fn == "where":
        a, b = narrowed(e.args[1], src, dt, own), narrowed(e.args[2], src, dt, own)
        return None if a is None or b is None else call("where", e.args[0], a, b)
    if new.max >= old.max or e.fn in ("tanh", "sigmoid", "sin", "cos", "erf"):
        return e
    if e.fn in ("mul", "div") and isinstance(e.args[1], Const):
        inner = narrowed(e.args[0], src, dt, own)
        return e if inner == e.args[0] else None
    return None


def is_choice_of_numbers(e: Expr) -> bool:
    """A number, or a choice between numbers."""
    return isinstance(e, Const) or (
        isinstance(e, Call) and e.fn == "where" and is_choice_of_numbers(e.args[1]) and is_choice_of_numbers(e.args[2])
    )


def is_finite(e: Expr) -> bool:
    """Whether an expression is a finite number."""
    return isinstance(e, Const) and math.isfinite(e.value)


def settled(e: Expr) -> bool:
    """A choice between numbers and known integers: conditions may be moved outside functions of it without growing it."""
    return isinstance(e, (Const, Lin)) or (
        isinstance(e, Call)
        and (
            (e.fn == "where" and all(settled(a) for a in e.args[1:]))
            or (e.fn in ("cast_float", "abs") and settled(e.args[0]))
        )
    )


def as_integers(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Both as integers when both are floats that hold known integers."""

    def strip(e: Expr) -> Expr | None:
        if isinstance(e, Lin):
            return e
        if isinstance(e, Call) and e.fn == "cast_float" and isinstance(e.args[0], Lin):
            return e.args[0]
        if isinstance(e, Const) and e.kind == FLOAT and math.isfinite(e.value) and float(e.value).is_integer():
            return Lin(sympy.Integer(int(e.value)))
        return None

    for e, number in ((a, b), (b, a)):
        # every float dtype holds these numbers, and no other integer is rounded to one of them
        if not (isinstance(number, Const) and number.kind == FLOAT and abs(number.value) < 2**7):
            continue
        whole = float(number.value).is_integer()
        if whole and isinstance(e, Call) and e.fn == "cast_float" and e.args[0].kind == INT:
            n = Lin(sympy.Integer(int(number.value)))
            return (e.args[0], n) if e is a else (n, e.args[0])
    x, y = strip(a), strip(b)
    if x is None or y is None or (isinstance(a, Const) and isinstance(b, Const)):
        return a, b
    return x, y
