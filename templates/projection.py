"""FP8 operands straight from hidden states: :func:`project` launches templates/common/projection.py on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_inductor.templates.quantise import FORMATS, SCALE_KEYS, Quantised, empty_of, rotation
from fa_inductor.templates.rendering import padded_dim

#: Features of one step of the product; blocks of tokens that run side by side.
STEP, SECTION = 64, 8


def together(heads: int, kv_heads: int, qk_dim: int, v_dim: int, arch: int | None) -> int:
    """How many heads a program computes; ``arch``: the compute capability (90 for 9.0) where tiles come by TMA, else None.

    Tiles of 128 x 256 load less for each product than those of 128 x 128: on an H200 they took 0.85 to 0.93 of the time
    (benchmarks/notes/fp8.md). On sm_100 that tile spills at head dim 128.
    """
    fit = all(padded_dim(d) == d <= 128 for d in (qk_dim, v_dim))
    return 2 if arch == 90 and fit and heads % 2 == kv_heads % 2 == 0 else 1


def constants(
    qk_dim: int, v_dim: int, format: str, bias: bool, tma: bool, permute: bool = False, rounds: bool = False, heads: int = 1
) -> dict[str, Any]:
    """The kernel's compile-time arguments; ``heads``: of a program."""
    return {
        "QK_DIM": qk_dim, "QK_PAD": padded_dim(qk_dim), "V_DIM": v_dim, "V_PAD": padded_dim(v_dim), "KEYS": SCALE_KEYS,
        "TOGETHER": heads, "STEP": STEP, "SECTION": SECTION, "BIAS": bias,
        "GROUP": rotation(qk_dim) if FORMATS[format].rotates else 0, "INTEGER": FORMATS[format].integer,
        "PERMUTE": permute, "TMA": tma, "ROUNDS": rounds,
    }  # fmt: skip


def options(qk_dim: int, v_dim: int, heads: int = 1) -> dict[str, int]:
    """Launch options; ``heads``: of a program."""
    return {"num_warps": 8, "num_stages": 3 if heads * max(qk_dim, v_dim) > 128 else 4}


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    heads: int,
    kv_heads: int,
    format: str,
    permute: bool = False,
    rounds: bool = False,
) -> Quantised:
    """The FP8 operands of ``(linear(x, w, b) for w, b in zip(weights, biases))`` split into heads, by one kernel.

    Args:
        x: [B, L, features], bf16 or fp16.
        weights: of q [heads * Dqk, features], of k [kv_heads * Dqk, features], of v [kv_heads * Dv, features].
        biases: of each as many elements as rows; or none at all.
        format, permute, rounds: as :func:`fa_inductor.templates.quantise.quantise` has them.
    """
    from fa_inductor.templates.common.projection import project as kernel
    from fa_inductor.templates.direct import set_allocator

    x, *weights = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, *weights))
    biases = [b.contiguous() for b in biases]
    batch, length, features = x.shape
    qk_dim, v_dim = weights[0].shape[0] // heads, weights[2].shape[0] // kv_heads
    made = empty_of(x, (batch, heads, length, qk_dim), (batch, kv_heads, length, qk_dim), v_dim, format)
    major, minor = torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (0, 0)
    aligned = all(t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1]) for t in (x, *weights))
    tma = major >= 9 and aligned
    if tma:
        set_allocator(x.device)
    wide = together(heads, kv_heads, qk_dim, v_dim, 10 * major + minor if tma else None)
    kernel[(batch * made.k_scale.shape[2] * (heads + 2 * kv_heads) // wide,)](
        x, *weights, *(biases or weights), *made.tensors(), batch, heads, kv_heads, length, features, x.stride(0), x.stride(1),
        *(w.stride(0) for w in weights),
        **constants(qk_dim, v_dim, format, bool(biases), tma, permute, rounds, wide), **options(qk_dim, v_dim, wide),
    )  # fmt: skip
    return made
