"""What describes one attention site: the proven match, the refusals, and the last checks before a match is made."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from pathlib import Path

import sympy
import torch
from torch import fx

from fa_inductor.bounds import Facts
from fa_inductor.expr import SCORE, Const
from fa_inductor.patterns.anchor import Softmax
from fa_inductor.patterns.finish import Finisher
from fa_inductor.patterns.guards import RowStep
from fa_inductor.patterns.operands import Axes, Extents, Operand
from fa_inductor.patterns.provenance import Place
from fa_inductor.patterns.pull import op_name
from fa_inductor.patterns.stability import may_be_dead, may_overflow, may_vanish
from fa_inductor.patterns.terms import Index, tensor_of, value_of
from fa_inductor.spec import AttentionSpec, Rejection
from fa_inductor.view import AtenView, DynamoValue, slicing

#: Dtypes of attention.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass
class AttentionMatch:
    """A proven site: ``output`` equals the fused op on q, k, v and the captures under ``spec``.

    ``groups`` lists the axes merged into the op's dimensions: batch, query heads, kv heads, query, key, qk features, v
    features. ``output_dims`` lists the axes merged in each dimension of ``output``.
    """

    spec: AttentionSpec
    q: Operand
    k: Operand
    v: Operand
    captures: tuple[fx.Node, ...]
    sizes: tuple[sympy.Symbol, ...]
    groups: dict[str, Axes]
    extents: Extents
    output: fx.Node
    output_dims: tuple[Axes, ...]
    holder: DynamoValue | None
    place: Place
    anchor: fx.Node
    pv: fx.Node
    dtype: torch.dtype
    dropout_p: float = 0.0
    region: tuple[fx.Node, ...] = ()
    sdpa: bool = False
    notes: tuple[str, ...] = ()
    steps: tuple[RowStep, ...] = ()
    dead_output: str = ""
    """``zero``: rows whose logsumexp is not finite (no key, NaN or infinite scores) are zero; ``nan``: rows without keys are NaN,
    put back after an op that makes them zero."""

    def full_spec(self) -> AttentionSpec:
        """The spec with its dropout; the seed is captured last."""
        if not self.dropout_p:
            return self.spec
        return replace(self.spec, dropout_p=self.dropout_p, seed_slot=len(self.captures))

    def extent(self, axes: Axes) -> sympy.Expr:
        out = sympy.Integer(1)
        for a in axes:
            out = out * self.extents[a]
        return sympy.expand(out)


class Reject(Exception):
    """Internal: the site is not what a fused op computes, with the node at fault, or ``at`` (sub-graph, Dynamo node) where the view
    has none for it."""

    def __init__(
        self, reason: str, node: fx.Node | None = None, silent: bool = False, at: tuple[tuple[str, ...], fx.Node] | None = None
    ):
        super().__init__(reason)
        self.reason, self.node, self.silent, self.at = reason, node, silent, at


class Split(Exception):
    """An axis has to be split, into one of extent ``inner`` and the rest, and the site looked at again."""

    def __init__(self, axis: sympy.Symbol, inner: sympy.Expr):
        self.axis, self.inner = axis, inner


@dataclass
class Rows:
    """A product ``lhs @ rhs`` seen from one element: operand nodes, their indices and the contraction."""

    lhs: tuple[fx.Node, Index]
    rhs: tuple[fx.Node, Index]


@dataclass
class Site:
    """A softmax and the product with V behind it, as found, before anything is proven."""

    anchor: Softmax
    pv: fx.Node
    output: fx.Node
    holder: DynamoValue | None
    place: Place
    splits: dict[int, list[sympy.Expr]] = field(default_factory=dict)
    stable: bool = True
    sinks_survive: bool = True
    """Whether a row without keys is left to its sinks; False where its maximum, -inf, is taken off all the same."""


def rejection(view: AtenView, reason: str, node: fx.Node) -> Rejection:
    """A rejection that says where in the user's graph ``node`` comes from."""
    origin = view.origin.get(node)
    if origin is None:
        return Rejection(reason, node.name)
    return Rejection(reason, origin.node.name, source_line(origin.node), origin.path)


#: explain() calls the user's function: its line says nothing about where an attention is.
_EXPLAIN = Path(slicing.__file__).parents[1] / "entry.py"


