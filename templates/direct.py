"""The kernels called directly on tensors, without Inductor: for tests, kernel benchmarks and tuning.

Shapes and semantics are those of the ops (:mod:`fa_inductor.ops`). Runs on CUDA tensors, and on CPU tensors in Triton's
interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates import standalone
from fa_inductor.templates.backward import dkdv_kernel, dq_kernel, is_wide, recomputes_delta, rows_kernel
from fa_inductor.templates.configs import PASSES, TileConfig
from fa_inductor.templates.forward import forward_kernel, packs_heads
from fa_inductor.templates.program import Program
from fa_inductor.templates.quantise import fp8_problem, quantise
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import DIAGONALS, CaptureInfo
from fa_inductor.templates.splits import merge, unit_of
from fa_inductor.templates.tiles import SUMMARY, choose, summarised_slots

_INT32 = 2**31 - 1
#: Rows of the largest tile of any configuration; offsets inside a tile are bounded with it.
_TILE_ROWS = 256


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], others: Sequence[Tensor] = ()
) -> Problem:
    """What a kernel for these operands may assume. ``others``: more [B, H, L, D] operands (grad_out)."""
    batch, heads, rows, qk_dim = q.shape
    cols = k.shape[2]
    extents = {"b": batch, "h": heads, "q_idx": rows, "kv_idx": cols, DIAGONALS: rows + cols - 1}
    info = tuple(
        CaptureInfo(
            t.dim(),
            tuple(frozenset(n for n, e in extents.items() if size >= e) for size in t.shape),
            tuple(t.shape),
            t.dim() >= 2 and t.is_floating_point() and t.stride(-2) > 0 and descriptor_fits(t),
        )
        for t in captures
    )
    operands = [q, k, v, *others]
    return Problem(
        qk_dim=qk_dim,
        v_dim=v.shape[3],
        group=heads // k.shape[1],
        captures=info,
        wide_sizes=tuple(abs(s) > _INT32 // 2 for s in sizes),
        wide_tile=any(t.stride(2) * _TILE_ROWS + t.stride(3) * t.shape[3] > _INT32 for t in operands),
        wide_captures=tuple(
            sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) > _INT32 for t in captures
        ),
        even_q=rows % 128 == 0,
        even_kv=cols % 128 == 0,
        precision="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        rows=rows,
        cols=cols,
        square=rows <= cols,
        sizes=tuple(sizes),
        tma=all(descriptor_fits(t) for t in operands),
        element=q.element_size(),
    )


def descriptor_fits(t: Tensor) -> bool:
    """Whether a tensor descriptor can read tiles of the last two dimensions of ``t``."""
    outer = (s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
    return t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(outer)


@dataclass(frozen=True)
class Configs:
    """Tile configurations of the kernels of one attention."""

    forward: TileConfig
    dkdv: TileConfig
    dq: TileConfig
    rows: TileConfig


def choose_all(
    spec: AttentionSpec, problem: Problem, arch: int, index: int = 0, shared: int | None = None
) -> Configs:
    """The ``index``-th configuration of each kernel's row (the last one where the row is shorter).

    ``shared``: bytes of shared memory that one program may have, None where it is that of the architecture's first device.
    """

    def pick(which: str) -> TileConfig:
        found = choose(Program.of(spec, problem), problem, arch, which, shared)
        return found[min(index, len(found) - 1)]

    return Configs(*(pick(w) for w in PASSES))


def _empty(like: Tensor, shape: Sequence[int], layout: str) -> Tensor:
    b, h, m, d = shape
    return like.new_empty((b, m, h, d)).transpose(1, 2) if layout == "bmhd" else like.new_empty((b, h, m, d))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    configs: Configs,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as the op gives them. ``options`` go to the launch (``arch="sm80"``)."""
    problem = problem_of(q, k, v, captures, sizes)
    operands = {"Q": q, "K": k, "V": v}
    return _forward(operands, captures, sizes, spec, problem, configs.forward, k.shape[1], v.shape[3], **options)


