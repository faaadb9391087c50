"""The functional ATen view of a Dynamo graph: what the graph computes, for analysis only, never run.

Dynamo's graph is what gets rewritten, but it spells one thing in many ways: methods, functions, einsum strings, in-place
writes, autocast blocks, checkpoint bodies. :func:`build` interprets it on fake tensors under functionalisation and records the
ATen ops. Every ATen node keeps its *origin* (the Dynamo node, sub-graph path and clock it came from), and
:meth:`AtenView.dynamo_values` answers the reverse question: which Dynamo node holds this ATen value at that clock. A value
overwritten in place in between has no holder any more, so a rewrite that needs it is refused.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fa_inductor import aliasing, view_slice

aten = torch.ops.aten

_lib = torch.library.Library("fa_inductor_view", "DEF")
_lib.define("opaque(Tensor[] inputs, int key) -> Tensor[]")
_lib.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, bool enable_gqa)"
    " -> Tensor"
)

_opaque_outputs: dict[int, list[torch.Tensor]] = {}


def _opaque(inputs: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in _opaque_outputs[key]]


def _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):  # type: ignore[no-untyped-def]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]) if not enable_gqa else q.shape[:-2]
    return q.new_empty((*lead, q.shape[-2], v.shape[-1]))


for _name, _impl in (("opaque", _opaque), ("sdpa", _sdpa)):
    _lib.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fa_inductor_view::{_name}", _impl, lib=_lib)

#: Leaves of the view that stand for something else than the ATen op of their name.
OPAQUE = torch.ops.fa_inductor_view.opaque.default
#: ``detach``, which nothing else in the view becomes. It shares memory with its input: writes through either are seen by both.
DETACH = aten.alias.default
SDPA = torch.ops.fa_inductor_view.sdpa.default


class ViewError(Exception):
    """The view could not be built; carries the Dynamo node at fault when there is one."""

    def __init__(self, message: str, node: fx.Node | None = None):
        super().__init__(message)
        self.node = node


Path = tuple[str, ...]
Holder = tuple[Path, fx.Node]


@dataclass(frozen=True)
class Origin:
    """Where an ATen node came from."""

    path: Path
    node: fx.Node
    clock: int
    grad_enabled: bool


@dataclass(frozen=True)
class DynamoValue:
    """A Dynamo node (or one leaf of its output) that holds an ATen value."""

    path: Path
    node: fx.Node
    leaf: int


@dataclass
class AtenView:
    """Result of :func:`build`."""

    graph: fx.Graph = None  # type: ignore[assignment]
    module: fx.GraphModule = None  # type: ignore[assignment]
    fake_mode: FakeTensorMode | None = None
    origin: dict[fx.Node, Origin] = field(default_factory=dict)
    bodies: dict[Path, fx.GraphModule] = field(default_factory=dict)
    opaque_bodies: list[tuple[Path, fx.Node]] = field(default_factory=list)
    transformed: list[tuple[Path, fx.Node]] = field(default_factory=list)
    """Softmaxes and attention calls under torch.func transforms, which the view does not enter."""
    rewritten: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """What stands for a leaf of a Dynamo node since a rewrite replaced it."""
    erased: set[fx.Node] = field(default_factory=set)
    seconds: float = 0.0
    clock: int = 0
    _shared: dict[Any, Any] = field(default_factory=dict)
    _history: dict[Holder, list[tuple[int, dict[int, fx.Node | None]]]] = field(default_factory=dict)
    _holders: dict[fx.Node, list[tuple[Holder, int]]] = field(default_factory=dict)
    _live: dict[Holder, list[tuple[int, Any]]] = field(default_factory=dict)
    _storages: dict[int, set[Holder]] = field(default_factory=dict)

    def dynamo_values(self, node: fx.Node, clock: int, path: Path) -> list[DynamoValue]:
        """Dynamo values of sub-graph ``path`` that hold ``node`` just before ``clock``, earliest first."""
        out = []
        for holder, leaf in self._holders.get(node, ()):
            if holder[0] != path or holder[1].op == "output":
                continue
            past = [leaves for t, leaves in self._history[holder] if t < clock]
            if past and past[-1].get(leaf) is node:
                out.append(DynamoValue(holder[0], holder[1], leaf))
        return out

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """A result of the analysis that sites have in common: layers repeat, and so do their questions."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def results(self, holder: Holder) -> dict[int, fx.Node | None]:
        """ATen node per output leaf of a Dynamo node, as first produced."""
        return self._history[holder][0][1] if holder in self._history else {}

    def holders(self, node: fx.Node) -> list[tuple[Holder, int]]:
        return self._holders.get(node, [])


