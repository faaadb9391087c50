"""Few queries against many keys: the keys of a tile of queries are shared out, and the parts merged.

A decoding step has one tile of queries a key head: too few programs to fill a GPU or to draw its memory bandwidth. The
forward kernel then runs SPLITS programs a tile (flash decoding, https://pytorch.org/blog/flash-decoding/), each with the
softmax of its own keys, and :func:`merge` weighs them by their sums of exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fa_inductor.spec import CacheForm
from fa_inductor.templates.program import Program

LN2 = math.log(2.0)
#: Programs that are wanted for each multiprocessor: measured on an H200, 16 x 8192 keys (128 tiles) 3981 GB/s with two and
#: 3845 with four; 65536 keys (8 tiles) 3531 with two and 3573 with four.
RESIDENT, RESIDENT_OF_FEW = 2, 4
#: Fewest keys of one program.
LEAST_KEYS = 256
#: Most programs: as many as Inductor reduces at once, without a loop.
MOST = 64
#: Share of the multiprocessors, in percent, that a wave of one program each must keep busy.
WHOLE_WAVE = 90
#: Programs for each multiprocessor, one after the other, where sequences differ in what they see. Measured on an H200, 16 sequences
#: of 256 to 7936 keys, microseconds: 84.6 with four, 88.2 with two, 96.0 with one.
UNEVEN = 4


#: The same for caches in pages and in 8 bits, whose conversion keeps the warps busy: 16 x 8192 int8 keys 2494 GB/s with four and
#: 2107 with two (of 128 keys), pages of 16 3914 with two and 3903 with four.
RESIDENT_PAGES, RESIDENT_BITS = 2, 4


def split_count(blocks: int, keys: int, processors: int, cache: CacheForm | None = None) -> int:
    """Programs that share a tile's keys, several on each multiprocessor.

    Args:
        blocks: tiles of queries, over all heads. keys: seqlen_kv. processors: multiprocessors of the device.
        cache: how keys and values are stored.
    """
    if blocks < 1:
        return 1
    if cache is not None:
        resident = RESIDENT_BITS if cache.k or cache.v else RESIDENT_PAGES
    else:
        resident = RESIDENT_OF_FEW if blocks * RESIDENT_OF_FEW <= processors else RESIDENT
    return _shares(blocks, keys, resident * processors)


def one_each(blocks: int, keys: int, processors: int, uneven: bool = False) -> int:
    """Programs that share a tile's keys where one at a time runs on each multiprocessor; 0 where too many would have none.

    Args as :func:`split_count`'s. uneven: whether sequences may differ in how many keys they see.
    """
    if blocks < 1:
        return 0
    splits = _shares(blocks, keys, processors)
    if not WHOLE_WAVE * processors <= 100 * blocks * splits <= 100 * processors:
        return 0
    return _shares(blocks, keys, UNEVEN * processors) if uneven else splits


def _shares(blocks: int, keys: int, programs: int) -> int:
    return max(1, min(programs // blocks, keys // LEAST_KEYS, MOST))


def unit_of(program: Program) -> float:
    """The natural logarithm's share of one unit of the kernel's running maximum."""
    return program.scale if program.wide else LN2


def merge(parts: Any, stats: Any, shape: Sequence[Any], unit: float, dead_zero: bool, aten: Any) -> tuple[Any, Any]:
    """(out [B, H, M, D] float32, lse [B, H, M]) of ``parts`` [S, B, H, M, D] and ``stats`` [2, S, B, H, M], float32.

    ``stats`` are each part's maximum, in units of ``unit`` in the natural logarithm, and its sum of exponentials. A part
    without any key has zeros, -inf and 0. Rows without any key at all are NaN, or zeros where ``dead_zero``.

    Args:
        shape: of ``parts``. aten: has the functions by ATen's names: ``torch.ops.aten``, or Inductor's lowerings of them.
    """
    maxima, sums = aten.select(stats, 0, 0), aten.select(stats, 0, 1)
    # Weights for every element anew: all reductions then run over the same elements, and Inductor makes them one kernel.
    wide_maxima, wide_sums = (aten.expand(aten.unsqueeze(x, -1), shape) for x in (maxima, sums))
    _, weight, total = _weights(wide_maxima, wide_sums, unit, aten)
    weighted = aten.sum(aten.mul(parts, weight), [0])
    divisor = aten.where(aten.eq(total, 0.0), 1.0, total) if dead_zero else total
    base, _, total = _weights(maxima, sums, unit, aten)
    return aten.div(weighted, divisor), aten.add(aten.mul(base, unit), aten.log(total))


def _weights(maxima: Any, sums: Any, unit: float, aten: Any) -> tuple[Any, Any, Any]:
    """(greatest maximum or 0 where there is none, weight of each part, sum of the weights)."""
    top = aten.amax(maxima, [0])
    base = aten.where(aten.eq(top, float("-inf")), 0.0, top)
    weight = aten.mul(sums, aten.exp(aten.mul(aten.sub(maxima, base), unit)))
    return base, weight, aten.sum(weight, [0])
