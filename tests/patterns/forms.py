"""Attention as people spell it: one function a form, with inputs drawn in float64.

Tensors are [B, H, M, D] unless a form says otherwise. Shared by the tests of values and of rewritten graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 10, 14, 8
INF = float("inf")


class Draw:
    """Random inputs of one form; floats are float64 and get rounded to the dtype under test by the caller."""

    def __init__(self, seed: int = 0):
        self.g = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.g)

    def qkv(self, rows: int = ROWS, keys: int = KEYS, kv_heads: int = HEADS, v_dim: int = DIM) -> tuple[Tensor, ...]:
        q = self.normal(BATCH, HEADS, rows, DIM)
        return q, self.normal(BATCH, kv_heads, keys, DIM), self.normal(BATCH, kv_heads, keys, v_dim)

    def keep(self, *shape: int) -> Tensor:
        """A bool mask that keeps most keys, and the first of every row."""
        mask = torch.rand(shape, generator=self.g) < 0.7
        mask[..., 0] = True
        return mask


def qkv(d: Draw) -> tuple[Tensor, ...]:
    return d.qkv()


@dataclass(frozen=True)
class Form:
    """``make()`` gives the function or module, ``draw`` its inputs; floating inputs get gradients but those in ``frozen``.

    ``fused`` is the number of attentions in it. ``tolerates`` names dtypes whose rounding the form's own constants fit.
    """

    name: str
    make: Callable[[], Callable]
    draw: Callable[[Draw], tuple[Any, ...]] = qkv
    fused: int = 1
    frozen: tuple[int, ...] = ()


FORMS: dict[str, Form] = {}


def form(draw: Callable[[Draw], tuple[Any, ...]] = qkv, **more: Any) -> Callable[[Callable], Callable]:
    """Registers a function as a form of its name."""

    def register(fn: Callable) -> Callable:
        make = fn if isinstance(fn, type) else lambda: fn
        FORMS[fn.__name__] = Form(fn.__name__, make, draw, **more)
        return fn

    return register


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


# ------------------------------------------------------------------------------------------------- spellings of softmax
@form()
def plain(q, k, v):
    return scores(q, k).softmax(-1) @ v


@form()
def upcast_softmax(q, k, v):
    return F.softmax(scores(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v


@form()
def hand_written_softmax(q, k, v):
    s = scores(q, k)
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def exp_logsumexp(q, k, v):
    s = scores(q, k)
    return torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True)) @ v


@form()
def exp_log_softmax(q, k, v):
    return F.log_softmax(scores(q, k), dim=-1).exp() @ v


@form()
def deferred_division(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


@form()
def shifted_by_the_maximum(q, k, v):
    s = scores(q, k)
    return (s - s.max(-1, keepdim=True)[0].detach()).softmax(-1) @ v


# ---------------------------------------------------------------------------------------------------------------- masks
@form()
def causal_top_left(q, k, v):
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@form()
def causal_bottom_right(q, k, v):
    rows, keys = q.shape[-2], k.shape[-2]
    keep = torch.ones(rows, keys, dtype=torch.bool).tril(diagonal=keys - rows)
    return scores(q, k).masked_fill(keep.logical_not(), -INF).softmax(-1) @ v


@form()
def causal_additive(q, k, v):
    mask = torch.full((q.shape[-2], k.shape[-2]), -INF, dtype=q.dtype).triu(1)
    return (scores(q, k) + mask).softmax(-1) @ v


@form()
def causal_finite_fill(q, k, v):
    rows, keys = q.shape[-2], k.shape[-2]
    later = torch.arange(keys)[None, :] > torch.arange(rows)[:, None]
    return torch.where(later, torch.finfo(q.dtype).min, scores(q, k)).softmax(-1) @ v


@form()
def more_queries_than_keys(q, k, v):
    """Bottom-right causal where the first rows keep no key: with a finite fill their weights are all equal."""
    q, k, v = k, q, F.pad(v, (0, 0, 0, 0))[:, :, : q.shape[-2]]
    rows, keys = q.shape[-2], k.shape[-2]
    keep = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + (keys - rows)
    return scores(q, k).masked_fill(~keep, -1e9 if q.dtype is torch.float64 else torch.finfo(q.dtype).min).softmax(-1) @ v


@form()
def window(q, k, v):
    row, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    keep = (key <= row) & (row - key < 4)
    return torch.where(keep, scores(q, k), -INF).softmax(-1) @ v


@form(lambda d: (*d.qkv(), torch.tensor([3, 0])))
def prefix(q, k, v, length):
    """The first ``length`` [B] keys are visible to all, the rest causal."""
    row, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    keep = (key <= row) | (key < length[:, None, None, None])
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@form(lambda d: (*d.qkv(ROWS, ROWS), d.integers(3, BATCH, ROWS).sort(-1).values))
def documents(q, k, v, segment):
    """``segment`` [B, N] numbers the document of each token."""
    same = segment[:, None, :, None] == segment[:, None, None, :]
    row, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    return scores(q, k).masked_fill(~(same & (key <= row)), -INF).softmax(-1) @ v


@form()
def chunked(q, k, v):
    row, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    keep = (row // 4 == key // 4) & (key <= row)
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@form(lambda d: (*d.qkv(), d.keep(BATCH, KEYS)))
def padding(q, k, v, keep):
    return scores(q, k).masked_fill(~keep[:, None, None, :], -INF).softmax(-1) @ v


@form(lambda d: (*d.qkv(), d.keep(BATCH, KEYS).long()))
def padding_additive(q, k, v, keep):
    """As BERT did it."""
    mask = (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0
    return (scores(q, k) + mask).softmax(-1) @ v


@form(lambda d: (*d.qkv(ROWS, ROWS), d.keep(BATCH, ROWS)))
def padding_and_causal_in_place(q, k, v, keep):
    n = q.shape[-2]
    s = scores(q, k)
    s.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -INF)
    s.masked_fill_(~keep[:, None, None, :], torch.finfo(s.dtype).min)
    return s.softmax(-1) @ v


# ----------------------------------------------------------------------------------------- scales, biases, score functions
@form(lambda d: (*d.qkv(), d.normal(HEADS, ROWS, KEYS)))
def additive_bias(q, k, v, bias):
    return (scores(q, k) + bias).softmax(-1) @ v


@form(lambda d: (*d.qkv(), d.normal(KEYS)))
def key_bias_with_alpha(q, k, v, bias):
    return torch.add(scores(q, k), bias, alpha=3).softmax(-1) @ v


@form(lambda d: (*d.qkv(ROWS, ROWS), d.normal(HEADS)))
def temperature(q, k, v, tau):
    """Cosine attention with a trained factor a head."""
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return (s * tau.clamp(max=2.0).exp()[:, None, None]).softmax(-1) @ v


@form()
def negative_scale_on_q_and_k(q, k, v):
    return ((q * -0.5) @ (k / 1.5).mT).softmax(-1) @ v


@form(lambda d: (*d.qkv(ROWS, ROWS), torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)))
def alibi(q, k, v, slopes):
    """BLOOM: the bias is the product's own addend, operands are [B * H, M, D]."""
    b, h, n, d = q.shape
    bias = slopes[None, :, None] * torch.arange(n).to(q.dtype)[None, None, :]
    bias = bias.expand(b, h, n).reshape(b * h, 1, n)
    s = bias.baddbmm(q.reshape(b * h, n, d), k.reshape(b * h, n, d).transpose(1, 2), beta=1.0, alpha=d**-0.5)
    s = s.view(b, h, n, n) + torch.full((n, n), -INF, dtype=q.dtype).triu(1)
    return (s.softmax(-1).view(b * h, n, n) @ v.reshape(b * h, n, d)).view(b, h, n, d)


