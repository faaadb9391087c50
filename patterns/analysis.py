"""The analysis of one site for one candidate product of queries and keys.

The walk starts at the value that will be replaced (the product with V, or the quotient of a deferred division). Its
dimensions are the site's axes. Pulling one element of it through the graph gives the index of every operand in these axes,
and from them the roles: the key axis is what the product with V sums over, query axes are those of the rows of the score
matrix, and the rest are batch, key-value heads and query groups, by what K and V vary with.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import sympy
import torch
from torch import fx

from fa_inductor.expr import BOOL, Call, Const, Expr, call, substitute
from fa_inductor.patterns.anchor import ADDING, fresh_index, is_rearrangement, total_index
from fa_inductor.patterns.arithmetic import summands
from fa_inductor.patterns.captures import SideOperands
from fa_inductor.patterns.guards import Guard, RowStep, masked_again
from fa_inductor.patterns.index_map import broadcast
from fa_inductor.patterns.operands import Axes, Extents, Operand, choose, radix, split_of_index, split_points
from fa_inductor.patterns.prover import Prover
from fa_inductor.patterns.pull import Puller, op_name
from fa_inductor.patterns.shifts import RowShifts
from fa_inductor.patterns.site import (
    DTYPES,
    AttentionMatch,
    Reject,
    Rows,
    Site,
    Split,
    ancestors,
    between,
    build_match,
    only_shape,
    shown,
)
from fa_inductor.patterns.terms import Dropped, Elem, Index, RowValue, dtype, shape
from fa_inductor.patterns.weights import Weights
from fa_inductor.view import DETACH, AtenView

_MAX_SINKS = 8


def dim_of(axis: sympy.Symbol) -> tuple[int, int]:
    """(dimension of the output, part of it) that an axis symbol stands for."""
    dim, _, part = axis.name[1:].partition("_")
    return int(dim), int(part or 0)


class Analysis:
    """One site on the way from its two products to a proven spec, or to the :class:`Reject` that says why there is none."""

    def __init__(self, view: AtenView, site: Site, qk: fx.Node, live: set[fx.Node], others: list[fx.Node]):
        self.view, self.site, self.qk, self.live, self.others = view, site, qk, live, others
        self.place = site.place
        self.extents: Extents = {}
        self.spine = between(qk, site.anchor.logits).union(*(between(qk, x) for x in site.anchor.also))
        self.region: set[fx.Node] = set()

    # -- axes
    def _axis(self, name: str, extent: sympy.Expr) -> sympy.Expr:
        if extent == 0:
            raise Reject("a dimension has size 0: nothing to compute", self.site.output)
        if extent == 1:
            return sympy.Integer(0)
        s = sympy.Symbol(name, integer=True, nonnegative=True)
        self.extents[s] = extent
        return s

    def _output_index(self) -> tuple[Index, tuple[Axes, ...]]:
        index: list[sympy.Expr] = []
        dims: list[Axes] = []
        for i, d in enumerate(shape(self.site.output)):
            e, axes = sympy.Integer(0), []
            for p, part in enumerate(self.site.splits.get(i, [d])):
                a = self._axis(f"j{i}_{p}", part)
                e = sympy.expand(e * part + a)
                if a != 0:
                    axes.append(a)
            index.append(e)
            dims.append(tuple(axes))
        return tuple(index), tuple(dims)

    def _prover(self) -> Prover:
        return self.view.shared(("prover", tuple(self.extents.items())), lambda: Prover(
            {s: (sympy.Integer(0), d - 1) for s, d in self.extents.items()}))  # fmt: skip

    # -- steps
    def run(self) -> AttentionMatch:
        out_index, out_dims = self._output_index()
        pv_index = self._product_element(out_index)
        probs, value = self._weights_operand(pv_index)
        dropout_p, at = self._probabilities(probs)
        logits, sinks = self._logits(at)
        q_side, k_side, query_rows = self._score_operands(logits)
        self._check_escape()
        return self._assemble(out_dims, pv_index, value, dropout_p, logits, sinks, q_side, k_side, query_rows)

    def _product_element(self, out_index: Index) -> Index:
        """Index of the element of the product with V that an element of the output is."""
        site, pv = self.site, self.site.pv
        total = site.anchor.total
        puller = Puller(self._prover(), lambda n, i: Elem(n, i) if n is pv or n is total else None)
        e = puller.element(site.output, out_index)
        if total is not None:
            if not (isinstance(e, Call) and e.fn == "div" and all(isinstance(a, Elem) for a in e.args)):
                raise Reject("the deferred division is not product / sum", site.output)
            self._deferred = e.args[1]
            e = e.args[0]
        if not (isinstance(e, Elem) and e.node is pv):
            raise Reject("the output is more than the product with V", site.output)
        self.region |= puller.visited | {pv}
        return e.index

    def _operands(self, product: fx.Node, at: Index, contraction: sympy.Expr) -> Rows:
        """The two operands of a matmul at output element ``at``."""
        a, b = product.args[1:3] if product.target in ADDING else product.args[:2]
        assert isinstance(a, fx.Node)
        assert isinstance(b, fx.Node)
        batch, (row, col) = at[:-2], at[-2:]
        return Rows((a, (*batch, row, contraction)), (b, (*batch, contraction, col)))

    def _weights_operand(self, pv_index: Index) -> tuple[Expr, tuple[fx.Node, Index]]:
        """(expression of the softmax weight in the product with V, the other operand)."""
        site, pv = self.site, self.site.pv
        if pv.target in ADDING and (pv.kwargs.get("beta", 1) != 0 or pv.kwargs.get("alpha", 1) != 1):
            raise Reject("the product with V adds another tensor", pv)
        first = pv.args[1 if pv.target in ADDING else 0]
        assert isinstance(first, fx.Node)
        n = self._axis("n", shape(first)[-1])
        self.key = n
        rows = self._operands(pv, pv_index, n)
        below = between(site.anchor.node, pv)
        sides = [(rows.lhs, rows.rhs), (rows.rhs, rows.lhs)]
        hit = [(p, v) for p, v in sides if p[0] in below or p[0] is site.anchor.node]
        if len(hit) != 1:
            raise Reject("both operands of the product with V depend on the probabilities", pv)
        (node, index), value = hit[0]
        puller = Puller(self._prover(), dropout=True)
        self.weights = Weights(puller, site.anchor.node, below, node, n)
        e = puller.element(node, index)
        if site.anchor.total is not None and self.weights.changed:
            raise Reject("the exponentials are changed before they are divided by their sum", self._changer())
        self.region |= {x for x in puller.visited if x in below} | {site.anchor.node}
        # The sum, its sinks and whatever else is made of the exponentials must pass gradients on like the op.
        for logits in (site.anchor.logits, *site.anchor.also):
            self.region |= between(logits, site.output)
        return e, value

    def _probabilities(self, e: Expr) -> tuple[float, Index]:
        """(dropout probability, index into the softmax) of the weight; anything else after the softmax is refused."""
        p = 0.0
        if isinstance(e, Dropped):
            p, e = e.p, e.inner
            if not 0.0 <= p < 1.0:
                raise Reject(f"dropout with probability {p} leaves nothing", self._changer())
        if not (isinstance(e, Elem) and e.node is self.site.anchor.node):
            by = self._changer()
            if by.target is DETACH:
                raise Reject("gradient is cut between the softmax and the product with V (detach)", by)
            raise Reject(f"the probabilities are changed by {shown(by)} between the softmax and the product with V", by)
        return p, e.index

    def _changer(self) -> fx.Node:
        """The first node after the softmax that does more than rearrange or ask for its shape."""
        below = between(self.site.anchor.node, self.site.pv) - self.weights.taken_aside
        changing = (n for n in self.view.graph.nodes if n in below and not is_rearrangement(n) and not only_shape(n))
        return next(changing, self.site.pv)

    def _logits(self, at: Index) -> tuple[Expr, list[Expr]]:
        """(expression of the logit at the key axis, expressions of logits outside of it)."""
        anchor = self.site.anchor
        length = shape(anchor.logits)[anchor.dim]
        n = self.key
        keys = self.extents[n] if n != 0 else sympy.Integer(1)
        offset = sympy.expand(at[anchor.dim] - n)
        others = [i for k, i in enumerate(at) if k != anchor.dim]
        if (n != 0 and any(i.has(n) for i in others)) or not offset.is_Integer or offset < 0:
            raise Reject("softmax is not taken over the axis that the product with V sums over", anchor.node)
        extra = sympy.expand(length - keys)
        if not extra.is_Integer or extra < 0 or extra > _MAX_SINKS:
            raise Reject("softmax normalises over other keys than the product with V sums over", anchor.node)
        if anchor.total is not None:
            self._check_total(at)
        self._check_rows(others)
        prover = self._prover()
        puller = Puller(prover, self._spine_stop(prover))
        self._puller = puller
        row_shifts = RowShifts(puller, anchor, self.qk, n)
        main = row_shifts.strip(puller.element(anchor.logits, at))
        for again in self.weights.remasked:
            main = (self._masked_again(main[0], again), main[1])
        sinks = []
        for t in (*range(int(offset)), *range(int(offset), int(extra))):
            position = sympy.Integer(t) if t < offset else sympy.expand(keys + t)
            where = (*at[: anchor.dim], position, *at[anchor.dim + 1 :])
            sinks.append(row_shifts.strip(puller.element(anchor.logits, where)))
        if anchor.sink is not None and anchor.sink.node is None:
            sinks.append((Const(math.log(anchor.sink.value, anchor.base)), ()))
        elif anchor.sink is not None:
            sinks.append(row_shifts.strip(puller.element(anchor.sink.node, anchor.sink.position(at))))
        shifts = {x[1] for x in (main, *sinks)}
        if len(shifts) > 1:
            raise Reject("the logits are shifted by different amounts within a row", anchor.logits)
        self.region |= {v for v in puller.visited if v in self.spine} | {self.qk}
        site = self.site
        for shift in main[1]:
            row_shifts.check(shift, main[0], at, {x for s in sinks for x in s[0].walk()})
        self._row = (*at[: anchor.dim], sympy.Integer(0), *at[anchor.dim + 1 :])
        site.stable = anchor.stable or (len(main[1]) == 1 and row_shifts.is_own_maximum(main[1][0], main[0], at))
        if anchor.sink is not None:
            site.sinks_survive = all(row_shifts.finite_without_keys(x, main[0], at) for x in main[1])
        logits = [x[0] if anchor.base == math.e else call("mul", x[0], Const(math.log(anchor.base))) for x in (main, *sinks)]
        return logits[0], logits[1:]

    def _masked_again(self, logit: Expr, guard: Guard) -> Expr:
        cond = self._puller.convert(self._puller.element(guard.cond, guard.index), BOOL)
        both = (cond, self._puller.prover.not_(cond))
        found = masked_again(logit, *(both if guard.zero_when else both[::-1]), self.qk)
        if found is None:
            raise Reject("the probabilities are masked after the softmax, otherwise than the scores before it", guard.cond)
        return found

    def _check_total(self, at: Index) -> None:
        anchor = self.site.anchor
        expected = total_index(anchor.total, (anchor.node,), at, anchor.dim)  # type: ignore[arg-type]
        if expected is None or not isinstance(self._deferred, Elem) or self._deferred.index != expected:
            raise Reject("the deferred division uses the sum of another row", anchor.total)

    def _check_rows(self, others: list[sympy.Expr]) -> None:
        point = split_of_index(others, set(self.extents) - {self.key}, self.extents)
        if point is not None:
            raise Split(*point)
        for i in others:
            if radix(i, self.extents) is None and not i.is_Integer:
                raise Reject("rows of the softmax are not a plain product of the output's axes", self.site.anchor.node)

    def _spine_stop(self, prover: Prover):  # type: ignore[no-untyped-def]
        query = frozenset(s for s in self.extents if s != self.key)
        side = SideOperands(prover, self.place, query, self.key if self.key != 0 else None)
        qk = self.qk

        def stop(node: fx.Node, index: Index) -> Expr | None:
            if node is qk:
                if dtype(qk) not in DTYPES:
                    raise Reject(f"the product of queries and keys is of dtype {dtype(qk)}", qk)
                return self._product_term(node, index, side)
            if node not in self.spine:
                return side(node, index)
            name = op_name(node)
            reduced = name in ("amax", "logsumexp", "mean") or (
                node.target is operator.getitem and node.args[1] == 0 and op_name(node.args[0]) == "max"  # type: ignore[arg-type]
            )
            if reduced:
                if self.key != 0 and any(i.has(self.key) for i in index):
                    raise Reject("the scores are combined with a reduction over another axis than the keys", node)
                if name == "mean":
                    self._check_mean(node)
                return RowValue(node, index)
            if node.target is DETACH:
                e = self._puller.element(node.args[0], index)  # type: ignore[arg-type]
                if isinstance(e, RowValue):
                    return replace(e, detached=True)
                raise Reject("gradient is cut between the scores and the softmax (detach)", node)
            return None

        return stop

    def _check_mean(self, node: fx.Node) -> None:
        """A mean over the keys is only a shift while it is finite: a masked key makes it -inf and all of its row NaN."""
        src = node.args[0]
        assert isinstance(src, fx.Node)
        index, own = fresh_index(src, "r")
        e = Puller(own, lambda n, i: Elem(n, i) if n is self.qk else None).element(src, index)
        for x in e.walk():
            number = isinstance(x, Const) and math.isfinite(float(x.value))
            if not (number or (isinstance(x, Elem) and x.node is self.qk) or (isinstance(x, Call) and x.fn in ("mul", "div"))):
                raise Reject("the scores are shifted by their mean, which is not finite where a key is masked", node)

    def _product_term(self, node: fx.Node, index: Index, side: SideOperands) -> Expr:
        if node.target not in ADDING:
            return Elem(node, index)
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if not all(isinstance(x, (int, float)) for x in (beta, alpha)):
            raise Reject(f"{op_name(node)} with a run-time alpha or beta", node)
        e: Expr = call("mul", Elem(node, index), Const(float(alpha)))  # type: ignore[arg-type]
        added = node.args[0]
        assert isinstance(added, fx.Node)
        if beta != 0:  # beta = 0 ignores the input, even where it is NaN
            other = call("mul", side(added, broadcast(index, shape(added))), Const(float(beta)))  # type: ignore[arg-type]
            e = call("add", *summands(e, other, dtype(node)))
        return e

    def _score_operands(self, logits: Expr):  # type: ignore[no-untyped-def]
        """The query and key operand of the product, told apart by the key axis."""
        hits = {x for x in logits.walk() if isinstance(x, Elem) and x.node is self.qk}
        unknown = [x for x in logits.walk() if isinstance(x, Elem) and x.node in self.spine and x.node is not self.qk]
        if unknown:
            raise Reject(f"{shown(unknown[0].node)} between the scores and the softmax is not understood", unknown[0].node)
        if any(isinstance(x, Dropped) for x in logits.walk()):
            raise Reject("dropout between the scores and the softmax is not understood", self.qk)
        if len(hits) != 1:
            raise Reject("a logit depends on more than one entry of the product", self.qk)
        at = next(iter(hits)).index
        features = self.qk.args[1 if self.qk.target in ADDING else 0]
        assert isinstance(features, fx.Node)
        e = self._axis("e", shape(features)[-1])
        self.features = e
        rows = self._operands(self.qk, at, e)
        batch, row, col = at[:-2], at[-2], at[-1]
        n = self.key
        if n == 0:
            return rows.lhs, rows.rhs, row if col == 0 else self._ambiguous(row, col)
        if col == n and not row.has(n) and not any(i.has(n) for i in batch):
            return rows.lhs, rows.rhs, row
        if row == n and not col.has(n) and not any(i.has(n) for i in batch):
            (a, ia), (b, ib) = rows.rhs, rows.lhs
            return (a, ia), (b, ib), col
        raise Reject("the keys of the product are not the keys of the softmax in the same order", self.qk)

    def _ambiguous(self, row: sympy.Expr, col: sympy.Expr) -> sympy.Expr:
        if row == 0:
            return col
        raise Reject("with a single key the query and key operands cannot be told apart", self.qk)

    def _check_escape(self) -> None:
        """Nobody outside of the region may need the scores or the probabilities."""
        site = self.site
        inside = self.spine | between(site.anchor.node, site.pv) | {self.qk, site.anchor.node, site.anchor.logits}
        for logits in (site.anchor.logits, *site.anchor.also):
            inside |= between(logits, site.pv)
        if site.anchor.total is not None:
            inside |= between(site.anchor.node, site.output) | {site.anchor.total, site.output}
        ends = {site.pv, site.output}
        for n in inside:
            for u in n.users:
                if u in self.live and u not in inside and u not in ends and n not in ends and not _asks_size(u):
                    what = "probabilities" if n is site.anchor.node or n not in self.spine else "scores"
                    used = "returned or used elsewhere" if u.op == "output" else f"also used by {op_name(u) or u.name}"
                    raise Reject(f"the {what} are {used}", n if u.op == "output" else u)

    # -- the match
    def _assemble(self, out_dims, pv_index, value, dropout_p, logits, sinks, q_side, k_side, query_rows):  # type: ignore[no-untyped-def]
        site, prover, extents = self.site, self._prover(), self.extents
        rows = radix(query_rows, extents)
        columns = radix(pv_index[-1] if value[1][-1] == pv_index[-1] else pv_index[-2], extents)
        if rows is None or columns is None:
            raise Reject("rows or columns of a product are not a plain product of axes", self.qk)
        n, e = self.key, self.features
        batch_axes = {s for s in extents if s not in (*rows, *columns, n, e)}
        for side in (k_side, value, q_side):
            point = split_points(side[0], side[1], prover, batch_axes, extents)
            if point is not None:
                raise Split(*point)
        keep = {s for s in (n, e) if s != 0}
        q = choose(q_side[0], q_side[1], prover, self.place, extents, set(rows) | (keep - {n}), scales=True)
        k = choose(k_side[0], k_side[1], prover, self.place, extents, keep, scales=True)
        v = choose(value[0], value[1], prover, self.place, extents, set(columns) | (keep - {e}), scales=False)
        scale = q.scale * k.scale
        if scale != 1.0:
            logits, sinks = _rescale(logits, self.qk, scale), sinks
        groups = self._roles(out_dims, rows, columns, q, k, v)
        dead_rows, steps = self._row_steps(prover)
        match = build_match(self.view, site, groups, extents, q, k, v, logits, sinks, dropout_p, out_dims, self.qk,
                            self._region_nodes(q, k, v), dead_rows)  # fmt: skip
        match.steps, match.dead_output = steps, "zero" if self.weights.finite_rows else ""
        if any(s.zero_when is not None for s in steps) and dead_rows == "nan" and not sinks:
            # The backward of an op that makes rows NaN makes all gradients NaN, also for rows that are zeroed behind it.
            match.spec, match.dead_output = replace(match.spec, dead_rows="zero"), "nan"
        if match.dead_output and match.dtype == torch.float64:
            raise Reject("rows without keys are told by a float32 logsumexp, too narrow for float64", site.pv)
        return match

    def _row_steps(self, prover: Prover) -> tuple[str, tuple[RowStep, ...]]:
        """(rule for dead rows, what zeroes or multiplies rows of the output, in order)."""

        def operand(node: fx.Node, index: Index, refused: str) -> Operand:
            if node in self.spine or self.qk in ancestors(node):
                raise Reject(refused, node)
            return choose(node, index, prover, self.place, self.extents, set(), scales=False)

        return self.weights.row_steps(self.site.anchor, self._row, operand)

    def _region_nodes(self, *operands: Operand) -> list[fx.Node]:
        nodes = [n for n in self.region if n in self.view.origin]
        return nodes + [p for o in operands for p in o.passed]

    def _roles(self, out_dims, rows: Axes, columns: Axes, q: Operand, k: Operand, v: Operand) -> dict[str, Axes]:  # type: ignore[no-untyped-def]
        order = [a for d in out_dims for a in d]
        fixed = {*rows, *columns, self.key, self.features}
        shared = [a for a in order if a not in fixed and (a in k.axes or a in v.axes)]
        grouped = [a for a in order if a not in fixed and a not in shared and a in q.axes]
        spread = [a for a in order if a not in fixed and a not in shared and a not in grouped]
        query = rows[-1:]
        bad = [a for a in rows if a in k.axes or a in v.axes]
        if bad:
            raise Reject("keys or values depend on the query position", self.qk)
        batch = spread + shared
        kv_heads: tuple = ()
        # A lone shared axis in front is the batch: a single key-value head serves every query head of its group.
        if shared and not (len(shared) == 1 and out_dims[0][:1] == (shared[0],) and len(out_dims) > 2):
            kv_heads = (shared[-1],)
            batch = [a for a in order if a in spread or (a in shared and a != shared[-1])]
        group = [a for a in order if a in grouped or a in rows[:-1]]
        return {
            "batch": tuple(batch), "kv_heads": kv_heads, "heads": (*kv_heads, *group), "query": query,
            "key": (self.key,) if self.key != 0 else (), "qk": (self.features,) if self.features != 0 else (),
            "v": columns,
        }  # fmt: skip


def _rescale(e: Expr, product: fx.Node, scale: float) -> Expr:
    hits = [x for x in e.walk() if isinstance(x, Elem) and x.node is product]
    return substitute(e, {h: call("mul", h, Const(scale)) for h in hits})


def _asks_size(node: fx.Node) -> bool:
    """Run-time sizes may be read off any tensor that has them; its values are not used."""
    return op_name(node) in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
