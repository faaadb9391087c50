"""Tile configurations by (architecture, dtype, head dim, pass)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is tiled and launched.

    Attributes:
        block_m, block_n: queries and keys per tile, powers of two >= 16.
        num_warps, num_stages: Triton launch options.
        section: heads that run side by side (forward).
        tma: load through tensor descriptors where the problem allows it.
        warp_specialize: producer and consumer warps through Triton's warp specialisation (sm_90 and newer).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    section: int = 8
    tma: bool = False
    warp_specialize: bool = False