@form()
def softcap(q, k, v):
    return (torch.tanh(scores(q, k) / 2.0) * 2.0).softmax(-1) @ v


@form(lambda d: (*d.qkv(ROWS, ROWS), d.normal(32, HEADS)))
def t5(q, k, v, table):
    """No scale; the bias is gathered by distance from a trained table [32, H]."""
    n = q.shape[-2]
    distance = (torch.arange(n)[None, :] - torch.arange(n)[:, None]).clamp(-15, 15) + 15
    bias = F.embedding(distance, table).permute(2, 0, 1).unsqueeze(0)
    return (q @ k.transpose(3, 2) + bias).softmax(-1) @ v


def _swin_inputs(d: Draw) -> tuple[Tensor, ...]:
    size, windows = 2, 4
    tokens = size * size
    region = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 2, 2], [0, 1, 2, 3]])
    mask = torch.where(region[:, None, :] == region[:, :, None], 0.0, -100.0).double()
    place = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
    relative = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + size - 1
    index = relative[..., 0] * (2 * size - 1) + relative[..., 1]
    q, k, v = (d.normal(BATCH * windows, HEADS, tokens, DIM) for _ in range(3))
    return q, k, v, d.normal((2 * size - 1) ** 2, HEADS), index, mask


@form(_swin_inputs, frozen=(5,))
def swin(q, k, v, table, index, mask):
    """Shifted windows: relative bias, then a mask per window through a 5-D view."""
    bw, h, n, _ = q.shape
    windows = mask.shape[0]
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    s = s + table[index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
    s = s.view(bw // windows, windows, h, n, n) + mask.unsqueeze(1).unsqueeze(0)
    return s.view(-1, h, n, n).softmax(-1) @ v


@form(lambda d: (*d.qkv(ROWS, ROWS), d.normal(HEADS)))
def sinks(q, k, v, sink):
    """A trained logit a head that takes its share and is dropped."""
    s = scores(q, k) + torch.full((q.shape[-2],) * 2, -INF, dtype=q.dtype).triu(1)
    s = torch.cat([s, sink.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ v


# -------------------------------------------------------------------------------------------------------- heads and layouts
def repeat_kv(x: Tensor, times: int) -> Tensor:
    b, h, n, d = x.shape
    return x[:, :, None, :, :].expand(b, h, times, n, d).reshape(b, h * times, n, d)


@form(lambda d: d.qkv(kv_heads=2))
def gqa_repeat_kv(q, k, v):
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    return scores(q, k).softmax(-1) @ v


@form(lambda d: d.qkv(kv_heads=2))
def gqa_repeat_interleave(q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return scores(q, k).softmax(-1) @ v


@form(lambda d: (d.normal(BATCH, ROWS, HEADS, DIM), d.normal(BATCH, KEYS, 2, DIM), d.normal(BATCH, KEYS, 2, DIM)))
def gqa_grouped_einsum(q, k, v):
    """[B, M, H, D] in and out."""
    q = q.unflatten(2, (2, -1))
    s = torch.einsum("bmhgd,bnhd->bhgmn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


@form(lambda d: d.qkv(kv_heads=2))
def gqa_broadcast(q, k, v):
    """5-D: query groups beside the key-value head."""
    q, k, v = q.unflatten(1, (2, 2)), k.unsqueeze(2), v.unsqueeze(2)
    return (scores(q, k).softmax(-1) @ v).flatten(1, 2)


@form(lambda d: (d.normal(BATCH, HEADS, ROWS, DIM), d.normal(BATCH, KEYS, DIM), d.normal(BATCH, KEYS, DIM)))
def mqa_einsum(q, k, v):
    s = torch.einsum("bhmd,bnd->bhmn", q, k) * 0.25
    return torch.einsum("bhmn,bnd->bhmd", s.softmax(-1), v)


@form(lambda d: d.qkv(v_dim=12))
def mla(q, k, v):
    """Keys of half positional features shared by all heads; values of another width."""
    k = torch.cat([k[..., :4], k[:, :1, :, 4:].expand(-1, k.shape[1], -1, -1)], dim=-1)
    return scores(q, k).softmax(-1) @ v


@form(lambda d: (d.normal(BATCH, DIM, ROWS), d.normal(BATCH, DIM, KEYS), d.normal(BATCH, DIM, KEYS)))
def channels_first(q, k, v):
    """[B, D, M]: keys need no transpose, the values come first in the second product."""
    p = torch.bmm(q.transpose(1, 2), k).mul(DIM**-0.5).softmax(-1)
    return torch.bmm(v, p.transpose(1, 2))


@form(lambda d: (d.normal(BATCH, HEADS, DIM, ROWS),) * 3)
def cross_covariance(q, k, v):
    """XCiT: the sequence is the channel axis."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@form(lambda d: (d.normal(BATCH, ROWS, 3 * HEADS * DIM),))
def packed_qkv(x):
    q, k, v = x.view(*x.shape[:2], 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
    out = scores(q, k).softmax(-1) @ v
    return out.transpose(1, 2).reshape(*x.shape[:2], -1)


@form(lambda d: (*d.qkv(3), *d.qkv(3, 6)[1:]))
def kv_cache(q, k_new, v_new, k_old, v_old):
    """The extended cache is an output too."""
    k, v = torch.cat([k_old, k_new], dim=2), torch.cat([v_old, v_new], dim=2)
    keys, rows = k.shape[-2], q.shape[-2]
    keep = torch.arange(keys)[None, :] <= torch.arange(keys - rows, keys)[:, None]
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v, k, v


# -------------------------------------------------------------------------------------------------------------- composites
@form()
def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@form(lambda d: (*d.qkv(), d.keep(BATCH, 1, ROWS, KEYS)))
def sdpa_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


@form(lambda d: d.qkv(kv_heads=2))
def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@form(lambda d: (d.normal(BATCH, ROWS, HEADS * DIM),))
class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@form()
def checkpointed(q, k, v):
    return checkpoint(lambda q, k, v: plain(q, k, v) * 2.0, q, k, v, use_reentrant=False)
