"""Puts the fused op into the Dynamo graph where a match was proven."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from fa_inductor import caches, capture_layout, cpu_export, fp8, ops
from fa_inductor.patterns import AttentionMatch
from fa_inductor.patterns.caches import BLOCK, SLOT, Cache, Scale
from fa_inductor.patterns.operands import Axes, Operand
from fa_inductor.patterns.projection import Projection, Projections
from fa_inductor.patterns.terms import size
from fa_inductor.spec import AttentionSpec
from fa_inductor.view import AtenView, Path
from fa_inductor.view.aliasing import is_inplace, storages, writes_after, written_source


class RewriteError(Exception):
    """The match holds but its nodes could not be built here; the graph is left as it was."""


class Emitter:
    """Builds Dynamo nodes before ``anchor`` for values of the view; computes their example values as it goes."""

    def __init__(self, view: AtenView, match: AttentionMatch, anchor: fx.Node):
        self.view, self.match, self.anchor, self.graph = view, match, anchor, anchor.graph
        self.made: list[fx.Node] = []
        self.override: dict[fx.Node, fx.Node] = {}
        self._memo: dict[fx.Node, Any] = {}
        self.grad = view.origin[match.pv].grad_enabled
        self.device = match.pv.meta["val"].device

    # -- nodes
    def call(self, fn: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(fn, args, kwargs)
        self.made.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        example = lambda n: n.meta["example_value"]  # noqa: E731
        mode = self.view.fake_mode or contextlib.nullcontext()
        env = getattr(self.view.fake_mode, "shape_env", None)
        quiet = env.suppress_guards() if env is not None else contextlib.nullcontext()
        with mode, quiet, torch.set_grad_enabled(self.grad):
            node.meta["example_value"] = fn(*fx.map_arg(args, example), **fx.map_arg(kwargs, example))
        return node

    def undo(self) -> None:
        for shared in ("masks in the graph", capture_layout.SHARED):
            self.view.shared(shared, dict).clear()
        for n in reversed(self.made):
            self.graph.erase_node(n)
        self.made.clear()

    def discard(self, start: int) -> None:
        """Erase the nodes made since ``made`` had ``start`` of them."""
        gone = self.made[start:]
        del self.made[start:]
        self._memo = {n: x for n, x in self._memo.items() if x not in gone}
        for n in reversed(gone):
            self.graph.erase_node(n)

    # -- values
    def value(self, node: fx.Node) -> Any:
        """The Dynamo node that holds ATen value ``node`` here, computed anew where nobody holds it."""
        if node in self.override:
            return self.override[node]
        if node not in self._memo:
            self._memo[node] = self._value(node)
        return self._memo[node]

    def _value(self, node: fx.Node) -> Any:
        v = node.meta.get("val")
        if isinstance(v, torch.SymInt):
            return self.size(size(v))
        if isinstance(v, torch.SymFloat):
            return self._run_time_float(v)
        held = self.match.place.holder(node)
        if held is not None:
            if (held.node, held.leaf) in self.view.rewritten:
                return self.view.rewritten[held.node, held.leaf]
            if held.node in self.view.erased:
                raise RewriteError(f"{held.node.name} went with another attention")
            example = held.node.meta.get("example_value")
            if isinstance(example, torch.Tensor):
                return held.node
            if isinstance(example, (tuple, list)) and isinstance(example[held.leaf], torch.Tensor):
                return self.call(operator.getitem, held.node, held.leaf)
            raise RewriteError(f"{held.node.name} holds its tensors in a structure that is not a plain tuple")
        if node.op != "call_function":
            raise RewriteError(f"{node.name} cannot be computed here")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._argument)  # type: ignore[misc]
        return self.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _argument(self, node: fx.Node) -> Any:
        """As :meth:`value`, with run-time numbers as numbers: schemas that take one do not take a tensor."""
        v = node.meta.get("val")
        if not isinstance(v, torch.SymFloat):
            return self.value(node)
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.SymFloat) and example.node.expr == v.node.expr:
                return n
        raise RewriteError(f"run-time float {v} is not at hand")

    def _run_time_float(self, v: torch.SymFloat) -> fx.Node:
        """The 0-d tensor that a run-time float was read from."""
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.SymFloat) and example.node.expr == v.node.expr:
                if n.target == "item":
                    return n.args[0]
                return self.call(torch.ops.aten.scalar_tensor.default, n, dtype=torch.float64, device=self.device)
        raise RewriteError(f"run-time float {v} has no tensor in this graph")

    def size(self, e: sympy.Expr) -> Any:
        """A size as an int or as a node of the graph."""
        if e.is_Integer:
            return int(e)
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.SymInt) and example.node.expr == e:
                return n
        for n in self.graph.nodes:
            if n is self.anchor:
                break
            example = n.meta.get("example_value")
            if isinstance(example, torch.Tensor) and type(example).__name__ == "FakeTensor" and not is_inplace(n):
                for d, s in enumerate(example.shape):
                    if isinstance(s, torch.SymInt) and s.node.expr == e:
                        return self.call(torch.ops.aten.sym_size.int, n, d)
        if e.is_Add or e.is_Mul:
            fn = operator.add if e.is_Add else operator.mul
            out = self.size(e.args[0])
            for a in e.args[1:]:
                out = self._integer(fn, out, self.size(a))
            return out
        if isinstance(e, FloorDiv):
            return self._integer(operator.floordiv, self.size(e.args[0]), self.size(e.args[1]))
        raise RewriteError(f"size {e} is not at hand")

    def _integer(self, fn: Callable, a: Any, b: Any) -> Any:
        return fn(a, b) if isinstance(a, int) and isinstance(b, int) else self.call(fn, a, b)

    # -- layout
    def extent(self, axes: Axes) -> Any:
        return self.size(self.match.extent(axes))

    def rearrange(self, x: fx.Node, have: Sequence[Axes], want: Sequence[Axes]) -> fx.Node:
        """``x``, whose dimensions merge the axes ``have``, with dimensions ``want``; axes it lacks are expanded."""
        runs = [_run_of(d, want) for d in have]
        if any(r is None for r in runs):  # a dimension that is no run of one wanted dimension comes apart
            sizes: list[Any] = []
            for d, r in zip(have, runs, strict=True):
                sizes.extend([self.extent((a,)) for a in d] if r is None else [self.extent(d)])
            have = [p for d, r in zip(have, runs, strict=True) for p in ([(a,) for a in d] if r is None else [d])]
            x = self.call(torch.reshape, x, sizes)
        atoms = [d for d in have if d]
        for i in range(len(have) - 1, -1, -1):
            if not have[i]:
                x = self.call(torch.select, x, i, 0)
        target = [a for d in want for a in d]
        order = sorted(range(len(atoms)), key=lambda i: target.index(atoms[i][0]))
        if order != list(range(len(atoms))):
            x = self.call(torch.permute, x, order)
        atoms = [atoms[i] for i in order]
        x, atoms = self._spread(x, atoms, want)
        return self._merge(x, atoms, want)

    def _spread(self, x: fx.Node, atoms: list[Axes], want: Sequence[Axes]) -> tuple[fx.Node, list[Axes]]:
        have = {a for d in atoms for a in d}
        missing = [a for d in want for a in d if a not in have]
        if not missing:
            return x, atoms
        target = [a for d in want for a in d]
        for a in missing:
            at = sum(1 for d in atoms if target.index(d[0]) < target.index(a))
            x = self.call(torch.unsqueeze, x, at)
            atoms = [*atoms[:at], (a,), *atoms[at:]]
        sizes = [self.extent(d) if d[0] in missing else -1 for d in atoms]
        return self.call(torch.Tensor.expand, x, sizes), atoms

    def _merge(self, x: fx.Node, atoms: list[Axes], want: Sequence[Axes]) -> fx.Node:
        for position, axes in enumerate(want):
            count, covered = 0, 0
            while covered < len(axes):
                covered += len(atoms[position + count])
                count += 1
            if count == 0:
                x = self.call(torch.unsqueeze, x, position)
                atoms = [*atoms[:position], (), *atoms[position:]]
            elif count > 1:
                x = self.call(torch.flatten, x, position, position + count - 1)
                atoms = [*atoms[:position], axes, *atoms[position + count :]]
        return x

    def operand(self, o: Operand, want: Sequence[Axes], dtype: torch.dtype) -> fx.Node:
        x = self.value(o.node)
        if x.meta["example_value"].dtype != o.dtype and o.dtype != dtype:
            x = self.call(torch.Tensor.to, x, o.dtype)  # the rounding that the user's cast does
        if x.meta["example_value"].dtype != dtype:
            x = self.call(torch.Tensor.to, x, dtype)
        return self.rearrange(x, o.dims, want)


def _run_of(axes: Axes, want: Sequence[Axes]) -> Axes | None:
    """``axes`` when they are consecutive in one wanted dimension."""
    if not axes:
        return axes
    for d in want:
        if axes[0] in d:
            at = d.index(axes[0])
            return axes if d[at : at + len(axes)] == axes else None
    return None


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
        em.rearrange(em.value(s.node), s.dims, dims) if s.page or s.product else em.operand(o, dims, match.dtype)
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
    x = em.value(scale.by.node)
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
    captures = [em.value(c) for c in match.captures]
    if kernel in ("triton", "general"):
        spec = capture_layout.arrange(em, match, spec, captures)
    return captures, spec


def _mask(em: Emitter, q: fx.Node, k: fx.Node, captures: list[fx.Node], sizes: list[Any], spec: AttentionSpec) -> fx.Node:
    """The mask of a site that runs as ATen ops: one node for all layers that ask for the same one."""
    lengths = [_text(n) for t in (q, k) for n in t.meta["example_value"].shape[:3]]
    key = ("mask", em.match.place.path, str(spec.score), str(em.match.dtype), *captures, *map(str, sizes), *lengths)
    made: dict[Any, fx.Node] = em.view.shared("masks in the graph", dict)
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
    for cond, zero_when in match.guards:
        mask = em.rearrange(em.value(cond.node), cond.dims, match.output_dims)
        zero = em.call(torch.ops.aten.scalar_tensor.default, 0.0, dtype=match.dtype, device=em.device)
        out = em.call(torch.where, mask, *((zero, out) if zero_when else (out, zero)))
    want = match.output.meta["val"]
    if want.dtype != match.dtype:
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
