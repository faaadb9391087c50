"""Which nodes of a Dynamo graph the view must interpret: what lies around a softmax, not the whole model.

Tracing costs half a millisecond a node (eight with run-time sizes), and most of a model has nothing to do with its masks and
score matrices. Taken are the softmaxes and what follows them up to the next matmul, everything upstream of the scores, views and
casts upstream of a matmul operand, in-place writes (they decide who still holds what) and switches of autocast and grad mode. Any
other value that one of these asks for becomes an opaque node of the view.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

from fa_inductor.view.aliasing import side_writes, storages, written

SOFTMAXES = {
    F.softmax, F.softmin, F.gumbel_softmax, torch.softmax, torch.special.softmax, F.log_softmax, torch.log_softmax,
    torch.exp, torch.exp_, torch.exp2, torch.special.exp2, torch.logsumexp,
    "softmax", "log_softmax", "exp", "exp_", "exp2", "logsumexp",
    torch.ops.aten._softmax.default, torch.ops.aten.softmax.int, torch.ops.aten.exp.default, torch.ops.aten._safe_softmax.default,
    torch.ops.aten.log_softmax.int, torch.ops.aten.logsumexp.default, torch.ops.aten.exp2.default,
}  # fmt: skip
COMPOSITES = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
MATMULS = {
    torch.matmul, operator.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm, torch.functional.einsum, torch.einsum,
    "matmul", "__matmul__", "bmm", "mm", "baddbmm", "addmm", "__rmatmul__", torch.Tensor.matmul, torch.linalg.matmul,
    torch.tensordot, torch.ops.aten.bmm.default, torch.ops.aten.matmul.default, torch.ops.aten.mm.default,
    torch.ops.aten.baddbmm.default, torch.ops.aten.addmm.default, torch.ops.aten.einsum.default,
}  # fmt: skip
#: Functions whose inside holds nothing that a match needs and that cost much to trace.
HEAVY = {
    F.linear, torch._C._nn.linear, F.layer_norm, F.group_norm, F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm,
    F.embedding, F.embedding_bag, F.conv1d, F.conv2d, F.conv3d,
    torch.conv1d, torch.conv2d, torch.conv3d, F.cross_entropy, F.gelu, F.silu, torch._C._nn.gelu, torch._C._nn.silu,
} | ({F.rms_norm} if hasattr(F, "rms_norm") else set())  # fmt: skip
_SWITCHES = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast, torch._C._set_grad_enabled}
_REARRANGE = {
    "view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "contiguous", "flatten", "unflatten", "getitem",
    "chunk", "split", "unbind", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "narrow", "select", "repeat_interleave",
    "repeat", "to", "float", "half", "bfloat16", "double", "type_as", "type", "mul", "div", "truediv", "true_divide", "clone",
    "expand_as", "view_as", "reshape_as", "tensor_split", "split_with_sizes", "broadcast_to", "mT", "getattr", "tile", "detach",
    "rearrange", "int", "long", "index", "index_select", "gather", "take_along_dim",
}  # fmt: skip


def is_anchor(n: fx.Node) -> bool:
    """A softmax or an attention call by its own name; an exp alone is no sign of attention."""
    return n.target in COMPOSITES or (n.target in SOFTMAXES and "softmax" in name_of(n))


def transformed(graph: fx.Graph) -> list[fx.Node]:
    """Nodes between the entry and the exit of torch.func transforms (vmap, grad, jvp), whose tensors are wrapped."""
    found: list[fx.Node] = []
    depth = 0
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "")
        depth += name.endswith("_increment_nesting")
        if depth:
            found.append(n)
        depth -= name.endswith("_decrement_nesting")
    return found


def name_of(n: fx.Node) -> str:
    """What a node calls, as ATen, a method or a function spells it."""
    t = n.target
    if isinstance(t, torch._ops.OpOverload):
        return t._schema.name.split("::")[1]
    return t.strip("_") if isinstance(t, str) else getattr(t, "__name__", str(t))


def is_heavy(n: fx.Node) -> bool:
    """Whether ``n`` stays opaque in the view. A table that is looked up as it is may be a position bias."""
    return n.target in HEAVY and (n.target is not F.embedding or bool(side_writes(n)))


def is_rearrangement(n: fx.Node) -> bool:
    """Views, casts, factors and lookups; and whatever Dynamo knows to share memory with an input, by any name."""
    if not n.op.startswith("call"):
        return False
    if n.target in HEAVY or n.target in MATMULS:
        return False
    return name_of(n) in _REARRANGE or any(storages(n) & storages(a) for a in n.all_input_nodes)


def live_nodes(graph: fx.Graph, is_inplace) -> set[fx.Node]:  # type: ignore[no-untyped-def]
    """Nodes that the outputs or an in-place write depend on."""
    todo = [n for n in graph.nodes if n.op == "output" or is_inplace(n)]
    live: set[fx.Node] = set()
    while todo:
        n = todo.pop()
        if n not in live:
            live.add(n)
            todo.extend(n.all_input_nodes)
    return live


@dataclass
class Slice:
    """Nodes of one graph to interpret, and which of its placeholders they are computed from.

    ``inputs`` are needed with everything that computes them, ``operands`` (of matmuls) with the views that lead to them.
    """

    need: set[fx.Node]
    inputs: set[fx.Node]
    operands: set[fx.Node]


def needed(gm: fx.GraphModule, is_inplace, memo: dict[int, Slice]) -> Slice:  # type: ignore[no-untyped-def]
    """What of ``gm`` to interpret; ``memo`` keeps the answers, by the id of the (sub-)graph."""
    if id(gm) not in memo:
        memo[id(gm)] = _needed(gm, is_inplace, memo)
    return memo[id(gm)]


def _needed(gm: fx.GraphModule, is_inplace, memo: dict[int, Slice]) -> Slice:  # type: ignore[no-untyped-def]
    slicer = _Slicer(transformed(gm.graph))
    inplace, always = [], []
    for n in gm.graph.nodes:
        if not n.op.startswith("call") or n in slicer.closed:
            continue
        if n.target in SOFTMAXES:
            slicer.below(n)
        elif n.target in COMPOSITES:
            slicer.upstream([n])
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            _enter(gm, n, slicer, is_inplace, memo)
            always.append(n)
        elif n.target in _SWITCHES:
            always.append(n)
        elif is_inplace(n):
            inplace.append(n)
    if not slicer.need:
        return Slice(set(), set(), set())
    for n in always:
        slicer.need.add(n)
        slicer.operands(n.all_input_nodes)
    slicer.writes(inplace)
    return Slice(slicer.need, slicer.inputs, slicer.operand_inputs - slicer.inputs)


def _enter(gm: fx.GraphModule, call: fx.Node, slicer: _Slicer, is_inplace, memo: dict[int, Slice]) -> None:  # type: ignore[no-untyped-def]
    """Demands of a sub-graph body on the values that it is called with: a mask may be made outside of a checkpoint."""
    bodies = [getattr(gm, str(a.target), None) for a in call.all_input_nodes if a.op == "get_attr"]
    modules = [b for b in bodies if isinstance(b, fx.GraphModule)]
    if len(modules) != 1:
        return
    inner = needed(modules[0], is_inplace, memo)
    if not inner.need:
        return
    slicer.need.add(call)
    placeholders = [n for n in modules[0].graph.nodes if n.op == "placeholder"]
    pairs = list(zip(reversed(placeholders), reversed(call.args), strict=False))
    slicer.upstream([a for p, a in pairs if p in inner.inputs and isinstance(a, fx.Node)])
    slicer.operands([a for p, a in pairs if p in inner.operands and isinstance(a, fx.Node)])


class _Slicer:
    def __init__(self, closed: Iterable[fx.Node]) -> None:
        self.closed = set(closed)
        self.need: set[fx.Node] = set()
        self.inputs: set[fx.Node] = set()
        self.operand_inputs: set[fx.Node] = set()
        self._full: set[fx.Node] = set()
        self._memory: dict[fx.Node, set[int]] = {}

    def writes(self, inplace: list[fx.Node]) -> None:
        """In-place nodes that write into needed values or into what those are computed from; others change nothing here.

        What is written into a mask or the scores counts like what computes them; elsewhere only the fact of the write does.
        """
        waiting, count = inplace[::-1], -1
        while len(waiting) != count:
            count = len(waiting)
            full = self._storages_of(self._full | self.inputs)
            known = self._storages_of({i for n in self.need for i in (n, *n.all_input_nodes)})
            for n in list(waiting):
                into = self._storages_of(written(n))
                if into & full and not is_heavy(n):
                    self.upstream([n])
                elif into & (known | full):
                    self.need.add(n)
                    self.operands(n.all_input_nodes)
                else:
                    continue
                waiting.remove(n)

    def _storages_of(self, nodes: Iterable[fx.Node]) -> set[int]:
        for n in nodes:
            if n not in self._memory:
                self._memory[n] = storages(n)
        return {s for n in nodes for s in self._memory[n]}

    def below(self, softmax: fx.Node) -> None:
        """The softmax and its users up to the next matmul, with all that they depend on."""
        todo, found = [softmax], [softmax]
        seen = {softmax}
        while todo:
            for u in todo.pop().users:
                if u in seen or u.op == "output" or is_heavy(u):
                    continue
                seen.add(u)
                found.append(u)
                if u.target not in MATMULS and u.target not in COMPOSITES:
                    todo.append(u)
        self.upstream(found)

    def upstream(self, nodes: Iterable[fx.Node]) -> None:
        """``nodes`` and everything they depend on; matmuls pass on to their operands' views only."""
        todo = list(nodes)
        while todo:
            n = todo.pop()
            if n.op == "placeholder":
                self.inputs.add(n)
            if n in self._full or not n.op.startswith("call"):
                continue
            if is_heavy(n) or n in self.closed:
                continue
            self._full.add(n)
            self.need.add(n)
            if n.target in MATMULS or n.target in COMPOSITES:
                self.operands(n.all_input_nodes)
                if name_of(n) in ("baddbmm", "addmm") or n.target in COMPOSITES:
                    todo.extend(n.all_input_nodes[:1] if n.target not in COMPOSITES else _mask_inputs(n))
            else:
                todo.extend(n.all_input_nodes)

    def operands(self, nodes: Iterable[fx.Node]) -> None:
        todo = list(nodes)
        while todo:
            n = todo.pop()
            if n.op == "placeholder":
                self.operand_inputs.add(n)
            if n not in self.need and n not in self.closed and (is_rearrangement(n) or n.target is F.embedding):
                self.need.add(n)
                todo.extend(n.all_input_nodes)
                # A factor computed of run-time sizes: the view has no node for such a number but the arithmetic itself.
                self.upstream([a for a in n.all_input_nodes if isinstance(a.meta.get("example_value"), torch.SymFloat)])


def _mask_inputs(n: fx.Node) -> list[fx.Node]:
    """Mask arguments of an SDPA or MHA call: they are analysed like any other mask."""
    masks = [n.kwargs.get("attn_mask"), n.kwargs.get("key_padding_mask")]
    if n.target is F.scaled_dot_product_attention and len(n.args) > 3:
        masks.append(n.args[3])
    return [m for m in masks if isinstance(m, fx.Node)]
