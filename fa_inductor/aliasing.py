"""Memory that a graph reaches by two ways: what the functional view, which knows of one, would get wrong once it is written."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils import _pytree as pytree


def storages(n: fx.Node) -> set[int]:
    """Identities of the storages that a Dynamo node's tensors live in, as Dynamo's own fake tensors share them."""
    out = set()
    for t in pytree.tree_leaves(n.meta.get("example_value")):
        if isinstance(t, torch.Tensor):
            try:
                out.add(t.untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError):
                continue
    return out


def written(n: fx.Node) -> list[fx.Node]:
    """Arguments that an in-place node may write into."""
    if isinstance(n.target, torch._ops.OpOverload):
        return n.all_input_nodes
    out = n.kwargs.get("out")
    return [a for a in pytree.tree_leaves((n.args[:1] or tuple(n.kwargs.values()), out)) if isinstance(a, fx.Node)]


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            yield m.graph


def hidden_write(gm: fx.GraphModule, is_inplace) -> fx.Node | None:  # type: ignore[no-untyped-def]
    """The first in-place node that writes memory which two inputs of the graph share."""
    writes = [n for g in _graphs(gm) for n in g.nodes if n.op.startswith("call") and is_inplace(n)]
    inputs = [storages(n) for n in gm.graph.nodes if n.op == "placeholder"] if writes else []
    for n in writes:
        into = {s for a in written(n) for s in storages(a)}
        if sum(bool(into & s) for s in inputs) > 1:
            return n
    return None


def writes_after(node: fx.Node, is_inplace) -> set[int]:  # type: ignore[no-untyped-def]
    """Storages that in-place nodes behind ``node`` in its graph write."""
    found: set[int] = set()
    n = node.next
    while n.op != "root":
        if n.op.startswith("call") and is_inplace(n):
            found |= {s for a in written(n) for s in storages(a)}
        n = n.next
    return found
