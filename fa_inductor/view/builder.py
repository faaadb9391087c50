"""The functional ATen view of a Dynamo graph: what the graph computes, for analysis only, never run.

Dynamo's graph is what gets rewritten, but it spells one thing in many ways: methods, functions, einsum strings, in-place
writes, autocast blocks, checkpoint bodies. :func:`build` interprets it on fake tensors under functionalisation and records the
ATen ops. Every ATen node keeps its *origin* (the Dynamo node, sub-graph path and clock it came from), and
:meth:`~.aten_view.AtenView.dynamo_values` answers the reverse question: which Dynamo node holds this ATen value at that clock.
A value overwritten in place in between has no holder any more, so a rewrite that needs it is refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, maybe_enable_thunkify
from torch.utils import _pytree as pytree

from fa_inductor.view import aliasing
from fa_inductor.view.aliasing import is_inplace
from fa_inductor.view.aten_view import AtenView, ViewError
from fa_inductor.view.books import Books
from fa_inductor.view.interpreter import FOREIGN, Interpreter
from fa_inductor.view.leaves import Leaves, opaque_outputs, plain
from fa_inductor.view.tape import Tape, of_run_time

aten = torch.ops.aten
log = logging.getLogger("fa_inductor")


@functools.cache
def decompositions() -> dict:
    """What is made smaller in the view. The dictionary is shared: not to be changed."""
    from torch._decomp import get_decompositions

    return dict(
        get_decompositions(
            [
                aten.tril.default, aten.triu.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_,
                aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros_like, aten.ones_like,
                aten.full_like, aten.zeros, aten.ones, aten.new_ones, aten.new_zeros, aten.new_full, aten.rsub,
                aten.addcmul, aten.addcdiv, aten.transpose.int, aten.t, aten._unsafe_view, aten.select_scatter,
            ]
        )
    )  # fmt: skip


def _example(n: fx.Node) -> Any:
    v = n.meta.get("example_value", n.meta.get("val"))
    if aliasing.is_foreign(v):
        return FOREIGN
    if isinstance(v, torch.Tensor) and not isinstance(v, FakeTensor):
        raise ViewError(f"input {n.name} is a {type(v).__name__}, not a plain tensor", n)
    return v


def _fake_mode(gm: fx.GraphModule) -> FakeTensorMode | None:
    for n in gm.graph.nodes:
        for t in pytree.tree_leaves(n.meta.get("example_value", n.meta.get("val"))):
            if isinstance(t, FakeTensor):
                return t.fake_mode
    return None


def _tensor_attributes(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Real tensors that get_attr nodes of the graph and its bodies name (constants that Dynamo lifted)."""
    found: dict[int, torch.Tensor] = {}
    for m in gm.modules():
        if not isinstance(m, fx.GraphModule):
            continue
        for n in m.graph.nodes:
            if n.op == "get_attr":
                value: Any = m
                for part in str(n.target).split("."):
                    value = getattr(value, part, None)
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    found[id(value)] = value
    return list(found.values())


@contextlib.contextmanager
def _isolated(mode: FakeTensorMode | None) -> Iterator[None]:
    """Everything that building the view could disturb is put back: guards, unbacked symbols, autocast cache, grad mode."""
    grad = torch.is_grad_enabled()
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    with contextlib.ExitStack() as stack:
        env = mode.shape_env if mode is not None else None
        if env is not None:
            stack.enter_context(env.ignore_fresh_unbacked_symbols())
            stack.enter_context(env.suppress_guards())
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)
            torch._C._set_grad_enabled(grad)


def build(gm: fx.GraphModule) -> AtenView:
    """The functional ATen view of what lies around the attention of ``gm``.

    Args:
        gm: a Dynamo graph whose nodes carry ``example_value``.

    Raises:
        ViewError: anything that could not be interpreted; the caller leaves the graph as it is.
    """
    shared = aliasing.hidden_write(gm, is_inplace)
    if shared is not None:
        raise ViewError(f"{shared.name} writes memory that two inputs of the graph share", shared)
    beside = aliasing.write_beside_subclasses(gm)
    if beside is not None:
        raise ViewError(f"{beside.name} writes in place in a graph of tensor subclasses, which may share its memory", beside)
    start = time.perf_counter()
    inputs = [_example(n) for n in gm.graph.nodes if n.op == "placeholder"]
    attributes = _tensor_attributes(gm)
    mode = _fake_mode(gm)
    view = None
    if mode is not None and _known_sizes(gm):
        try:
            view = _build(gm, inputs, attributes, mode, _on_tape)
        except Exception as e:  # make_fx knows more, and fails in its own words
            log.debug("recorded again by make_fx: %s: %s", type(e).__name__, e)
    view = view or _build(gm, inputs, attributes, mode, _by_make_fx)
    view.seconds = time.perf_counter() - start
    return view


