"""What Inductor knows of an op's operands, as the templates want it: :class:`Operands` and :func:`problem_of`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from fa_inductor import _compat
from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import DIAGONALS, CaptureInfo
from fa_inductor.templates.tiles import SUMMARY, summarised_slots

_INT32 = 2**31 - 1
#: Rows of the largest tile of any configuration; offsets inside a tile are bounded with it.
_TILE_ROWS = 256


@dataclass
class Cache:
    """What comes with k and v that are read as they are stored, realised, and the number of keys."""

    form: CacheForm
    table: Any
    k_scale: Any
    v_scale: Any
    keys: Any

    def named(self) -> dict[str, Any]:
        given = {"TABLE": self.table, "KS": self.k_scale, "VS": self.v_scale}
        return {name: t for name, t in given.items() if t is not None}


@dataclass
class Operands:
    """The operands of one op, realised, and what Inductor knows of them."""

    q: Any
    k: Any
    v: Any
    captures: list[Any]
    sizes: list[Any]
    spec: AttentionSpec
    others: list[Any]
    cache: Cache | None = None

    @property
    def extents(self) -> tuple[Any, Any, Any, Any, Any]:
        """(batch, query heads, key heads, query length, key length)."""
        batch, heads, rows, _ = self.q.get_size()
        keys = self.cache.keys if self.cache else self.k.get_size()[2]
        return batch, heads, self.k.get_size()[1], rows, keys

    def named(self) -> dict[str, Any]:
        """The operands, the captured tensors and their summaries, as the kernels name them."""
        tensors = {"Q": self.q, "K": self.k, "V": self.v, **{f"CAP{i}": t for i, t in enumerate(self.captures)}}
        if self.cache:
            tensors |= self.cache.named()
        problem = problem_of(self)
        for slot in summarised_slots(Program.of(self.spec, problem), problem):
            tensors[f"LOW{slot}"], tensors[f"TOP{slot}"] = summary_of(self.captures[slot])
        return tensors


#: Graph -> (buffer, sizes, strides, offset) -> summary: every layer that uses a mask shares one.
_SUMMARIES: WeakKeyDictionary[Any, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def summary_of(t: Any) -> tuple[Any, Any]:
    """Least and greatest of every :data:`SUMMARY` elements of the last dimension, bool as 0 and 1."""
    from torch._inductor.virtualized import V

    layout = t.get_layout()
    key = (t.get_name(), *map(str, (layout.size, layout.stride, layout.offset)))
    made = _SUMMARIES.setdefault(V.graph, {})
    if key not in made:
        made[key] = _summarise(t)
    return made[key]


def _summarise(t: Any) -> tuple[Any, Any]:
    import torch
    from torch._inductor.lowering import lowerings, to_dtype

    aten, prims = torch.ops.aten, torch.ops.prims
    if t.get_dtype() == torch.bool:
        t = to_dtype(t, torch.int8)
    *outer, n = t.get_size()
    tiles = (n + SUMMARY - 1) // SUMMARY
    if not _sizevars().statically_known_multiple_of(n, SUMMARY):
        # The last block is filled up with the last element.
        index = lowerings[prims.iota.default](
            tiles * SUMMARY, start=0, step=1, dtype=torch.int64, device=t.get_device(), requires_grad=False
        )
        last = lowerings[aten.minimum](index, lowerings[aten.full]([], n - 1, dtype=torch.int64, device=t.get_device()))
        t = lowerings[aten.index](t, [*[None] * len(outer), last])
    blocks = lowerings[aten.view](t, [*outer, tiles, SUMMARY])
    low, top = (lowerings[fn](blocks, [-1]) for fn in (aten.amin, aten.amax))
    low.realize()
    top.realize()
    return realised(low), realised(top)


def realised(x: Any) -> Any:
    """``x`` as a buffer or a strided view of one, its layout fixed; never copied for its strides."""
    from torch._inductor import ir

    x = ir.ExternKernel.realize_input(x)
    x.freeze_layout()
    return x


def _sizevars() -> Any:
    from torch._inductor.virtualized import V

    return V.graph.sizevars


def number(x: Any) -> int | None:
    """``x`` where it is a number, else None."""
    import sympy

    x = sympy.sympify(x)
    return int(x) if x.is_Integer else None


def hint(x: Any) -> int | None:
    """``x``, or for a run-time size the value that the graph was traced with; None without one."""
    known = number(x)
    if known is not None:
        return known
    sizevars = _sizevars()
    try:
        return _compat.traced_size(sizevars, x)
    except Exception:  # an unbacked size has no hint
        return None


def _fits_int32(extent: Any) -> bool:
    """Whether an offset fits int32: known, or true now and guarded."""
    import sympy

    known = number(extent)
    if known is not None:
        return known <= _INT32
    try:
        return bool(_sizevars().evaluate_expr(sympy.Le(extent, _INT32)))
    except Exception:  # a size without a hint cannot be guarded
        return False


def _descriptor_fits(x: Any) -> bool:
    """Whether a tensor descriptor can read tiles of ``x``: as templates.direct.descriptor_fits, for IR nodes."""
    from torch._inductor.virtualized import V

    multiple = 16 // x.get_dtype().itemsize
    known = _sizevars().statically_known_multiple_of
    strides, offset = x.get_stride(), x.get_layout().offset
    if not _sizevars().statically_known_equals(strides[-1], 1):
        return False
    if x.get_name() in getattr(V.graph, "unaligned_buffers", ()):
        return False
    return all(known(s, multiple) for s in (*strides[:-1], offset))


def problem_of(o: Operands) -> Problem:
    """What Inductor knows about the operands when their kernel is rendered."""
    batch, heads, kv_heads, rows, cols = o.extents
    sizevars = _sizevars()
    extents = {"b": batch, "h": heads, "q_idx": rows, "kv_idx": cols, DIAGONALS: rows + cols - 1}

    def capture(t: Any) -> CaptureInfo:
        sizes = t.get_size()
        covers = tuple(frozenset(n for n, e in extents.items() if sizevars.statically_known_leq(e, s)) for s in sizes)
        tma = len(sizes) >= 2 and t.get_dtype().is_floating_point and _descriptor_fits(t)
        tma = tma and sizevars.statically_known_gt(t.get_stride()[-2], 0)
        return CaptureInfo(len(sizes), covers, tuple(number(s) for s in sizes), tma)

    def span(t: Any) -> Any:
        return sum(((n - 1) * s for n, s in zip(t.get_size(), t.get_stride(), strict=True)), start=0)

    def tile_span(t: Any) -> Any:
        return t.get_stride()[2] * _TILE_ROWS + t.get_stride()[3] * t.get_size()[3]

    operands = [o.q, o.k, o.v, *o.others]
    return Problem(
        qk_dim=sizevars.guard_int(o.q.get_size()[3]),
        v_dim=sizevars.guard_int(o.v.get_size()[3]),
        group=sizevars.guard_int(heads) // sizevars.guard_int(kv_heads),
        captures=tuple(capture(t) for t in o.captures),
        # A sum of such a size and an index is to fit as well.
        wide_sizes=tuple(not (_fits_int32(2 * s) and _fits_int32(-2 * s)) for s in o.sizes),
        wide_tile=not all(_fits_int32(tile_span(t)) for t in operands),
        wide_captures=tuple(not _fits_int32(span(t)) for t in o.captures),
        even_q=sizevars.statically_known_multiple_of(rows, 128),
        even_kv=sizevars.statically_known_multiple_of(cols, 128),
        precision=_float32_precision(),
        rows=number(rows),
        cols=number(cols),
        square=sizevars.statically_known_leq(rows, cols),
        sizes=tuple(number(s) for s in o.sizes),
        tma=o.cache is None and all(_descriptor_fits(t) for t in operands),
        element=o.q.get_dtype().itemsize,
        cache=o.cache.form if o.cache else None,
    )


def _float32_precision() -> str:
    """``tf32`` where torch.set_float32_matmul_precision allows it for matmuls, else ``ieee``."""
    import torch

    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    ieee = setting == "ieee" if setting != "none" else torch.get_float32_matmul_precision() == "highest"
    return "ieee" if ieee else "tf32"
