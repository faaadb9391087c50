"""FP8 operands of an attention: :func:`quantise` launches templates/common/quantise.py on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa_inductor.templates.rendering import Problem, padded_dim

#: Keys that share a scale.
SCALE_KEYS = 128
#: The largest numbers that are used of e4m3 and of int8.
E4M3_MAX, INT8_MAX = 448.0, 127.0
#: The least magnitude that a block is scaled for: products of scales stay within float32.
TINY = 2.0**-50
#: Most elements that are rotated together: the matrix and the tile fit the shared memory of sm_89.
_MOST_ROTATED = 128
#: Queries of a program.
ROWS = 64


@dataclass(frozen=True)
class Format:
    """How q, k and v are cast.

    Attributes:
        rotates: q and k are multiplied with the normalised Hadamard matrix first. integer: q and k become 8-bit integers.
    """

    rotates: bool
    integer: bool


#: By name. Rotated numbers are all about as large as their root mean square; for such, integers are finer than e4m3.
FORMATS = {"e4m3": Format(False, False), "e4m3-rotated": Format(True, False), "int8-e4m3": Format(True, True)}


@dataclass(frozen=True)
class Quantised:
    """q, k and v in 8 bits.

    Attributes:
        q: [B, Hq, M, Dqk], k: [B, Hkv, N, Dqk], dense; e4m3 or int8.
        v: [B, Hkv, Dv, N rounded up to SCALE_KEYS], dense; zero behind N.
        q_scale: [B, Hq, M] float32; k_scale, v_scale: [B, Hkv, ceil(N / SCALE_KEYS)] float32. A number times its scale is
            the operand's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.q_scale, self.k_scale, self.v_scale


def empty(q: Tensor, k: Tensor, v: Tensor, format: str) -> Quantised:
    """Uninitialised FP8 operands for q [B, Hq, M, Dqk], k [B, Hkv, N, Dqk], v [B, Hkv, N, Dv]."""
    return empty_of(q, q.shape, k.shape, v.shape[3], format)


def empty_of(like: Tensor, q_shape: Sequence[Any], k_shape: Sequence[Any], v_dim: int, format: str) -> Quantised:
    """Uninitialised FP8 operands on the device of ``like``."""
    batch, kv_heads, keys, _ = k_shape
    blocks = (keys + SCALE_KEYS - 1) // SCALE_KEYS
    e4m3, f32 = torch.float8_e4m3fn, torch.float32
    small = torch.int8 if FORMATS[format].integer else e4m3
    return Quantised(
        like.new_empty(tuple(q_shape), dtype=small),
        like.new_empty(tuple(k_shape), dtype=small),
        like.new_empty((batch, kv_heads, v_dim, blocks * SCALE_KEYS), dtype=e4m3),
        like.new_empty(tuple(q_shape[:3]), dtype=f32),
        like.new_empty((batch, kv_heads, blocks), dtype=f32),
        like.new_empty((batch, kv_heads, blocks), dtype=f32),
    )


def rotation(dim: int) -> int:
    """How many elements of a head of ``dim`` elements are rotated together: a power of two that divides it."""
    return min(dim & -dim, _MOST_ROTATED)


def constants(qk_dim: int, v_dim: int, format: str, permute: bool = False, rounds: bool = False) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {
        "QK_DIM": qk_dim, "QK_PAD": padded_dim(qk_dim), "V_DIM": v_dim, "V_PAD": padded_dim(v_dim), "ROWS": ROWS,
        "KEYS": SCALE_KEYS, "GROUP": rotation(qk_dim) if FORMATS[format].rotates else 0, "INTEGER": FORMATS[format].integer,
        "PERMUTE": permute, "ROUNDS": rounds,
    }  # fmt: skip


def warps(qk_dim: int, v_dim: int) -> int:
    """Warps of a program: a block's elements fit their registers."""
    return 16 if max(qk_dim, v_dim) > 128 else 8


def quantise(q: Tensor, k: Tensor, v: Tensor, format: str, permute: bool = False, rounds: bool = False) -> Quantised:
    """q, k and v in FP8 by one kernel.

    Args:
        q: [B, Hq, M, Dqk], k: [B, Hkv, N, Dqk], v: [B, Hkv, N, Dv], bf16 or fp16, any strides.
        format: of :data:`FORMATS`; :func:`rotation` elements of q and k are rotated together.
        permute: v's keys lie in the order that the Hopper kernel wants.
        rounds: for Triton's interpreter.
    """
    from fa_inductor.templates.common.quantise import quantise as kernel

    made = empty(q, k, v, format)
    batch, heads, rows, qk_dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[3]
    q_tiles, blocks = -(-rows // ROWS), made.k_scale.shape[2]
    q_programs, kv_programs = batch * heads * q_tiles, batch * kv_heads * blocks
    kernel[(q_programs + 2 * kv_programs,)](
        q, k, v, *made.tensors(), heads, kv_heads, rows, k.shape[2], q_tiles, q_programs, kv_programs,
        *q.stride(), *k.stride(), *v.stride(), **constants(qk_dim, v_dim, format, permute, rounds), num_warps=warps(qk_dim, v_dim),
    )  # fmt: skip
    return made


def fp8_problem(problem: Problem) -> Problem:
    """What is known of the FP8 operands of a problem: they are dense, with rows of 16-byte multiples."""
    return replace(problem, element=1, tma=problem.qk_dim % 16 == 0, wide_tile=False)
