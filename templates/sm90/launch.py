"""Launches of the Gluon kernels on tensors: descriptors, grids and default tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.sm90.form import form_of, padded

#: Query rows of one consumer warpgroup.
CONSUMER_ROWS = 64


#: Bytes of shared memory that a block may have on Hopper, and what barriers take at most.
SHARED, BARRIERS = 232448, 1024


@dataclass(frozen=True)
class GluonConfig:
    """Tile and launch choices of the forward kernel.

    Attributes:
        keys: keys of a tile. stages: buffers of K and of V.
        consumers: warpgroups of 64 query rows, 2 or 3. registers: of a thread of theirs.
        section: heads that run side by side.
        ping_pong: whether consumers take turns in issuing products.
        schedule: "tile": a program a tile; "static": a program an SM, which takes every n-th tile; "dynamic": a program an
            SM, which takes the next tile that nobody has taken.
    """

    keys: int
    stages: int
    consumers: int = 2
    registers: int = 240
    section: int = 8
    ping_pong: bool = True
    schedule: str = "dynamic"


def _descriptor(t: Tensor, rows: int, dim: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, dim]
    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    # A dimension of one element may have any stride; TMA wants multiples of 16 bytes.
    strides = [s if n > 1 else 8 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(t, list(t.shape), [*strides, 1], block, layout)


#: By padded head dim of queries and keys. Forward, TFLOP/s on an H200 (torch 2.11, triton 3.6, bf16, 16384 tokens, hidden
#: size 2048; in brackets cuDNN in that run): D64 S4k 527 (483); D128 S4k 630 (678), causal 541 (561), S16k causal 664 (605);
#: D256 S4k causal 660 (609). The other schedules were slower or within the spread of runs, ``static`` much so under a mask.
CONFIGS = {
    64: GluonConfig(128, 2, consumers=3, registers=160),
    128: GluonConfig(128, 2),
    256: GluonConfig(64, 2),
}


def _own_output(config: GluonConfig, d_pad: int, v_pad: int) -> bool:
    """Whether the output has room for a buffer of its own in shared memory."""
    queries, output = (CONSUMER_ROWS * config.consumers * dim for dim in (d_pad, v_pad))
    tiles = config.stages * config.keys * (d_pad + v_pad)
    return 2 * (queries + output + tiles) + BARRIERS <= SHARED


def constants(config: GluonConfig, d_pad: int, v_pad: int) -> dict[str, Any]:
    """The kernel's compile-time arguments that a configuration decides."""
    return {
        "KEYS": config.keys,
        "STAGES": config.stages,
        "CONSUMERS": config.consumers,
        "SECTION": config.section,
        "DYNAMIC": config.schedule == "dynamic",
        "REGISTERS": config.registers,
        "PING_PONG": config.ping_pong,
        "OWN_O": _own_output(config, d_pad, v_pad),
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: GluonConfig,
    *,
    scale: float,
    low: int | None = None,
    high: int | None = None,
    softcap: float | None = None,
    layout: str = "bhmd",
    dead_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [B, Hq, M, Dqk], k [B, Hkv, N, Dqk], v [B, Hkv, N, Dv], bf16 or fp16 on one Hopper GPU.

    Args:
        scale: factor of the logits. low, high: query m attends to keys m + low .. m + high; None for no limit.
        softcap: scores become ``tanh(score * softcap)`` before ``scale``.
        layout: memory order of out. dead_zero: rows without keys give 0, not NaN.
    """
    from fa_inductor.templates.sm90.gluon_forward import flash_forward

    b, hq, m, d = q.shape
    hkv, n, dv = k.shape[1], k.shape[2], v.shape[3]
    shape = (b, m, hq, dv) if layout == "bmhd" else (b, hq, m, dv)
    out = q.new_empty(shape)
    out = out.transpose(1, 2) if layout == "bmhd" else out
    lse = q.new_empty((b, hq, m), dtype=torch.float32)
    d_pad, v_pad = padded(d), padded(dv)
    tiles = -(-m // (CONSUMER_ROWS * config.consumers))
    dynamic = config.schedule == "dynamic"
    programs = tiles * b * hq
    if config.schedule != "tile":
        programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    flash_forward[(programs,)](
        _descriptor(q, CONSUMER_ROWS, d_pad),
        _descriptor(k, config.keys, d_pad),
        _descriptor(v, config.keys, v_pad),
        _descriptor(out, CONSUMER_ROWS, v_pad),
        lse,
        (torch.zeros if dynamic else torch.empty)(1, dtype=torch.int32, device=q.device),
        scale * math.log2(math.e),
        softcap or 0.0,
        m,
        n,
        0 if low is None else low,
        0 if high is None else high,
        hq,
        b * hq,
        hq // hkv,
        **constants(config, d_pad, v_pad),
        EVEN=n % config.keys == 0,
        HAS_LOW=low is not None,
        HAS_HIGH=high is not None,
        SOFTCAP=softcap is not None,
        DEAD_ZERO=dead_zero,
        num_warps=4,
    )
    return out, lse


def attention(q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], program: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of a program that has a :class:`~fa_inductor.templates.sm90.form.Form`, with its default tiles."""
    spec = AttentionSpec.parse(program)
    form = form_of(spec)
    if isinstance(form, str):
        raise ValueError(f"not a program of the Gluon kernel ({form}): {program}")
    low, high = form.band(q.shape[2], k.shape[2], sizes)
    # TMA reads rows of 16-byte multiples from 16-byte aligned addresses; compiled code passes nothing else.
    q, k, v = (t if t.data_ptr() % 16 == 0 else t.clone() for t in (q, k, v))
    return forward(
        q, k, v, CONFIGS[padded(q.shape[3])], scale=form.scale, low=low, high=high, softcap=form.softcap,
        layout=spec.layout, dead_zero=spec.dead_rows == "zero",
    )  # fmt: skip
