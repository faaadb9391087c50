"""Calls of ``F.scaled_dot_product_attention``, also those inside composite functions such as ``nn.MultiheadAttention``'s."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import fx

from fa_inductor.expr import Const, Expr, call
from fa_inductor.patterns.analysis import Analysis, dim_of
from fa_inductor.patterns.anchor import Softmax
from fa_inductor.patterns.captures import SideOperands
from fa_inductor.patterns.index_map import broadcast
from fa_inductor.patterns.operands import choose, radix, split_points
from fa_inductor.patterns.provenance import Place
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.site import AttentionMatch, Reject, Site, Split, build_match
from fa_inductor.patterns.terms import Elem, Index, dtype, quotient, shape, size, value_of
from fa_inductor.view import AtenView, DynamoValue


def match_sdpa(view: AtenView, node: fx.Node) -> AttentionMatch:
    """The site of one SDPA node of the view; rows without a key yield 0, as SDPA defines."""
    origin = view.origin[node]
    held = next((h for h in view.holders(node) if h[0][0] == origin.path and h[0][1].op not in ("output", "placeholder")), None)
    holder = DynamoValue(origin.path, held[0][1], held[1]) if held is not None else None
    site = Site(Softmax(node, node, -1, "zero"), node, node, holder, Place(view, origin.path, origin.clock, origin.grad_enabled))
    for _ in range(6):
        try:
            return _analyse(view, site, node)
        except Split as s:
            dim, part = dim_of(s.axis)
            parts = site.splits.setdefault(dim, [shape(node)[dim]])
            parts[part : part + 1] = [quotient(parts[part], s.inner), s.inner]
    raise Reject("the batch and head axes could not be separated", node)


def _lead(index: Index, node: fx.Node, grouped: bool, heads: sympy.Expr, prover: Prover) -> Index:
    """Index of the leading dimensions of an operand, with query heads mapped to key-value heads when grouped."""
    dims = shape(node)[:-2]
    if grouped and dims and dims[-1] != heads:
        ratio = quotient(heads, dims[-1])
        if ratio is None or not ratio.is_Integer:
            raise Reject("the query heads are no proven multiple of the key-value heads", node)
        head = index[-1]
        return (*broadcast(index[:-1], dims[:-1]), prover.floordiv(head, ratio) if dims[-1] != 1 else sympy.Integer(0))
    return broadcast(index, dims)


def _guard_equal_sizes(*operands: fx.Node) -> None:
    """Sizes that the call demands to be equal become one, by a guard on run-time sizes: eager fails where it would."""
    shapes = [value_of(o).shape for o in operands]  # type: ignore[attr-defined]
    q, k, v = shapes
    pairs = [(q[-1], k[-1]), (k[-2], v[-2])]
    pairs += [(a, b) for x in (k, v) for a, b in zip(reversed(q[:-2]), reversed(x[:-2]), strict=False)]
    for a, b in pairs:
        if size(a) != size(b) and _hint(a) is not None and _hint(a) == _hint(b):
            bool(a == b)


def _hint(d: int | torch.SymInt) -> int | None:
    return d.node.hint if isinstance(d, torch.SymInt) and d.node.has_hint() else d if isinstance(d, int) else None


def _analyse(view: AtenView, site: Any, node: fx.Node) -> AttentionMatch:
    q, k, v, mask, dropout_p, is_causal, scale, grouped = node.args
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    if len(shape(q)) < 2:
        raise Reject("operands of fewer than two dimensions", node)
    _guard_equal_sizes(q, k, v)
    a = Analysis(view, site, node, set(), [])
    out_index, out_dims = a._output_index()
    lead, row, column = out_index[:-2], out_index[-2], out_index[-1]
    a.key = n = a._axis("n", shape(k)[-2])
    a.features = e = a._axis("e", shape(q)[-1])
    heads = shape(q)[-3] if len(shape(q)) > 2 else sympy.Integer(1)
    prover, extents = a._prover(), a.extents
    q_side = (q, (*broadcast(lead, shape(q)[:-2]), row, e))
    k_side = (k, (*_lead(lead, k, bool(grouped), heads, prover), n, e))
    v_side = (v, (*_lead(lead, v, bool(grouped), heads, prover), n, column))
    rows, columns = radix(row, extents) or (), radix(column, extents) or ()
    batch = {s for s in extents if s not in (*rows, *columns, n, e)}
    for side in (k_side, v_side, q_side):
        point = split_points(side[0], side[1], prover, batch, extents)
        if point is not None:
            raise Split(*point)
    keep = {s for s in (n, e) if s != 0}
    oq = choose(q_side[0], q_side[1], prover, site.place, extents, set(rows) | (keep - {n}), scales=True)
    ok = choose(k_side[0], k_side[1], prover, site.place, extents, keep, scales=True)
    ov = choose(v_side[0], v_side[1], prover, site.place, extents, set(columns) | (keep - {e}), scales=False)
    logits = _logits(a, node, mask, is_causal, scale, out_index[:-1], prover, oq.scale * ok.scale)
    groups = a._roles(out_dims, rows, columns, oq, ok, ov)
    region = [node, *oq.passed, *ok.passed, *ov.passed]
    return build_match(view, site, groups, extents, oq, ok, ov, logits, [], float(dropout_p), out_dims, node, region,
                         "zero", sdpa=True)  # type: ignore[arg-type]  # fmt: skip


def _logits(a: Any, node: fx.Node, mask: Any, is_causal: Any, scale: Any, at: Index, prover: Any, factor: float) -> Expr:
    features = shape(node.args[0])[-1]  # type: ignore[arg-type]
    if scale is None:
        if not features.is_Integer:
            raise Reject("the default scale depends on a run-time head_dim", node)
        scale = 1.0 / math.sqrt(int(features))
    if not isinstance(scale, (int, float)):
        raise Reject("the scale is a run-time number", node)
    index = (*at, a.key)
    s: Expr = call("mul", Elem(node, index), Const(float(scale) * factor))
    if is_causal:
        s = prover.where(prover.ge0(at[-1] - a.key), s, Const(-math.inf))
    if isinstance(mask, fx.Node):
        query = frozenset(x for x in a.extents if x != a.key)
        side = SideOperands(prover, a.place, query, a.key if a.key != 0 else None)
        e = side(mask, broadcast(index, shape(mask)))
        if dtype(mask) is torch.bool:
            s = prover.where(e, s, Const(-math.inf))
        else:
            s = call("add", s, e)
    return s
