"""Scalar expressions over one attention score: the score algebra's terms, printer and parser.

An expression describes one entry of the score matrix at batch ``b``, query head ``h``, query position ``q_idx`` and key
position ``kv_idx``. It is built from

* ``score``: the raw dot product ``q[b, h, q_idx] . k[b, h // group, kv_idx]`` (float),
* numbers (Python ``float``, ``int`` or ``bool``; floats are IEEE, ``inf`` and ``nan`` included),
* integer symbols: ``b``, ``h``, ``q_idx``, ``kv_idx``, the sizes ``q_len`` and ``kv_len``, and run-time sizes ``n0, n1, ...``,
* elements of captured tensors: ``f0[...]`` (floating point), ``i0[...]`` (integer), ``m0[...]`` (bool), where the number is
  the capture's slot and the indices are integer expressions,
* pointwise functions (:data:`FUNCTIONS`).

``str(expr)`` is a stable text in Python syntax and :func:`parse` is its inverse: ``parse(str(e)) == e``. The text is what the
fused op carries in the graph, so compile caches key on it and a graph dump says what is computed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from fa_inductor.errors import ProgramError

FLOAT, INT, BOOL = "float", "int", "bool"

INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")
SIZE_NAMES = ("q_len", "kv_len")

_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_LOGIC = {"and_": "&", "or_": "|"}
_FLOAT_UNARY = (
    "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf", "relu",
    "floor", "reciprocal",
)  # fmt: skip

#: name -> number of arguments. ``cast_*`` convert between kinds (bool -> 0/1, int -> float, non-zero -> True).
FUNCTIONS: dict[str, int] = {
    **dict.fromkeys((*_ARITHMETIC, *_COMPARE, *_LOGIC, "minimum", "maximum", "pow"), 2),
    **dict.fromkeys((*_FLOAT_UNARY, "neg", "not_", "isnan", "cast_float", "cast_int", "cast_bool"), 1),
    "where": 3,
}


class Expr:
    """Base of every term. Immutable, hashable, compared by structure."""

    __slots__ = ()
    kind: str

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()

    def walk(self) -> Iterator[Expr]:
        """Every sub-expression, each distinct one once, children first."""
        seen: set[Expr] = set()
        stack: list[tuple[Expr, bool]] = [(self, False)]
        while stack:
            node, done = stack.pop()
            if node in seen:
                continue
            if done:
                seen.add(node)
                yield node
            else:
                stack.append((node, True))
                stack.extend((c, False) for c in node.children)

    def depends_on(self, *terms: Expr) -> bool:
        return any(n in terms for n in self.walk())


@dataclass(frozen=True)
class Score(Expr):
    """The raw query-key dot product, before any scale."""

    kind = FLOAT

    def __str__(self) -> str:
        return "score"


@dataclass(frozen=True)
class Const(Expr):
    """A number. ``Const(1)``, ``Const(1.0)`` and ``Const(True)`` are three different terms."""

    value: float | int | bool

    @property
    def kind(self) -> str:  # type: ignore[override]
        return BOOL if isinstance(self.value, bool) else INT if isinstance(self.value, int) else FLOAT

    # bool is an int and 1 == 1.0 in Python; terms of different kinds must never be mixed up.
    def _key(self) -> tuple[str, str]:
        return (self.kind, repr(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Sym(Expr):
    """An integer symbol: an index (``b h q_idx kv_idx``), a size (``q_len kv_len``) or a run-time size (``n0 n1 ...``)."""

    name: str
    kind = INT

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Load(Expr):
    """``captures[slot][index]``; ``kind`` is the captured tensor's: float, int or bool."""

    slot: int
    index: tuple[Expr, ...]
    kind: str = FLOAT

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.index

    def __str__(self) -> str:
        inner = ", ".join(_strip(str(i)) for i in self.index) or "()"
        return f"{_LOAD_PREFIX[self.kind]}{self.slot}[{inner}]"


@dataclass(frozen=True)
class Call(Expr):
    """A pointwise function of :data:`FUNCTIONS`. Build calls with :func:`call`, which checks kinds and folds constants."""

    fn: str
    args: tuple[Expr, ...]
    kind: str = FLOAT

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args

    def __hash__(self) -> int:
        # Deep trees are hashed often; dataclass hashing is recursive and not cached.
        h = self.__dict__.get("_hash")
        if h is None:
            h = hash((self.fn, self.args, self.kind))
            object.__setattr__(self, "_hash", h)
        return h

    def __str__(self) -> str:
        op = _ARITHMETIC.get(self.fn) or _COMPARE.get(self.fn) or _LOGIC.get(self.fn)
        if op:
            return f"({self.args[0]} {op} {self.args[1]})"
        if self.fn == "neg":
            return f"(-{self.args[0]})"
        if self.fn == "not_":
            return f"(~{self.args[0]})"
        return f"{self.fn}({', '.join(_strip(str(a)) for a in self.args)})"


