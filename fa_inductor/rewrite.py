"""Puts the fused op into the Dynamo graph where a match was proven."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fa_inductor import caches, capture_layout, cpu_export, fp8, ops
from fa_inductor.emitter import MASKS, Emitter, RewriteError
from fa_inductor.patterns import AttentionMatch
from fa_inductor.patterns.caches import BLOCK, SLOT, Cache, Scale
from fa_inductor.patterns.projection import Projection, Projections
from fa_inductor.patterns.terms import size
from fa_inductor.spec import AttentionSpec
from fa_inductor.view import AtenView, Path
from fa_inductor.view.aliasing import is_inplace, storages, writes_after, written_source


def apply(
    view: AtenView,
    match: AttentionMatch,
    kernel: str,
    fp8_format: str = "",
    projections: Projections | None = None,
    cache: Cache | None = None,
) -> AttentionSpec:
    """Rewrite one site with the op run by ``kernel``, in FP8 where a format is given and then from hidden states where there are
    ``projections``, or with k and v as ``cache`` stores them; returns the spec the op carries.

    Raises:
        RewriteError: nodes could not be built; the graph is unchanged.
    """
    if cache is not None:
        match = replace(match, extents=cache.extents)
    origin = view.origin[match.pv]
    anchor = match.holder.node if match.holder is not None else origin.node
    emitter = Emitter(view, match, anchor)
    try:
        spec, result = _emit_op(emitter, match, kernel, fp8_format, projections, cache)
        leaves = _new_leaves(view, emitter, match, result, anchor)
        replacements = _leaf_replacements(anchor, leaves)
    except Exception as e:
        emitter.undo()
        raise e if isinstance(e, RewriteError) else RewriteError(f"{type(e).__name__}: {e}") from e
    view.rewritten.update({(anchor, leaf): new for leaf, new in leaves.items()})
    for old, new in replacements:
        view.rewritten[old, 0] = new
        old.replace_all_uses_with(new)
    _erase(view, match, anchor)
    return spec


def _emit_op(
    em: Emitter, match: AttentionMatch, kernel: str, fp8_format: str, projections: Projections | None, cache: Cache | None
) -> tuple[AttentionSpec, fx.Node]:
    g = match.groups
    if projections is not None:
        return _emit_projected(em, match, kernel, fp8_format, projections)
    q = em.operand(match.q, (g["batch"], g["heads"], g["query"], g["qk"]), match.dtype)
    k, v, stored = _keys_and_values(em, match, cache)
    captures, spec = _captures(em, match, kernel)
    sizes = [em.size(s) for s in match.sizes]
    if match.dropout_p:
        captures.append(em.call(ops.dropout_seed, q))
    _check_later_writes(em, [q, k, v, *captures])
    if fp8_format:
        op = em.call(fp8.fp8_attention, q, k, v, captures, sizes, spec.program, kernel, fp8_format)
    elif cache is not None:
        keys = em.size(match.extent(g["key"]))
        op = em.call(caches.cached_attention, q, k, v, *stored, captures, sizes, keys, spec.program, cache.form.text, kernel)
    elif kernel == "reference in the graph":
        op = em.call(cpu_export.reference_attention, q, k, v, captures, sizes, spec.program)
    elif kernel == "aten in the graph":
        op = em.call(cpu_export.attention, q, k, v, _mask(em, q, k, captures, sizes, spec), captures, sizes, spec.program)
    else:
        op = em.call(ops.flash_attention, q, k, v, captures, sizes, spec.program, kernel)
    out = em.call(operator.getitem, op, 0)
    if out.meta["example_value"].requires_grad and _written_later(em.view, match.place.path, em.anchor):
        out = em.call(torch.clone, out)  # the backward reads the op's own output, which must not be written
    if match.dead_output:
        out = _dead_output(em, match, op, out)
    return spec, _shape_output(em, match, out)


def _keys_and_values(em: Emitter, match: AttentionMatch, cache: Cache | None) -> tuple[fx.Node, fx.Node, list[fx.Node | None]]:
    """k, v, and where they are read as they are stored their table and scales."""
    g = match.groups
    if cache is None:
        k = em.operand(match.k, (g["batch"], g["kv_heads"], g["key"], g["qk"]), match.dtype)
        return k, em.operand(match.v, (g["batch"], g["kv_heads"], g["key"], g["v"]), match.dtype), []
    *wanted, blocks = cache.dims(g)
    k, v = (
        em.rearrange(em.constant(s.node), s.dims, dims) if s.page or s.product else em.operand(o, dims, match.dtype)
        for s, o, dims in zip((cache.k, cache.v), (match.k, match.v), wanted, strict=True)
    )
    table = cache.table
    entries = None if table is None else em.rearrange(em.value(table.node), table.dims, blocks)
    return k, v, [entries, *(_scale(em, s) for s in (cache.k.scale, cache.v.scale))]


def _scale(em: Emitter, scale: Scale | None) -> fx.Node | None:
    """[batch, key heads, keys] in the dtype that it is multiplied in."""
    if scale is None:
        return None
    g = em.match.groups
    if isinstance(scale.by, float):
        x = em.call(torch.ops.aten.scalar_tensor.default, scale.by, dtype=torch.float32, device=em.device)
        return em.rearrange(x, (), (g["batch"], g["kv_heads"], g["key"]))
    x = em.constant(scale.by.node)
    if x.meta["example_value"].dim() == 0 and x.meta["example_value"].dtype != scale.dtype:
        x = em.call(torch.Tensor.to, x, scale.dtype)  # a tensor without dimensions has no say in the product's dtype
    looked_up = {a for d in scale.by.dims for a in d} & {BLOCK, SLOT}
    return em.rearrange(x, scale.by.dims, (g["batch"], g["kv_heads"], (BLOCK, SLOT) if looked_up else g["key"]))


def _emit_projected(
    em: Emitter, match: AttentionMatch, kernel: str, fp8_format: str, p: Projections
) -> tuple[AttentionSpec, fx.Node]:
    """As :func:`_emit_op`, from the hidden states. Inference: nothing is needed by a backward."""

    def rows(whole: fx.Node, part: Projection) -> fx.Node:
        size = whole.meta["example_value"].shape[0]
        return whole if part.first == 0 and size == part.rows else em.call(torch.narrow, whole, 0, part.first, part.rows)

    parts = (p.q, p.k, p.v)
    weights = [rows(part.weight, part) for part in parts]
    biases = [rows(part.bias, part) for part in parts if part.bias is not None]
    heads, kv_heads = (int(match.extent(match.groups[name])) for name in ("heads", "kv_heads"))
    captures, spec = _captures(em, match, kernel)
    sizes = [em.size(s) for s in match.sizes]
    layers = (p.hidden, weights, biases, heads, kv_heads)
    op = em.call(fp8.fp8_projected_attention, *layers, captures, sizes, spec.program, kernel, fp8_format)
    out = em.call(operator.getitem, op, 0)
    if match.dead_output:
        out = _dead_output(em, match, op, out)
    return spec, _shape_output(em, match, out)


def _captures(em: Emitter, match: AttentionMatch, kernel: str) -> tuple[list[fx.Node], AttentionSpec]:
    """The captured tensors as a kernel reads them best, and the spec that reads them so."""
    spec = replace(match.full_spec(), layout=_layout(match))
    # The op's output requires a gradient where an operand does. Eager code's does not for what a condition alone reads.
    reached = spec.differentiable_slots()
    captures = [em.value(c) if i in reached else em.constant(c) for i, c in enumerate(match.captures)]
    if kernel in ("triton", "general"):
        spec = capture_layout.arrange(em, match, spec, captures)
    return captures, spec


def _mask(em: Emitter, q: fx.Node, k: fx.Node, captures: list[fx.Node], sizes: list[Any], spec: AttentionSpec) -> fx.Node:
    """The mask of a site that runs as ATen ops: one node for all layers that ask for the same one."""
    lengths = [_text(n) for t in (q, k) for n in t.meta["example_value"].shape[:3]]
    key = ("mask", em.match.place.path, str(spec.score), str(em.match.dtype), *captures, *map(str, sizes), *lengths)
    made: dict[Any, fx.Node] = em.view.shared(MASKS, dict)
    if key not in made or not made[key] < em.anchor:
        made[key] = em.call(cpu_export.mask, q, k, captures, sizes, spec.program)
    return made[key]


def _dead_output(em: Emitter, match: AttentionMatch, op: fx.Node, out: fx.Node) -> fx.Node:
    """Rows by their logsumexp: 0 where it is not finite, or NaN where the row has no key."""
    lse = em.call(torch.Tensor.detach, em.call(operator.getitem, op, 1))
    zero = match.dead_output == "zero"
    dead = em.call(torch.logical_not, em.call(torch.isfinite, lse)) if zero else em.call(torch.isneginf, lse)
    value = 0.0 if zero else float("nan")
    filler = em.call(torch.ops.aten.scalar_tensor.default, value, dtype=match.dtype, device=em.device)
    return em.call(torch.where, em.call(torch.unsqueeze, dead, -1), filler, out)


def _written_later(view: AtenView, path: Path, node: fx.Node) -> bool:
    """Whether the value of ``node`` is written in place behind it: in its graph, as a result of its sub-graph, or, where
    the graph returns it (a graph break may follow), by whoever gets it."""
    while not storages(node) & writes_after(node, is_inplace):
        if not path:
            return any(storages(node) & storages(a) for a in node.graph.output_node().all_input_nodes)
        node = next(n for n in view.bodies[path[:-1]].graph.nodes if n.name == path[-1])
        path = path[:-1]
    return True


def _check_later_writes(em: Emitter, operands: list[fx.Node]) -> None:
    """The backward computes the scores anew, so it needs operands that eager code may overwrite once they are used."""
    if not (em.grad and any(t.requires_grad for o in operands for t in [o.meta["example_value"]] if isinstance(t, torch.Tensor))):
        return
    later = writes_after(em.anchor, is_inplace)
    for o in operands:
        if storages(o) & later:
            raise RewriteError(f"{o.name} is written in place after the attention, whose backward still needs it")
    for o in operands[3:]:
        source = written_source(o, is_inplace)
        if source is not None:
            raise RewriteError(f"the backward may compute {o.name} anew from {source.name}, which this graph writes in place")


def _shape_output(em: Emitter, match: AttentionMatch, out: fx.Node) -> fx.Node:
    """The op's output with the dimensions, dtype and strides of the value it replaces."""
    g = match.groups
    out = em.rearrange(out, (g["batch"], g["heads"], g["query"], g["v"]), match.output_dims)
    for step in match.steps:
        if isinstance(step.by, float):
            out = em.call(torch.mul, out, step.by)
            continue
        by = em.value(step.by.node)
        if by.meta["example_value"].dtype != step.by.dtype:
            by = em.call(torch.Tensor.to, by, step.by.dtype)  # the rounding that the user's cast does
        by = em.rearrange(by, step.by.dims, match.output_dims)
        if step.zero_when is None:
            out = em.call(torch.mul, out, by)
        else:
            zero = em.call(torch.ops.aten.scalar_tensor.default, 0.0, dtype=match.dtype, device=em.device)
            out = em.call(torch.where, by, *((zero, out) if step.zero_when else (out, zero)))
    want = match.output.meta["val"]
    if want.dtype != out.meta["example_value"].dtype:
        out = em.call(torch.Tensor.to, out, want.dtype)
    if match.holder is not None and _layout(match) == "bhmd" and not _same_strides(out.meta["example_value"], want):
        out = _restride(em, out, want)
    return out