_INPLACE_OPERATORS = {
    operator.setitem, operator.iadd, operator.imul, operator.isub, operator.itruediv, operator.ifloordiv, operator.iand,
    operator.ior, operator.ixor, operator.ipow, operator.imatmul, operator.imod, operator.ilshift, operator.irshift,
}  # fmt: skip
_INPLACE_POSITIONAL = {"relu", "dropout", "silu", "elu", "gelu", "leaky_relu", "hardtanh", "threshold", "celu", "selu", "mish"}


def is_inplace(n: fx.Node) -> bool:
    """Whether a Dynamo node may write into one of its inputs."""
    if n.op == "call_method":
        t = str(n.target)
        return (t.endswith("_") and not t.endswith("__")) or (t.startswith("__i") and t.endswith("__")) or t == "__setitem__"
    if n.op != "call_function":
        return False
    if n.target in _INPLACE_OPERATORS or n.kwargs.get("inplace") or n.kwargs.get("out") is not None:
        return True
    if isinstance(n.target, torch._ops.OpOverload):
        return n.target._schema.is_mutable
    if isinstance(n.target, torch._ops.OpOverloadPacket):
        overloads = [getattr(n.target, o) for o in n.target.overloads()]
        if any(o._schema.is_mutable and not any(a.is_out for a in o._schema.arguments) for o in overloads):
            return True
    if aliasing.side_writes(n):
        return True
    if getattr(n.target, "__module__", "") == "_operator":
        return False  # and_, or_ and not_ are named so for Python's sake
    name = getattr(n.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (
        name in _INPLACE_POSITIONAL and any(a is True for a in n.args[1:])
    )


def _decompositions() -> dict:
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


class _Leaves(TorchFunctionMode):
    """Keeps SDPA and detach as single nodes, also where a composite function calls them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _call_sdpa(*args, **kwargs)
        data = getattr(getattr(func, "__self__", None), "__name__", "") == "data" and func.__name__ == "__get__"
        if data or func in (torch.detach, torch.Tensor.detach):
            return DETACH(args[0])
        result = func(*args, **kwargs)
        if func in _MAY_RETURN_ALIAS and _is_alias_of(result, args[0]):
            return aten.slice.Tensor(args[0], 0)
        return result


#: Views that torch spells ``alias`` where nothing changes, as ``x[:, 0:]`` does; the view says ``slice`` there.
_MAY_RETURN_ALIAS = {
    torch.Tensor.__getitem__, torch.movedim, torch.moveaxis, torch.Tensor.movedim, torch.Tensor.moveaxis,
}  # fmt: skip


def _is_alias_of(result: Any, x: torch.Tensor) -> bool:
    """Whether ``result`` is all of ``x`` and was recorded as an ``alias`` node."""
    if not isinstance(result, FunctionalTensor) or x.dim() == 0 or result.shape != x.shape:
        return False
    proxy_mode = get_proxy_mode()
    slot = get_proxy_slot(_plain(result), proxy_mode.tracer, None) if proxy_mode is not None else None
    return slot is not None and slot.proxy.node.target is DETACH


def _call_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@contextlib.contextmanager
def _sdpa_inside() -> Iterator[None]:
    """Keeps SDPA a leaf inside a Python composite, where a function mode is off: F's own name is replaced for the time.

    Only calls on functional tensors, which exist in this analysis alone, are answered here; other threads get the original.
    """
    original = F.scaled_dot_product_attention

    def leaf(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        answer = _call_sdpa if isinstance(query, FunctionalTensor) else original
        return answer(query, *args, **kwargs)

    F.scaled_dot_product_attention = leaf  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original  # type: ignore[assignment]


class _Interpreter(fx.Interpreter):
    """Runs a Dynamo graph on functional fake tensors and keeps the books of provenance."""

    def __init__(self, gm: fx.GraphModule, builder: _Builder, path: Path):
        super().__init__(gm, garbage_collect_values=False)
        self.builder, self.path = builder, path
        self.need = builder.need_of(gm)
        builder.view.bodies[path] = gm
        builder.view.transformed += [(path, n) for n in view_slice.transformed(gm.graph) if view_slice.is_anchor(n)]

    def run_node(self, n: fx.Node) -> Any:
        if n.op.startswith("call") and n not in self.need:
            return _SKIPPED
        for a in n.all_input_nodes:
            if self.env.get(a) is _SKIPPED and (n.op != "output" or self.path):
                self.env[a] = self._interpret(a, lambda x: self.opaque(x, ()))
        return self._interpret(n, self._dispatch)

    def _interpret(self, n: fx.Node, how: Callable[[fx.Node], Any]) -> Any:
        b, view = self.builder, self.builder.view
        mark = b.aten_graph._root._prev
        view.clock += 1
        try:
            result = how(n)
        except ViewError:
            raise
        except Exception as e:
            raise ViewError(f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}", n) from e
        origin = Origin(self.path, n, view.clock, b.grad_enabled)
        x = mark._next
        while x is not b.aten_graph._root:
            view.origin.setdefault(x, origin)
            x = x._next
        b.record((self.path, n), result)
        if is_inplace(n):
            b.reread(n, [r for a in n.all_input_nodes for r in pytree.tree_leaves(self.env.get(a))])
        return result

    def _dispatch(self, n: fx.Node) -> Any:
        b = self.builder
        if n.op == "output":
            return self._output(n)
        if n.op == "get_attr":
            return b.attribute(self, n)
        if n.op == "call_function":
            target = n.target
            if isinstance(target, torch._ops.HigherOrderOperator):
                return self._higher_order(n)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if target is torch._C._set_grad_enabled:
                b.grad_enabled = args[0]
                return None
            if target is torch.amp.autocast_mode._enter_autocast:
                token = target(*args, **kwargs)
                b.autocast.append(token)
                return token
            if target is torch.amp.autocast_mode._exit_autocast:
                b.autocast.remove(args[0])
                return target(*args)
            if target in view_slice.HEAVY and "example_value" in n.meta:
                for a in aliasing.side_writes(n):
                    self.env[a].copy_(self.opaque(a, (args, kwargs)))
                return self.opaque(n, (args, kwargs))
            if getattr(target, "__name__", "") == "_get_data_attr":  # ``x.data``, as Dynamo spells it
                return DETACH(args[0])
            if target is F.multi_head_attention_forward:
                with _sdpa_inside():
                    return target(*args, **kwargs)
        return super().run_node(n) if n.op != "call_module" else self._module(n)

    def _output(self, n: fx.Node) -> Any:
        """At the top: whatever interpreted values the rest of the graph uses, so that their users are not forgotten."""
        live = view_slice.live_nodes(self.module.graph, is_inplace)  # type: ignore[arg-type]
        for a in self.module.graph.nodes:  # type: ignore[union-attr]
            users = [u for u in a.users if u in live and u not in self.need]
            known = a in self.need or (bool(self.path) and a.op == "placeholder")
            if a not in live or not known or not users:
                continue
            if isinstance(self.env[a], (tuple, list)) and all(u.target is operator.getitem for u in users):
                self.builder.kept.extend(self.env[a][u.args[1]] for u in users)
            else:
                self.builder.kept.append(self.env[a])
        return super().run_node(n) if self.path else self.builder.kept

    def _module(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.opaque(n, (args, kwargs))

    def _higher_order(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        name = n.target.name()  # type: ignore[union-attr]
        b = self.builder
        if name in ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"):
            return self._body(n, args[0], args[1:])
        if name == "invoke_subgraph":
            return self._body(n, args[0], args[2:])
        if name == "wrap_with_set_grad_enabled":
            before, b.grad_enabled = b.grad_enabled, args[0]
            try:
                return self._body(n, args[1], args[2:])
            finally:
                b.grad_enabled = before
        if name == "wrap_with_autocast":
            device, dtype, enabled, cache, body, *rest = args
            with torch.autocast(device, dtype, enabled, cache):
                return self._body(n, body, rest)
        self.builder.view.opaque_bodies.append((self.path, n))
        return self.opaque(n, (args, kwargs))

    def _body(self, n: fx.Node, gm: Any, args: Any) -> Any:
        if not isinstance(gm, fx.GraphModule):
            return self.opaque(n, args)
        return _Interpreter(gm, self.builder, (*self.path, n.name)).run(*args)

    def opaque(self, n: fx.Node, inputs: Any) -> Any:
        """One node that stands for all outputs of ``n``; shapes come from Dynamo's own example values."""
        leaves, spec = pytree.tree_flatten(n.meta.get("example_value"))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        key = self.builder.new_key(tensors)
        made = OPAQUE([t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)], key)
        # Without a functional input the mode does not wrap the result, and in-place writes into it would go unseen.
        out = iter(t if isinstance(t, FunctionalTensor) else FunctionalTensor.to_functional(t) for t in made)
        return pytree.tree_unflatten([next(out) if isinstance(t, torch.Tensor) else t for t in leaves], spec)


