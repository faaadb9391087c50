"""What a Dynamo graph writes, and memory that it reaches by two ways, of which the functional view knows one."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages(n: fx.Node) -> set[int]:
    """Identities of the storages that a Dynamo node's tensors live in, as Dynamo's own fake tensors share them."""
    out = set()
    for t in pytree.tree_leaves(n.meta.get("example_value")):
        if isinstance(t, torch.Tensor):
            try:
                out.add(t.untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError):
                continue  # a sparse or opaque tensor has no storage, so no memory that another tensor could share through it
    return out


#: Functions that write into some arguments on the side: (position and name of each, position and name of the switch).
_SIDE_WRITES = {
    F.batch_norm: (((1, "running_mean"), (2, "running_var")), (5, "training")),
    torch.batch_norm: (((3, "running_mean"), (4, "running_var")), (5, "training")),
    F.instance_norm: (((1, "running_mean"), (2, "running_var")), (5, "use_input_stats")),
    torch.instance_norm: (((3, "running_mean"), (4, "running_var")), (5, "use_input_stats")),
    F.embedding: (((1, "weight"),), (3, "max_norm")),
    F.embedding_bag: (((1, "weight"),), (3, "max_norm")),
}


def side_writes(n: fx.Node) -> list[fx.Node]:
    """Arguments that a function of another purpose updates: running statistics, renormalised embedding rows."""
    if n.op != "call_function" or n.target not in _SIDE_WRITES:
        return []
    places, switch = _SIDE_WRITES[n.target]  # type: ignore[index]
    given = [n.kwargs.get(name, n.args[i] if i < len(n.args) else None) for i, name in (*places, switch)]
    default = n.target is F.instance_norm and len(n.args) <= switch[0] and switch[1] not in n.kwargs
    if not given.pop() and not default:
        return []
    return [a for a in given if isinstance(a, fx.Node)]


def written(n: fx.Node) -> list[fx.Node]:
    """Arguments that an in-place node may write into."""
    if isinstance(n.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return n.all_input_nodes
    if n.op == "call_function" and n.target in _SIDE_WRITES:
        return side_writes(n)
    out = n.kwargs.get("out")
    return [a for a in pytree.tree_leaves((n.args[:1] or tuple(n.kwargs.values()), out)) if isinstance(a, fx.Node)]


def is_foreign(value: Any) -> bool:
    """Whether the example value of a node holds a tensor that wraps others, as DTensor does."""
    return any(is_traceable_wrapper_subclass(t) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def write_beside_subclasses(gm: fx.GraphModule) -> fx.Node | None:
    """The first in-place node of a graph in which tensor subclasses occur: they may share memory with plain tensors."""
    nodes = [n for g in _graphs(gm) for n in g.nodes if n.op.startswith("call") or n.op == "placeholder"]
    if not any(is_foreign(n.meta.get("example_value")) for n in nodes):
        return None
    return next((n for n in nodes if n.op.startswith("call") and is_inplace(n)), None)


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            yield m.graph


def hidden_write(gm: fx.GraphModule, is_inplace) -> fx.Node | None:  # type: ignore[no-untyped-def]
    """The first in-place node that writes memory which two inputs of the graph share."""
    writes = [n for g in _graphs(gm) for n in g.nodes if n.op.startswith("call") and is_inplace(n)]
    inputs = [storages(n) for n in gm.graph.nodes if n.op == "placeholder"] if writes else []
    for n in writes:
        if any(sum(s in t for t in inputs) > 1 for a in written(n) for s in storages(a)):
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


def written_source(node: fx.Node, is_inplace) -> fx.Node | None:  # type: ignore[no-untyped-def]
    """An input of the graph that ``node`` is computed from and that some in-place node writes.

    AOTAutograd keeps such an input for the backward instead of the value before the write; eager code is not affected, since
    it does not need the value there.
    """
    into = {s for n in node.graph.nodes if n.op.startswith("call") and is_inplace(n) for a in written(n) for s in storages(a)}
    todo, seen = [node] if into else [], {node}
    while todo:
        n = todo.pop()
        if n.op == "placeholder" and storages(n) & into:
            return n
        todo.extend(a for a in n.all_input_nodes if a not in seen)
        seen.update(n.all_input_nodes)
    return None


_INPLACE_OPERATORS = {
    operator.setitem, operator.iadd, operator.imul, operator.isub, operator.itruediv, operator.ifloordiv, operator.iand,
    operator.ior, operator.ixor, operator.ipow, operator.imatmul, operator.imod, operator.ilshift, operator.irshift,
}  # fmt: skip
#: Their methods; ``__invert__`` and ``__index__`` only begin like one.
_INPLACE_METHODS = {f"__{f.__name__}__" for f in _INPLACE_OPERATORS}


@lru_cache(maxsize=512)
def _inplace_position(fn: Any) -> int | None:
    """Position of the argument ``inplace`` of a Python function, as of ``F.dropout(input, p, training, inplace)``."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def is_inplace(n: fx.Node) -> bool:
    """Whether a Dynamo node may write into one of its inputs."""
    if n.op == "call_method":
        t = str(n.target)
        return (t.endswith("_") and not t.endswith("__")) or t in _INPLACE_METHODS
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
    if side_writes(n):
        return True
    if getattr(n.target, "__module__", "") == "_operator":
        return False  # and_, or_ and not_ are named so for Python's sake
    name = getattr(n.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    at = _inplace_position(n.target)
    return at is not None and len(n.args) > at and n.args[at] is not False
