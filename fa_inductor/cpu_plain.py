"""The plain program, ``softmax(q @ k.T * scale) @ v``, by one call of ATen's flash attention for CPU.

There is nothing to evaluate in blocks, so short sequences pay too. What only the general path (:mod:`fa_inductor.cpu_flash`)
computes as eager code does is looked for in the result: rows whose logsumexp is not finite, or 0, which is how the op reports
a row of -inf, and values that are not finite.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.cpu_plan import plain_scale
from fa_inductor.spec import AttentionSpec

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _readable(*tensors: Tensor) -> bool:
    """Whether the op reads these strides right: columns side by side, rows at least a row apart."""
    return all(t.stride(3) == 1 and t.stride(2) >= t.shape[3] for t in tensors)


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operands are of one head_dim and dtype, agree with each other, hold something, and lie as the op reads them."""
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.dtype == k.dtype == v.dtype
        and q.device.type == k.device.type == v.device.type == "cpu"
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[1] % k.shape[1] == 0
        and _readable(q, k, v)
    )


@lru_cache(maxsize=1024)
def _plain(program: str) -> tuple[float | None, str]:
    """(scale, layout) by the program's text: a string is cheaper to look up than a spec."""
    spec = AttentionSpec.parse(program)
    return plain_scale(spec), spec.layout


def forward(q: Tensor, k: Tensor, v: Tensor, program: str) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a plain program on operands that :func:`fits`; None for the general path."""
    scale, layout = _plain(program)
    if scale is None:
        return None
    out, lse = FLASH(q, k, v, scale=scale)
    # Few and small ops: between large products each of them costs more than its own work.
    low, high = torch.aminmax(lse.abs())
    if not (float(low) > 0.0 and float(high) < math.inf and math.isfinite(float(out.sum(dtype=lse.dtype)))):
        return None
    return reference.with_layout(out, layout), lse.to(torch.float32).contiguous()


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, limit: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of q, k and v where every row's |lse| is below ``limit``; None for the general path."""
    scale = plain_scale(spec)
    if scale is None or not fits(q, k, v) or not (lse.abs() < limit).all():
        return None
    grad_out = grad_out if _readable(grad_out) else grad_out.contiguous()
    out = out if _readable(out) else out.contiguous()
    return FLASH_BACKWARD(grad_out, q, k, v, out, lse, 0.0, False, scale=scale)