def _build(
    gm: fx.GraphModule, inputs: list[Any], attributes: list[torch.Tensor], mode: FakeTensorMode | None, how: Callable
) -> AtenView:
    """The view as ``how``, one of the next two, records it."""
    books = Books()
    view = books.view
    view.fake_mode = mode
    try:
        with _isolated(mode), mode or contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
            fakes = [mode.from_tensor(a, static_shapes=True) if mode is not None else a for a in attributes]
            view.graph = how(gm, books, attributes, [*inputs, *fakes])
    finally:
        for token in reversed(books.autocast):
            torch.amp.autocast_mode._exit_autocast(token)
        for k in books.keys:
            opaque_outputs.pop(k, None)
    view._live.clear()
    view._storages.clear()
    return view


def _known_sizes(gm: fx.GraphModule) -> bool:
    """Whether no value of the graph and its bodies has, or is, a number that only the run tells."""
    return not any(
        of_run_time(t) for n in _nodes(gm) for t in pytree.tree_leaves(n.meta.get("example_value", n.meta.get("val")))
    )


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Of the graph and its bodies."""
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            yield from m.graph.nodes


def _on_tape(gm: fx.GraphModule, books: Books, attributes: list[torch.Tensor], xs: list[Any]) -> fx.Graph:
    """Without functional tensors, if nothing writes in place: they double the time."""
    writes = any(
        is_inplace(n) or n.target is F.multi_head_attention_forward or isinstance(n.target, torch._ops.HigherOrderOperator)
        for n in _nodes(gm)
    )
    tape = Tape(decompositions(), writes)
    for x in xs:
        tape.input(x)
    books.aten_graph, books.node_of = tape.graph, tape.node_of
    with tape:
        results = _interpreted(gm, books, attributes, xs, writes)
    tape.output(results)
    return tape.graph


def _by_make_fx(gm: fx.GraphModule, books: Books, attributes: list[torch.Tensor], xs: list[Any]) -> fx.Graph:
    """With sizes of run time."""

    def run(*xs: Any) -> Any:
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        tracer = proxy_mode.tracer

        def node_of(t: torch.Tensor) -> fx.Node | None:
            slot = get_proxy_slot(t, tracer, None)
            return slot.proxy.node if slot is not None else None

        books.aten_graph, books.node_of = tracer.graph, node_of
        # Arithmetic of run-time sizes is recorded where an op takes its result, not whenever a stride is computed.
        with maybe_enable_thunkify():
            return _interpreted(gm, books, attributes, list(xs), True)

    with _use_lazy_graph_module(True):  # nobody runs it
        trace = make_fx(
            run, decomposition_table=decompositions(), tracing_mode="real", _disable_torch_fn_metadata_mode=True
        )
        return trace(*xs).graph


def _interpreted(
    gm: fx.GraphModule, books: Books, attributes: list[torch.Tensor], xs: list[Any], functional: bool
) -> list[Any]:
    """What was kept and what was written, after running the graph; on functional tensors where it may write."""
    inputs = len(xs) - len(attributes)
    books.functional = functional
    with FunctionalTensorMode(_allow_token_discovery=True) if functional else contextlib.nullcontext():
        ys = [FunctionalTensor.to_functional(x) if functional and isinstance(x, torch.Tensor) else x for x in xs]
        books.attr_values = dict(zip((id(a) for a in attributes), ys[inputs:], strict=True))
        with Leaves(books.aten_of):
            out = Interpreter(gm, books, ()).run(*ys[:inputs])
        outs = [plain(t) for t in pytree.tree_leaves(out) if isinstance(t, (torch.Tensor, torch.SymInt))]
        written = [
            plain(y) for y in ys if isinstance(y, FunctionalTensor) and torch._functionalize_has_data_mutation(y.elem)
        ]
        return outs + written
