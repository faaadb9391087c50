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
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    section: int = 8
    tma: bool = False


def _rows(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*r) for r in rows)


def _tma(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*r, tma=True) for r in rows)


# (arch, bytes per element, padded head dim, pass) -> (block_m, block_n, num_warps, num_stages), ...
#
# sm_90 at head dims 64 and 128: measured with benchmarks/tune_tiles.py on an H200 (torch 2.11, triton 3.6), 16384
# tokens, hidden size 2048, S = 4096, TFLOP/s of the kernel alone in brackets. The other rows are the tiles of those,
# or of FlashAttention-2, halved until ahead-of-time compilation shows no spills; nothing was timed for them.
_TABLE: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    # sm_80, 16-bit: 166912 bytes of shared memory (163 KiB), cp.async stages, mma.sync.
    (80, 2, 64, "forward"): _rows((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3)),
    (80, 2, 128, "forward"): _rows((128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 4, 3)),
    (80, 2, 256, "forward"): _rows((64, 64, 8, 2), (32, 32, 4, 2), (64, 32, 4, 2)),
    (80, 2, 512, "forward"): _rows((32, 16, 4, 2), (16, 16, 4, 2)),
    (80, 2, 64, "dkdv"): _rows((32, 64, 4, 2), (64, 64, 4, 2)),
    (80, 2, 128, "dkdv"): _rows((64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2)),
    (80, 2, 256, "dkdv"): _rows((32, 32, 8, 2), (16, 32, 4, 2)),
    (80, 2, 512, "dkdv"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    (80, 2, 64, "dq"): _rows((64, 32, 4, 2), (64, 64, 4, 2)),
    (80, 2, 128, "dq"): _rows((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    (80, 2, 256, "dq"): _rows((32, 32, 4, 2), (16, 32, 4, 2)),
    (80, 2, 512, "dq"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    # sm_90, 16-bit: 232448 bytes of shared memory, TMA loads and wgmma.
    (90, 2, 64, "forward"): (*_tma((64, 128, 4, 2)), *_rows((64, 128, 4, 2), (128, 64, 4, 3))),  # 441 439 434
    (90, 2, 128, "forward"): (*_tma((128, 64, 4, 2)), *_rows((128, 128, 8, 3), (64, 64, 4, 3))),  # 541 506 467
    # At 256, causal: 488 483 361.
    (90, 2, 256, "forward"): (*_tma((128, 64, 8, 2)), *_rows((128, 64, 8, 2)), *_tma((64, 64, 4, 2))),
    (90, 2, 512, "forward"): _rows((32, 16, 4, 2), (16, 16, 4, 2)),
    (90, 2, 64, "dkdv"): (*_tma((64, 64, 4, 2), (32, 64, 4, 2)), *_rows((64, 64, 4, 3))),  # 552 517 487
    (90, 2, 128, "dkdv"): (*_tma((64, 64, 4, 2)), *_rows((64, 128, 8, 3), (64, 64, 4, 2))),  # 616 572 526
    (90, 2, 256, "dkdv"): (*_tma((64, 64, 8, 2)), *_rows((64, 32, 8, 2), (32, 32, 8, 2))),  # causal: 244 239 214
    (90, 2, 512, "dkdv"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    (90, 2, 64, "dq"): (*_tma((64, 64, 4, 2)), *_rows((128, 64, 8, 3)), *_tma((128, 64, 8, 3))),  # 646 631 618
    (90, 2, 128, "dq"): (*_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3), (64, 64, 4, 2))),  # 648 607 568
    (90, 2, 256, "dq"): (*_tma((64, 64, 4, 2)), *_rows((128, 32, 8, 2)), *_tma((64, 32, 4, 2))),  # causal: 440 437 310
    (90, 2, 512, "dq"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    # sm_100, 16-bit: the accumulators live in 512 columns of tensor memory.
    (100, 2, 64, "forward"): _tma((128, 64, 8, 3), (128, 64, 4, 2)),
    (100, 2, 128, "forward"): _tma((128, 128, 8, 2), (128, 64, 4, 2)),
    (100, 2, 256, "forward"): _tma((128, 64, 8, 2), (64, 64, 4, 1)),
    (100, 2, 512, "forward"): _rows((32, 16, 4, 2), (16, 16, 4, 2)),
    (100, 2, 64, "dkdv"): _tma((64, 64, 4, 2), (64, 64, 8, 1)),
    (100, 2, 128, "dkdv"): _tma((64, 64, 8, 2), (64, 64, 4, 1)),
    (100, 2, 256, "dkdv"): _rows((32, 32, 8, 1), (16, 32, 4, 1)),
    (100, 2, 512, "dkdv"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    (100, 2, 64, "dq"): _tma((128, 64, 8, 2), (64, 64, 4, 2)),
    (100, 2, 128, "dq"): _tma((128, 64, 8, 2), (64, 64, 4, 2)),
    (100, 2, 256, "dq"): _rows((32, 32, 4, 1), (16, 32, 4, 1)),
    (100, 2, 512, "dq"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
}  # fmt: skip

# FP8 forward. Tiles of the 16-bit rows, halved until ahead-of-time compilation shows no spills.
_TABLE |= {
    (80, 1, 64, "forward"): _rows((128, 64, 8, 3), (64, 64, 4, 3)),
    (80, 1, 128, "forward"): _rows((128, 64, 8, 3), (64, 64, 4, 2)),
    (80, 1, 256, "forward"): _rows((64, 64, 8, 2), (64, 32, 4, 2)),
    (90, 1, 64, "forward"): (*_tma((128, 64, 4, 3)), *_rows((128, 64, 4, 3), (64, 64, 4, 3))),
    (90, 1, 128, "forward"): (*_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3), (64, 64, 4, 3))),
    (90, 1, 256, "forward"): (*_tma((64, 64, 8, 2)), *_rows((64, 64, 8, 2), (64, 32, 4, 2))),
    (100, 1, 64, "forward"): _tma((128, 64, 8, 3), (128, 64, 4, 2)),
    (100, 1, 128, "forward"): _tma((128, 64, 8, 3), (128, 64, 4, 2)),
    (100, 1, 256, "forward"): _tma((128, 64, 8, 2), (64, 64, 4, 1)),
}

# Programs whose mask leaves tiles out: rows that replace those above. Smaller tiles lose less at the mask's edge.
_MASKED: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (90, 2, 64, "forward"): (*_rows((64, 64, 4, 3), (128, 64, 4, 3)), *_tma((64, 128, 4, 2))),  # causal: 425 413 409
    (90, 2, 128, "forward"): (*_rows((64, 64, 4, 3)), *_tma((128, 64, 4, 2), (64, 64, 4, 3))),  # causal: 491 480 464
    (90, 2, 256, "forward"): (*_rows((128, 64, 8, 2)), *_tma((128, 64, 8, 2), (64, 64, 4, 2))),  # causal: 536 489
    (90, 2, 64, "dkdv"): (*_tma((32, 64, 4, 2)), *_rows((32, 64, 4, 3), (64, 64, 4, 2))),  # causal: 474 460 440
    (90, 2, 128, "dkdv"): (*_tma((64, 64, 4, 2)), *_rows((64, 64, 4, 2), (64, 128, 8, 3))),  # causal: 558 522, 592 522
    (90, 2, 256, "dkdv"): (*_tma((64, 64, 8, 1), (64, 64, 8, 2)), *_rows((32, 32, 8, 2))),  # causal: 267 257
    (90, 2, 64, "dq"): (*_rows((64, 64, 4, 3), (128, 64, 4, 3)), *_tma((64, 64, 4, 2))),  # causal: 598 578 559
    (90, 2, 128, "dq"): (*_rows((128, 64, 8, 3)), *_tma((128, 32, 8, 3)), *_rows((64, 64, 4, 2))),  # causal: 598 576 573
}  # fmt: skip

# Masks that compare what is captured of a query and of a key: few tiles a block. Measured with 8 documents in S.
_DOCUMENTS: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (90, 2, 128, "dkdv"): (*_rows((64, 64, 4, 2)), *_tma((64, 64, 4, 2)), *_rows((64, 128, 8, 3))),  # 278 261 260
    (90, 2, 128, "dq"): _rows((64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 3)),  # 293 290 275
}  # fmt: skip

# Programs that read a bias or mask of the scores' size: its tile needs registers too. Measured with a bias [H, S, S].
_LOADS_TILES: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (90, 2, 128, "forward"): (*_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3)), *_tma((64, 64, 4, 2))),  # 413 401 340
    (90, 2, 128, "dkdv"): (*_tma((64, 64, 4, 2), (64, 64, 4, 3)), *_rows((64, 128, 8, 3))),  # 514 414 325
    (90, 2, 128, "dq"): (*_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3)), *_tma((64, 64, 4, 2))),  # 555 539 494
}

