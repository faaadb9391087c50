"""The pass over Dynamo graphs, before autograd: view, recognise, select a kernel, rewrite, report."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fa_inductor import rewrite
from fa_inductor.config import Options
from fa_inductor.describe import dtype_text, form_of, shapes_of
from fa_inductor.patterns import AttentionMatch, recognise
from fa_inductor.patterns.site import source_line
from fa_inductor.report import SiteReport
from fa_inductor.selection import Choice, choose_kernel
from fa_inductor.spec import Rejection
from fa_inductor.view import AtenView, ViewError, builder
from fa_inductor.view.slicing import COMPOSITES, SOFTMAXES

log = logging.getLogger("fa_inductor")

@dataclass
class PassResult:
    """Sites in graph order and the seconds spent."""

    sites: list[SiteReport] = field(default_factory=list)
    seconds: float = 0.0
    fused: int = 0


class AttentionPass:
    """Rewrites the attention of a Dynamo graph in place.

    Args:
        options: what the user asked for.
        select: kernel choice; replaced in tests.
    """

    def __init__(self, options: Options, select: Callable[[AttentionMatch, Options], Choice] = choose_kernel):
        self.options, self.select = options, select

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        start = time.perf_counter()
        result = PassResult()
        if self.options.enabled:
            with _no_collection():
                for module in _units(gm):
                    self._run(module, result)
        result.seconds = time.perf_counter() - start
        return result

    def _run(self, gm: fx.GraphModule, result: PassResult) -> None:
        if not _may_hold_attention(gm):
            return
        try:
            view = builder.build(gm)
            found = recognise(view)
        except ViewError as e:
            result.sites.append(_unread(e))
            return
        except Exception as e:  # the model must still run: a fault of ours is a declined graph
            log.warning("fa_inductor could not analyse a graph and leaves it as it is", exc_info=True)
            result.sites.append(SiteReport("rejected", reason=f"analysis failed: {type(e).__name__}: {e}"))
            return
        shared = _agreeing(view, found)
        done: set[tuple] = set()
        for item in found:
            if isinstance(item, Rejection):
                result.sites.append(_rejected(item))
                continue
            try:
                report = self._site(view, item, shared, done)
            except Exception as e:  # a site of ours that fails must not take the model with it
                log.warning("fa_inductor could not rewrite a site and leaves it as it is", exc_info=True)
                report = SiteReport("rejected", reason=f"rewrite failed: {type(e).__name__}: {e}")
            if report is not None:
                result.sites.append(report)
                result.fused += report.status == "fused"
        for module in view.bodies.values():
            module.graph.lint()
            module.recompile()

    def _site(self, view: AtenView, match: AttentionMatch, shared: dict, done: set[tuple]) -> SiteReport | None:
        """Rewrite one match; None for another call of a sub-graph that was rewritten already."""
        body = view.bodies[match.place.path]
        key = (id(body), _anchor_node(view, match))
        if key in done:
            return None
        if not shared[key]:
            return _declined(view, match, "the sub-graph is called several times and not every call is the same attention")
        done.add(key)
        try:
            choice = self.select(match, self.options)
        except Exception as e:
            log.warning("fa_inductor could not choose a kernel and leaves a site as it is", exc_info=True)
            choice = Choice(None, reason=f"kernel selection failed: {type(e).__name__}: {e}")
        if choice.kernel is None:
            return _declined(view, match, choice.reason, choice.fused_already)
        try:
            spec = rewrite.apply(view, match, choice.kernel, choice.fp8, choice.projections, choice.cache)
        except rewrite.RewriteError as e:
            return _declined(view, match, str(e))
        report = _report(view, match, "fused", program=spec.program, template=choice.template)
        return replace(report, fp8=choice.fp8 or (f"not FP8: {choice.fp8_refused}" if choice.fp8_refused else ""))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses Python's cyclic garbage collection: tracing makes many objects that stay, among the many of a model's graphs,
    and looking through all of them again and again was up to a sixth of the pass."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _units(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The top graph, then bodies that the view does not enter (branches of cond, bodies of loops), each on its own."""
    yield gm
    opaque = {"cond", "while_loop", "scan", "map_impl", "associative_scan"}
    for module in list(gm.modules()):
        if not isinstance(module, fx.GraphModule):
            continue
        for n in module.graph.nodes:
            if isinstance(n.target, torch._ops.HigherOrderOperator) and n.target.name() in opaque:
                for a in n.all_input_nodes:
                    body = getattr(module, str(a.target), None) if a.op == "get_attr" else None
                    if isinstance(body, fx.GraphModule):
                        yield body