def source_line(node: fx.Node) -> str:
    """``file:line: code`` of the user's innermost frame of a Dynamo node; its module where no frame was kept."""
    lines = [ln.strip() for ln in (node.meta.get("stack_trace") or "").strip().splitlines() if ln.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith('File "'):
            where = lines[i][6:].split('", line ')
            if Path(where[0]) == _EXPLAIN:
                continue
            number = where[1].split(",")[0] if len(where) == 2 else "?"
            code = lines[i + 1] if i + 1 < len(lines) else ""
            return f"{where[0]}:{number}: {code}"
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    if modules:
        name, kind = modules[-1][0], modules[-1][1]
        return f"in {name} ({getattr(kind, '__name__', kind)})"
    return ""


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Every node that ``node`` is computed from, itself left out."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for a in todo.pop().all_input_nodes:
            if a not in found:
                found.add(a)
                todo.append(a)
    return found


def shown(node: fx.Node) -> str:
    """The name of an ATen node's op for messages; pieces of a result are named by what made it."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return op_name(node) or slicing.name_of(node)


def only_shape(node: fx.Node) -> bool:
    """An op that reads nothing of its input but shape, dtype and device."""
    name = op_name(node)
    return name.endswith("_like") or name.startswith("new_")


def between(start: fx.Node, end: fx.Node) -> set[fx.Node]:
    """Nodes on paths from ``start`` (excluded) to ``end`` (included)."""
    up: set[fx.Node] = set()
    todo = [end]
    while todo:
        n = todo.pop()
        if n in up or n is start:
            continue
        up.add(n)
        todo.extend(n.all_input_nodes)
    down, todo = set(), [start]
    while todo:
        n = todo.pop()
        for u in n.users:
            if u in up and u not in down:
                down.add(u)
                todo.append(u)
    return down


def build_match(view, site, groups, extents, q, k, v, logits, sinks, dropout_p, out_dims, product, region, dead_rows, sdpa=False):  # type: ignore[no-untyped-def]
    """Last checks shared by softmax sites and SDPA calls, then the match with its program."""
    place: Place = site.place
    op_dtype = torch.promote_types(q.dtype, v.dtype)
    if not {q.dtype, v.dtype, op_dtype} <= set(DTYPES) or q.dtype != k.dtype:
        raise Reject(f"operands of dtypes {q.dtype}, {k.dtype}, {v.dtype}", site.pv)
    devices = {tensor_of(o.node).device for o in (q, k, v)}
    if len(devices) > 1:
        raise Reject(f"operands on several devices: {sorted(map(str, devices))}", site.pv)
    barrier = place.gradient_barrier(region)
    if barrier is not None:
        raise Reject(f"gradient does not flow through {barrier.name} as through its inputs (detach or no_grad inside)", site.pv)
    query, key = groups["query"], groups["key"]
    lengths = [_extent(query, extents), _extent(key, extents)]
    finisher = Finisher(groups["batch"], groups["heads"], query[0] if query else None, key[0] if key else None,
                        extents, lengths[0], lengths[1], product)  # fmt: skip
    score = finisher.expression(logits)
    extra = tuple(finisher.expression(s) for s in sinks)
    if not score.depends_on(SCORE) or any(x.depends_on(SCORE) for x in extra):
        raise Reject("the logits beside the keys depend on the scores", site.pv)
    held = bool(extra) and all(isinstance(x, Const) for x in extra)  # a sink that is a number keeps the sum from vanishing
    facts, is_mask = _facts(lengths), lambda x: not place.requires_grad(finisher.captures[x.slot])
    if not site.stable and not held and may_vanish(score, is_mask, facts):
        raise Reject("without the row's maximum taken off, exp vanishes in a row whose keys are all masked", site.anchor.node)
    if not site.stable and may_overflow(score, is_mask):
        raise Reject("without the row's maximum taken off, exp overflows where a large number is added", site.anchor.node)
    if not site.sinks_survive and may_be_dead(score, is_mask, facts):
        raise Reject("a row whose keys are all masked is NaN, as its maximum is taken off before the sink", site.anchor.node)
    for c in finisher.captures:
        if not place.emittable(c) and not isinstance(value_of(c), torch.SymFloat):
            raise Reject(f"captured value {c.name} cannot be had where the fused op would go", c)
        value = value_of(c)
        if isinstance(value, torch.Tensor) and value.device not in devices and value.dim() > 0:
            raise Reject(f"captured value {c.name} is on another device", c)
    spec = AttentionSpec(score=score, sinks=extra, dead_rows=dead_rows)
    return AttentionMatch(
        spec, q, k, v, tuple(finisher.captures), tuple(finisher.sizes), groups, extents, site.output, out_dims, site.holder,
        place, site.anchor.node if isinstance(site.anchor, Softmax) else site.pv, site.pv, op_dtype, dropout_p,
        tuple(region), sdpa,
    )  # fmt: skip


def _facts(lengths: list[sympy.Expr]) -> Facts:
    q_len, kv_len = (int(n) if n.is_Integer else None for n in lengths)
    return Facts(q_len, kv_len)


def _extent(axes: Axes, extents: Extents) -> sympy.Expr:
    out = sympy.Integer(1)
    for a in axes:
        out = out * extents[a]
    return out
