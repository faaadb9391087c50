"""Heads, groups of heads and memory layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.patterns.forms.base import BATCH, DIM, HEADS, INF, KEYS, ROWS, form, scores


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


@form()
def keys_of_each_query(q, k, v):
    """[B, H, M, N, D] keys: the query axis is a batch axis."""
    own = k.unsqueeze(2) + q.unsqueeze(3)
    s = torch.einsum("bhmd,bhmnd->bhmn", q, own)
    return torch.einsum("bhmn,bhmnd->bhmd", s.softmax(-1), own) + v.mean()


@form()
def values_scaled_in_place(q, k, v):
    v = v * 1.0
    p = scores(q, k).softmax(-1)
    v.mul_(2.0)
    return p @ v


@form(lambda d: (d.normal(BATCH, ROWS, DIM), d.normal(BATCH, KEYS, DIM), d.normal(BATCH, KEYS, DIM)))
def single_head(q, k, v):
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.3).softmax(-1), v)
