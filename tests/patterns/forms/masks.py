"""Masks, proven from positions or captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.patterns.forms.base import BATCH, INF, KEYS, ROWS, form, scores


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
    fill = -1e9 if q.dtype is torch.float64 else torch.finfo(q.dtype).min
    return scores(q, k).masked_fill(~keep, fill).softmax(-1) @ v


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
