"""Attention sites of a view: from each softmax to an AttentionMatch or a Rejection with its reason."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fa_inductor.errors import ProgramError
from fa_inductor.patterns.analysis import Analysis, dim_of
from fa_inductor.patterns.anchor import MATMULS, Softmax, find_softmaxes, is_rearrangement
from fa_inductor.patterns.index_map import aten
from fa_inductor.patterns.mixing import LINEAR, find_mixing, follows_scores, opaque_consumer
from fa_inductor.patterns.provenance import Place
from fa_inductor.patterns.pull import op_name
from fa_inductor.patterns.site import AttentionMatch, Reject, Site, Split, rejection, source_line
from fa_inductor.patterns.terms import Unsupported, quotient, shape, value_of
from fa_inductor.spec import Rejection
from fa_inductor.view import OPAQUE, SDPA, AtenView, DynamoValue, slicing

_TRANSFORMED = "inside a torch.func transform (vmap, grad, jvp), which the fused op does not support"
_FOREIGN = "on a tensor subclass such as DTensor, for which the fused op has no rule: take the local tensors (to_local) before"


def recognise(view: AtenView) -> list[AttentionMatch | Rejection]:
    """Every attention site of the view, in graph order; what merely contains a softmax is not a site."""
    out: list[AttentionMatch | Rejection] = []
    live = slicing.live_nodes(view.graph, lambda n: False)  # the view is functional: nothing writes
    for n in view.graph.nodes:
        if n.target is SDPA and n in live:
            from fa_inductor.patterns.sdpa import match_sdpa

            out.append(_guarded(view, n, lambda n=n: match_sdpa(view, n)))
    for softmax in find_softmaxes(view.graph, lambda n: n not in view.origin or view.origin[n].grad_enabled):
        if softmax.node not in live:
            continue
        found = _guarded(view, softmax.node, lambda s=softmax: _match(view, s, live))
        if found is not None:
            out.append(found)
    for nodes, reason in ((view.transformed, _TRANSFORMED), (view.foreign, _FOREIGN)):
        out += [Rejection(reason, n.name, source_line(n), path) for path, n in nodes]
    return out


def _guarded(view: AtenView, node: fx.Node, attempt):  # type: ignore[no-untyped-def]
    try:
        return attempt()
    except Reject as r:
        if r.at is not None:
            return Rejection(r.reason, r.at[1].name, source_line(r.at[1]), r.at[0])
        return None if r.silent else rejection(view, r.reason, r.node or node)
    except Unsupported as u:
        return rejection(view, u.reason, u.node or node)
    except ProgramError as e:
        return rejection(view, str(e), node)


# ------------------------------------------------------------------------------------------------ locating the site
def _match(view: AtenView, softmax: Softmax, live: set[fx.Node]) -> AttentionMatch:
    """The match; where there is none, what mixes the scores or the probabilities is a better reason than what failed then."""
    try:
        return _match_products(view, softmax, live)
    except (Reject, Unsupported):
        found = find_mixing(view, softmax, live)
        if not found:
            raise
        raise Reject("; ".join(reason for *_, reason in found), at=found[0][:2]) from None


def _match_products(view: AtenView, softmax: Softmax, live: set[fx.Node]) -> AttentionMatch:
    candidates = _products_above(softmax.logits)
    pvs, others = _products_below(softmax, live)
    _check_missing(view, softmax, live, candidates, pvs, others)
    if not candidates or not pvs:
        raise Reject("no products around this softmax", silent=True)
    if softmax.refused:
        raise Reject(softmax.refused, softmax.node)
    if len(pvs) > 1:
        raise Reject("the probabilities are multiplied with more than one tensor", pvs[1])
    pv = pvs[0]
    site = _locate(view, softmax, pv, live)
    failures: list[Exception] = []
    for qk in candidates:
        try:
            return _match_product(view, site, qk, live, others)
        except (Reject, Unsupported) as e:
            failures.append(e)
    raise failures[0]


def _check_missing(
    view: AtenView, softmax: Softmax, live: set[fx.Node], candidates: list[fx.Node], pvs: list[fx.Node], others: list[fx.Node]
) -> None:
    """Refuse, with the reason, where one of the two products or both cannot be seen, but what is there looks like attention."""
    after = opaque_consumer(view, softmax) if not pvs else None
    if not candidates and (pvs or (after is not None and after[2])):
        source = _scores_from_outside(softmax.logits)
        if source is not None and source.op == "placeholder":
            where = "what it normalises comes in as an input"
            raise Reject(f"no product of queries and keys before this softmax in this graph: {where}", softmax.node, not pvs)
        maker = view.origin[source].node if source is not None else None
        # mixing.py tells linear layers on scores from those on hidden states.
        if maker is not None and (follows_scores(maker) if maker.target in LINEAR else _computed_from_product(maker)):
            raise Reject(f"{slicing.name_of(maker)} between the scores and the softmax is not understood", softmax.node)
    if not candidates or pvs:
        return
    changed = "the probabilities are changed by {} between the softmax and the product with V"
    if _returned_probabilities(softmax, candidates, live):
        if after is None:
            raise Reject("the product with V is not in this graph: the probabilities are its result", softmax.node)
        path, node, followed = after
        reason = changed if followed else "the probabilities go into {}, behind which no product with V was found"
        raise Reject(reason.format(slicing.name_of(node)), at=(path, node))
    opaque = next((o for o in others if o.target is OPAQUE and _product_behind(o)), None)
    if opaque is not None:
        raise Reject(changed.format(slicing.name_of(view.origin[opaque].node)), opaque)


def _products_above(logits: fx.Node, limit: int = 600) -> list[fx.Node]:
    """Matmuls that the logits are computed from without passing another matmul, nearest first."""
    todo, seen, hits = [logits], {logits}, []
    while todo and limit:
        limit -= 1
        n = todo.pop(0)
        if n.target in MATMULS:
            hits.append(n)
            continue
        for a in n.all_input_nodes:
            if a not in seen and a.target not in (OPAQUE, SDPA):
                seen.add(a)
                todo.append(a)
    return hits


def _scores_from_outside(logits: fx.Node) -> fx.Node | None:
    """What the logits are an elementwise function of and as large as: an input (after a graph break) or an opaque value."""
    todo, seen = [logits], {logits}
    while todo and len(seen) < 64:
        n = todo.pop(0)
        opaque = n.target is operator.getitem and n.args[0].target is OPAQUE  # type: ignore[union-attr]
        if (n.op == "placeholder" or opaque) and len(shape(n)) >= 3 and shape(n) == shape(logits):
            return n
        if n is not logits or n.op == "call_function":
            pointwise = isinstance(n.target, torch._ops.OpOverload) and torch.Tag.pointwise in n.target.tags
            if not (pointwise or is_rearrangement(n)):
                continue
        for a in n.all_input_nodes:
            if a not in seen and isinstance(value_of(a), torch.Tensor) and a.target not in (OPAQUE, SDPA):
                seen.add(a)
                todo.append(a)
    return None


def _computed_from_product(node: fx.Node, limit: int = 16) -> bool:
    """Whether a Dynamo node follows a matmul within a few nodes."""
    todo, seen = [node], {node}
    while todo and len(seen) < limit:
        for a in todo.pop(0).all_input_nodes:
            if a.target in slicing.MATMULS:
                return True
            if a not in seen and a.op.startswith("call"):
                seen.add(a)
                todo.append(a)
    return False


def _product_behind(node: fx.Node, limit: int = 16) -> bool:
    """Whether a matmul follows an ATen node within a few nodes."""
    todo, seen = [node], {node}
    while todo and len(seen) < limit:
        for u in todo.pop(0).users:
            if u.target in MATMULS:
                return True
            if u not in seen:
                seen.add(u)
                todo.append(u)
    return False


def _returned_probabilities(softmax: Softmax, candidates: list[fx.Node], live: set[fx.Node]) -> bool:
    """A softmax of a batched product over its last axis that is a result of the graph: a graph break cut off the values."""
    batched = any(c.target is not aten.mm.default and len(shape(c)) == 3 for c in candidates)
    if not batched or softmax.total is not None or softmax.dim != len(shape(softmax.node)) - 1:
        return False
    todo, seen = [softmax.node], {softmax.node}
    while todo:
        for u in todo.pop().users:
            if u.op == "output":
                return True
            if u in live and u not in seen and is_rearrangement(u):
                seen.add(u)
                todo.append(u)
    return False


def _products_below(softmax: Softmax, live: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(matmuls fed by the probabilities, live users on the way that are neither matmul nor elementwise)."""
    todo, seen = [softmax.node], {softmax.node}
    hits: list[fx.Node] = []
    others: list[fx.Node] = []
    limit = 200
    while todo and limit:
        limit -= 1
        n = todo.pop(0)
        for u in n.users:
            if u in seen or u not in live:
                continue
            seen.add(u)
            if u.target in MATMULS:
                hits.append(u)
            elif u is softmax.total:
                continue
            elif u.op == "output" or u.target in (OPAQUE, SDPA):
                others.append(u)
            else:
                todo.append(u)
    return hits, others