def _forward(
    operands: dict[str, Tensor],
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    problem: Problem,
    config: TileConfig,
    kv_heads: int,
    v_dim: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    q = operands["Q"]
    set_allocator(q.device)
    kernel = forward_kernel(spec, problem, config)
    batch, heads, rows, _ = q.shape
    out = _empty(q, (batch, heads, rows, v_dim), spec.layout)
    splits = config.splits
    written = out if splits == 1 else out.new_empty((splits, *out.shape), dtype=torch.float32)
    lse = q.new_empty((2, *written.shape[:-1]) if splits > 1 else out.shape[:-1], dtype=torch.float32)
    pack = packs_heads(problem, config)
    tiles = -(-(rows * problem.group if pack else rows) // config.block_m)
    grid = tiles * batch * (kv_heads if pack else heads) * splits
    tensors = {**operands, "LSE": lse, **named(captures, spec, problem)}
    standalone.launch(kernel, grid, tensors, written, sizes, **options)
    if splits > 1:
        unit = unit_of(Program.of(spec, problem))
        merged, lse = merge(written, lse, written.shape, unit, spec.dead_rows == "zero", torch.ops.aten)
        out.copy_(merged)
    return out, lse


def cached_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    scales: Sequence[Tensor | None],
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    keys: int,
    spec: AttentionSpec,
    form: CacheForm,
    config: TileConfig,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as :mod:`fa_inductor.caches` gives them."""
    shape = (q.shape[0], k.shape[1], keys)
    strides = [(0, 0, t.stride(2), t.stride(3)) for t in (k, v)]
    k_like, v_like = (torch.empty_strided((*shape, t.shape[3]), s, device="meta") for t, s in zip((k, v), strides, strict=True))
    problem = replace(problem_of(q, k_like, v_like, captures, sizes), tma=False, cache=form)
    tensors = {"Q": q, "K": k, "V": v, "TABLE": table, "KS": scales[0], "VS": scales[1]}
    given = {name: t for name, t in tensors.items() if t is not None}
    return _forward(given, captures, [*sizes, keys], spec, problem, config, k.shape[1], v.shape[3], **options)


def fp8_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    config: TileConfig,
    format: str = "e4m3",
    rounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with the operands cast to FP8; ``format`` and ``rounds`` as :func:`quantise` has them."""
    set_allocator(q.device)
    small = quantise(q, k, v, format, rounds=rounds)
    problem = fp8_problem(problem_of(q, k, v, captures, sizes))
    kernel = forward_kernel(spec, problem, config, fp8=True, rounds=rounds)
    batch, heads, rows, _ = q.shape
    out = _empty(q, (batch, heads, rows, v.shape[3]), spec.layout)
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    pack = packs_heads(problem, config)
    grid = -(-(rows * problem.group if pack else rows) // config.block_m) * batch * (k.shape[1] if pack else heads)
    scales = {"QS": small.q_scale, "KS": small.k_scale, "VS": small.v_scale}
    tensors = {"Q": small.q, "K": small.k, "V": small.v, "LSE": lse, **scales, **named(captures, spec, problem)}
    standalone.launch(kernel, grid, tensors, out, sizes)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    spec: AttentionSpec,
    needs_grad: Sequence[bool],
    configs: Configs,
    **options: Any,
) -> list[Tensor | None]:
    """Gradients of (q, k, v, *captures) where ``needs_grad``, else None. dQ, dK, dV in ``spec.layout``."""
    set_allocator(q.device)
    problem = problem_of(q, k, v, captures, sizes, [grad_out])
    batch, heads, rows, _ = q.shape
    tensors = {"Q": q, "K": k, "V": v, "DO": grad_out, "LSE": lse, **named(captures, spec, problem)}
    tensors["DELTA"] = (out.float() * grad_out.float()).sum(-1)
    if is_wide(spec, problem):
        row_max, row_log = torch.empty_like(lse), torch.empty_like(lse)
        tensors["ROW_LOG"] = row_log
        if recomputes_delta(spec, problem):
            tensors["ROW_DELTA"] = torch.empty_like(lse)
        grid = -(-rows // configs.rows.block_m) * batch * heads
        standalone.launch(rows_kernel(spec, problem, configs.rows), grid, tensors, row_max, sizes, **options)
        tensors["ROW_MAX"], tensors["DELTA"] = row_max, tensors.get("ROW_DELTA", tensors["DELTA"])
    grads: list[Tensor | None] = [None] * len(needs_grad)
    slots = tuple(i for i, need in enumerate(needs_grad[3:]) if need)
    if needs_grad[1] or needs_grad[2]:
        dk, dv = _empty(k, k.shape, spec.layout), _empty(v, v.shape, spec.layout)
        grid = -(-k.shape[2] // configs.dkdv.block_n) * batch * k.shape[1]
        kernel = dkdv_kernel(spec, problem, configs.dkdv)
        standalone.launch(kernel, grid, {**tensors, "DV": dv}, dk, sizes, **options)
        grads[1], grads[2] = (dk if needs_grad[1] else None), (dv if needs_grad[2] else None)
    if needs_grad[0] or slots:
        dq = _empty(q, q.shape, spec.layout)
        buffers = {s: torch.zeros(captures[s].shape, dtype=torch.float32, device=q.device) for s in slots}
        grid = -(-rows // configs.dq.block_m) * batch * heads
        kernel = dq_kernel(spec, problem, configs.dq, slots)
        grad_tensors = {f"GRAD{s}": t for s, t in buffers.items()}
        standalone.launch(kernel, grid, {**tensors, **grad_tensors}, dq, sizes, **options)
        grads[0] = dq if needs_grad[0] else None
        for s, t in buffers.items():
            grads[3 + s] = t.to(captures[s].dtype)
    return grads


def set_allocator(device: torch.device) -> None:
    """Tensor descriptors made inside a kernel live in scratch memory that Triton asks for."""
    if device.type == "cuda":
        import triton

        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))


def named(captures: Sequence[Tensor], spec: AttentionSpec, problem: Problem) -> dict[str, Tensor]:
    """The captured tensors and their summaries, as the kernels name them."""
    tensors = {f"CAP{i}": t for i, t in enumerate(captures)}
    for slot in summarised_slots(Program.of(spec, problem), problem):
        parts = blocks(captures[slot])
        tensors[f"LOW{slot}"], tensors[f"TOP{slot}"] = parts.amin(-1), parts.amax(-1)
    return tensors


def blocks(t: Tensor) -> Tensor:
    """``t`` [..., n] as [..., ceil(n / SUMMARY), SUMMARY], filled up with its last element; bool as 0 and 1."""
    n = t.shape[-1]
    tiles = -(-n // SUMMARY)
    whole = t[..., torch.arange(tiles * SUMMARY, device=t.device).clamp_max(n - 1)]
    return (whole.to(torch.int8) if t.dtype == torch.bool else whole).unflatten(-1, (tiles, SUMMARY))