# Short sequences: (..., masked) rows. Measured at S = 512.
SHORT = 1024
_SHORT: dict[tuple[int, int, int, str, bool], tuple[TileConfig, ...]] = {
    (90, 2, 128, "forward", False): (*_rows((64, 64, 4, 3)), *_tma((128, 64, 4, 2))),  # 366 363
    (90, 2, 128, "dkdv", False): (*_rows((64, 128, 8, 3)), *_tma((64, 64, 4, 2))),  # 418 403
    (90, 2, 128, "dkdv", True): (*_rows((64, 64, 4, 2), (64, 128, 8, 3)), *_tma((64, 64, 4, 2))),  # 319 288 279
    (90, 2, 128, "dq", False): (*_tma((128, 32, 8, 3)), *_rows((128, 64, 8, 3), (64, 64, 4, 2))),  # 441 432 429
    (90, 2, 128, "dq", True): _rows((64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3)),  # 303 291 244
}

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


@dataclass(frozen=True)
class Use:
    """What a configuration is for.

    Attributes:
        arch: 80, 90 or 100.
        element: bytes of one operand element, 1, 2 or 4.
        qk_pad, v_pad: padded head dims.
        rows: seqlen_q times the query heads of a group, where it is a number.
        keys: seqlen_kv where it is a number.
        masked: whether the mask leaves tiles out.
        loads_tiles: whether a tensor of the scores' size is read.
        documents: whether the mask compares something captured of the query with something captured of the key.
    """

    arch: int
    element: int
    qk_pad: int
    v_pad: int
    rows: int | None = None
    keys: int | None = None
    masked: bool = False
    loads_tiles: bool = False
    documents: bool = False


