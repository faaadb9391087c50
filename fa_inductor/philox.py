"""Dropout's random stream: Philox4x32-10 in torch integer ops, the same numbers as Triton's ``tl.rand(seed, offset)``.

One number decides one softmax weight. With ``seed, offset0 = seed_tensor`` (int64[2]) the weight at (b, h, m, n) of a
[B, H, M, N] probability matrix (H counts query heads) is kept iff::

    linear = ((b * H + h) * M + m) * N + n          # int64, whatever the tiling
    tl.rand(seed, (offset0 + linear).to(tl.int64)) > dropout_p

so forward, backward and every kernel draw the same mask. The offset must be int64 in Triton too: its low word is the
first counter word, its high word the second. Formulas: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC'11), section 4.3; word order and float conversion as in ``triton/language/random.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_ROUNDS = 10
#: Largest float32 s with int32_max * s < 1, the constant of Triton's uint_to_uniform_float.
_UNIT = 4.6566127342e-10


def _mul_hi_lo(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``factor * x`` for 0 <= x < 2**32, held in int64."""
    # The product may pass 2**63 and wrap; its low 64 bits, hence both words, are right all the same.
    product = x * factor
    return (product >> 32) & _MASK32, product & _MASK32


def philox_4x32(seed: Tensor, offset: Tensor) -> Tensor:
    """First output word, int64 in [0, 2**32), of Philox4x32-10 with key ``seed`` and counter ``offset``, both int64."""
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1 = offset & _MASK32, (offset >> 32) & _MASK32
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        hi_b, lo_b = _mul_hi_lo(_ROUND_B, c2)
        hi_a, lo_a = _mul_hi_lo(_ROUND_A, c0)
        c0, c1, c2, c3 = hi_b ^ c1 ^ k0, lo_b, hi_a ^ c3 ^ k1, lo_a
        k0, k1 = (k0 + _KEY_A) & _MASK32, (k1 + _KEY_B) & _MASK32
    return c0


def rand(seed: Tensor, offset: Tensor) -> Tensor:
    """float32 in [0, 1), equal bit for bit to ``tl.rand(seed, offset)`` for an int64 offset."""
    word = philox_4x32(seed, offset)
    signed = torch.where(word >= 2**31, word - 2**32, word)
    folded = torch.where(signed < 0, -signed - 1, signed)
    return folded.to(torch.float32) * _UNIT


def keep_mask(seed: Tensor, p: float, shape: tuple[int, int, int, int]) -> Tensor:
    """bool [B, H, M, N]: which softmax weights dropout keeps. ``seed`` is int64[2] = (seed, offset) on any device."""
    batch, heads, rows, cols = shape
    linear = torch.arange(batch * heads * rows * cols, device=seed.device, dtype=torch.int64)
    return (rand(seed[0], seed[1] + linear) > p).view(shape)
