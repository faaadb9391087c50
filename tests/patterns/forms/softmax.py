"""Spellings of the softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.patterns.forms.base import form, scores


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


@form(fused=2)
def attention_of_attention(q, k, v):
    """A Hopfield network's retrieval: the result is the next query, with nothing in between."""
    out = scores(q, k).softmax(-1) @ k
    return scores(out, k).softmax(-1) @ v
