"""Scales, biases and functions of the score."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.patterns.forms.base import BATCH, DIM, HEADS, INF, KEYS, ROWS, Draw, form, scores


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


@form()
def second_product_as_bias(q, k, v):
    return (q @ k.mT + k[:, :, : q.shape[-2]] @ k.mT).softmax(-1) @ v


@form()
def clamped_scores(q, k, v):
    s = scores(q, k).clamp(-1.0, 1.0)
    s /= 0.5
    return s.softmax(-1) @ v


@form(lambda d: (*d.qkv(), d.keep(BATCH, 1, ROWS, KEYS)))
def mask_added_as_number(q, k, v, mask):
    return (scores(q, k) + mask).softmax(-1) @ v


@form(lambda d: (*d.qkv(), d.normal(BATCH, HEADS, ROWS, 7)))
def all_of_the_scores_sliced_and_written(q, k, v, bias):
    """Decomposed relative positions of an image, where the slice leaves out class tokens: here there are none."""
    s = scores(q, k)
    s[:, :, 0:, 0:] = (s[:, :, 0:, 0:].view(BATCH, HEADS, ROWS, 7, 2) + bias.unsqueeze(-1)).view(BATCH, HEADS, ROWS, KEYS)
    return s.softmax(-1) @ v


@form(lambda d: (*d.qkv(), d.normal(BATCH, HEADS, 2, 2)))
def slice_written_into_scores(q, k, v, patch):
    s = scores(q, k)
    s[:, :, 2:4, 3:5] = patch
    return s.softmax(-1) @ v
