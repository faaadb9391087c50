"""Computes something else than softmax(f(q k^T)) v."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.patterns.forms import HEADS, INF, scores
from tests.patterns.lookalikes.base import OTHER_AXIS, lookalike, plus


# ----------------------------------------------------------------------------------------------------- another softmax
@lookalike(OTHER_AXIS)
def softmax_over_queries(q, k, v):
    return scores(q, k).softmax(-2) @ v


@lookalike(OTHER_AXIS)
def softmax_over_heads(q, k, v):
    return scores(q, k).softmax(1) @ v


@lookalike(OTHER_AXIS)
def softmax_over_batch(q, k, v):
    return scores(q, k).softmax(0) @ v


@lookalike(OTHER_AXIS)
def transposed_probabilities(q, k, v):
    return scores(q, k).softmax(-1).transpose(-2, -1) @ v


@lookalike(OTHER_AXIS)
def softmax_over_heads_and_keys(q, k, v):
    b, h, n, _ = q.shape
    p = scores(q, k).transpose(1, 2).reshape(b, n, -1).softmax(-1)
    return p.view(b, n, h, -1).transpose(1, 2) @ v


@lookalike(OTHER_AXIS)
def divided_by_the_sum_over_queries(q, k, v):
    e = scores(q, k).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@lookalike(OTHER_AXIS)
def deferred_division_by_another_sum(q, k, v):
    e = scores(q, k).exp()
    return (e @ v) / e.sum(-2).unsqueeze(-1)


@lookalike(None)
def deferred_division_by_the_sum_of_others(q, k, v):
    e, other = scores(q, k).exp(), scores(k, q).exp()
    return (e @ v) / other.sum(-1, keepdim=True)


@lookalike("shifted by different amounts within a row")
def divided_by_the_sum_plus_epsilon(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-3)) @ v


@lookalike("shifted by different amounts within a row")
def sink_that_is_not_shifted(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + q[..., :1].exp())) @ v


@lookalike("its maximum is taken off before the sink")
def sink_beside_rows_without_keys(q, k, v):
    s = scores(q, k).masked_fill(k[..., None, :, 0] > -10, -torch.inf)
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    return (e / (e.sum(-1, keepdim=True) + (-top).exp())) @ v


@lookalike("exp is not divided by the sum of its row alone")
def divided_by_a_negative_number_more(q, k, v):
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) - 1e-3)) @ v


@lookalike("exp is not divided by the sum of its row alone")
def normalised_with_a_floor(q, k, v):
    return torch.nn.functional.normalize(scores(q, k).exp(), p=1, dim=-1, eps=20.0) @ v


@lookalike("changed by nan_to_num")
def nan_becomes_one(q, k, v):
    return scores(q, k).softmax(-1).nan_to_num(1.0) @ v


@lookalike("masked after the softmax, otherwise")
def masked_after_softmax_by_another_mask(q, k, v):
    s = scores(q, k).masked_fill(k[..., None, :, 0] > 0.5, -torch.inf)
    return s.softmax(-1).masked_fill(k[..., None, :, 0] > 0.4, 0.0) @ v


@lookalike("masked after the softmax, otherwise")
def masked_after_a_small_fill(q, k, v):
    hidden = k[..., None, :, 0] > 0.5
    return scores(q, k).masked_fill(hidden, -5.0).softmax(-1).masked_fill(hidden, 0.0) @ v


@lookalike("reduction over another axis")
def less_the_maximum_over_queries(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-2, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@lookalike("max between the scores and the softmax")
def less_the_global_maximum(q, k, v):
    s = scores(q, k)
    return (s - s.max()).softmax(-1) @ v


@lookalike(None)
def exponentials_not_normalised(q, k, v):
    return scores(q, k).exp() @ v


@lookalike(None)
def sigmoid_weights(q, k, v):
    return torch.sigmoid(scores(q, k)) @ v


@lookalike(None)
def squared_relu_weights(q, k, v):
    return (F.relu(scores(q, k)).square() / k.shape[-2]) @ v


@lookalike(None)
def log_probabilities(q, k, v):
    return F.log_softmax(scores(q, k), -1) @ v


# -------------------------------------------------------------------------------------------------------- other scores
BEFORE = "mixes the scores over heads (axis 1 of [2, 4, 8, 8]) between the product of queries and keys and the softmax"
AFTER = "mixes the probabilities over heads (axis 1 of [2, 4, 8, 8]) between the softmax and the product with V"


@lookalike("einsum " + BEFORE, plus(HEADS, HEADS))
def talking_heads_before(q, k, v, mix):
    return torch.einsum("bhmn,hg->bgmn", scores(q, k), mix).softmax(-1) @ v


@lookalike("einsum " + AFTER, plus(HEADS, HEADS))
def talking_heads_after(q, k, v, mix):
    return torch.einsum("bhmn,hg->bgmn", scores(q, k).softmax(-1), mix) @ v


@lookalike(f"matmul {BEFORE}; matmul {AFTER}", plus(HEADS, HEADS))
def talking_heads_by_matmul(q, k, v, mix):
    p = (mix @ scores(q, k).flatten(2)).view(2, HEADS, 8, 8).softmax(-1)
    return (p.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2) @ v


@lookalike("linear " + BEFORE, plus(HEADS, HEADS))
def talking_heads_before_by_a_layer(q, k, v, weight):
    s = F.linear(scores(q, k).permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2)
    return s.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -INF).softmax(-1) @ v


@lookalike("linear " + AFTER, plus(HEADS, HEADS))
def talking_heads_after_by_a_layer(q, k, v, weight):
    return F.linear(scores(q, k).softmax(-1).permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2) @ v


@lookalike(f"linear {BEFORE}; linear {AFTER}", plus(HEADS, HEADS))
def talking_heads(q, k, v, weight):
    """As in CaiT."""
    s = F.linear(scores(q, k).permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2)
    return F.linear(s.softmax(-1).permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2) @ v


@lookalike("einsum mixes the probabilities over axis 2 of [2, 8, 4, 8] between", plus(HEADS, HEADS))
def talking_heads_behind_the_queries(q, k, v, mix):
    s = torch.einsum("bhmd,bhnd->bmhn", q, k)
    return torch.einsum("bmgn,bgnd->bmgd", torch.einsum("bmhn,hg->bmgn", s.softmax(-1), mix), v)


@lookalike(OTHER_AXIS, plus(8, 8))
def probabilities_mixed_over_queries(q, k, v, mix):
    return torch.einsum("bhmn,mp->bhpn", scores(q, k).softmax(-1), mix) @ v


@lookalike("changed by linear between the softmax and the product with V", plus(8, 8))
def probabilities_mixed_over_queries_by_a_layer(q, k, v, weight):
    return F.linear(scores(q, k).softmax(-1).mT, weight).mT @ v


@lookalike("the probabilities go into linear, behind which no product with V was found", plus(8, HEADS))
def features_of_the_probabilities(q, k, v, weight):
    return F.linear(scores(q, k).softmax(-1).permute(0, 2, 3, 1), weight).relu()


@lookalike(None, plus(8, 8))
def router(q, k, v, weight):
    """A softmax over what a layer makes of hidden states, and a product behind it."""
    return F.linear(q @ k[0, 0], weight).softmax(-1) @ v


@lookalike(None, plus(8, 8))
def pooled_over_positions(q, k, v, weight):
    return F.linear(q @ k[0, 0], weight).softmax(-2).mT @ v


@lookalike("conv2d between the scores and the softmax", plus(HEADS, 1, 3, 3))
def convolved_before_and_after(q, k, v, kernel):
    p = F.conv2d(scores(q, k), kernel, padding=1, groups=HEADS).softmax(-1)
    return F.conv2d(p, kernel, padding=1, groups=HEADS) @ v


@lookalike("changed by conv2d between the softmax and the product with V", plus(HEADS, 1, 3, 3))
def convolved_probabilities(q, k, v, kernel):
    return F.conv2d(scores(q, k).softmax(-1), kernel, padding=1, groups=HEADS) @ v


@lookalike("conv2d between the scores and the softmax", plus(HEADS, 1, 3, 3))
def convolved_scores(q, k, v, kernel):
    return F.conv2d(scores(q, k), kernel, padding=1, groups=HEADS).softmax(-1) @ v


@lookalike("topk between the scores and the softmax")
def top_k_scores(q, k, v):
    s = scores(q, k)
    least = s.topk(3, dim=-1).values[..., -1:]
    return s.masked_fill(s < least, -INF).softmax(-1) @ v


@lookalike("std between the scores and the softmax")
def standardised_rows(q, k, v):
    s = scores(q, k)
    return ((s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)).softmax(-1) @ v


@lookalike("cumsum between the scores and the softmax")
def cumulative_scores(q, k, v):
    return scores(q, k).cumsum(-1).softmax(-1) @ v


@lookalike("roll between the scores and the softmax")
def shifted_scores(q, k, v):
    return scores(q, k).roll(1, -1).softmax(-1) @ v


@lookalike("rand_like between the scores and the softmax")
def gumbel_noise(q, k, v):
    s = scores(q, k)
    noise = -torch.rand_like(s).clamp_min(1e-6).log()
    return (s + noise).softmax(-1) @ v


@lookalike("no product of queries and keys before this softmax")
def linear_attention(q, k, v):
    q, k = q.softmax(-1), k.softmax(-2)
    return q @ (k.mT @ v)


@lookalike(None)
def linear_attention_elu(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


@lookalike(None)
def classifier(q, k, v):
    """A softmax between two matmuls that are no scores and values."""
    return (q @ k[0, 0]).softmax(-1)


@lookalike("more than one entry of the product")
def symmetrised_scores(q, k, v):
    s = scores(q, k)
    return (s + s.mT).softmax(-1) @ v


@lookalike("round between the scores and the softmax")
def rounded_scores(q, k, v):
    return ((scores(q, k) * 4).round() / 4).softmax(-1) @ v


@lookalike("native_dropout between the scores and the softmax")
def dropout_of_scores(q, k, v):
    return F.dropout(scores(q, k), 0.3).softmax(-1) @ v


@lookalike("bernoulli between the scores and the softmax")
def dropped_keys(q, k, v):
    s = scores(q, k)
    drop = torch.bernoulli(torch.full_like(s, 0.3)).bool()
    return s.masked_fill(drop, -INF).softmax(-1) @ v


@lookalike("nan_to_num between the scores and the softmax")
def nan_to_num_scores(q, k, v):
    return scores(q, k).nan_to_num().softmax(-1) @ v


@lookalike(None)
def distance_scores(q, k, v):
    return (-torch.cdist(q, k)).softmax(-1) @ v


@lookalike(None)
def additive_attention(q, k, v):
    s = torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1)
    return s.softmax(-1) @ v