def _restride(em: Emitter, out: fx.Node, want: torch.Tensor) -> fx.Node:
    """A copy of ``out`` in the memory order of ``want``: code behind the site may rely on it, as ``view`` does."""
    hints = [int(_hint(s)) for s in want.stride()]
    order = sorted(range(want.dim()), key=lambda d: (-hints[d], -int(_hint(want.shape[d]))))
    swapped = order != list(range(want.dim()))
    out = em.call(torch.permute, out, order) if swapped else out
    out = em.call(torch.Tensor.contiguous, out)
    out = em.call(torch.permute, out, [order.index(d) for d in range(want.dim())]) if swapped else out
    if not _same_strides(out.meta["example_value"], want):
        raise RewriteError(f"the output's strides {tuple(want.stride())} cannot be reproduced")
    return out


def _hint(n: Any) -> int:
    """A number to sort strides by; the result is compared symbolically afterwards."""
    if isinstance(n, torch.SymInt):
        e = n.node.expr
        return int(e.subs(dict.fromkeys(e.free_symbols, 7919)))
    return int(n)


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(_text(n) == "1" or _text(x) == _text(y) for n, x, y in pairs)


def _text(n: Any) -> str:
    return str(sympy.expand(size(n)))


def _layout(match: AttentionMatch) -> str:
    """[B, M, H, D] storage when every use swaps heads and queries and then copies or reshapes: that copy becomes free."""
    if match.holder is None or len(match.output_dims) != 4 or match.output_dims[2] != match.groups["query"]:
        return "bhmd"
    node = match.holder.node
    if not isinstance(node.meta.get("example_value"), torch.Tensor) or not node.users:
        return "bhmd"
    for u in node.users:
        swaps = u.target in ("transpose", torch.transpose, "swapaxes") and sorted(x % 4 for x in u.args[1:3]) == [1, 2]
        order = u.args[1] if len(u.args) == 2 else u.args[1:]
        swaps = swaps or (u.target in ("permute", torch.permute) and list(order) in ([0, 2, 1, 3], (0, 2, 1, 3)))
        if not swaps or not all(c.target in ("contiguous", "reshape", torch.reshape, "flatten") for c in u.users):
            return "bhmd"
    return "bmhd"


