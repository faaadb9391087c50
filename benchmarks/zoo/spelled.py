"""Single attentions, one spelling each: scale, softmax, layout, head sharing. Masks are in ``spelled_masks``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.base import BATCH, HEADS, LENGTH, WIDTH, Built, floats, register

HEAD = WIDTH // HEADS
Attend = Callable[..., Tensor]


class Spelled(nn.Module):
    """Projections around one attention.

    ``attend(self, q, k, v, *extra)`` receives q [B, H, M, D], k and v [B, Hkv, N, D] and returns [B, H, M, Dv].
    Tensors in ``buffers`` and ``parameters`` become attributes of the module.
    """

    def __init__(
        self,
        attend: Attend,
        kv_heads: int = HEADS,
        value_dim: int = HEAD,
        buffers: dict[str, Tensor] | None = None,
        parameters: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.attend, self.kv_heads, self.value_dim = attend, kv_heads, value_dim
        self.to_q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.to_k = nn.Linear(WIDTH, kv_heads * HEAD)
        self.to_v = nn.Linear(WIDTH, kv_heads * value_dim)
        self.out = nn.Linear(HEADS * value_dim, WIDTH)
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        for name, tensor in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: Tensor, *extra: Any) -> Any:
        batch, length, _ = x.shape
        q = self.to_q(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k = self.to_k(x).view(batch, length, self.kv_heads, HEAD).transpose(1, 2)
        v = self.to_v(x).view(batch, length, self.kv_heads, self.value_dim).transpose(1, 2)
        y = self.attend(self, q, k, v, *extra)
        rest: tuple[Tensor, ...] = ()
        if isinstance(y, tuple):
            y, *others = y
            rest = tuple(others)
        y = self.out(y.transpose(1, 2).reshape(batch, length, HEADS * self.value_dim))
        return (y, *rest) if rest else y


class Bare(nn.Module):
    """No projections: the operands are the arguments, as in a library function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *operands: Tensor) -> Any:
        return self.attend(*operands)


def spelling(
    attend: Attend, *, extra: Callable[[], tuple[Any, ...]] | None = None, length: int = LENGTH, **fields: Any
) -> None:
    """Register ``attend`` under its own name, as a :class:`Spelled` block over x [B, length, C]."""
    module_fields = {key: fields.pop(key) for key in ("kv_heads", "value_dim") if key in fields}
    tensors = {key: fields.pop(key) for key in ("buffers", "parameters") if key in fields}

    def make() -> Built:
        built = {key: value() for key, value in tensors.items()}
        block = Spelled(attend, **module_fields, **built)
        return block, (floats(BATCH, length, WIDTH), *(extra() if extra else ())), {}

    fields.setdefault("sites", 1)
    fields.setdefault("grad_inputs", (0,))
    register(fields.pop("name", attend.__name__), fields.pop("family", "spelled"), make, **fields)


def bare(attend: Attend, *shapes: tuple[int, ...], **fields: Any) -> None:
    """Register ``attend(q, k, v)`` on random operands of the given shapes."""

    def make() -> Built:
        operands = tuple(floats(*shape, seed=20 + index) for index, shape in enumerate(shapes))
        return Bare(attend), operands, {}

    fields.setdefault("sites", 1)
    fields.setdefault("grad_inputs", tuple(range(len(shapes))))
    register(fields.pop("name", attend.__name__), fields.pop("family", "spelled"), make, **fields)


# ---- scale -------------------------------------------------------------------------------------------------


def divide_by_root(m, q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(HEAD), dim=-1) @ v


def scale_before_product(m, q, k, v):
    return torch.matmul((q * HEAD**-0.5).matmul(k.mT).softmax(-1), v)


def scale_on_keys(m, q, k, v):
    return (q @ (k / HEAD**0.5).transpose(2, 3)).softmax(dim=3) @ v


def scale_on_both(m, q, k, v):
    root = HEAD**-0.25
    return F.softmax((q * root) @ (k * root).swapaxes(-1, -2), -1) @ v


def scale_none(m, q, k, v):
    return F.softmax(q @ k.mT, -1) @ v


def scale_zero_dim_tensor(m, q, k, v):
    return F.softmax((q @ k.mT) / torch.sqrt(torch.tensor(HEAD, dtype=q.dtype)), -1) @ v


def scale_trained_per_head(m, q, k, v):
    return F.softmax((q @ k.mT) * m.temperature.exp(), -1) @ v


def scale_cosine_clamped(m, q, k, v):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return F.softmax(q @ k.mT * m.temperature.clamp(max=math.log(100.0)).exp(), -1) @ v


def scale_negative_twice(m, q, k, v):
    return F.softmax(-(q * -0.5) @ k.mT * 0.5, -1) @ v


