"""Symbolic evaluation of one element of an ATen value: index in, :class:`~fa_inductor.expr.Expr` out.

:class:`Puller` walks from a value towards its inputs. Views only change the index, pointwise ops become calls, index
arithmetic (arange, comparisons, tril and triu as they decompose, cumsum of constants, gathers by known positions) becomes
integers and booleans that :class:`~fa_inductor.patterns.prover.Prover` decides. What it does not see through stays an
:class:`~fa_inductor.patterns.terms.Elem`. A ``stop`` hook lets the caller end the walk at chosen nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fa_inductor._compat import clamp_gradient
from fa_inductor.expr import BOOL, FLOAT, INT, Call, Const, Expr, call, result_kind
from fa_inductor.patterns.arithmetic import (
    EXACT_INTEGER,
    Arithmetic,
    common_dtype,
    fits,
    is_choice_of_numbers,
    is_float,
    narrowed,
    rounded,
    settled,
    summands,
)
from fa_inductor.patterns.index_map import broadcast, pull_view, slice_start
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.terms import Dropped, Elem, Index, Lin, Unsupported, dtype, kind_of, shape, size, value_of

_UNARY = {
    "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf",
    "relu", "reciprocal",
}  # fmt: skip
_BINARY = {"mul": "mul", "div": "div", "minimum": "minimum", "maximum": "maximum", "pow": "pow"}
_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne"}

Stop = Callable[[fx.Node, Index], "Expr | None"]


def op_name(node: fx.Node) -> str:
    """``add`` for ``aten.add.Tensor``; empty for anything that is no ATen or prims call."""
    t = node.target
    if node.op != "call_function" or not isinstance(t, torch._ops.OpOverload) or t.namespace not in ("aten", "prims"):
        return ""
    return t._schema.name.split("::")[1]


class Puller(Arithmetic):
    """Evaluates elements; one instance per set of index ranges, results are memoised."""

    def __init__(self, prover: Prover, stop: Stop | None = None, dropout: bool = False):
        self.prover = prover
        self.stop = stop
        self.dropout = dropout  # whether dropout may appear as a term; else it is a value like any other
        self.visited: set[fx.Node] = set()
        self._stops: set[fx.Node] = set()
        self._memo: dict[tuple[fx.Node, Index], Expr] = {}

    def element(self, node: fx.Node, index: Sequence[sympy.Expr]) -> Expr:
        """The element of ``node`` at ``index``."""
        key = (node, tuple(index))
        if key not in self._memo:
            if self.stop is not None:
                stopped = self.stop(node, key[1])
                if stopped is not None:
                    self._stops.add(node)
                    self._memo[key] = stopped
                    return stopped
            self.visited.add(node)
            self._memo[key] = self._in_dtype(self._element(node, key[1]), node, key[1])
        return self._memo[key]

    def _in_dtype(self, e: Expr, node: fx.Node, index: Index) -> Expr:
        """``e``, computed with unbounded integers, where the dtype of ``node`` provably holds it; else the value as it is."""
        if e.kind != INT or not isinstance(value_of(node), torch.Tensor) or kind_of(dtype(node)) != INT:
            return e
        return e if fits(e, dtype(node), self.prover) else self.leaf(node, index)

    def leaf(self, node: fx.Node, index: Index) -> Expr:
        return Elem(node, index, kind_of(dtype(node)))

    def operand(self, arg: Any, index: Index, want: str | None = None) -> Expr:
        """Operand of a pointwise node at the output's index, converted to kind ``want``."""
        if isinstance(arg, fx.Node):
            v = value_of(arg)
            if isinstance(v, torch.Tensor):
                e = self.element(arg, broadcast(index, shape(arg)))
            elif isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool):
                e = Lin(size(arg))
            else:
                e = Elem(arg, (), FLOAT)  # a run-time Python float
        elif isinstance(arg, bool):
            e = Const(arg)
        elif isinstance(arg, int):
            e = Lin(sympy.Integer(arg))
        elif isinstance(arg, float):
            e = Const(arg)
        else:
            raise Unsupported(f"operand {arg!r}")
        return e if want is None else self.convert(e, want)

    # ------------------------------------------------------------------ nodes
    def _element(self, node: fx.Node, index: Index) -> Expr:
        if node.op in ("placeholder", "get_attr"):
            return self._input(node, index)
        pulled = pull_view(node, index, self.prover)
        if pulled is not None:
            return self.element(*pulled)
        name = op_name(node)
        handler = getattr(self, f"_op_{name}", None)
        if handler is not None:
            return handler(node, index)
        if node.target is operator.getitem:
            return self._getitem(node, index)
        if name in _UNARY:
            return self._unary(name, node, index)
        if name in _BINARY:
            return self._binary(name, node, index)
        if name in _COMPARE:
            return self._comparison(name, node, index)
        return self.leaf(node, index)

    def _comparison(self, name: str, node: fx.Node, index: Index) -> Expr:
        a, b = (self.operand(x, index) for x in node.args[:2])
        common = common_dtype(node.args[:2])
        if common in EXACT_INTEGER or not is_float(common):
            return self.compare(name, a, b)
        # torch compares in the tensor's own dtype: numbers are rounded to it first
        if any(x.kind == INT and not (isinstance(x, Lin) and x.value.is_number) for x in (a, b)):
            return self.leaf(node, index)
        if any(isinstance(x, Elem) and not isinstance(value_of(x.node), torch.Tensor) for x in (a, b)):
            return self.leaf(node, index)
        a, b = (self._narrow(self.convert(x, FLOAT), common) for x in (a, b))
        return self.compare(name, a, b)

    def _input(self, node: fx.Node, index: Index) -> Expr:
        v = constant_value(node)
        if v is not None and not index:
            kind = kind_of(dtype(node))
            return Const(bool(v)) if kind == BOOL else Lin(sympy.Integer(int(v))) if kind == INT else Const(float(v))
        return self.leaf(node, index)

    def _unary(self, name: str, node: fx.Node, index: Index) -> Expr:
        dt = dtype(node)
        if not is_float(dt) and (dt is torch.bool or name not in ("neg", "abs")):
            return self.leaf(node, index)
        x = self.operand(node.args[0], index, kind_of(dt))
        if isinstance(x, Lin) and name == "neg":
            return Lin(sympy.expand(-x.value))
        if name == "neg" and isinstance(x, Call) and x.fn == "cast_float" and isinstance(x.args[0], Lin):
            return Call("cast_float", (Lin(sympy.expand(-x.args[0].value)),), FLOAT)
        if isinstance(x, Const) and x.kind == FLOAT:
            with torch.no_grad():
                return Const(rounded(float(getattr(torch, name)(torch.tensor(x.value, dtype=torch.float64))), dt))
        result_kind(name, (x,))
        return call(name, x)

    def _binary(self, name: str, node: fx.Node, index: Index) -> Expr:
        dt = dtype(node)
        if dt is torch.bool:
            return self._logic("and_", node, index) if name == "mul" else self.leaf(node, index)
        mode = node.kwargs.get("rounding_mode") if name == "div" else None
        a, b = self.operand(node.args[0], index), self.operand(node.args[1], index)
        if mode == "floor" and not is_float(dt):
            return self.arithmetic("floordiv", a, b, dt)
        if (
            mode == "trunc"
            and not is_float(dt)
            and isinstance(a, Lin)
            and isinstance(b, Lin)
            and self.prover.holds(a.value)
        ):
            return self.arithmetic("floordiv", a, b, dt)
        if mode is not None or (name == "pow" and not is_float(dt)):
            return self.leaf(node, index)
        return self.arithmetic(_BINARY[name], a, b, dt)

    def _sum(self, node: fx.Node, index: Index, fn: str, swap: bool = False) -> Expr:
        a, b = self.operand(node.args[0], index), self.operand(node.args[1], index)
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        dt = dtype(node)
        if swap:
            a, b = b, a
            if alpha != 1:
                raise Unsupported("rsub with alpha", node)
        if alpha != 1:
            b = self.arithmetic("mul", b, self.operand(alpha, index), dt)
        if dt is torch.bool:
            return (
                self.leaf(node, index) if fn == "sub" else self.prover.or_(self.convert(a, BOOL), self.convert(b, BOOL))
            )
        return self.arithmetic(fn, *summands(a, b, dt), dt)

    def _op_add(self, node: fx.Node, index: Index) -> Expr:
        return self._sum(node, index, "add")

    def _op_sub(self, node: fx.Node, index: Index) -> Expr:
        return self._sum(node, index, "sub")

    def _op_rsub(self, node: fx.Node, index: Index) -> Expr:
        return self._sum(node, index, "sub", swap=True)

    def _op_floor_divide(self, node: fx.Node, index: Index) -> Expr:
        if is_float(dtype(node)):
            return self.leaf(node, index)
        return self.arithmetic(
            "floordiv", self.operand(node.args[0], index), self.operand(node.args[1], index), dtype(node)
        )

    def _op_remainder(self, node: fx.Node, index: Index) -> Expr:
        if is_float(dtype(node)):
            return self.leaf(node, index)
        return self.arithmetic("mod", self.operand(node.args[0], index), self.operand(node.args[1], index), dtype(node))

    def _op_clamp(self, node: fx.Node, index: Index) -> Expr:
        bounds = (*node.args[1:], None, None)[:2]
        low, high = node.kwargs.get("min", bounds[0]), node.kwargs.get("max", bounds[1])
        x = self.operand(node.args[0], index)
        x = x if low is None else self._clamped("maximum", x, low, node, index)
        return x if high is None else self._clamped("minimum", x, high, node, index)

    def _op_clamp_min(self, node: fx.Node, index: Index) -> Expr:
        return self._clamped("maximum", self.operand(node.args[0], index), node.args[1], node, index)

    def _op_clamp_max(self, node: fx.Node, index: Index) -> Expr:
        return self._clamped("minimum", self.operand(node.args[0], index), node.args[1], node, index)

    def _clamped(self, fn: str, x: Expr, bound: Any, node: fx.Node, index: Index) -> Expr:
        """One side of a clamp. At the bound its gradient is not always split in halves, as that of a maximum is."""
        dt = dtype(node)
        b = self.operand(bound, index)
        if not is_float(dt) or (is_choice_of_numbers(x) and is_choice_of_numbers(b)):
            return self.arithmetic(fn, x, b, dt)
        x, b = self.convert(x, FLOAT), self._narrow(self.convert(b, FLOAT), dt)
        share = clamp_gradient(isinstance(bound, fx.Node) and isinstance(value_of(bound), torch.Tensor))
        if share == 0.5:
            return self.arithmetic(fn, x, b, dt)
        beyond = {"maximum": "lt", "minimum": "gt"} if share == 1.0 else {"maximum": "le", "minimum": "ge"}
        return self.prover.where(self.compare(beyond[fn], x, b), b, x)

    def _logic(self, fn: str, node: fx.Node, index: Index) -> Expr:
        if dtype(node) is not torch.bool:
            return self.leaf(node, index)
        args = [self.operand(a, index, BOOL) for a in node.args[:2]]
        return self.prover.and_(*args) if fn == "and_" else self.prover.or_(*args)

    def _op_bitwise_and(self, node: fx.Node, index: Index) -> Expr:
        return self._logic("and_", node, index)

    def _op_logical_and(self, node: fx.Node, index: Index) -> Expr:
        return self._logic("and_", node, index)

    def _op_bitwise_or(self, node: fx.Node, index: Index) -> Expr:
        return self._logic("or_", node, index)

    def _op_logical_or(self, node: fx.Node, index: Index) -> Expr:
        return self._logic("or_", node, index)

    def _op_bitwise_xor(self, node: fx.Node, index: Index) -> Expr:
        if dtype(node) is not torch.bool:
            return self.leaf(node, index)
        a, b = (self.operand(x, index, BOOL) for x in node.args[:2])
        return self.prover.or_(self.prover.and_(a, self.prover.not_(b)), self.prover.and_(self.prover.not_(a), b))

    _op_logical_xor = _op_bitwise_xor

    def _op_logical_not(self, node: fx.Node, index: Index) -> Expr:
        if dtype(node) is not torch.bool:
            return self.leaf(node, index)
        return self.prover.not_(self.operand(node.args[0], index, BOOL))

    _op_bitwise_not = _op_logical_not

    def _op_isnan(self, node: fx.Node, index: Index) -> Expr:
        x = self.operand(node.args[0], index, FLOAT)
        return Const(math.isnan(float(x.value))) if isinstance(x, Const) else call("isnan", x)

    def _op_where(self, node: fx.Node, index: Index) -> Expr:
        cond = self.operand(node.args[0], index, BOOL)
        kind, dt = kind_of(dtype(node)), dtype(node)
        a, b = (self._narrow(self.operand(x, index, kind), dt) for x in node.args[1:3])
        return self.prover.where(cond, a, b)

    def _narrow(self, e: Expr, dt: torch.dtype) -> Expr:
        if isinstance(e, Elem) and isinstance(value_of(e.node), torch.SymFloat) and dt.itemsize < 4 and dt is not torch.bfloat16:
            raise Unsupported(f"a run-time number in {dt}, where it may become infinite")
        return Const(rounded(float(e.value), dt)) if isinstance(e, Const) and e.kind == FLOAT else e

    def _op__to_copy(self, node: fx.Node, index: Index) -> Expr:
        src, dt = node.args[0], dtype(node)
        assert isinstance(src, fx.Node)
        e = self.element(src, index)
        if kind_of(dt) != FLOAT or e.kind != FLOAT:
            if kind_of(dt) == FLOAT and e.kind == INT and settled(e):
                return self._lift(
                    lambda x: self._exact_float(x.value, dt) if isinstance(x, Lin) else call("cast_float", x), e
                )
            return self.convert(e, kind_of(dt))
        if is_choice_of_numbers(e):
            return self._lift(lambda x: self._narrow(x, dt), e)
        if isinstance(e, Call) and e.fn == "cast_float" and isinstance(e.args[0], Lin):
            return self._exact_float(e.args[0].value, dt)
        cast = narrowed(e, dtype(src), dt, self._stops)
        return self.leaf(node, index) if cast is None else cast

    _op_convert_element_type = _op__to_copy

    # ------------------------------------------------------------------ sources
    def _op_iota(self, node: fx.Node, index: Index) -> Expr:
        e = sympy.expand(size(node.kwargs["start"]) + size(node.kwargs["step"]) * index[0])
        return Lin(e) if not is_float(dtype(node)) else self._exact_float(e, dtype(node))

    def _op_arange(self, node: fx.Node, index: Index) -> Expr:
        if is_float(dtype(node)):
            return self.leaf(node, index)
        args = node.args
        start = size(args[0]) if len(args) > 1 else sympy.Integer(0)
        step = size(args[2]) if len(args) > 2 else sympy.Integer(1)
        return Lin(sympy.expand(start + step * index[0]))

    def _fill(self, value: Any, node: fx.Node) -> Expr:
        dt = dtype(node)
        if isinstance(value, fx.Node):
            v = value_of(value)
            if isinstance(v, (torch.SymFloat, torch.Tensor)):
                raise Unsupported("fill with a run-time value", node)
            return self.convert(Lin(size(value)), kind_of(dt))
        if dt is torch.bool:
            return Const(bool(value))
        return Const(rounded(float(value), dt)) if is_float(dt) else Lin(sympy.Integer(int(value)))

    def _op_full(self, node: fx.Node, index: Index) -> Expr:
        return self._fill(node.args[1], node)

    _op_full_like = _op_full

    def _op_new_full(self, node: fx.Node, index: Index) -> Expr:
        return self._fill(node.args[2], node)

    def _op_scalar_tensor(self, node: fx.Node, index: Index) -> Expr:
        return self._fill(node.args[0], node)

    def _op_fill(self, node: fx.Node, index: Index) -> Expr:
        value = node.args[1]
        if isinstance(value, fx.Node) and isinstance(value_of(value), torch.Tensor):
            return self.operand(value, (), kind_of(dtype(node)))
        return self._fill(value, node)

    # ------------------------------------------------------------------ structure
    def _op_cat(self, node: fx.Node, index: Index) -> Expr:
        parts: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        d = int(node.args[1] if len(node.args) > 1 else 0) % len(index)  # type: ignore[arg-type]
        spans, offset = [], sympy.Integer(0)
        for p in parts:
            if len(shape(p)) != len(index):
                continue  # legacy: an empty 1-d tensor may be concatenated with anything
            spans.append((p, offset, shape(p)[d]))
            offset = sympy.expand(offset + shape(p)[d])
        result: Expr | None = None
        for p, start, extent in reversed(spans):
            inside = self.prover.ge0(start + extent - 1 - index[d])
            if result is not None and inside == Const(False):
                continue
            at = list(index)
            at[d] = sympy.expand(index[d] - start)
            if result is not None:
                # the branch holds only below its end: narrow the index so that comparisons inside fold
                value = self._within(p, tuple(at), d, extent)
            else:
                value = self.element(p, at)
            value = self.convert(value, kind_of(dtype(node)))
            result = value if result is None else self.prover.where(inside, value, result)
        assert result is not None
        return result

    def _within(self, p: fx.Node, at: Index, d: int, extent: sympy.Expr) -> Expr:
        if extent == 1:
            return self.element(p, (*at[:d], sympy.Integer(0), *at[d + 1 :]))
        return self.element(p, at)

    def _op_constant_pad_nd(self, node: fx.Node, index: Index) -> Expr:
        src, pads = node.args[0], node.args[1]
        assert isinstance(src, fx.Node)
        value = node.args[2] if len(node.args) > 2 else 0
        at, inside, dims = list(index), Const(True), shape(src)
        cond: Expr = inside
        for k in range(len(pads) // 2):  # type: ignore[arg-type]
            d = len(index) - 1 - k
            at[d] = sympy.expand(index[d] - size(pads[2 * k]))  # type: ignore[index]
            cond = self.prover.and_(cond, self.prover.ge0(at[d]), self.prover.ge0(dims[d] - 1 - at[d]))
        return self.prover.where(cond, self.element(src, at), self._fill(value, node))

    def _op_slice_scatter(self, node: fx.Node, index: Index) -> Expr:
        into, src = node.args[0], node.args[1]
        args = [into, *node.args[2:]]
        proxy = _SliceArgs(tuple(args))
        d, start, step = slice_start(proxy, self.prover)  # type: ignore[arg-type]
        if step != 1:
            raise Unsupported("strided slice assignment", node)
        assert isinstance(into, fx.Node)
        assert isinstance(src, fx.Node)
        end = sympy.expand(start + shape(src)[d])
        inside = self.prover.and_(self.prover.ge0(index[d] - start), self.prover.ge0(end - 1 - index[d]))
        at = list(index)
        at[d] = sympy.expand(index[d] - start) if shape(src)[d] != 1 else sympy.Integer(0)
        if inside == Const(False):
            return self.element(into, index)
        value = self.convert(self.element(src, at), kind_of(dtype(node)))
        return value if inside == Const(True) else self.prover.where(inside, value, self.element(into, index))

    def _op_copy(self, node: fx.Node, index: Index) -> Expr:
        return self._narrow(self.operand(node.args[1], index, kind_of(dtype(node))), dtype(node))

    def _op_index(self, node: fx.Node, index: Index) -> Expr:
        src, positions = node.args[0], node.args[1]
        assert isinstance(src, fx.Node)
        used = [i for i, p in enumerate(positions) if p is not None]  # type: ignore[arg-type]
        if used != list(range(used[0], used[-1] + 1)):
            return self.leaf(node, index)
        tensors = [positions[i] for i in used]  # type: ignore[index]
        if any(dtype(t) in (torch.bool, torch.uint8) for t in tensors):
            return self.leaf(node, index)
        rank = max(len(shape(t)) for t in tensors)
        inner = index[used[0] : used[0] + rank]
        dims = shape(src)
        values = [self.operand(t, inner) for t in tensors]

        def gather(*vs: Expr) -> Expr:
            at = list(index[: used[0]])
            for pos, v in zip(used, vs, strict=True):
                if not isinstance(v, Lin):
                    raise Unsupported("gather by run-time positions", node)
                if self.prover.holds(v.value):
                    at.append(v.value)
                elif self.prover.holds(-v.value - 1):
                    at.append(sympy.expand(v.value + dims[pos]))
                else:
                    raise Unsupported("gather at positions of unknown sign", node)
            return self.element(src, (*at, *index[used[0] + rank :]))

        try:
            return self._lift(gather, *values)
        except Unsupported:
            return self.leaf(node, index)

    def _op_cumsum(self, node: fx.Node, index: Index) -> Expr:
        """A prefix sum of a value that does not depend on the position is ``value * (position + 1)``."""
        src = node.args[0]
        assert isinstance(src, fx.Node)
        d = int(node.args[1]) % len(index)  # type: ignore[arg-type]
        if is_float(dtype(node)):
            return self.leaf(node, index)
        t = sympy.Dummy("t", integer=True, nonnegative=True)
        inner = Puller(Prover({**self.prover.ranges, t: (sympy.Integer(0), shape(node)[d] - 1)}))
        try:
            v = inner.convert(inner.element(src, (*index[:d], t, *index[d + 1 :])), INT)
        except Unsupported:
            return self.leaf(node, index)
        if isinstance(v, Lin) and not v.value.has(t):
            return Lin(sympy.expand(v.value * (index[d] + 1)))
        return self.leaf(node, index)

    def _getitem(self, node: fx.Node, index: Index) -> Expr:
        src = node.args[0]
        if isinstance(src, fx.Node) and op_name(src) == "native_dropout" and node.args[1] == 0:
            p, train = src.args[1], src.args[2]
            if train is False or p == 0:
                return self.operand(src.args[0], index)
            if self.dropout and 0 < float(p) < 1:  # type: ignore[arg-type]
                return Dropped(self.operand(src.args[0], index), float(p))  # type: ignore[arg-type]
        return self.leaf(node, index)


class _SliceArgs:
    """Arguments of slice_scatter in the order of slice."""

    def __init__(self, args: tuple[Any, ...]):
        self.args = args


def constant_value(node: fx.Node) -> float | int | bool | None:
    """The number that a 0-d constant tensor of the graph holds."""
    if node.op != "get_attr":
        return None
    v: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        v = getattr(v, part, None)
    v = getattr(v, "constant", None) if getattr(v, "constant", None) is not None else v
    if isinstance(v, torch.Tensor) and type(v) is torch.Tensor and v.numel() == 1:
        return v.item()
    return None