def _new_leaves(
    view: AtenView, em: Emitter, match: AttentionMatch, result: fx.Node, anchor: fx.Node
) -> dict[int, fx.Node]:
    """New node by leaf of ``anchor``. A site inside one composite node is replaced by the composite's own ATen nodes."""
    path = match.place.path
    if match.holder is not None:
        return {match.holder.leaf: result}
    em.override[match.output] = result
    leaves = view.results((path, anchor))
    below = _descendants(match.output)
    new = {i: em.value(a) for i, a in leaves.items() if a is not None and (a in below or a is match.output)}
    if not new:
        raise RewriteError(f"nothing that {anchor.name} returns depends on its attention")
    return new


def _leaf_replacements(node: fx.Node, new: dict[int, fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    example = node.meta.get("example_value")
    if isinstance(example, torch.Tensor):
        return [(node, new[0])]
    tensors = [i for i, t in enumerate(example) if isinstance(t, torch.Tensor)] if isinstance(example, (tuple, list)) else []
    if len(pytree.tree_leaves(example)) != len(example or ()) or not set(new) <= set(tensors):
        raise RewriteError(f"{node.name} returns a structure that is not a plain tuple")
    pairs = []
    for u in list(node.users):
        if u.target is not operator.getitem:
            raise RewriteError(f"{node.name} is used whole by {u.name}")
        if u.args[1] in new:
            pairs.append((u, new[u.args[1]]))
    return pairs


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for u in todo.pop().users:
            if u not in found:
                found.add(u)
                todo.append(u)
    return found


def _erase(view: AtenView, match: AttentionMatch, anchor: fx.Node) -> None:
    """Remove what only the site used. In-place nodes stay: they may write into what others read."""
    path = match.place.path
    region = {view.origin[n].node for n in match.region if n in view.origin and view.origin[n].path == path} | {anchor}
    for n in reversed(list(anchor.graph.nodes)):
        if n in region and not n.users and not is_inplace(n) and n.op in ("call_function", "call_method"):
            anchor.graph.erase_node(n)
            view.erased.add(n)
