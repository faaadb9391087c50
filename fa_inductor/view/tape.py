"""Records the ATen ops that run on fake tensors as nodes of a graph: what ``make_fx`` does, for graphs of known sizes alone.

A graph without run-time sizes needs little of ``make_fx``: no proxies, no symbols, no constant propagation and no code, and the
fake mode need not ask Python what the kernels on meta tensors know. Leaving that out takes more than half of the time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

_QUERIES = {aten.size.default, aten.stride.default, aten.storage_offset.default}
_KNOWN = (FakeTensor, torch.Tensor, torch.nn.Parameter)
#: Ops whose kernels on meta tensors tell all there is to know where sizes are known, beside those that are tagged pointwise.
_PLAIN = {
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.slice.Tensor, aten.select.int, aten.alias.default,
    aten.as_strided.default, aten.detach.default, aten.bmm.default, aten.sum.dim_IntList, aten.amax.default,
    aten._softmax.default, aten.clone.default,
}  # fmt: skip


class Unfit(Exception):
    """The tape cannot record this; ``make_fx`` may."""


def of_run_time(x: Any) -> bool:
    """Whether ``x`` is a number that only the run tells, or a tensor with such a size."""
    if isinstance(x, FakeTensor):
        return x._has_symbolic_sizes_strides
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


class Tape(TorchDispatchMode):
    """Records while it is active. Nodes carry what they give as ``val``; constants are attributes of :attr:`root`.

    Args:
        table: decompositions by op.
        writes: whether ops that write into their arguments may come; a functional mode above makes others of them.

    Raises:
        Unfit: where an op gives numbers that depend on values, or writes without leave.
    """

    #: Modes of torch's own lie in slots: in this one, a functional mode finds the tape below itself.
    _mode_key = torch._C._TorchDispatchModeKey.PROXY

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self, table: Mapping[Any, Any], writes: bool):
        super().__init__()
        self.table, self.writes = table, writes
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.graph.owning_module = self.root  # type: ignore[assignment]
        # Weak: torch makes a copy, and so another node, where what an op gives is held by somebody already.
        self._nodes: Any = WeakTensorKeyDictionary()
        self._constants = 0
        self.tracer = SimpleNamespace(tensor_tracker=self)  # the functional mode looks here for the entry of a tensor

    def input(self, x: Any) -> None:
        """One more input of the graph."""
        self._record(self.graph.placeholder(f"arg{len(self.graph.nodes)}_1"), x)

    def output(self, values: list[Any]) -> None:
        """Ends the graph."""
        self.graph.output([self._argument(x) for x in values])

    def node_of(self, x: torch.Tensor) -> fx.Node | None:
        """The node whose value ``x`` is."""
        return self._nodes.get(x)

    def __getitem__(self, x: torch.Tensor) -> Any:
        """The entry of a tensor as torch's tracers have it."""
        return SimpleNamespace(proxy=SimpleNamespace(node=self._nodes[x]))

    def _argument(self, x: Any) -> Any:
        if of_run_time(x):
            raise Unfit("a number that only the run tells")
        if isinstance(x, torch.Tensor):
            node = self.node_of(x)
            return node if node is not None else self._constant(x)
        if isinstance(x, (list, tuple)):
            return (list if isinstance(x, list) else tuple)(map(self._argument, x))
        return x

    def _constant(self, x: torch.Tensor) -> fx.Node:
        name = f"_tensor_constant{self._constants}"
        self._constants += 1
        setattr(self.root, name, x)
        node = self.graph.create_node("get_attr", name)
        self._nodes[x] = node
        fake = isinstance(x, FakeTensor)
        node.meta["val"] = snapshot_fake(x) if fake else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        if any(type(x) not in _KNOWN for x in tensors):
            return NotImplemented
        if func in self.table:
            with self:
                return self.table[func](*args, **kwargs)
        if func not in _QUERIES and autograd_would_have_decomposed(func, flat):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if torch.Tag.data_dependent_output in func.tags or (func._schema.is_mutable and not self.writes):
            raise Unfit(str(func))
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default
        given, named = tuple(map(self._argument, args)), {k: self._argument(x) for k, x in kwargs.items()}
        node = self.graph.create_node("call_function", func, given, named, name=func.overloadpacket.__name__)
        result = _run(func, args, kwargs, tensors)
        self._record(node, result)
        return result

    def _record(self, node: fx.Node, result: Any) -> None:
        if of_run_time(result):
            raise Unfit(f"{node.target} gives a number that only the run tells")
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
            node.meta["val"] = snapshot_fake(result)
        elif isinstance(result, (tuple, list)):
            parts = [self.graph.call_function(operator.getitem, (node, i)) for i in range(len(result))]
            for part, x in zip(parts, result, strict=True):
                self._record(part, x)
            node.meta["val"] = type(result)(part.meta.get("val") for part in parts)


@functools.cache
def _is_plain(func: Any) -> bool:
    return func in _PLAIN or (torch.Tag.pointwise in func.tags and not func._schema.is_mutable)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    """``func(*args, **kwargs)`` on fakes; straight on their meta tensors where the fake mode does just that, after a while."""
    first = tensors[0] if tensors else None
    if isinstance(first, FakeTensor) and _is_plain(func):
        device = first.fake_device
        same = lambda x: isinstance(x, FakeTensor) and x.fake_device == device  # noqa: E731
        if all(same(x) and x.constant is None and x.layout is torch.strided for x in tensors):  # type: ignore[attr-defined]
            with no_python_dispatcher(), in_kernel_invocation_manager(first.fake_mode):
                return FakeTensor(first.fake_mode, func(*args, **kwargs), device)
    return func(*args, **kwargs)
