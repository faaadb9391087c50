"""Buffers that the lowerings ask Inductor for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def layout_like(like: Any, size: Sequence[Any], stride: Sequence[Any] | None, dtype: Any = None) -> Any:
    """The layout of a buffer on ``like``'s device, contiguous without ``stride``, of ``like``'s dtype without ``dtype``."""
    from torch._inductor import ir

    return ir.FixedLayout(like.get_device(), dtype or like.get_dtype(), list(size), stride and list(stride))


def empty_like(like: Any, size: Sequence[Any], stride: Sequence[Any] | None, dtype: Any = None) -> Any:
    """A realised buffer with :func:`layout_like`'s layout, whose elements nobody has set."""
    from torch._inductor.lowering import empty_strided

    made = empty_strided(list(size), stride, dtype=dtype or like.get_dtype(), device=like.get_device())
    made.realize()
    return made


def contiguous(x: Any) -> Any:
    """``x`` as a contiguous buffer, copied only where it has other strides already.

    For what kernels address without strides: where Inductor may choose a layout, it pads strides above 1024 elements to multiples
    of 128 bytes (torch._inductor.config.comprehensive_padding).
    """
    from torch._inductor import ir

    x.realize()
    x = ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, ir.FlexibleLayout.contiguous_strides(x.get_size())))
    x.freeze_layout()
    return x


def zeros_like(like: Any) -> Any:
    """A zeroed contiguous float32 buffer of ``like``'s shape, for a kernel to add into."""
    import torch
    from torch._inductor.lowering import lowerings

    made = lowerings[torch.ops.aten.full](
        list(like.get_size()), 0.0, dtype=torch.float32, layout=None, device=like.get_device(), pin_memory=False
    )
    made.realize()
    return made
