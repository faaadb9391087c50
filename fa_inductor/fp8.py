"""FP8 attention, for inference: its ops and what they compute, written with torch ops.

``fp8_attention`` is ``flash_attention`` (:mod:`fa_inductor.ops`) on operands cast to e4m3, one scale for each query and for each
block of keys; it has no gradient. ``format`` is ``e4m3``, or ``e4m3-rotated``: q and k are first multiplied with the normalised
Hadamard matrix, which leaves their products as they are and spreads a dimension of large values over all of them; or
``int8-e4m3``: rotated, q and k then become 8-bit integers, whose products are exact. In a compiled
graph on a GPU with FP8 units the kernels of :mod:`fa_inductor.templates` run; anything else computes :func:`rounded` operands'
attention in float32, without rounding the weights.

``fp8_operands`` casts (:mod:`fa_inductor.templates.quantise`), ``hopper_fp8_attention`` casts and runs the Gluon kernel.
``fp8_projected_...`` are the same from hidden states x [B, L, features]: q, k and v are linear layers of them, with ``weights``
[heads * head_dim, features] and ``biases`` (one each, or none), and are cast where they are computed
(:mod:`fa_inductor.templates.projection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fa_inductor import ops, reference
from fa_inductor.errors import ProgramError
from fa_inductor.templates import quantise

FORMATS = tuple(quantise.FORMATS)

_LIB = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_LIB.define(
    "fp8_attention(Tensor q, Tensor k, Tensor v, Tensor[] captures, SymInt[] sizes, str program, str kernel, str format)"
    " -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.flexible_layout,),
)
_LIB.define(
    "fp8_operands(Tensor q, Tensor k, Tensor v, str format)"
    " -> (Tensor q8, Tensor k8, Tensor v8, Tensor q_scale, Tensor k_scale, Tensor v_scale)",
    tags=(torch.Tag.flexible_layout,),
)
_LIB.define(
    "hopper_fp8_attention(Tensor q, Tensor k, Tensor v, SymInt[] sizes, str program, str format) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.flexible_layout,),
)

_LAYERS = "Tensor x, Tensor[] weights, Tensor[] biases, int heads, int kv_heads"
_LIB.define(
    f"fp8_projected_attention({_LAYERS}, Tensor[] captures, SymInt[] sizes, str program, str kernel, str format)"
    " -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.flexible_layout,),
)
_LIB.define(
    f"fp8_projected_operands({_LAYERS}, str format)"
    " -> (Tensor q8, Tensor k8, Tensor v8, Tensor q_scale, Tensor k_scale, Tensor v_scale)",
    tags=(torch.Tag.flexible_layout,),
)
_LIB.define(
    f"hopper_fp8_projected_attention({_LAYERS}, SymInt[] sizes, str program, str format) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.flexible_layout,),
)

fp8_attention = torch.ops.fa_inductor.fp8_attention.default
fp8_operands = torch.ops.fa_inductor.fp8_operands.default
hopper_fp8_attention = torch.ops.fa_inductor.hopper_fp8_attention.default
fp8_projected_attention = torch.ops.fa_inductor.fp8_projected_attention.default
fp8_projected_operands = torch.ops.fa_inductor.fp8_projected_operands.default
hopper_fp8_projected_attention = torch.ops.fa_inductor.hopper_fp8_projected_attention.default


def check_format(format: str) -> None:
    """Raises ProgramError for a format that is not known."""
    if format not in FORMATS:
        raise ProgramError(f"unknown FP8 format {format!r}; known are {', '.join(FORMATS)}")


# ------------------------------------------------------------------------------------------------- what the casts compute
def hadamard(dim: int) -> Tensor:
    """The normalised Hadamard matrix [dim, dim] in float32; dim is a power of two."""
    made = torch.ones(1, 1)
    while made.shape[0] < dim:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made * dim**-0.5


def _top(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest finite magnitude over the last ``dims``, which are kept."""
    size = x.abs()
    return torch.where(size < torch.inf, size, 0.0).amax(dims, keepdim=True).clamp_min(quantise.TINY)


def _times(x: Tensor, most: float, top: Tensor) -> Tensor:
    """x * (most / top), the quotient rounded correctly, as the kernel computes it: others would round other numbers up."""
    # torch computes a number over a tensor as that number times the tensor's inverse.
    return x * (torch.full_like(top, most) / top)