def candidates(use: Use, which: str) -> list[TileConfig]:
    """The configurations to try for one kernel (``which`` of :data:`PASSES`), best first."""
    dim, kind = max(64, use.qk_pad, use.v_pad), "dq" if which == "rows" else which
    key = (use.arch, use.element, dim, kind)
    short = (*key, use.masked)
    if use.element == 4:
        found = _FLOAT32[dim, kind]
    elif use.loads_tiles and key in _LOADS_TILES:
        found = _LOADS_TILES[key]
    elif use.documents and key in _DOCUMENTS:
        found = _DOCUMENTS[key]
    elif use.keys is not None and use.keys <= SHORT and short in _SHORT:
        found = _SHORT[short]
    else:
        found = _MASKED.get(key, _TABLE[key]) if use.masked else _TABLE[key]
    if which == "rows":
        found = tuple(replace(c, tma=False, num_stages=1) for c in found)
    if which == "forward" and use.rows is not None and use.rows <= 64 and use.element == 2:
        found = tuple(_short(c, use.rows) for c in found)
    return list(dict.fromkeys(found))


def _short(config: TileConfig, rows: int) -> TileConfig:
    """A configuration for few queries: a tile no taller than they need, loaded through pointers."""
    block_m = max(16, 1 << (rows - 1).bit_length())
    if block_m >= config.block_m:
        return config
    return replace(config, block_m=block_m, num_warps=4, tma=False)