def _locate(view: AtenView, softmax: Softmax, pv: fx.Node, live: set[fx.Node]) -> Site:
    """The value to replace: the first Dynamo value at or after the product with V (after the division if deferred)."""
    origin = view.origin.get(pv)
    if origin is None:
        raise Reject("the product with V has no origin in the graph", pv)
    path, node, divided = origin.path, pv, softmax.total is None
    while True:
        here = view.origin.get(node)
        if here is not None and divided:
            place = Place(view, path, here.clock, origin.grad_enabled)
            for holder, leaf in view.holders(node):
                if holder[0] == path and holder[1].op not in ("output", "placeholder"):
                    return Site(softmax, pv, node, DynamoValue(path, holder[1], leaf), place)
        users = [u for u in node.users if u in live]
        if len(users) != 1:
            break
        user = users[0]
        if not divided and user.target is aten.div.Tensor and user.args[0] is node:
            divided = True
        elif not is_rearrangement(user) or op_name(user) in ("_to_copy", "convert_element_type"):
            break
        node = user
    if not divided:
        raise Reject("exp is not divided by the sum of its row alone, so this is no softmax", softmax.node)
    return Site(softmax, pv, pv, None, Place(view, path, origin.clock, origin.grad_enabled))


# ------------------------------------------------------------------------------------------------ analysing the site
def _match_product(view: AtenView, site: Site, qk: fx.Node, live: set[fx.Node], others: list[fx.Node]) -> AttentionMatch:
    site.splits.clear()
    for _ in range(6):
        try:
            return Analysis(view, site, qk, live, others).run()
        except Split as s:
            dim, part = dim_of(s.axis)
            parts = site.splits.setdefault(dim, [shape(site.output)[dim]])
            parts[part : part + 1] = [quotient(parts[part], s.inner), s.inner]
    raise Reject("the batch and head axes could not be separated", qk)
