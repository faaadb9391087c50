"""Questions that a match puts to the view: can a value be had where the rewrite happens, does gradient flow as assumed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fa_inductor.patterns.terms import value_of
from fa_inductor.view import DETACH, OPAQUE, SDPA, AtenView, DynamoValue, Path

RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "exponential", "cauchy", "geometric")
_REEMIT_LIMIT = 60


def example_leaves(node: fx.Node) -> list:
    """The tensors and numbers in a node's example value."""
    return pytree.tree_leaves(node.meta.get("example_value", node.meta.get("val")))


def _float_tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in example_leaves(node) if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())]


class Place:
    """A point of the Dynamo graph (sub-graph path and clock) where a fused op would be inserted."""

    def __init__(self, view: AtenView, path: Path, clock: int, grad_enabled: bool):
        self.view, self.path, self.clock, self.grad_enabled = view, path, clock, grad_enabled
        self._emittable: dict[fx.Node, bool] = {}

    def holder(self, node: fx.Node) -> DynamoValue | None:
        """The first Dynamo value here that holds ``node``."""
        values = self.view.dynamo_values(node, self.clock, self.path)
        return values[0] if values else None

    def emittable(self, node: fx.Node) -> bool:
        """Whether ``node`` is held here, or can be computed here from what is held by a few pure ATen calls."""
        if node not in self._emittable:
            self._emittable[node] = self._check_emittable(node)
        return self._emittable[node]

    def _check_emittable(self, node: fx.Node) -> bool:
        todo, seen = [node], set()
        while todo:
            n = todo.pop()
            if n in seen or not isinstance(value_of(n), (torch.Tensor, list, tuple)):
                continue
            if self.holder(n) is not None:
                continue
            seen.add(n)
            if len(seen) > _REEMIT_LIMIT or n.op != "call_function" or n.target in (OPAQUE, SDPA, DETACH):
                return False
            if any(w in str(n.target) for w in RANDOM):
                return False
            todo.extend(n.all_input_nodes)
        return True

    def requires_grad(self, node: fx.Node) -> bool:
        """Whether the value, as held or re-emitted here, takes part in autograd."""
        held = self.holder(node)
        if held is not None:
            leaves = example_leaves(held.node)
            t = leaves[held.leaf] if held.leaf < len(leaves) else None
            return isinstance(t, torch.Tensor) and t.requires_grad
        return any(self.requires_grad(i) for i in node.all_input_nodes)

    def gradient_barrier(self, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """The first Dynamo node among the origins of ``nodes`` through which gradient does not flow as its inputs say.

        ``detach``, ``.data`` and no_grad blocks inside a region flip ``requires_grad``; an op with an autograd formula of its
        own, put in where grad mode is as it is here, would not.
        """
        checked: set[tuple[Path, fx.Node]] = set()
        for n in nodes:
            origin = self.view.origin.get(n)
            if origin is None or (origin.path, origin.node) in checked or origin.node.op in ("placeholder", "get_attr"):
                continue
            checked.add((origin.path, origin.node))
            outputs = _float_tensors(origin.node)
            if not outputs:
                continue
            flows = any(t.requires_grad for i in origin.node.all_input_nodes for t in _float_tensors(i))
            cut = origin.grad_enabled and any(t.requires_grad for t in outputs) != flows
            if cut or (flows and origin.grad_enabled != self.grad_enabled):
                return origin.node
        return None