def soft_capped(m, q, k, v):
    scores = q @ k.mT * HEAD**-0.5
    return (20.0 * torch.tanh(scores / 20.0)).softmax(-1) @ v


def normed_queries_keys(m, q, k, v):
    def norm(z):
        return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6)

    return (norm(q) @ norm(k).mT * HEAD**-0.5).softmax(-1) @ v


# ---- softmax -----------------------------------------------------------------------------------------------


def softmax_float32(m, q, k, v):
    scores = q @ k.mT * HEAD**-0.5
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def softmax_upcast_scores(m, q, k, v):
    scores = (q.float() @ k.float().mT) * HEAD**-0.5
    return scores.softmax(-1).type_as(v) @ v


def softmax_by_hand(m, q, k, v):
    scores = q @ k.mT * HEAD**-0.5
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


def softmax_no_max(m, q, k, v):
    weights = (q @ k.mT * HEAD**-0.5).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def softmax_by_logsumexp(m, q, k, v):
    scores = q @ k.mT * HEAD**-0.5
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def softmax_by_log_softmax(m, q, k, v):
    return F.log_softmax(q @ k.mT * HEAD**-0.5, -1).exp() @ v


def softmax_divided_last(m, q, k, v):
    scores = q @ k.mT * HEAD**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights @ v) / weights.sum(-1, keepdim=True)


def softmax_shifted_twice(m, q, k, v):
    scores = q @ k.mT * HEAD**-0.5
    scores = scores - scores.amax(-1, keepdim=True).detach()
    return scores.softmax(-1) @ v


def softmax_module(m, q, k, v):
    return nn.Softmax(dim=-1)(q @ k.mT * HEAD**-0.5) @ v


def softmax_with_dropout(m, q, k, v):
    weights = (q @ k.mT * HEAD**-0.5).softmax(-1)
    return F.dropout(weights, 0.2, m.training) @ v


# ---- layout ------------------------------------------------------------------------------------------------


def einsum_heads_second(m, q, k, v):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(HEAD**-0.5).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def einsum_heads_third(m, q, k, v):
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))
    weights = torch.einsum("blhe,bshe->bhls", q, k).div(HEAD**0.5).softmax(-1)
    return torch.einsum("bhls,bshd->blhd", weights, v).transpose(1, 2)


def folded_bmm(m, q, k, v):
    q, k, v = (z.reshape(-1, z.shape[2], HEAD) for z in (q, k, v))
    y = torch.bmm(torch.bmm(q * HEAD**-0.5, k.transpose(1, 2)).softmax(-1), v)
    return y.view(-1, HEADS, y.shape[1], HEAD)


def baddbmm_alpha(m, q, k, v):
    q, k, v = (z.reshape(-1, z.shape[2], HEAD) for z in (q, k, v))
    room = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(room, q, k.mT, beta=0, alpha=HEAD**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(-1, HEADS, q.shape[1], HEAD)


def keys_kept_transposed(m, q, k, v):
    columns = k.permute(0, 1, 3, 2).contiguous()
    return (torch.matmul(q, columns) * HEAD**-0.5).softmax(-1) @ v


def values_on_the_left(q, k, v):
    """q, k, v [B, C, N]: channels first, the value product written v @ p^T."""
    weights = torch.bmm(q.transpose(1, 2), k).softmax(-1)
    return torch.bmm(v, weights.transpose(1, 2))


def one_head(q, k, v):
    return torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, 2) @ v


def no_batch(q, k, v):
    """q, k, v [N, D]: two plain matrix products."""
    return torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), -1) @ v


def packed_qkv(x):
    """x [B, N, 3, H, D], unbound after one permute."""
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
    return ((q @ k.mT) * HEAD**-0.5).softmax(-1) @ v


def axial_rows(q, k, v):
    """q, k, v [B, S, H, N, D]: one attention per row of a grid."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def cross_covariance(q, k, v):
    """q, k, v [B, H, D, N]: the attention runs over channels."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


# ---- heads -------------------------------------------------------------------------------------------------


