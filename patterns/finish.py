"""From analysis terms to the program language: axes become b, h, q_idx, kv_idx; values become captures; sizes become symbols."""

from __future__ import annotations

from functools import reduce

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.expr import KV_IDX, KV_LEN, Q_IDX, Q_LEN, SCORE, B, Call, Const, Expr, H, Load, Sym, call
from fa_inductor.patterns.operands import Axes, Extents
from fa_inductor.patterns.terms import Elem, Lin, RowValue, Unsupported, kind_of, value_of


class Finisher:
    """Translates expressions of one site; collects its captures and run-time sizes in order of first use."""

    def __init__(self, batch: Axes, heads: Axes, query: sympy.Symbol | None, key: sympy.Symbol | None, extents: Extents,
                 q_len: sympy.Expr, kv_len: sympy.Expr, product: fx.Node):  # fmt: skip
        self.extents, self.product = extents, product
        self.q_len, self.kv_len = q_len, kv_len
        self.captures: list[fx.Node] = []
        self.sizes: list[sympy.Symbol] = []
        self.table: dict[sympy.Symbol, Expr] = {}
        if query is not None:
            self.table[query] = Q_IDX
        if key is not None:
            self.table[key] = KV_IDX
        self._spread(batch, B)
        self._spread(heads, H)
        self._memo: dict[Expr, Expr] = {}

    def _spread(self, axes: Axes, whole: Sym) -> None:
        """Each axis as a digit of the merged index ``whole``."""
        stride = sympy.Integer(1)
        for i, a in reversed(list(enumerate(axes))):
            e: Expr = whole
            if stride != 1:
                e = call("floordiv", e, self.integer(stride))
            if i > 0:
                e = call("mod", e, self.integer(self.extents[a]))
            self.table[a] = e
            stride = sympy.expand(stride * self.extents[a])

    # -- integers
    def integer(self, e: sympy.Expr) -> Expr:
        if e.is_Integer:
            return Const(int(e))
        if e.is_Symbol:
            return self._symbol(e)
        if isinstance(e, FloorDiv):
            return call("floordiv", self.integer(e.args[0]), self.integer(e.args[1]))
        if isinstance(e, Mod) or type(e).__name__ == "PythonMod":
            return call("mod", self.integer(e.args[0]), self.integer(e.args[1]))
        if type(e).__name__ in ("Max", "Min"):  # sympy's, and torch's own
            fn = "maximum" if type(e).__name__ == "Max" else "minimum"
            return reduce(lambda x, y: call(fn, x, y), (self.integer(x) for x in sorted(e.args, key=_order)))
        if e.is_Add:
            return self._sum(sorted(e.args, key=_order))
        if e.is_Mul:
            out: Expr | None = None
            for f in sorted(e.args, key=lambda x: (x.is_number, _order(x))):
                x = self.integer(f)
                out = x if out is None else call("mul", out, x)
            assert out is not None
            return out
        if e.is_Pow and e.args[1].is_Integer and 1 < int(e.args[1]) < 5:
            base = self.integer(e.args[0])
            out = base
            for _ in range(int(e.args[1]) - 1):
                out = call("mul", out, base)
            return out
        raise Unsupported(f"integer expression {e}")

    def _symbol(self, s: sympy.Symbol) -> Expr:
        if s in self.table:
            return self.table[s]
        if s in self.extents:
            raise Unsupported(f"axis {s} is neither batch, head, query nor key")
        if s == self.q_len:
            return Q_LEN
        if s == self.kv_len:
            return KV_LEN
        if s not in self.sizes:
            self.sizes.append(s)
        return Sym(f"n{self.sizes.index(s)}")

    def _sum(self, terms: list[sympy.Expr]) -> Expr:
        plus = [t for t in terms if not t.could_extract_minus_sign()]
        minus = [-t for t in terms if t.could_extract_minus_sign()]
        out: Expr = Const(0)
        for t in plus:
            out = call("add", out, self.integer(t)) if out != Const(0) else self.integer(t)
        for t in minus:
            out = call("sub", out, self.integer(t))
        return out

    def _compare(self, fn: str, e: sympy.Expr) -> Expr:
        """``e >= 0`` as ``negative part <= positive part``, which reads like the user's own comparison."""
        terms = sorted(sympy.Add.make_args(sympy.expand(e)), key=_order)
        small = sympy.Add(*[-t for t in terms if t.could_extract_minus_sign()])
        large = sympy.Add(*[t for t in terms if not t.could_extract_minus_sign()])
        if small.is_number and not large.is_number:
            return call("ge" if fn == "ge" else "eq", self.integer(large), self.integer(small))
        return call("le" if fn == "ge" else "eq", self.integer(small), self.integer(large))

    # -- expressions
    def expression(self, e: Expr) -> Expr:
        if e not in self._memo:
            self._memo[e] = self._expression(e)
        return self._memo[e]

    def _expression(self, e: Expr) -> Expr:
        if isinstance(e, Lin):
            return self.integer(e.value)
        if isinstance(e, RowValue):
            raise Unsupported("the scores are combined with a reduction over scores other than a row-wise shift", e.node)
        if isinstance(e, Elem):
            if e.node is self.product:
                return SCORE
            return self._load(e)
        if isinstance(e, Call):
            if e.fn in ("ge", "eq") and isinstance(e.args[0], Lin) and isinstance(e.args[1], Lin):
                return self._compare(e.fn, e.args[0].value - e.args[1].value)
            return call(e.fn, *(self.expression(a) for a in e.args))
        return e

    def _load(self, e: Elem) -> Expr:
        if e.node not in self.captures:
            self.captures.append(e.node)
        v = value_of(e.node)
        kind = kind_of(v.dtype) if isinstance(v, torch.Tensor) else "float"
        return Load(self.captures.index(e.node), tuple(self.integer(i) for i in e.index), kind)


def _order(t: sympy.Expr) -> tuple[bool, str]:
    return (t.is_number, str(t))
