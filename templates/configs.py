"""Tile configurations by (architecture, operand size, head dim, pass).

Each row lists candidates, best first. Without max-autotune the first one that compiles is taken; with it all are timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PASSES = ("forward", "dkdv", "dq", "rows")


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is tiled and launched.

    Attributes:
        block_m, block_n: queries and keys per tile, powers of two >= 16.
        num_warps, num_stages: Triton launch options.
        section: heads that run side by side.
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


def _rows(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*r) for r in rows)


def _tma(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*r, tma=True) for r in rows)


# (arch, bytes per element, padded head dim, pass) -> (block_m, block_n, num_warps, num_stages), ...
_TABLE: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    # sm_80, 16-bit: 166912 bytes of shared memory (163 KiB), cp.async stages, mma.sync.
    (80, 2, 64, "forward"): _rows((128, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 3)),
    (80, 2, 128, "forward"): _rows((128, 64, 8, 3), (128, 32, 4, 3), (64, 64, 4, 2)),
    (80, 2, 256, "forward"): _rows((64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    (80, 2, 512, "forward"): _rows((32, 16, 4, 2), (16, 16, 4, 2)),
    (80, 2, 64, "dkdv"): _rows((64, 64, 4, 2), (32, 64, 4, 2)),
    (80, 2, 128, "dkdv"): _rows((32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    (80, 2, 256, "dkdv"): _rows((32, 32, 8, 2), (16, 32, 4, 2)),
    (80, 2, 512, "dkdv"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (80, 2, 64, "dq"): _rows((64, 64, 4, 2), (64, 32, 4, 2)),
    (80, 2, 128, "dq"): _rows((64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    (80, 2, 256, "dq"): _rows((32, 32, 4, 2), (16, 32, 4, 2)),
    (80, 2, 512, "dq"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    # sm_90, 16-bit: 232448 bytes of shared memory, TMA loads and wgmma.
    (90, 2, 64, "forward"): _tma((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3)),
    (90, 2, 128, "forward"): _tma((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)),
    (90, 2, 256, "forward"): _tma((128, 64, 8, 2), (64, 64, 4, 2)),
    (90, 2, 512, "forward"): _rows((64, 32, 8, 2), (32, 16, 4, 2), (16, 16, 4, 2)),
    (90, 2, 64, "dkdv"): _tma((64, 128, 8, 2), (64, 64, 4, 2)),
    (90, 2, 128, "dkdv"): _rows((64, 128, 8, 2), (64, 64, 4, 2)),
    (90, 2, 256, "dkdv"): _rows((64, 64, 8, 1), (32, 32, 4, 2)),
    (90, 2, 512, "dkdv"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (90, 2, 64, "dq"): _tma((128, 64, 8, 3), (64, 64, 4, 2)),
    (90, 2, 128, "dq"): _tma((128, 64, 8, 3), (64, 64, 4, 2)),
    (90, 2, 256, "dq"): _tma((64, 64, 8, 2), (64, 32, 4, 2)),
    (90, 2, 512, "dq"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    # sm_100, 16-bit: the accumulators live in 512 columns of tensor memory.
    (100, 2, 64, "forward"): _tma((128, 64, 8, 3), (128, 64, 4, 2)),
    (100, 2, 128, "forward"): _tma((128, 128, 8, 2), (128, 64, 4, 2)),
    (100, 2, 256, "forward"): _tma((128, 64, 8, 2), (64, 64, 4, 1)),
    (100, 2, 512, "forward"): _rows((32, 16, 4, 2), (16, 16, 4, 2)),
    (100, 2, 64, "dkdv"): _tma((64, 64, 4, 2), (64, 64, 8, 1)),
    (100, 2, 128, "dkdv"): _tma((64, 64, 8, 2), (64, 64, 4, 1)),
    (100, 2, 256, "dkdv"): _rows((32, 32, 8, 1), (16, 32, 4, 1)),
    (100, 2, 512, "dkdv"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (100, 2, 64, "dq"): _tma((128, 64, 8, 2), (64, 64, 4, 2)),
    (100, 2, 128, "dq"): _tma((128, 64, 8, 2), (64, 64, 4, 2)),
    (100, 2, 256, "dq"): _rows((32, 32, 4, 1), (16, 32, 4, 1)),
    (100, 2, 512, "dq"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
}  # fmt: skip

# float32 operands (ieee: FMA units; tf32: tensor cores) need twice the room: the same rows serve every architecture.
_FLOAT32: dict[tuple[int, str], tuple[TileConfig, ...]] = {
    (64, "forward"): _rows((64, 32, 4, 2), (32, 32, 4, 2)),
    (128, "forward"): _rows((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1)),
    (256, "forward"): _rows((32, 16, 4, 2), (16, 16, 4, 1)),
    (512, "forward"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (64, "dkdv"): _rows((32, 32, 4, 2), (16, 32, 4, 1)),
    (128, "dkdv"): _rows((32, 32, 4, 1), (16, 16, 4, 1)),
    (256, "dkdv"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (512, "dkdv"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    (64, "dq"): _rows((32, 32, 4, 2), (32, 16, 4, 1)),
    (128, "dq"): _rows((32, 32, 4, 1), (16, 16, 4, 1)),
    (256, "dq"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (512, "dq"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
}


def head_dim_row(qk_pad: int, v_pad: int) -> int:
    """The head dim whose rows serve a kernel with these padded head dims."""
    return max(64, qk_pad, v_pad)


def candidates(arch: int, element: int, qk_pad: int, v_pad: int, which: str, rows: int | None) -> list[TileConfig]:
    """The configurations to try for one kernel, best first.

    Args:
        arch: 80, 90 or 100.
        element: bytes of one operand element, 2 or 4.
        qk_pad, v_pad: padded head dims.
        which: one of :data:`PASSES`.
        rows: seqlen_q times the heads packed into a tile where known: a forward tile need not be taller.
    """
    dim = head_dim_row(qk_pad, v_pad)
    kind = "dq" if which == "rows" else which
    found = _FLOAT32[dim, kind] if element == 4 else _TABLE[arch, element, dim, kind]
    if which == "rows":
        found = tuple(replace(c, tma=False, num_stages=1) for c in found)
    if which == "forward" and rows is not None and rows <= 64 and element == 2:
        found = (*dict.fromkeys(_short(c, rows) for c in found),)
    return list(found)


def _short(config: TileConfig, rows: int) -> TileConfig:
    """A configuration for few queries: a tile no taller than they need, and one warp for every 16 rows up to 4."""
    block_m = max(16, 1 << (rows - 1).bit_length())
    if block_m >= config.block_m:
        return config
    return replace(config, block_m=block_m, num_warps=4, tma=False, warp_specialize=False)