def grouped_repeat_interleave(m, q, k, v):
    k, v = (z.repeat_interleave(HEADS // 2, dim=1) for z in (k, v))
    return (q @ k.mT * HEAD**-0.5).softmax(-1) @ v


def grouped_expand(m, q, k, v):
    def widen(z):
        b, h, n, d = z.shape
        return z[:, :, None].expand(b, h, HEADS // h, n, d).reshape(b, HEADS, n, d)

    return (q @ widen(k).mT * HEAD**-0.5).softmax(-1) @ widen(v)


def grouped_einsum(m, q, k, v):
    b, _, n, d = q.shape
    q = q.reshape(b, 2, HEADS // 2, n, d)
    weights = (torch.einsum("bgrnd,bgsd->bgrns", q, k) * d**-0.5).softmax(-1)
    return torch.einsum("bgrns,bgsd->bgrnd", weights, v).reshape(b, HEADS, n, d)


def grouped_broadcast(m, q, k, v):
    b, _, n, d = q.shape
    q = q.view(b, 2, HEADS // 2, n, d)
    return ((q @ k[:, :, None].mT * d**-0.5).softmax(-1) @ v[:, :, None]).reshape(b, HEADS, n, d)


def one_shared_key(m, q, k, v):
    weights = (torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * HEAD**-0.5).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", weights, v[:, 0])


def wider_values(m, q, k, v):
    return (q @ k.mT * HEAD**-0.5).softmax(-1) @ v


# ---- around ------------------------------------------------------------------------------------------------


def cross_attention(m, q, k, v, context):
    b, n, _ = context.shape
    k = m.to_k(context).view(b, n, HEADS, HEAD).transpose(1, 2)
    v = m.to_v(context).view(b, n, HEADS, HEAD).transpose(1, 2)
    return (q @ k.mT * HEAD**-0.5).softmax(-1) @ v


def grown_cache(m, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    return (q @ k.mT * HEAD**-0.5).softmax(-1) @ v, k, v


def query_blocks(m, q, k, v):
    """The queries in a Python loop of three blocks: three attentions."""
    return torch.cat([(part @ k.mT * HEAD**-0.5).softmax(-1) @ v for part in q.chunk(3, dim=2)], dim=2)


def difference_of_two(m, q, k, v):
    """Two attentions over the halves of the head dimension, subtracted after the value product."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    scale = (HEAD // 2) ** -0.5
    return (q1 @ k1.mT * scale).softmax(-1) @ v - 0.3 * ((q2 @ k2.mT * scale).softmax(-1) @ v)


def recomputed(m, q, k, v):
    return checkpoint(divide_by_root, None, q, k, v, use_reentrant=False)


def under_autocast(m, q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return divide_by_root(m, q, k, v).to(q.dtype)


def keys_are_values(m, q, k, v):
    return (q @ k.mT * HEAD**-0.5).softmax(-1) @ k


_QKV = (BATCH, HEADS, LENGTH, HEAD)
for _attend in (
    divide_by_root,
    scale_before_product,
    scale_on_keys,
    scale_on_both,
    scale_none,
    scale_zero_dim_tensor,
    scale_negative_twice,
    soft_capped,
    normed_queries_keys,
    softmax_float32,
    softmax_upcast_scores,
    softmax_by_hand,
    softmax_no_max,
    softmax_by_logsumexp,
    softmax_by_log_softmax,
    softmax_divided_last,
    softmax_shifted_twice,
    softmax_module,
    einsum_heads_second,
    einsum_heads_third,
    folded_bmm,
    baddbmm_alpha,
    keys_kept_transposed,
    recomputed,
    under_autocast,
    keys_are_values,
):
    spelling(_attend)
spelling(divide_by_root, name="divide_by_root_any_length", dynamic=True)
spelling(scale_trained_per_head, parameters=lambda: {"temperature": floats(HEADS, 1, 1) * 0.1})
spelling(scale_cosine_clamped, parameters=lambda: {"temperature": torch.full((HEADS, 1, 1), math.log(10.0))})
spelling(softmax_with_dropout, random=True)
for _attend in (grouped_repeat_interleave, grouped_expand, grouped_einsum, grouped_broadcast):
    spelling(_attend, kv_heads=2)
spelling(one_shared_key, kv_heads=1)
spelling(wider_values, value_dim=24)
spelling(cross_attention, extra=lambda: (floats(BATCH, 13, WIDTH, seed=6),))
spelling(
    grown_cache, extra=lambda: (floats(BATCH, HEADS, 9, HEAD, seed=7), floats(BATCH, HEADS, 9, HEAD, seed=8)), length=1
)
spelling(query_blocks, sites=3)
spelling(difference_of_two, sites=2)
bare(values_on_the_left, (BATCH, 32, LENGTH), (BATCH, 32, LENGTH), (BATCH, 48, LENGTH))
bare(one_head, *[(BATCH, LENGTH, WIDTH)] * 3)
bare(no_batch, *[(LENGTH, WIDTH)] * 3)
bare(packed_qkv, (BATCH, LENGTH, 3, HEADS, HEAD))
bare(axial_rows, *[(BATCH, 3, HEADS, 8, HEAD)] * 3)
bare(cross_covariance, *[(BATCH, HEADS, HEAD, 40)] * 3)
