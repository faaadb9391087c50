"""Few queries against many keys inside Inductor: how many programs share the keys, and what they wrote put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_inductor.lowering_operands import Operands, hint, number
from fa_inductor.templates import configs
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.splits import merge, one_each, split_count


def merged(parts: Any, stats: Any, dtype: Any, strides: Sequence[Any], unit: float, dead_zero: bool) -> tuple[Any, Any]:
    """(out, lse) of what the programs that share a tile's keys have written."""
    from torch._inductor import ir
    from torch._inductor.lowering import to_dtype

    out, lse = merge(parts, stats, parts.get_size(), unit, dead_zero, Lowerings())
    out = to_dtype(out, dtype)
    # Left to itself it becomes contiguous, and where another layout was asked for, folding the heads one kernel more.
    out.realize()
    return ir.ExternKernel.require_exact_strides(out, strides), lse


class Lowerings:
    """Inductor's lowerings under the names of the ATen functions."""

    def __getattr__(self, name: str) -> Any:
        import torch
        from torch._inductor.lowering import lowerings

        return lowerings[getattr(torch.ops.aten, name)]


def shared_out(
    o: Operands, problem: Problem, found: list[configs.TileConfig], deep: configs.TileConfig | None, uneven: bool = False
) -> tuple[list[configs.TileConfig], int]:
    """(configurations, programs that share the keys of a tile of queries), from the sizes at hand where they are run-time sizes.

    Args:
        found: configurations of which several programs run on a multiprocessor, best first.
        deep: one of which a single program does; it comes first where one wave of them keeps the device busy.
        uneven: whether sequences may differ in how many keys they see.
    """
    import torch

    known = _tiles(o, problem, found[0])
    if known is None:
        return found, 1
    blocks, cols = known
    processors = torch.cuda.get_device_properties(o.q.get_device()).multi_processor_count
    one = one_each(blocks, cols, processors, uneven and hint(o.extents[0]) != 1) if deep is not None else 0
    if deep is not None and one:
        return [deep, *found], one
    return found, split_count(blocks, cols, processors, problem.cache)


def _tiles(o: Operands, problem: Problem, config: configs.TileConfig) -> tuple[int, int] | None:
    """(tiles of queries over all heads, seqlen_kv); None where their keys are not to be shared out.

    Each part is as large as the output, in float32. A graph traced with few queries would hold many times the output of all
    those that it may be run with: their number must be known, and the batch size too where they are more than few.
    """
    from fa_inductor.templates.forward import packs_heads

    if problem.rows is None or (number(o.extents[0]) is None and problem.rows * problem.group > configs.FEW_ROWS):
        return None
    batch, heads, kv_heads, rows, cols = (hint(x) for x in o.extents)
    if batch is None or heads is None or kv_heads is None or rows is None or cols is None:
        return None
    pack = packs_heads(problem, config)
    tiles = -(-(rows * problem.group if pack else rows) // config.block_m)
    return tiles * batch * (kv_heads if pack else heads), cols
