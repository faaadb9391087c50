"""Score expressions as Triton text.

:class:`ScorePrinter` turns :class:`~fa_inductor.expr.Expr` terms into straight-line Triton statements, one variable
a distinct sub-expression, so that a value shared by the logit, its derivative and the captures' gradients is
computed once. Equal input gives equal text.

The statements are free of shapes: the template binds ``score``, ``q_idx`` and ``kv_idx`` to blocks that broadcast to
its tile, in either orientation, and ``b_idx``, ``h_idx``, ``Q_LEN``, ``KV_LEN``, ``SIZE0...`` to scalars. Floats are
float32. Integer arithmetic is int32 where its result cannot leave that range for lengths below 2^30, and int64
elsewhere and where captured tensors take part, of whatever dtype. A load whose index is not proven to lie inside its
tensor is masked and reads 0 or False outside it, as the reference does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fa_inductor.derivative import selects
from fa_inductor.diagonal import COLUMN, ROW, ROWS
from fa_inductor.expr import BOOL, FLOAT, INDEX_NAMES, INT, SIZE_NAMES, Call, Const, Expr, Load, Score, Sym

#: Program symbol -> name of the variable that the templates bind.
#: See :attr:`CaptureInfo.covers`.
DIAGONALS = "diagonals"

NAMES = {"b": "b_idx", "h": "h_idx", "q_idx": "q_idx", "kv_idx": "kv_idx", "q_len": "Q_LEN", "kv_len": "KV_LEN"}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and_": "&", "or_": "|",
}  # fmt: skip

# {0} and {1} are the arguments. Where Triton has no accurate primitive the formula is written out: expm1 and log1p
# as in Kahan's "Much ado about nothing's sign bit" (they keep full precision at 0), tanh by exp2 of a non-positive
# number.
_FLOAT_TEXT = {
    "div": "{0} / {1}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "_expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": "_log1p({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "tanh": "_tanh({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-({0})))",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "floor": "tl.floor({0})",
    "reciprocal": "1.0 / ({0})",
    "isnan": "{0} != {0}",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}

#: Device functions that the printed text may call; appended to every kernel's source by the renderer when used.
DEVICE_FUNCTIONS = {
    "_expm1": """
@triton.jit
def _expm1(x):
    # (exp(x) - 1) * x / log(exp(x)): the rounding of exp(x) cancels. Saturated ends are handled apart.
    u = tl.exp(x)
    d = u - 1.0
    r = tl.where(d == 0.0, x, d * (x / tl.log(u)))
    return tl.where((x > 80.0) | (x < -17.0), d, r)
""",
    "_log1p": """
@triton.jit
def _log1p(x):
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / d)))
""",
    "_tanh": """
@triton.jit
def _tanh(x):
    # -2.885390081777927 = -2 * log2(e); exp2 of a non-positive number cannot overflow. The series keeps small x
    # accurate.
    t = tl.exp2(tl.abs(x) * -2.885390081777927)
    r = (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(x) < 0.02, x - x * x * x * 0.3333333333333333, tl.where(x < 0.0, -r, r))