def _e4m3(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(x in e4m3, its scales)."""
    top, most = _top(x, dims), quantise.E4M3_MAX
    return _times(x, most, top).clamp(-most, most).to(torch.float8_e4m3fn), (top / most).squeeze(dims)


def _int8(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(x in int8, its scales)."""
    top, most = _top(x, dims), quantise.INT8_MAX
    small = _times(x, most, top).nan_to_num(0.0, torch.inf, -torch.inf).clamp(-most, most).round().to(torch.int8)
    # No integer is NaN.
    nan = x.isnan().flatten(dims[0]).any(-1)
    return small, torch.where(nan, torch.nan, (top / most).squeeze(dims))


def cast_operands(q: Tensor, k: Tensor, v: Tensor, format: str) -> quantise.Quantised:
    """What :func:`fa_inductor.templates.quantise.quantise` computes."""
    check_format(format)
    how = quantise.FORMATS[format]
    made = quantise.empty(q, k, v, format)
    q, k, v = (t.float() for t in (q, k, v))
    if how.rotates:
        group = quantise.rotation(q.shape[3])
        matrix = hadamard(group).to(q.device)
        q, k = ((t.unflatten(-1, (-1, group)) @ matrix).flatten(-2) for t in (q, k))
    block = quantise.SCALE_KEYS
    blocks = made.k_scale.shape[2]
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, blocks * block - t.shape[2])).unflatten(2, (blocks, block)) for t in (k, v))
    cast = _int8 if how.integer else _e4m3
    for x, dims, small, scale, kind in (
        (q, (3,), made.q, made.q_scale, cast),
        (k, (3, 4), made.k, made.k_scale, cast),
        (v, (3, 4), made.v, made.v_scale, _e4m3),
    ):
        found, scales = kind(x, dims)
        found = found.flatten(2, 3) if len(dims) == 2 else found
        small.copy_(found.transpose(2, 3) if small is made.v else found[:, :, : small.shape[2]])
        scale.copy_(scales)
    return made


def rounded(q: Tensor, k: Tensor, v: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) cast to FP8 and back, in float32; q and k still rotated."""
    return widened(cast_operands(q, k, v, format))


def widened(made: quantise.Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers (q, k, v) that cast operands stand for, in float32; v's keys are not permuted."""
    keys = made.k.shape[2]
    k_scale, v_scale = (s.repeat_interleave(quantise.SCALE_KEYS, 2)[:, :, :keys, None] for s in (made.k_scale, made.v_scale))
    return (
        made.q.float() * made.q_scale[..., None],
        made.k.float() * k_scale,
        made.v.float().transpose(2, 3)[:, :, :keys] * v_scale,
    )


# ------------------------------------------------------------------------------------------------------------------ kernels
def _fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str, kernel: str, format: str
) -> tuple[Tensor, Tensor]:
    spec = ops.check_operands(q, k, v, captures, sizes, program, kernel)
    with ops._own_context():
        out, lse = reference.attention(*rounded(q, k, v, format), captures, sizes, spec)
        return reference.with_layout(out.to(q.dtype), spec.layout), lse


def _fp8_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], program: str, kernel: str, format: str
) -> tuple[Tensor, Tensor]:
    check_format(format)
    return ops._flash_attention_fake(q, k, v, captures, sizes, program, kernel)


def _operands(q: Tensor, k: Tensor, v: Tensor, format: str) -> tuple[Tensor, ...]:
    return cast_operands(q, k, v, format).tensors()


def _operands_cuda(q: Tensor, k: Tensor, v: Tensor, format: str) -> tuple[Tensor, ...]:
    with torch.cuda.device(q.device):
        return quantise.quantise(q, k, v, format).tensors()


def _operands_fake(q: Tensor, k: Tensor, v: Tensor, format: str) -> tuple[Tensor, ...]:
    return quantise.empty(q, k, v, format).tensors()


def _hopper(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], program: str, format: str) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return ops._flash_attention(q, k, v, [], sizes, program, "reference")
    from fa_inductor.templates.sm90.fp8_launch import attention

    return attention(q, k, v, sizes, program, format)


