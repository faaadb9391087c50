"""Tile configurations by (architecture, operand size, head dim, pass).

Each row lists candidates, best first. Without max-autotune the first one that compiles is taken; with it all are timed.
Of the first ones, benchmarks/notes/aot.md shows what each device of a family makes of them: no spills, and the products of the
architecture, for plain and causal programs of which no length is known.
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
        splits: programs that share the keys of a tile of queries (forward; :mod:`fa_inductor.templates.splits`).
        poly_degree: degree, 3 or 4, of the polynomial that computes exp2 in the forward for a part of the scores; 0: none.
        poly_quarters: quarters of a tile's keys, 1 to 4, that it computes.
        rescale_threshold: the forward rescales its sums only where the maximum of a row has grown by more than this power of 2
            (8: sums of at most 256 times as much); 0: whenever it grows.
        dp_place: where the dK/dV kernel starts the product of V and dO: after that for dV (``dv``), between the weights and that
            (``weights``: dV is added while dS is computed) or with the scores (``score``: more registers where the program
            computes something of a score).
        pointers_once: load tiles that stay for a whole program (backward) through pointers. With a tensor descriptor each
            of them is waited for before the next is asked for, which counts where few tiles follow.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    section: int = 8
    tma: bool = False
    splits: int = 1
    poly_degree: int = 0
    poly_quarters: int = 1
    rescale_threshold: int = 0
    dp_place: str = "dv"
    pointers_once: bool = False


def _rows(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*r) for r in rows)


def _tma(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*r, tma=True) for r in rows)


def _early(row: tuple[int, int, int, int], place: str = "weights") -> tuple[TileConfig, ...]:
    """dK/dV with dP before dV. Measured against each other in one run: benchmarks/notes/general_backward.md."""
    return (TileConfig(*row, tma=True, dp_place=place),)


def _once(row: tuple[int, int, int, int], place: str = "dv") -> tuple[TileConfig, ...]:
    return (TileConfig(*row, tma=True, dp_place=place, pointers_once=True),)


def _thinned(*rows: tuple[int, int, int, int]) -> tuple[TileConfig, ...]:
    """Each with a quarter of exp2 as a polynomial and with the conditional rescale.

    Neither is a default, and nothing was run on sm_100 or sm_103: see benchmarks/notes/roofline.md. What the compiler makes of
    them takes 10 % more instructions a step, and by the model instructions are what bounds these kernels, not exponentials.
    With max-autotune the device decides.
    """
    found = _tma(*rows)
    return (*(replace(c, poly_degree=3) for c in found), *(replace(c, rescale_threshold=8) for c in found))


# (arch, bytes per element, padded head dim, pass) -> (block_m, block_n, num_warps, num_stages), ...
#
# sm_90 at head dims 64 and 128: measured with benchmarks/tune_tiles.py on an H200 (torch 2.11, triton 3.6), 16384
# tokens, hidden size 2048, S = 4096, TFLOP/s of the kernel alone in brackets. The other rows are the tiles that the model
# of benchmarks/roofline.py ranks first among those that compile ahead of time without spills; nothing was timed for them.
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
    (90, 2, 64, "dkdv"): (*_once((64, 64, 4, 2), "score"), *_tma((32, 64, 4, 2)), *_rows((64, 64, 4, 3))),  # 569 497 487
    (90, 2, 128, "dkdv"): (*_once((64, 64, 4, 2), "score"), *_rows((64, 128, 8, 3), (64, 64, 4, 2))),  # 598 524 442
    # With two stages 16 bytes spill (triton 3.7), and "score" 8, and yet they are the fastest: 261 323 322.
    (90, 2, 256, "dkdv"): (*_tma((64, 64, 8, 1), (64, 64, 8, 2)), *_early((64, 64, 8, 2), "score")),
    (90, 2, 512, "dkdv"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    (90, 2, 64, "dq"): (*_tma((64, 64, 4, 2)), *_rows((128, 64, 8, 3)), *_tma((128, 64, 8, 3))),  # 646 631 618
    (90, 2, 128, "dq"): (*_once((128, 64, 8, 3)), *_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3))),  # 659 638 614
    (90, 2, 256, "dq"): (*_tma((64, 64, 4, 2)), *_rows((128, 32, 8, 2)), *_tma((64, 32, 4, 2))),  # causal: 440 437 310
    (90, 2, 512, "dq"): _rows((16, 16, 8, 1), (16, 16, 4, 1)),
    # sm_100, 16-bit: the accumulators live in 512 columns of tensor memory.
    (100, 2, 64, "forward"): (*_tma((128, 64, 8, 3), (128, 64, 4, 2)), *_thinned((128, 64, 8, 3))),
    (100, 2, 128, "forward"): (*_tma((128, 128, 8, 2), (128, 64, 4, 2)), *_thinned((128, 128, 8, 2))),
    (100, 2, 256, "forward"): (*_tma((128, 64, 8, 2), (64, 64, 4, 1)), *_thinned((128, 64, 8, 2))),
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

# Lean programs (Use.lean): rows that replace those above. With captures, dropout, a window or a length in the mask most of them
# spill, 8 to 900 bytes and more. Model (benchmarks/roofline.py), causal: 1.14 to 3 times the rows above; nothing was timed.
_LEAN: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (80, 2, 256, "dkdv"): _rows((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2)),
    (80, 2, 64, "dq"): _rows((128, 32, 4, 2), (64, 32, 4, 2), (64, 64, 4, 2)),
    (80, 2, 128, "dq"): _rows((64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
    (80, 2, 256, "dq"): _rows((64, 64, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2)),
    (100, 2, 64, "forward"): (*_tma((128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 2)), *_thinned((128, 64, 4, 3))),
    (100, 2, 64, "dkdv"): _tma((64, 128, 4, 2), (64, 128, 8, 2), (64, 64, 4, 2)),
    (100, 2, 128, "dkdv"): _tma((64, 128, 8, 3), (64, 128, 8, 1), (64, 64, 8, 2)),
    (100, 2, 256, "dkdv"): (*_tma((64, 64, 8, 1)), *_rows((32, 32, 8, 1))),
    (100, 2, 64, "dq"): _tma((128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2)),
    (100, 2, 256, "dq"): (*_tma((128, 64, 8, 1)), *_rows((32, 32, 4, 1))),
}  # fmt: skip

# Lean programs whose mask leaves tiles out: rows that replace those of lean ones. With two stages 8 bytes spill at known lengths.
_LEAN_MASKED: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (80, 2, 128, "dq"): _rows((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2)),
}

# sm_86, sm_89 and sm_12x: 99 KiB of shared memory. Rows that replace those above there: what fits, and what does not spill on
# sm_120, which needs a few registers more than sm_80. Lean programs have no rows of their own: by the model their products
# bound these devices, whatever the tile.
_SMALL: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (80, 2, 128, "forward"): _rows((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 2)),
    (80, 2, 256, "forward"): _rows((64, 32, 8, 2), (32, 32, 4, 2)),
    (80, 2, 64, "dkdv"): _rows((64, 32, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2)),
}  # fmt: skip

#: Most shared memory, in bytes, of one program with the rows of a family. A device with less takes those of :data:`_SMALL`.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

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
    (90, 2, 64, "dkdv"): (*_once((64, 64, 4, 2), "score"), *_tma((32, 64, 4, 2)), *_rows((32, 64, 4, 3))),  # causal: 520 458
    (90, 2, 128, "dkdv"): (*_once((64, 64, 4, 2), "score"), *_early((64, 64, 4, 2)), *_rows((64, 64, 4, 2))),  # causal: 614 579 499
    # Of these only the first has no spills (triton 3.7; 32, 16 bytes); with 3.6 all have. Causal: 248 269 287.
    (90, 2, 256, "dkdv"): (*_once((64, 64, 8, 1)), *_tma((64, 64, 8, 1)), *_once((64, 64, 8, 2), "score")),
    (90, 2, 64, "dq"): (*_rows((64, 64, 4, 3), (128, 64, 4, 3)), *_tma((64, 64, 4, 2))),  # causal: 598 578 559
    (90, 2, 128, "dq"): (*_rows((128, 64, 8, 3)), *_tma((128, 32, 8, 3)), *_rows((64, 64, 4, 2))),  # causal: 598 576 573
}  # fmt: skip

# Masks that compare what is captured of a query and of a key: few tiles a block. Measured with 8 documents in S.
_DOCUMENTS: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (90, 2, 128, "dkdv"): (*_rows((64, 64, 4, 2)), *_tma((64, 64, 4, 2)), *_rows((64, 128, 8, 3))),  # 278 261 260
    (90, 2, 128, "dq"): _rows((64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 3)),  # 293 290 275
}  # fmt: skip

# The same in long sequences, whose documents may be long too: 23 of log-normal length in 32768 tokens (benchmarks/_packed.py).
LONG = 8192
_LONG_DOCUMENTS: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    **_DOCUMENTS,
    (90, 2, 128, "dkdv"): (*_tma((64, 64, 4, 2)), *_rows((64, 128, 8, 3), (64, 64, 4, 2))),  # 491 440 433
}  # fmt: skip

# Programs that read a bias or mask of the scores' size: its tile needs registers too. Measured with a bias [H, S, S].
_LOADS_TILES: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (90, 2, 128, "forward"): (*_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3)), *_tma((64, 64, 4, 2))),  # 413 401 340
    (90, 2, 128, "dkdv"): (*_early((64, 64, 4, 2)), *_tma((64, 64, 4, 3)), *_rows((64, 128, 8, 3))),  # 514 414 325
    (90, 2, 128, "dq"): (*_tma((128, 64, 8, 3)), *_rows((128, 64, 8, 3)), *_tma((64, 64, 4, 2))),  # 555 539 494
}

# The same for short sequences and head dims up to 32, as windows of a Swin transformer have: 16 heads of 256 windows of 144 tokens,
# D32, microseconds with a bias [H, 144, 144], and with a mask [4, 144, 144] of some windows besides: 192 317, 193 352, 208 327.
# The first of _TABLE takes 310 647, cuDNN with the sum of both in memory 347 to 378.
WINDOW, WINDOW_DIM = 256, 32
_LOADS_WINDOWS: dict[tuple[int, int, int, str], tuple[TileConfig, ...]] = {
    (90, 2, 64, "forward"): (*_tma((64, 32, 2, 2), (64, 32, 4, 3)), *_rows((16, 32, 1, 3))),
}

# Lengths that are not numbers when the kernel is compiled, (..., masked): their arithmetic takes the registers that the measured
# tiles lack then (8 bytes spill at 128, 64 to 88 at 256, and at 64 two programs fit instead of three). At 128 the third of an
# earlier run, 474 467 455 causal. At 256 nothing that was measured has wgmma and no spills: this one was not timed.
_UNKNOWN_128 = (*_tma((32, 64, 4, 2), (64, 64, 4, 2)), *_rows((64, 128, 8, 3)))
_UNKNOWN_256 = (*_tma((32, 64, 8, 1), (64, 64, 8, 1)), *_rows((64, 32, 8, 2)))
_UNKNOWN: dict[tuple[int, int, int, str, bool], tuple[TileConfig, ...]] = {
    (90, 2, 64, "dkdv", True): (*_tma((32, 64, 4, 2)), *_rows((32, 64, 4, 3), (64, 64, 4, 2))),  # lengths known: 474 460 440
    (90, 2, 128, "dkdv", False): _UNKNOWN_128,
    (90, 2, 128, "dkdv", True): _UNKNOWN_128,
    (90, 2, 256, "dkdv", False): _UNKNOWN_256,
    (90, 2, 256, "dkdv", True): _UNKNOWN_256,
}

# Short sequences: (..., masked) rows. Measured at S = 512.
SHORT = 1024
_SHORT: dict[tuple[int, int, int, str, bool], tuple[TileConfig, ...]] = {
    (90, 2, 128, "forward", False): (*_rows((64, 64, 4, 3)), *_tma((128, 64, 4, 2))),  # 366 363
    (90, 2, 128, "dq", False): (*_once((128, 32, 8, 3)), *_tma((128, 32, 8, 3)), *_rows((128, 64, 8, 3))),  # 483 447 428
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
    (64, "rows"): _rows((32, 32, 8, 1), (32, 16, 4, 1)),
    (128, "rows"): _rows((32, 32, 8, 1), (32, 16, 4, 1)),
    (256, "rows"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
    (512, "rows"): _rows((16, 16, 4, 1), (16, 16, 8, 1)),
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
        lean: whether next to nothing is computed of a score (Program.lean), and no loop over the heads of a group is around it.
        shared: bytes of shared memory that one program may have on the device; None: as much as :data:`SHARED` says.
        pages: whether keys and values are read through a table of pages.
        bits: whether keys or values are stored in 8 bits.
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
    lean: bool = False
    shared: int | None = None
    pages: bool = False
    bits: bool = False


def candidates(use: Use, which: str) -> list[TileConfig]:
    """The configurations to try for one kernel (``which`` of :data:`PASSES`), best first."""
    dim, kind = max(64, use.qk_pad, use.v_pad), "dq" if which == "rows" else which
    key = (use.arch, use.element, dim, kind)
    by_mask = (*key, use.masked)
    small = use.shared is not None and use.shared < SHARED[use.arch]
    if use.element == 4:
        found = _FLOAT32[dim, which]
    elif small:
        found = _SMALL.get(key, _TABLE[key])
    elif use.lean and key in _LEAN:
        found = (_LEAN_MASKED if use.masked and key in _LEAN_MASKED else _LEAN)[key]
    elif use.loads_tiles and _is_window(use) and key in _LOADS_WINDOWS:
        found = _LOADS_WINDOWS[key]
    elif use.loads_tiles and key in _LOADS_TILES:
        found = _LOADS_TILES[key]
    elif use.documents and key in _DOCUMENTS:
        found = (_LONG_DOCUMENTS if use.keys is not None and use.keys > LONG else _DOCUMENTS)[key]
    elif use.keys is None and by_mask in _UNKNOWN:
        found = _UNKNOWN[by_mask]
    elif use.keys is not None and use.keys <= SHORT and by_mask in _SHORT:
        found = _SHORT[by_mask]
    else:
        found = _MASKED.get(key, _TABLE[key]) if use.masked else _TABLE[key]
    if which == "rows":
        found = tuple(replace(c, tma=False, num_stages=1) for c in found)
    if which == "forward" and use.rows is not None and use.rows <= FEW_ROWS and use.element == 2:
        found = tuple(_short(c, use.rows) for c in found)
        few = few_rows(use)
        found = (few, *found) if few else found
    return list(dict.fromkeys(found))


def _is_window(use: Use) -> bool:
    return use.keys is not None and use.keys <= WINDOW and max(use.qk_pad, use.v_pad) <= WINDOW_DIM


#: Most queries, over the heads of a group, for which a tile is made for streaming K and V past it.
FEW_ROWS = 64


#: Whether there are pages, whether elements are stored in 8 bits -> (keys, fewest warps, stages) of a decoding step's tile.
#: 16 x 8192 keys, the kernel alone, GB/s of what is stored (plain: 3949): pages of 16 3914 and with 32 keys 3757, of 64 3930
#: and 3819; int8 2494 and with two warps 2403; int8 in pages of 16 2259 and with 128 keys and four warps 2203.
_FEW_ROWS = {(False, False): (32, 2, 3), (True, False): (64, 2, 3), (False, True): (64, 4, 3), (True, True): (64, 2, 3)}


def few_rows(use: Use) -> TileConfig | None:
    """The tile for a decoding step: reading K and V is all there is to do, and narrow tiles keep most of it in flight.

    None where so many queries of so many elements do not fit.

    GB/s of K and V on an H200 (torch 2.11, triton 3.6), GQA 32:8, D128, the kernel alone; of tiles with 32 keys and 2 warps:
    16 x 8192 keys 3981, 1 x 65536 keys 3573, 16 x 32768 keys 4368, and with 8 queries 8 x 8192 keys 3469. A copy: 4251.
    """
    assert use.rows is not None
    block_m, dim = max(16, 1 << (use.rows - 1).bit_length()), max(64, use.qk_pad, use.v_pad)
    if block_m * dim > 64 * 128:
        return None  # The accumulator and a share of the keys for each program would spill.
    keys, warps, stages = _FEW_ROWS[use.pages, use.bits]
    # As few warps as hold the tile in registers.
    num_warps = max(warps, block_m * dim // (1024 if dim > 128 or block_m > 32 else 2048))
    return TileConfig(block_m, 16 if dim > 256 else keys, num_warps, stages if dim <= 128 else 2)


#: Padded head dim -> (keys, warps, stages) of a tile for a decoding step of which one program runs on a multiprocessor.
_DEEP_ROWS = {64: (128, 4, 4), 128: (128, 4, 3)}
#: Most rows of such a tile.
DEEP_ROWS = 32


def deep_rows(use: Use) -> TileConfig | None:
    """The tile for a decoding step with one program on each multiprocessor, in place of several with the tile of :func:`few_rows`.

    As much of K and V is on its way, in fewer parts; with as many tiles as multiprocessors nothing is left to merge. None where
    that is not known to be faster.

    Microseconds on an H200 (torch 2.11, triton 3.6), merge included, of this tile, that of few_rows and cuDNN. GQA 32:8, D128:
    16 x 8192 keys 133.9 138.3 135.5, 1 x 65536 78.7 78.8 79.8, 16 x 32768 486.8 500.5 486.8, 8 x 8192 with 8 queries 80.5 87.5
    200.9, 4 x 32768 under a position 137.2 138.2 138.9, pages of 16 134.4 139.2. D64: 16 x 8192 keys 75.6 97.6 82.8, 1 x 65536
    48.3 49.8 47.8. Slower: int8 119.5 108.8, 512 tiles of 2048 keys 136.4 134.4, 4 x 2048 keys 20.8 20.1.
    """
    dim = max(64, use.qk_pad, use.v_pad)
    if use.arch != 90 or use.element != 2 or dim not in _DEEP_ROWS or use.bits or use.loads_tiles:
        return None
    if use.rows is None or use.rows > DEEP_ROWS or (use.shared is not None and use.shared < SHARED[use.arch]):
        return None
    return TileConfig(max(16, 1 << (use.rows - 1).bit_length()), *_DEEP_ROWS[dim])


def _short(config: TileConfig, rows: int) -> TileConfig:
    """A configuration for few queries: a tile no taller than they need, loaded through pointers."""
    block_m = max(16, 1 << (rows - 1).bit_length())
    if block_m >= config.block_m:
        return config
    return replace(config, block_m=block_m, num_warps=4, tma=False)