_SKIPPED = object()


class _Builder:
    def __init__(self, gm: fx.GraphModule):
        self.gm, self.view = gm, AtenView()
        self._slices: dict[int, view_slice.Slice] = {}
        self.autocast: list[Any] = []
        self.grad_enabled = torch.is_grad_enabled()
        self.keys: list[int] = []
        self.kept: list[Any] = []
        self.attr_values: dict[int, Any] = {}
        self.tracer: Any = None
        self.aten_graph: fx.Graph = None  # type: ignore[assignment]

    # -- books
    def new_key(self, tensors: list[torch.Tensor]) -> int:
        key = max(_opaque_outputs, default=0) + 1
        _opaque_outputs[key] = tensors
        self.keys.append(key)
        return key

    def need_of(self, gm: fx.GraphModule) -> set[fx.Node]:
        return view_slice.needed(gm, is_inplace, self._slices).need

    def aten_of(self, t: torch.Tensor) -> fx.Node | None:
        if isinstance(t, FunctionalTensor):
            torch._sync(t)
            t = torch._from_functional_tensor(t.elem)
        slot = get_proxy_slot(t, self.tracer, None)
        return slot.proxy.node if slot is not None else None

    def leaves(self, result: Any) -> dict[int, fx.Node | None]:
        return {i: self.aten_of(t) for i, t in enumerate(pytree.tree_leaves(result)) if isinstance(t, torch.Tensor)}

    def record(self, holder: Holder, result: Any) -> None:
        v = self.view
        leaves = self.leaves(result)
        v._history[holder] = [(v.clock, leaves)]
        if not leaves:
            return
        v._live[holder] = result
        for i, node in leaves.items():
            if node is not None:
                v._holders.setdefault(node, []).append((holder, i))
        for t in pytree.tree_leaves(result):
            if isinstance(t, FunctionalTensor):
                v._storages.setdefault(_storage_key(t), set()).add(holder)

    def reread(self, n: fx.Node, written: list[Any]) -> None:
        """After an in-place node: whoever shares storage with one of its inputs may hold another ATen value now."""
        v = self.view
        touched: set[Holder] = set()
        for t in written:
            if isinstance(t, FunctionalTensor):
                touched |= v._storages.get(_storage_key(t), set())
        for holder in touched:
            now = self.leaves(v._live[holder])
            if now != v._history[holder][-1][1]:
                v._history[holder].append((v.clock, now))
                for i, node in now.items():
                    if node is not None:
                        v._holders.setdefault(node, []).append((holder, i))

    def attribute(self, interp: _Interpreter, n: fx.Node) -> Any:
        value = interp.fetch_attr(n.target)  # type: ignore[arg-type]
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return self.attr_values.get(id(value), value)

    # -- run
    def build(self) -> AtenView:
        view = self.view
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        inputs = [_example(n) for n in placeholders]
        view.fake_mode = mode = _fake_mode(self.gm)
        attributes = _tensor_attributes(self.gm)

        def run(*xs: Any) -> Any:
            proxy_mode = get_proxy_mode()
            assert proxy_mode is not None
            self.tracer, self.aten_graph = proxy_mode.tracer, proxy_mode.tracer.graph
            with FunctionalTensorMode(_allow_token_discovery=True):
                ys = [FunctionalTensor.to_functional(x) if isinstance(x, torch.Tensor) else x for x in xs]
                self.attr_values = dict(zip((id(a) for a in attributes), ys[len(inputs) :], strict=True))
                with _Leaves():
                    out = _Interpreter(self.gm, self, ()).run(*ys[: len(inputs)])
                outs = [_plain(t) for t in pytree.tree_leaves(out) if isinstance(t, (torch.Tensor, torch.SymInt))]
                mutated = [
                    _plain(y)
                    for y in ys
                    if isinstance(y, FunctionalTensor) and torch._functionalize_has_data_mutation(y.elem)
                ]
                return outs + mutated

        start = time.perf_counter()
        try:
            with _isolated(mode), mode or contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
                fakes = [mode.from_tensor(a, static_shapes=True) if mode is not None else a for a in attributes]
                view.module = make_fx(
                    run,
                    decomposition_table=_decompositions(),
                    tracing_mode="real",
                    _disable_torch_fn_metadata_mode=True,
                )(*inputs, *fakes)
        finally:
            for token in reversed(self.autocast):
                torch.amp.autocast_mode._exit_autocast(token)
            for k in self.keys:
                _opaque_outputs.pop(k, None)
        view.graph = view.module.graph
        view._live.clear()
        view._storages.clear()
        view.seconds = time.perf_counter() - start
        return view


def _storage_key(t: FunctionalTensor) -> int:
    return t.elem.untyped_storage()._cdata


def _plain(t: Any) -> Any:
    if isinstance(t, FunctionalTensor):
        torch._sync(t)
        return torch._from_functional_tensor(t.elem)
    return t


def _example(n: fx.Node) -> Any:
    v = n.meta.get("example_value", n.meta.get("val"))
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
    return _Builder(gm).build()
