"""Blocks that resemble softmax attention and must keep their own meaning.

Each is one change away from attention: another axis, another normaliser, heads mixed, weights used elsewhere, an
operand that is not transposed. Fusing one of them as attention gives wrong values or wrong gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.zoo.base import BATCH, HEADS, LENGTH, floats
from benchmarks.zoo.spelled import bare, spelling
from benchmarks.zoo.spelled_masks import scores_of


def over_queries(m, q, k, v):
    return scores_of(q, k).softmax(-2) @ v


def over_heads(m, q, k, v):
    return scores_of(q, k).softmax(1) @ v


def over_heads_and_keys(m, q, k, v):
    b, h, n, _ = q.shape
    joint = scores_of(q, k).transpose(1, 2).reshape(b, n, -1).softmax(-1)
    return joint.view(b, n, h, -1).transpose(1, 2) @ v


def linear_elu(m, q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


def linear_two_softmaxes(m, q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def linear_first_order(m, q, k, v):
    """Weights 1 + s in place of exp(s)."""
    weights = 1 + F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return (weights / weights.sum(-1, keepdim=True)) @ v


def sigmoid_weights(m, q, k, v):
    return torch.sigmoid(scores_of(q, k) - 3.0) @ v


def squared_relu_weights(m, q, k, v):
    return (F.relu(scores_of(q, k)).square() / LENGTH) @ v


def heads_mixed_before(m, q, k, v):
    scores = torch.einsum("bhij,hg->bgij", scores_of(q, k), m.mix)
    return scores.softmax(-1) @ v


def heads_mixed_after(m, q, k, v):
    weights = torch.einsum("bhij,hg->bgij", scores_of(q, k).softmax(-1), m.mix)
    return weights @ v


def scores_convolved(m, q, k, v):
    return F.conv2d(scores_of(q, k), m.kernel, padding=1, groups=HEADS).softmax(-1) @ v


def masked_after_softmax(m, q, k, v):
    weights = scores_of(q, k).softmax(-1)
    return weights.tril() @ v


def head_gate_on_weights(m, q, k, v):
    """A factor per head on the weights, trained."""
    return (scores_of(q, k).softmax(-1) * m.gate.view(HEADS, 1, 1)) @ v


def sparsemax(m, q, k, v):
    scores = scores_of(q, k)
    ordered = scores.sort(-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    total = ordered.cumsum(-1) - 1
    support = (rank * ordered > total).sum(-1, keepdim=True)
    return F.relu(scores - total.gather(-1, support - 1) / support) @ v


def weights_returned(m, q, k, v):
    weights = scores_of(q, k).softmax(-1)
    return weights @ v, weights


def weights_entropy(m, q, k, v):
    weights = scores_of(q, k).softmax(-1)
    return weights @ v, -(weights * (weights + 1e-6).log()).sum(-1).mean()


def scores_returned(m, q, k, v):
    scores = scores_of(q, k)
    return scores.softmax(-1) @ v, scores.logsumexp(-1).square().mean()


def weights_detached(m, q, k, v):
    """Values as in attention; no gradient reaches q and k."""
    return scores_of(q, k).softmax(-1).detach() @ v


def weights_transposed(m, q, k, v):
    return scores_of(q, k).softmax(-1).mT @ v


def weights_plus_identity(m, q, k, v):
    return (scores_of(q, k).softmax(-1) + torch.eye(q.shape[-2], dtype=q.dtype)) @ v


def weights_top_four(m, q, k, v):
    """The four largest weights of a row, renormalised."""
    weights = scores_of(q, k).softmax(-1)
    weights = weights * (weights >= weights.topk(4, -1).values[..., -1:])
    return (weights / weights.sum(-1, keepdim=True)) @ v


def two_softmaxes_gated(m, q, k, v):
    gate = torch.sigmoid(m.gate).view(HEADS, 1, 1)
    weights = (1 - gate) * scores_of(q, k).softmax(-1) + gate * m.position.softmax(-1)
    return weights @ v


def values_from_weights(m, q, k, v):
    weights = scores_of(q, k).softmax(-1)
    return weights @ (v + weights.mean(-1, keepdim=True))


def keys_not_transposed(q, k, v):
    """All sizes equal, so that q @ k is legal."""
    return (q @ k * 0.25).softmax(-1) @ v


def keys_swapped_with_heads(q, k, v):
    return (q @ k.transpose(1, 2) * 0.25).softmax(-1) @ v


def temperature_from_row(m, q, k, v):
    """The scale is the standard deviation of the row of scores: pointwise no more."""
    scores = scores_of(q, k)
    return (scores / (scores.std(-1, keepdim=True) + 1e-3)).softmax(-1) @ v


def filled_with_zero(m, q, k, v):
    """A fill of 0 is no mask: the filled keys keep the weight exp(0)."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores_of(q, k).masked_fill(later, 0.0).softmax(-1) @ v


def filled_with_minus_three(m, q, k, v):
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores_of(q, k).masked_fill(later, -3.0).softmax(-1) @ v


def flag_added(m, q, k, v, flag):
    """A bool tensor added to the scores is the number 1."""
    return (scores_of(q, k) + flag).softmax(-1) @ v


def softmax_of_one_matrix(m, q, k, v):
    """A softmax with no product in front of it."""
    return m.position.softmax(-1) @ v


for _attend in (
    over_queries,
    over_heads,
    over_heads_and_keys,
    linear_elu,
    linear_two_softmaxes,
    linear_first_order,
    sigmoid_weights,
    squared_relu_weights,
    masked_after_softmax,
    sparsemax,
    weights_returned,
    weights_entropy,
    weights_detached,
    weights_transposed,
    weights_plus_identity,
    weights_top_four,
    values_from_weights,
    temperature_from_row,
):
    spelling(_attend, family="lookalike", kind="neg", sites=None)
for _attend in (heads_mixed_before, heads_mixed_after):
    spelling(
        _attend, family="lookalike", kind="neg", sites=None, parameters=lambda: {"mix": floats(HEADS, HEADS, seed=15)}
    )
spelling(
    scores_convolved,
    family="lookalike",
    kind="neg",
    sites=None,
    parameters=lambda: {"kernel": floats(HEADS, 1, 3, 3) * 0.3},
)
spelling(
    head_gate_on_weights,
    family="lookalike",
    kind="any",
    sites=None,
    parameters=lambda: {"gate": floats(HEADS, seed=16)},
)
spelling(
    two_softmaxes_gated,
    family="lookalike",
    kind="neg",
    sites=None,
    parameters=lambda: {"gate": floats(HEADS, seed=16), "position": floats(HEADS, LENGTH, LENGTH, seed=17)},
)
spelling(
    softmax_of_one_matrix,
    family="lookalike",
    kind="neg",
    sites=None,
    parameters=lambda: {"position": floats(HEADS, LENGTH, LENGTH, seed=17)},
)
for _attend in (keys_not_transposed, keys_swapped_with_heads):  # right if the operands are arranged as written
    bare(_attend, *[(BATCH, 16, 16, 16)] * 3, family="lookalike", kind="any", sites=None)
for _attend in (scores_returned, filled_with_zero, filled_with_minus_three):
    spelling(_attend, family="lookalike", kind="any", sites=None)
spelling(
    flag_added,
    family="lookalike",
    kind="any",
    sites=None,
    extra=lambda: (floats(LENGTH, LENGTH, seed=18) > 0,),
)