""",
}


class Unprintable(Exception):
    """The expression has no Triton form; the message says which part and why."""


@dataclass(frozen=True)
class CaptureInfo:
    """What is known about one captured tensor when the kernel is rendered.

    Attributes:
        rank: number of dimensions.
        covers: per dimension, the index symbols (``b h q_idx kv_idx``) whose whole range provably lies inside it, and
            :data:`DIAGONALS` where it has a place for every difference of a query and a key.
        sizes: per dimension, its size where it is a number, else None.
        tma: whether a tensor descriptor can read tiles of its last two dimensions (strides and alignment, as for q).
    """

    rank: int
    covers: tuple[frozenset[str], ...] = ()
    sizes: tuple[int | None, ...] = ()
    tma: bool = False

    def proves_inside(self, dim: int, index: Expr) -> bool:
        if isinstance(index, Sym):
            return bool(self.covers) and index.name in self.covers[dim]
        if isinstance(index, Const) and self.sizes:
            size = self.sizes[dim]
            return size is not None and 0 <= index.value < size
        if index == ROW and self.sizes:
            size = self.sizes[dim]
            return size is not None and size >= ROWS
        return index == COLUMN and bool(self.covers) and DIAGONALS in self.covers[dim]


def float_literal(value: float) -> str:
    """Triton text of ``value`` rounded to float32."""
    if math.isnan(value):
        return 'float("nan")'
    try:
        value = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        value = math.copysign(math.inf, value)
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    # Triton types a Python float below float32's normal range as float64.
    return repr(value) if value == 0 or abs(value) >= 1.1754943508222875e-38 else f"tl.full([], {value!r}, tl.float32)"


def is_nonnegative(e: Expr) -> bool:
    """Whether an integer expression is proven >= 0 (indices and lengths are; run-time sizes n0, n1, ... may not be)."""
    if isinstance(e, Const):
        return e.value >= 0
    if isinstance(e, Sym):
        return e.name in INDEX_NAMES or e.name in SIZE_NAMES
    if isinstance(e, Call):
        if e.fn in ("add", "mul", "minimum", "floordiv"):
            return all(is_nonnegative(a) for a in e.args)
        if e.fn == "maximum":
            return any(is_nonnegative(a) for a in e.args)
        if e.fn == "mod":
            return is_nonnegative(e.args[1])
        return e.fn == "abs" or (e.fn == "cast_int" and e.args[0].kind == BOOL)
    return False


_INT32 = 2**31 - 1
#: Lengths lie below this, and the run-time sizes that are held in int32 within it on either side.
_LENGTH = 2**30
_ANY = (-(2**63), 2**63)


def _range(e: Expr) -> tuple[int, int]:
    """(least, greatest) that an integer expression may be; past int32 for whatever a captured tensor takes part in.

    A run-time size is taken to be held in int32: a wide one is int64 itself, and so is what it takes part in.
    """
    if isinstance(e, Const):
        return int(e.value), int(e.value)
    if isinstance(e, Sym):
        low = 0 if e.name in INDEX_NAMES or e.name in SIZE_NAMES else -_LENGTH
        return low, _LENGTH - 2 if e.name in INDEX_NAMES else _LENGTH - 1
    if not isinstance(e, Call):
        return _ANY
    if e.fn == "cast_int":
        return (0, 1) if e.args[0].kind == BOOL else _ANY
    (a, b), (c, d) = _range(e.args[-1]), _range(e.args[-2] if len(e.args) > 1 else e.args[-1])
    if e.fn == "add":
        return a + c, b + d
    if e.fn == "sub":
        return c - b, d - a
    if e.fn == "mul":
        products = (a * c, a * d, b * c, b * d)
        return min(products), max(products)
    if e.fn in ("neg", "abs"):
        return min(a, -b), max(b, -a)
    if e.fn == "floordiv":
        return min(c, -d), max(d, -c)
    if e.fn == "mod":
        return min(a, 0), max(b, 0)
    return (min(a, c), max(b, d)) if e.fn in ("minimum", "maximum", "where") else _ANY


def in_int32(e: Expr) -> bool:
    """Whether an integer expression is proven to fit int32 where no run-time size in it is wide."""
    return all(-_INT32 <= n <= _INT32 for n in _range(e))


def _needs_int64(e: Call) -> bool:
    """Whether the integer operands of ``e`` are cast to int64: its result, or one of them, may lie outside int32.

    Two elements of one captured tensor are compared as they are; those of two tensors may differ in sign and width.
    """
    integers = [a for a in e.args if a.kind == INT]
    if not integers or e.fn.startswith("cast_"):
        return False
    if e.kind == BOOL and all(isinstance(a, Load) for a in integers) and len({a.slot for a in integers}) == 1:  # type: ignore[attr-defined]
        return False
    return not all(in_int32(x) for x in (*integers, *([e] if e.kind == INT else [])))


def _is_number(e: Expr) -> bool:
    """A number, a choice between numbers, or a product of such."""
    if not isinstance(e, Call):
        return isinstance(e, Const)
    return e.fn in ("where", "mul") and all(map(_is_number, e.args[e.fn == "where" :]))


class ScorePrinter:
    """Prints expressions into statements, remembering what is already computed.

    Args:
        captures: what is known about each slot.
        prefix: start of the variable names it makes.
        bound: expressions whose value is already in a variable (from an enclosing printer).
    """

    def __init__(
        self, captures: Sequence[CaptureInfo] = (), prefix: str = "t", bound: dict[Expr, str] | None = None
    ) -> None:
        self.captures = captures
        self.prefix = prefix
        self.names: dict[Expr, str] = dict(bound or {})
        self.lines: list[str] = []
        self.functions: set[str] = set()
        self._count = 0

    def emit(self, expr: Expr) -> str:
        """Add the statements that compute ``expr``; the text (a variable or a literal) of its value."""
        for node in expr.walk():
            if node not in self.names:
                self.names[node] = self._node(node)
        return self.names[expr]

    def assign(self, name: str, expr: Expr) -> None:
        """Add the statements that compute ``expr`` into the variable ``name``."""
        self.lines.append(f"{name} = {self.emit(expr)}")

    def bind(self, expr: Expr, text: str) -> None:
        """Add the statement that computes ``expr`` as ``text``."""
        self.names[expr] = self._new(text)

    def times(self, name: str, factor: Expr, nan: bool = True) -> str:
        """Text of ``name * factor``, after adding the statements that compute ``factor``.

        A factor ``where(c, x, 0)``, or a sum with such a term, is what differentiating a mask gives. It selects instead of
        multiplying, so that a NaN of a masked entry does not pass, as in autograd's formula for ``where``. Without ``nan``, where
        ``name`` is NaN only if operands are, a choice among several numbers multiplies all the same.
        """
        if factor == Const(1.0):
            return name
        if factor == Const(0.0):
            return "0.0"
        if isinstance(factor, Call) and selects(factor):
            if factor.fn == "add":
                return " + ".join(f"({self.times(name, x, nan)})" for x in factor.args)
            condition, *branches = factor.args
            if any(isinstance(x, Call) for x in branches) and _is_number(factor):
                # A choice of numbers, as of a clamp: one multiplication, where selecting branch by branch has one for each.
                number = self.emit(factor)
                return f"tl.where({number} == 0.0, 0.0, {name} * {number})" if nan else f"{name} * {number}"
            text = self.emit(condition)
            return f"tl.where({text}, {', '.join(self.times(name, x, nan) for x in branches)})"
        return f"{name} * ({self.emit(factor)})"

    def _new(self, text: str) -> str:
        name = f"{self.prefix}{self._count}"
        self._count += 1
        self.lines.append(f"{name} = {text}")
        return name

    def _node(self, e: Expr) -> str:
        if isinstance(e, Score):
            return "score"
        if isinstance(e, Sym):
            return NAMES.get(e.name) or f"SIZE{e.name[1:]}"
        if isinstance(e, Const):
            return float_literal(e.value) if e.kind == FLOAT else repr(e.value)
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, Call):
            return self._new(self._call(e))
        raise Unprintable(f"unknown term {type(e).__name__}")

    def _call(self, e: Call) -> str:
        wide = _needs_int64(e)
        args = [_int64(a, self.names[a]) if wide and a.kind == INT else self.names[a] for a in e.args]
        fn = e.fn
        if fn.startswith("cast_"):
            return self._cast(e, args[0])
        if fn == "where":
            return f"tl.where({args[0]}, {args[1]}, {args[2]})"
        if fn == "not_":
            return f"({args[0]}) == 0" if isinstance(e.args[0], Const) else f"~{args[0]}"
        if fn == "neg":
            return f"-({args[0]})"
        if fn in ("floordiv", "mod"):
            return self._divide(e, *args)
        if fn == "pow":
            return self._power(e, args[0])
        if fn in _INFIX:
            return f"{args[0]} {_INFIX[fn]} {args[1]}"
        if e.args[0].kind == INT and fn in ("minimum", "maximum", "abs"):
            return f"tl.{fn}({', '.join(args)})"
        text = _FLOAT_TEXT.get(fn)
        if text is None:
            raise Unprintable(f"no Triton form of {fn}")
        self.functions.update(f for f in DEVICE_FUNCTIONS if f in text)
        return text.format(*args)

    def _cast(self, e: Call, arg: str) -> str:
        source = e.args[0].kind
        if e.kind == BOOL:
            return f"{arg} != 0"
        kind = "float32" if e.kind == FLOAT else "int32" if source == BOOL else "int64"
        return f"tl.cast({arg}, tl.{kind})"

    def _divide(self, e: Call, a: str, b: str) -> str:
        """Python's floor division and modulo; Triton's truncate, the same where no operand is negative."""
        x, y = e.args
        op = "//" if e.fn == "floordiv" else "%"
        if is_nonnegative(x) and is_nonnegative(y):
            return f"{a} {op} {b}"
        r = self._new(f"{a} % {b}")
        wrong = self._new(f"({r} != 0) & (({r} < 0) != ({b} < 0))")
        if e.fn == "mod":
            return f"tl.where({wrong}, {r} + {b}, {r})"
        return f"{a} // {b} - tl.where({wrong}, 1, 0)"

    def _power(self, e: Call, base: str) -> str:
        exponent = e.args[1]
        if not isinstance(exponent, Const):
            raise Unprintable("pow with an exponent that is not a number")
        y = float(exponent.value)
        if y == 0.5:
            return f"tl.sqrt_rn({base})"
        if not (y.is_integer() and 0 < abs(y) <= 64):
            return f"tl.exp2({float_literal(y)} * tl.log2({base}))"
        power, result, n = base, "", int(abs(y))
        while n:
            if n & 1:
                result = self._new(f"{result} * {power}") if result else power
            n >>= 1
            if n:
                power = self._new(f"{power} * {power}")
        return f"1.0 / {result}" if y < 0 else result

    def raw(self, e: Load) -> tuple[str, str]:
        """(name of what ``e`` reads, as it lies in memory; the text of ``e`` in terms of that name)."""
        address, mask = self.element(e, "CAP")
        name = self._new(f"tl.load({address}, mask={mask}, other=0)" if mask else f"tl.load({address})")
        return name, f"{name}.to(tl.float32)" if e.kind == FLOAT else f"({name} != 0)" if e.kind == BOOL else name

    def _load(self, e: Load) -> str:
        address, mask = self.element(e, "CAP")
        value = f"tl.load({address}, mask={mask}, other=0)" if mask else f"tl.load({address})"
        if e.kind == FLOAT:
            return self._new(f"{value}.to(tl.float32)")
        return self._new(f"{value} != 0" if e.kind == BOOL else value)

    def element(self, e: Load, tensor: str) -> tuple[str, str]:
        """(address, mask) of the element that ``e`` reads, in the tensor ``tensor<slot>`` of the capture's shape.

        The mask is empty where the element provably exists.
        """
        slot = e.slot
        info = self.captures[slot] if slot < len(self.captures) else CaptureInfo(len(e.index))
        offsets, checks = [], []
        for dim, index in enumerate(e.index):
            text = self.emit(index)
            if not info.proves_inside(dim, index):
                if not is_nonnegative(index):
                    checks.append(f"({text} >= 0)")
                checks.append(f"({text} < CAP{slot}_N{dim})")
            if index != Const(0):
                offsets.append(f"{self._index(slot, index, text)} * {tensor}{slot}_S{dim}")
        address = " + ".join([f"{tensor}{slot}", *offsets])
        return address, (self._new(" & ".join(checks)) if checks else "")

    def _index(self, slot: int, index: Expr, text: str) -> str:
        if isinstance(index, Const):
            return text
        # A scalar costs nothing in 64 bits; a block of indices does, so its width is the kernel's choice.
        return f"tl.cast({text}, {f'CAP{slot}_INDEX' if varies(index) else 'tl.int64'})"


def _int64(e: Expr, text: str) -> str:
    if isinstance(e, Const):
        return text if abs(int(e.value)) <= _INT32 else f"tl.full([], {text}, tl.int64)"
    return f"tl.cast({text}, tl.int64)"


def varies(e: Expr) -> bool:
    """Whether ``e`` differs inside a tile: it depends on q_idx, kv_idx or the score."""
    return any(isinstance(n, Score) or (isinstance(n, Sym) and n.name in ("q_idx", "kv_idx")) for n in e.walk())


def hoistable(exprs: Iterable[Expr], inside: frozenset[str]) -> list[Expr]:
    """The largest sub-expressions of ``exprs`` worth computing outside a loop over the symbols in ``inside``.

    Those are the calls and loads that depend on none of ``inside`` and not on the score; ``inside`` names symbols.
    """
    found: dict[Expr, None] = {}

    def fixed(e: Expr) -> bool:
        return not any(isinstance(n, Score) or (isinstance(n, Sym) and n.name in inside) for n in e.walk())

    def visit(e: Expr) -> None:
        if isinstance(e, (Call, Load)) and fixed(e):
            found.setdefault(e)
            return
        for c in e.children:
            visit(c)

    for e in exprs:
        visit(e)
    return list(found)
