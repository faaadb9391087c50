"""Attention over keys and values that lie in pages or in 8-bit elements, read by the kernel as they are stored.

``cached_attention`` is ``flash_attention`` for inference with other operands. With a table, k and v are pages
[P, Hkv, page, D], and key n of sequence b lies in page ``table[b, n // page]`` at ``n % page``. 8-bit k and v are multiplied with
their scales [B, Hkv, N] in float32, rounded to the dtype that :class:`~fa_inductor.spec.CacheForm` names and cast to q's dtype,
as the code that was replaced did. Called outside of a compiled graph, and where no template runs, the op gathers and multiplies
like that code.

An entry of the table outside of the pages makes PyTorch's own lookup stop the device with an assertion. The kernels read
the nearest page instead: nothing outside of k and v is read, and nothing is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fa_inductor import ops, reference
from fa_inductor.errors import ProgramError
from fa_inductor.spec import AttentionSpec, CacheForm

#: Dtypes of stored elements; float16, bfloat16 and float32 hold every number of each.
STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

_LIB = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_LIB.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? k_scale, Tensor? v_scale, Tensor[] captures,"
    " SymInt[] sizes, SymInt keys, str program, str cache, str kernel) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.flexible_layout,),
)
cached_attention = torch.ops.fa_inductor.cached_attention.default


def check(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, scales: Sequence[Tensor | None], keys: Any, form: CacheForm
) -> None:
    """Raises :class:`ProgramError` where the operands are not what ``form`` says."""
    for name, t, product, scaled, scale in (
        ("k", k, form.k, form.k_scaled, scales[0]),
        ("v", v, form.v, form.v_scaled, scales[1]),
    ):
        stored = t.dtype in STORED if product else t.dtype == q.dtype
        if t.dim() != 4 or not stored or t.device != q.device:
            raise ProgramError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}, which {form.text} does not describe")
        if (scale is not None) != scaled or (scale is not None and (scale.dim() != 3 or not scale.is_floating_point())):
            raise ProgramError(f"the scale of {name} must be a float tensor [B, Hkv, N] if {form.text} has one")
    if (table is not None) != bool(form.page):
        raise ProgramError(f"a table of pages must be given with {form.text} and only then")
    if any(t is not None and t.device != q.device for t in (table, *scales)):
        raise ProgramError(f"the table and the scales must be on {q.device}, as q is")
    if table is not None:
        if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64):
            raise ProgramError(f"the table must be int32 or int64 [B, pages of a sequence], got {table.dtype} {tuple(table.shape)}")
        torch._check(k.shape[2] == form.page)
        torch._check(v.shape[2] == form.page)
        torch._check(table.shape[0] == q.shape[0])
        torch._check(table.shape[1] * form.page >= keys)


def _stored(t: Tensor, table: Tensor | None, keys: int, form: CacheForm) -> Tensor:
    """[B, Hkv, N, D] of what the table names, copied together; ``t`` itself without one."""
    if table is None:
        return t
    found = t[table] if form.wraps else t.index_select(0, table.flatten()).unflatten(0, table.shape)
    return found.transpose(1, 2).flatten(2, 3)[:, :, :keys]


def _dequantised(t: Tensor, product: str, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not product:
        return t
    # As one multiplication in the product's dtype, which computes in float32 and rounds.
    t = t.to(torch.float32)
    return (t if scale is None else t * scale.unsqueeze(-1).to(torch.float32)).to(getattr(torch, product)).to(dtype)


def materialised(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, scales: Sequence[Tensor | None], keys: int, form: CacheForm
) -> tuple[Tensor, Tensor]:
    """k and v [B, Hkv, N, D] in q's dtype."""
    k, v = (_stored(t, table, keys, form) for t in (k, v))
    return _dequantised(k, form.k, scales[0], q.dtype), _dequantised(v, form.v, scales[1], q.dtype)


class _Call(NamedTuple):
    """Arguments of ``cached_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    captures: list[Tensor]
    sizes: list[int]
    keys: int
    program: str
    cache: str
    kernel: str

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor | None, Tensor | None], int, CacheForm]:
        """What k and v are made of, checked."""
        made = self.k, self.v, self.table, (self.k_scale, self.v_scale), self.keys, CacheForm.parse(self.cache)
        check(self.q, *made)
        return made


def _cached_attention(*args: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*args)
    with ops._own_context():
        k, v = materialised(call.q, *call.stored)
        spec = ops.check_operands(call.q, k, v, call.captures, call.sizes, call.program, call.kernel)
        return reference.attention(call.q, k, v, call.captures, call.sizes, spec)


def _cached_attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*args)
    v = call.stored[1]
    batch, heads, rows, _ = call.q.shape
    out = ops._empty(call.q, (batch, heads, rows, v.shape[3]), AttentionSpec.parse(call.program).layout)
    return out, call.q.new_empty((batch, heads, rows), dtype=torch.float32)


def _no_backward(ctx: Any, *_grads: Any) -> tuple:
    raise NotImplementedError(
        "fa_inductor::cached_attention has no gradient: caches are read as they are stored in inference only, where no operand "
        "requires one"
    )


_LIB.impl("cached_attention", _cached_attention, "CompositeExplicitAutograd")
torch.library.register_autograd(cached_attention, _no_backward, lib=_LIB)
torch.library.register_fake(cached_attention, _cached_attention_fake, lib=_LIB)


@register_flop_formula(torch.ops.fa_inductor.cached_attention)
def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None, **kw: Any) -> int:
    """As flash_attention's: ``args`` are table, k_scale, v_scale, captures, sizes, keys, ..."""
    batch, heads, rows, _ = q
    return 2 * batch * heads * rows * int(args[5]) * (q[3] + v[3])
