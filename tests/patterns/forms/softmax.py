"""Spellings of the softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.patterns.forms.base import BATCH, HEADS, INF, KEYS, ROWS, Draw, form, scores


def _rows_without_keys(d: Draw) -> tuple[torch.Tensor, ...]:
    return *d.qkv(), d.keep(BATCH, 1, ROWS, KEYS) & (torch.arange(ROWS)[:, None] != 3)


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


@form()
def softmin(q, k, v):
    return F.softmin(scores(q, k), dim=-1) @ v


@form()
def base_two(q, k, v):
    s = scores(q, k) * 1.4426950408889634
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@form()
def exponential_written_twice(q, k, v):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    return (torch.exp(s - top) / torch.exp(s - top).sum(-1, keepdim=True)) @ v


@form()
def softmax_one(q, k, v):
    """Attention that may attend to nothing: a sink of logit 0."""
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    return (e / (e.sum(-1, keepdim=True) + (-top).exp())) @ v


@form(_rows_without_keys)
def softmax_one_with_a_row_without_keys(q, k, v, keep):
    s = scores(q, k).masked_fill(~keep, -INF)
    top = s.amax(-1, keepdim=True).clamp(min=0)
    e = (s - top).exp()
    return (e / (e.sum(-1, keepdim=True) + (-top).exp())) @ v


@form()
def plus_one_without_maximum(q, k, v):
    e = scores(q, k).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@form(lambda d: (*d.qkv(), d.normal(HEADS)))
def sink_in_the_sum(q, k, v, sink):
    s, sink = scores(q, k), sink[:, None, None]
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    e = (s - top).exp()
    return (e / (e.sum(-1, keepdim=True) + (sink - top).exp())) @ v


@form(_rows_without_keys)
def nan_to_num(q, k, v, keep):
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1).nan_to_num(0.0) @ v


@form(_rows_without_keys)
def nan_weights_filled(q, k, v, keep):
    p = scores(q, k).masked_fill(~keep, -INF).softmax(-1)
    return p.masked_fill(p.isnan(), 0.0) @ v


@form(_rows_without_keys)
def masked_before_and_after(q, k, v, keep):
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1).masked_fill(~keep, 0.0) @ v


@form(_rows_without_keys)
def finite_fill_and_masked_after(q, k, v, keep):
    s = torch.where(keep, scores(q, k), torch.finfo(torch.float32).min)
    return torch.where(keep, s.softmax(-1), 0.0) @ v


@form(lambda d: (*d.qkv(), d.keep(BATCH, ROWS)))
def rows_zeroed_by_multiplication(q, k, v, ok):
    return (scores(q, k).softmax(-1) * ok[:, None, :, None]) @ v


@form(lambda d: (*_rows_without_keys(d), torch.arange(ROWS) != 3))
def rows_without_keys_multiplied_by_zero(q, k, v, keep, ok):
    """NaN times zero is NaN: with -inf as the fill, such a guard does not help."""
    p = scores(q, k).masked_fill(~keep, -INF).softmax(-1)
    return (p * ok[:, None].to(p.dtype)) @ v


@form(lambda d: (*_rows_without_keys(d), torch.arange(ROWS) != 3))
def zeroed_by_multiplication_then_masked(q, k, v, keep, ok):
    p = scores(q, k).masked_fill(~keep, -INF).softmax(-1)
    return (p * ok[:, None]).masked_fill(~keep, 0.0) @ v


@form(lambda d: (*d.qkv(), d.normal(HEADS)))
def head_gate_after_softmax(q, k, v, gate):
    return (scores(q, k).softmax(-1) * gate[:, None, None]) @ v


@form(lambda d: (*d.qkv(), d.normal(BATCH, ROWS, HEADS)))
def gate_of_each_query(q, k, v, gate):
    """Trained, from another view of the hidden states, in float32 weights."""
    gate = torch.sigmoid(gate).transpose(1, 2)[..., None]
    return (gate * scores(q, k).softmax(-1, dtype=torch.float32)).to(q.dtype) @ v


@form(lambda d: (*d.qkv(), d.normal(HEADS), d.keep(BATCH, ROWS)))
def rows_zeroed_then_scaled(q, k, v, gate, ok):
    p = torch.where(ok[:, None, :, None], scores(q, k).softmax(-1), 0.0)
    return (p * gate.view(-1, 1, 1).expand(-1, 1, k.shape[-2]) * 0.5) @ v


@form(fused=2)
def attention_of_attention(q, k, v):
    """A Hopfield network's retrieval: the result is the next query, with nothing in between."""
    out = scores(q, k).softmax(-1) @ k
    return scores(out, k).softmax(-1) @ v