def _may_hold_attention(gm: fx.GraphModule) -> bool:
    return any(
        n.op in ("call_function", "call_method") and (n.target in SOFTMAXES or n.target in COMPOSITES)
        for m in gm.modules()
        if isinstance(m, fx.GraphModule)
        for n in m.graph.nodes
    )


def _anchor_node(view: AtenView, match: AttentionMatch) -> fx.Node:
    return match.holder.node if match.holder is not None else view.origin[match.pv].node


def _agreeing(view: AtenView, found: list) -> dict[tuple, bool]:
    """Per rewritten node of a sub-graph body: whether every call of the body proved the same attention.

    One body can stand for many calls (nested compile regions). It is rewritten once, so the proof must hold in each.
    """
    calls: dict[int, int] = {}
    for body in view.bodies.values():
        calls[id(body)] = calls.get(id(body), 0) + 1
    seen: dict[tuple, list[tuple]] = {}
    for m in found:
        if isinstance(m, AttentionMatch):
            key = (id(view.bodies[m.place.path]), _anchor_node(view, m))
            seen.setdefault(key, []).append(_signature(m))
    return {key: len(s) == calls[key[0]] and len(set(s)) == 1 for key, s in seen.items()}


def _signature(m: AttentionMatch) -> tuple:
    """What the rewrite of a match depends on, in terms of the body's own nodes."""
    rows = [s.by for s in m.steps if not isinstance(s.by, float)]
    used = (m.q.node, m.k.node, m.v.node, *m.captures, *(o.node for o in rows))
    held = tuple(m.place.holder(n) for n in used)
    names = tuple((h.node, h.leaf) if h is not None else None for h in held)
    after = (m.dead_output, *((s.by if isinstance(s.by, float) else s.by.dims, s.zero_when) for s in m.steps))
    return (m.spec.program, names, m.q.dims, m.k.dims, m.v.dims, m.output_dims, m.dropout_p, tuple(map(str, m.sizes)), after)


# ------------------------------------------------------------------------------------------------------------ reports
def _report(
    view: AtenView, match: AttentionMatch, status: str, program: str = "", template: str = "", reason: str = ""
) -> SiteReport:
    node = _anchor_node(view, match)
    grad = any(match.place.requires_grad(o.node) for o in (match.q, match.k, match.v))
    return SiteReport(
        status,
        path="/".join(match.place.path),
        node=node.name,
        source=source_line(node),
        form=form_of(match),
        shapes=shapes_of(match),
        dtype=dtype_text(match),
        backward=grad and view.origin[match.pv].grad_enabled,
        near_misses=match.notes,
        program=program or match.full_spec().program,
        template=template,
        reason=reason,
        evidence="selector chose it" if status == "fused" else "",
    )


def _declined(view: AtenView, match: AttentionMatch, reason: str, fused_already: bool = False) -> SiteReport:
    return replace(_report(view, match, "declined", reason=reason), fused_already=fused_already)


def _rejected(r: Rejection) -> SiteReport:
    return SiteReport("rejected", path="/".join(r.path), node=r.node, source=r.source, reason=r.reason, near_misses=r.notes)


def _unread(e: ViewError) -> SiteReport:
    node = e.node
    return SiteReport(
        "rejected",
        node=node.name if node is not None else "",
        source=source_line(node) if node is not None else "",
        reason=f"the graph could not be read: {e}",
    )
