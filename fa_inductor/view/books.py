"""The books that are kept while a view is made: which Dynamo value holds which ATen node, and since when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from fa_inductor.view import slicing
from fa_inductor.view.aliasing import is_inplace
from fa_inductor.view.aten_view import AtenView, Holder
from fa_inductor.view.leaves import opaque_outputs, plain


class Books:
    """State of one :func:`~fa_inductor.view.builder.build`: the view as it grows, and the modes that the graph has switched."""

    def __init__(self) -> None:
        self.view = AtenView()
        self._slices: dict[int, slicing.Slice] = {}
        self.autocast: list[Any] = []
        self.grad_enabled = torch.is_grad_enabled()
        self.keys: list[int] = []
        self.kept: list[Any] = []
        self.attr_values: dict[int, Any] = {}
        self.node_of: Callable[[torch.Tensor], fx.Node | None] = lambda _: None
        self.functional = True
        self.aten_graph: fx.Graph = None  # type: ignore[assignment]

    def new_key(self, tensors: list[torch.Tensor]) -> int:
        key = max(opaque_outputs, default=0) + 1
        opaque_outputs[key] = tensors
        self.keys.append(key)
        return key

    def need_of(self, gm: fx.GraphModule) -> set[fx.Node]:
        return slicing.needed(gm, is_inplace, self._slices).need

    def aten_of(self, t: torch.Tensor) -> fx.Node | None:
        return self.node_of(plain(t))

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

    def attribute(self, value: Any) -> Any:
        """What stands in the view for an attribute of the module."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return self.attr_values.get(id(value), value)


def _storage_key(t: FunctionalTensor) -> int:
    return t.elem.untyped_storage()._cdata