_LOAD_PREFIX = {FLOAT: "f", INT: "i", BOOL: "m"}
_LOAD_KIND = {v: k for k, v in _LOAD_PREFIX.items()}

SCORE = Score()
B, H, Q_IDX, KV_IDX = (Sym(n) for n in INDEX_NAMES)
Q_LEN, KV_LEN = (Sym(n) for n in SIZE_NAMES)
TRUE, FALSE = Const(True), Const(False)


def _strip(text: str) -> str:
    """Drop one pair of outer parentheses when they enclose the whole text."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def to_text(e: Expr) -> str:
    """The stable text of ``e`` without redundant outer parentheses."""
    return _strip(str(e))


def const(value: float | bool) -> Const:
    """A number as an expression."""
    return Const(value)


def _int_fold(fn: str, a: int, b: int) -> Expr | None:
    table: dict[str, Callable[[int, int], int | bool]] = {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
        "minimum": min, "maximum": max,
        "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
        "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
    }  # fmt: skip
    if fn in ("floordiv", "mod"):
        return None if b == 0 else Const(a // b if fn == "floordiv" else a % b)
    return Const(table[fn](a, b)) if fn in table else None


def _float_fold(fn: str, a: float, b: float) -> Expr | None:
    try:
        if fn == "add":
            return Const(a + b)
        if fn == "sub":
            return Const(a - b)
        if fn == "mul":
            return Const(a * b)
        if fn == "div" and b != 0:
            return Const(a / b)
        if fn in _COMPARE:
            r = {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}
            return Const(r[fn])
    except OverflowError:
        return None
    return None


def result_kind(fn: str, args: tuple[Expr, ...]) -> str:
    """Kind of ``fn(*args)``; raises :class:`ProgramError` when the argument kinds do not fit."""
    kinds = tuple(a.kind for a in args)
    if fn not in FUNCTIONS or len(args) != FUNCTIONS[fn]:
        raise ProgramError(f"unknown function or arity: {fn} with {len(args)} arguments")
    if fn in _LOGIC or fn == "not_":
        ok, out = all(k == BOOL for k in kinds), BOOL
    elif fn in _COMPARE:
        ok, out = kinds[0] == kinds[1], BOOL
    elif fn == "where":
        ok, out = kinds[0] == BOOL and kinds[1] == kinds[2], kinds[1]
    elif fn in ("floordiv", "mod"):
        ok, out = kinds == (INT, INT), INT
    elif fn in ("add", "sub", "mul", "minimum", "maximum"):
        ok, out = kinds[0] == kinds[1] != BOOL, kinds[0]
    elif fn in ("neg", "abs"):
        ok, out = kinds[0] != BOOL, kinds[0]
    elif fn in ("div", "pow"):
        ok, out = kinds == (FLOAT, FLOAT), FLOAT
    elif fn == "isnan":
        ok, out = kinds == (FLOAT,), BOOL
    elif fn.startswith("cast_"):
        ok, out = True, fn[5:]
    else:
        ok, out = kinds == (FLOAT,), FLOAT
    if not ok:
        raise ProgramError(f"{fn} does not take arguments of kinds {kinds}: {', '.join(map(str, args))}")
    return out


def call(fn: str, *args: Expr) -> Expr:
    """``fn(*args)`` with constants folded and neutral elements dropped.

    Folding never changes a value: float identities that lose NaN, inf or the sign of zero (``x * 0``, ``x - x``) are kept.
    """
    kind = result_kind(fn, args)
    a = args[0]
    if fn == "where":
        if isinstance(a, Const):
            return args[1] if a.value else args[2]
        if args[1] == args[2]:
            return args[1]
        return Call(fn, args, kind)
    if fn == "and_":
        return _fold_logic(args, FALSE, TRUE, fn)
    if fn == "or_":
        return _fold_logic(args, TRUE, FALSE, fn)
    if fn == "not_":
        if isinstance(a, Const):
            return Const(not a.value)
        if isinstance(a, Call) and a.fn == "not_":
            return a.args[0]
        return Call(fn, args, kind)
    if fn.startswith("cast_"):
        return _fold_cast(fn, a, kind)
    if fn == "neg" and isinstance(a, Const):
        return Const(-a.value)
    if len(args) == 2:
        return _fold_binary(fn, a, args[1], kind)
    return Call(fn, args, kind)


def _fold_logic(args: tuple[Expr, ...], absorbing: Const, neutral: Const, fn: str) -> Expr:
    x, y = args
    if absorbing in (x, y):
        return absorbing
    if x in (neutral, y):
        return y
    if y == neutral:
        return x
    return Call(fn, args, BOOL)


def _fold_cast(fn: str, a: Expr, kind: str) -> Expr:
    if a.kind == kind:
        return a
    if isinstance(a, Const):
        v = a.value
        if fn == "cast_float":
            return Const(float(v))
        if fn == "cast_bool":
            return Const(bool(v))
        if math.isfinite(v):
            return Const(int(v))
    return Call(fn, (a,), kind)


def _fold_binary(fn: str, x: Expr, y: Expr, kind: str) -> Expr:
    if isinstance(x, Const) and isinstance(y, Const):
        r = (
            _int_fold(fn, int(x.value), int(y.value))
            if x.kind == y.kind == INT
            else _float_fold(fn, float(x.value), float(y.value))
            if x.kind == y.kind == FLOAT
            else None
        )
        if r is not None:
            return r
    if fn in ("add", "mul") and isinstance(x, Const) and not isinstance(y, Const):
        x, y = y, x  # numbers go last, so equal expressions get equal texts
    if isinstance(y, Const):
        v = y.value
        if fn in ("add", "sub") and v == 0 and not isinstance(v, bool):
            return x  # x + 0.0 only turns -0.0 into 0.0, which compares equal
        if fn in ("mul", "div", "floordiv") and v == 1:
            return x
        if fn == "div" and isinstance(v, float) and v != 0 and math.isfinite(v) and math.isfinite(1.0 / v):
            return _fold_binary("mul", x, Const(1.0 / v), kind)
        if kind == INT and fn == "mul" and v == 0:
            return Const(0)
        if fn == "mul" and isinstance(x, Call) and x.fn == "mul" and isinstance(x.args[1], Const) and kind == FLOAT:
            c = float(x.args[1].value) * float(v)
            if math.isfinite(c) and c != 0.0:
                return Call("mul", (x.args[0], Const(c)), FLOAT)
    return Call(fn, (x, y), kind)


def substitute(e: Expr, table: dict[Expr, Expr]) -> Expr:
    """``e`` with every occurrence of a key of ``table`` replaced by its value (keys are matched top down)."""
    memo: dict[Expr, Expr] = {}

    def go(x: Expr) -> Expr:
        if x in table:
            return table[x]
        if x in memo:
            return memo[x]
        if isinstance(x, Load):
            r: Expr = Load(x.slot, tuple(go(i) for i in x.index), x.kind)
        elif isinstance(x, Call):
            r = call(x.fn, *(go(a) for a in x.args))
        else:
            r = x
        memo[x] = r
        return r

    return go(e)


def loads(e: Expr) -> list[Load]:
    """The distinct captured loads of ``e``, by slot."""
    return sorted({n for n in e.walk() if isinstance(n, Load)}, key=lambda n: (n.slot, str(n)))


# ------------------------------------------------------------------------------------------------------------- parser
_AST_BIN = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and_", ast.BitOr: "or_",
}  # fmt: skip
_AST_CMP = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


def from_ast(node: ast.AST) -> Expr:
    """Build an expression from a Python AST; raises :class:`ProgramError` on anything outside the grammar."""
    if isinstance(node, ast.Expression):
        return from_ast(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return Const(node.value)
    if isinstance(node, ast.Name):
        return _name(node.id)
    if isinstance(node, ast.UnaryOp):
        inner = from_ast(node.operand)
        if isinstance(node.op, ast.USub):
            return Const(-inner.value) if isinstance(inner, Const) else _raw("neg", inner)
        if isinstance(node.op, ast.Invert):
            return _raw("not_", inner)
    if isinstance(node, ast.BinOp) and type(node.op) in _AST_BIN:
        return _raw(_AST_BIN[type(node.op)], from_ast(node.left), from_ast(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _AST_CMP:
        return _raw(_AST_CMP[type(node.ops[0])], from_ast(node.left), from_ast(node.comparators[0]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _raw(node.func.id, *(from_ast(a) for a in node.args))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _subscript(node.value.id, node.slice)
    raise ProgramError(f"not an expression of the score algebra: {ast.dump(node)[:120]}")


def _raw(fn: str, *args: Expr) -> Expr:
    """A call exactly as written, so that ``parse(str(e)) == e`` whatever the folding rules are."""
    return Call(fn, args, result_kind(fn, args))


def _name(name: str) -> Expr:
    if name == "score":
        return SCORE
    if name == "inf":
        return Const(math.inf)
    if name == "nan":
        return Const(math.nan)
    if name in INDEX_NAMES or name in SIZE_NAMES or (name[:1] == "n" and name[1:].isdigit()):
        return Sym(name)
    raise ProgramError(f"unknown name {name!r} in a program")


def _subscript(name: str, index: ast.AST) -> Expr:
    if name[:1] not in _LOAD_KIND or not name[1:].isdigit():
        raise ProgramError(f"{name!r} is not a captured tensor; expected f<slot>, i<slot> or m<slot>")
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return Load(int(name[1:]), tuple(from_ast(p) for p in parts), _LOAD_KIND[name[0]])


@lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """The expression whose text is ``text``; raises :class:`ProgramError`."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ProgramError(f"cannot parse {text[:200]!r}: {e}") from e
    return from_ast(tree)