def _hopper_fake(q: Tensor, k: Tensor, v: Tensor, sizes: list[int], program: str, format: str) -> tuple[Tensor, Tensor]:
    return ops._flash_attention_fake(q, k, v, [], sizes, program, "triton")


# ------------------------------------------------------------------------------------------------------- from hidden states
def projected(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, heads, L, head_dim] of hidden states."""

    def layer(i: int, n: int) -> Tensor:
        y = torch.nn.functional.linear(x, weights[i], biases[i] if biases else None)
        return y.unflatten(-1, (n, -1)).transpose(1, 2)

    return layer(0, heads), layer(1, kv_heads), layer(2, kv_heads)


def _projected_attention(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, captures: list[Tensor], sizes: list[int],
    program: str, kernel: str, format: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with ops._own_context():
        q, k, v = projected(x, weights, biases, heads, kv_heads)
    return _fp8_attention(q, k, v, captures, sizes, program, kernel, format)


def _projected_attention_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, captures: list[Tensor], sizes: list[int],
    program: str, kernel: str, format: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fp8_attention_fake(*projected(x, weights, biases, heads, kv_heads), captures, sizes, program, kernel, format)


def _projected_operands(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, format: str
) -> tuple[Tensor, ...]:
    return cast_operands(*projected(x, weights, biases, heads, kv_heads), format).tensors()


def _projected_operands_cuda(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, format: str
) -> tuple[Tensor, ...]:
    from fa_inductor.templates.projection import project

    with torch.cuda.device(x.device):
        return project(x, weights, biases, heads, kv_heads, format).tensors()


def _projected_operands_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, format: str
) -> tuple[Tensor, ...]:
    return quantise.empty(*projected(x, weights, biases, heads, kv_heads), format).tensors()


def _hopper_projected(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, sizes: list[int], program: str, format: str
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return _hopper(*projected(x, weights, biases, heads, kv_heads), sizes, program, format)
    from fa_inductor.templates.projection import project
    from fa_inductor.templates.sm90.fp8_launch import attend

    with torch.cuda.device(x.device):
        return attend(project(x, weights, biases, heads, kv_heads, format, permute=True), x.dtype, sizes, program)


def _hopper_projected_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], heads: int, kv_heads: int, sizes: list[int], program: str, format: str
) -> tuple[Tensor, Tensor]:
    return _hopper_fake(*projected(x, weights, biases, heads, kv_heads), sizes, program, format)


def _no_backward(ctx: Any, *_grads: Any) -> tuple:
    raise NotImplementedError(
        "fa_inductor::fp8_attention has no gradient: options={'fp8': ...} is for inference; compile without it to train"
    )


_LIB.impl("fp8_attention", _fp8_attention, "CompositeExplicitAutograd")
_LIB.impl("fp8_operands", _operands, "CompositeExplicitAutograd")
_LIB.impl("fp8_operands", _operands_cuda, "CUDA")
_LIB.impl("hopper_fp8_attention", _hopper, "CUDA")
torch.library.register_fake(fp8_attention, _fp8_attention_fake, lib=_LIB)
torch.library.register_fake(fp8_operands, _operands_fake, lib=_LIB)
torch.library.register_fake(hopper_fp8_attention, _hopper_fake, lib=_LIB)
_LIB.impl("fp8_projected_attention", _projected_attention, "CompositeExplicitAutograd")
_LIB.impl("fp8_projected_operands", _projected_operands, "CompositeExplicitAutograd")
_LIB.impl("fp8_projected_operands", _projected_operands_cuda, "CUDA")
_LIB.impl("hopper_fp8_projected_attention", _hopper_projected, "CUDA")
torch.library.register_fake(fp8_projected_attention, _projected_attention_fake, lib=_LIB)
torch.library.register_fake(fp8_projected_operands, _projected_operands_fake, lib=_LIB)
torch.library.register_fake(hopper_fp8_projected_attention, _hopper_projected_fake, lib=_LIB)
torch.library.register_autograd(fp8_projected_attention, _no_backward, lib=_LIB)
torch.library.register_autograd(fp8_attention, _no_backward, lib=_LIB)


@register_flop_formula([torch.ops.fa_inductor.fp8_attention, torch.ops.fa_inductor.hopper_fp8_attention])
def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None, **kw: Any) -> int:
    return ops._products(q, k) * (q[3] + v[3])
