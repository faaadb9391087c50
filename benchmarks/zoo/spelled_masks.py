"""Masks, biases and sinks between the two products, one spelling each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.base import BATCH, HEADS, LENGTH, floats
from benchmarks.zoo.spelled import HEAD, spelling

INF = float("inf")


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * HEAD**-0.5


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [M, 1] and key positions [1, N]."""
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)[None, :]


# ---- causal and other masks of position --------------------------------------------------------------------


def causal_buffer(m, q, k, v):
    n = q.shape[-2]
    return scores_of(q, k).masked_fill(m.lower[:, :, :n, :n] == 0, -INF).softmax(-1) @ v


def causal_buffer_where(m, q, k, v):
    scores = scores_of(q, k)
    low = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return torch.where(m.lower[:, :, : q.shape[-2], : k.shape[-2]].bool(), scores, low).softmax(-1) @ v


def causal_triu_ones(m, q, k, v):
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores_of(q, k).masked_fill(later, -1e9).softmax(-1) @ v


def causal_triu_infinite(m, q, k, v):
    bias = torch.full((q.shape[-2], k.shape[-2]), -INF, dtype=q.dtype).triu(1)
    return (scores_of(q, k) + bias).softmax(-1) @ v


def causal_in_place(m, q, k, v):
    scores = scores_of(q, k)
    scores.masked_fill_(~torch.tril(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)), -INF)
    return scores.softmax(-1) @ v


def causal_bottom_right(m, q, k, v, past):
    k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
    offset = k.shape[-2] - q.shape[-2]
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(offset)
    return scores_of(q, k).masked_fill(keep.logical_not(), -INF).softmax(-1) @ v


def sliding_window(m, q, k, v):
    i, j = positions(q, k)
    keep = (j <= i) & (j > i - 6)
    return torch.where(keep, scores_of(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v


def sliding_window_tril_minus_tril(m, q, k, v):
    ones = torch.ones(q.shape[-2], k.shape[-2])
    band = torch.tril(ones) - torch.tril(ones, -6)
    return scores_of(q, k).masked_fill(band == 0, -INF).softmax(-1) @ v


def symmetric_band(m, q, k, v):
    i, j = positions(q, k)
    return scores_of(q, k).masked_fill((i - j).abs() > 4, -1e4).softmax(-1) @ v


def block_of_eight(m, q, k, v):
    i, j = positions(q, k)
    keep = (i // 8 == j // 8) & (j <= i)
    return scores_of(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


def dilated(m, q, k, v):
    i, j = positions(q, k)
    keep = ((i - j) % 3 == 0) & (j <= i)
    return scores_of(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


def prefix_lm(m, q, k, v, prefix):
    i, j = positions(q, k)
    keep = (j <= i) | (j < prefix[:, None, None, None])
    return scores_of(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


def documents(m, q, k, v, document):
    i, j = positions(q, k)
    same = document[:, None, :, None] == document[:, None, None, :]
    return scores_of(q, k).masked_fill(~(same & (j <= i)), -INF).softmax(-1) @ v


def global_tokens(m, q, k, v):
    i, j = positions(q, k)
    keep = ((i - j).abs() <= 3) | (i == 0) | (j == 0)
    return scores_of(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


# ---- padding -----------------------------------------------------------------------------------------------


def padding_filled(m, q, k, v, keep):
    return scores_of(q, k).masked_fill(~keep[:, None, None, :], -INF).softmax(-1) @ v


def padding_added(m, q, k, v, keep):
    bias = (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0
    return (scores_of(q, k) + bias).softmax(-1) @ v


def padding_log(m, q, k, v, keep):
    return (scores_of(q, k) + keep[:, None, None, :].to(q.dtype).log()).softmax(-1) @ v


def padding_and_causal(m, q, k, v, keep):
    i, j = positions(q, k)
    allowed = keep[:, None, None, :] & (j <= i)
    bias = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return (scores_of(q, k) + bias).softmax(-1) @ v


def padding_both_sides_guarded(m, q, k, v, keep):
    """Rows and columns masked; a row with no key is set to 0 after the softmax."""
    allowed = keep[:, None, :, None] & keep[:, None, None, :]
    weights = scores_of(q, k).masked_fill(~allowed, -INF).softmax(-1)
    return torch.nan_to_num(weights, nan=0.0) @ v


def padding_finite_dead_sample(m, q, k, v, keep):
    """One sample has no key at all: a finite fill makes its rows the average of all values."""
    return scores_of(q, k).masked_fill(~(keep & m.alive)[:, None, None, :], -1e9).softmax(-1) @ v


def float_mask_argument(m, q, k, v, bias):
    return (scores_of(q, k) + bias).softmax(-1) @ v


def mask_times_scores(m, q, k, v):
    lower = m.lower[:, :, : q.shape[-2], : k.shape[-2]]
    return (scores_of(q, k) * lower + -1e4 * (1 - lower)).softmax(-1) @ v


def two_masks(m, q, k, v, keep):
    i, j = positions(q, k)
    scores = scores_of(q, k).masked_fill(j > i, -1e9)
    return (scores + (~keep[:, None, None, :]).to(q.dtype) * -1e9).softmax(-1) @ v


# ---- biases ------------------------------------------------------------------------------------------------


def alibi(m, q, k, v):
    i, j = positions(q, k)
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(HEADS)], dtype=q.dtype).view(HEADS, 1, 1)
    bias = slopes * (j - i).to(q.dtype)
    return (scores_of(q, k) + bias).masked_fill(j > i, -INF).softmax(-1) @ v


def alibi_baddbmm(m, q, k, v):
    b, h, n, d = q.shape
    bias = (m.slopes[:, None, None] * torch.arange(n, dtype=q.dtype)).repeat(b, 1, 1)
    q, k, v = (z.reshape(b * h, n, d) for z in (q, k, v))
    scores = torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=d**-0.5)
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), torch.finfo(q.dtype).min)
    return torch.bmm(scores.softmax(-1), v).view(b, h, n, d)


def bucketed_bias(m, q, k, v):
    """T5: no scale; a table looked up by log-spaced distance."""
    i, j = positions(q, k)
    distance = (j - i).abs()
    far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / math.log(4) * 8).long()
    bucket = torch.where(distance < 8, distance, far.clamp(max=15)) + 16 * (j > i)
    bias = F.embedding(bucket, m.table).permute(2, 0, 1).unsqueeze(0)
    return (q @ k.mT + bias).softmax(-1) @ v


def gathered_bias(m, q, k, v):
    """Swin: a table indexed by a registered buffer."""
    n = q.shape[-2]
    bias = m.table[m.index.reshape(-1)].view(n, n, HEADS).permute(2, 0, 1).contiguous()
    return (scores_of(q, k) + bias[None]).softmax(-1) @ v


def gathered_bias_and_shift(m, q, k, v, shift):
    n = q.shape[-2]
    bias = m.table[m.index.reshape(-1)].view(n, n, HEADS).permute(2, 0, 1)
    scores = (scores_of(q, k) + bias[None]).view(-1, shift.shape[0], HEADS, n, n)
    scores = (scores + shift[None, :, None]).view(-1, HEADS, n, n)
    return scores.softmax(-1) @ v


def trained_bias(m, q, k, v):
    return (scores_of(q, k) + m.bias).softmax(-1) @ v


def relative_keys(m, q, k, v):
    """Shaw: the query against an embedding of the distance, added before the scale."""
    i, j = positions(q, k)
    relative = m.distance[(j - i).clamp(-8, 8) + 8]
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, relative)
    return (scores / HEAD**0.5).softmax(-1) @ v


def skewed_relative(m, q, k, v):
    """Music transformer: pad, reshape, slice."""
    b, h, n, d = q.shape
    relative = F.pad(q @ m.rows.mT, (1, 0)).reshape(b, h, n + 1, n)[:, :, 1:]
    scores = (q @ k.mT + relative) * d**-0.5
    i, j = positions(q, k)
    return scores.masked_fill(j > i, -INF).softmax(-1) @ v


def sinks_concatenated(m, q, k, v):
    scores = scores_of(q, k)
    sink = m.sinks.view(1, HEADS, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)
    return weights[..., :-1] @ v


def softmax_plus_one(m, q, k, v):
    scores = scores_of(q, k)
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = torch.exp(scores - top)
    return (weights / (weights.sum(-1, keepdim=True) + torch.exp(-top))) @ v


def soft_capped_causal(m, q, k, v):
    i, j = positions(q, k)
    scores = torch.tanh(scores_of(q, k) / 30.0) * 30.0
    return scores.masked_fill(j > i, torch.finfo(q.dtype).min).softmax(-1) @ v


def _lower() -> dict[str, Tensor]:
    return {"lower": torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64)}


def _keep() -> tuple[Tensor]:
    keep = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    keep[-1, 17:] = False
    return (keep,)


def _swin() -> dict[str, Tensor]:
    row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    row, column = row.flatten(), column.flatten()
    return {"index": (row[:, None] - row + 3) * 7 + (column[:, None] - column + 3)}


for _attend in (causal_buffer, causal_buffer_where, mask_times_scores):
    spelling(_attend, buffers=_lower)
for _attend in (
    causal_triu_ones,
    causal_triu_infinite,
    causal_in_place,
    sliding_window,
    sliding_window_tril_minus_tril,
    symmetric_band,
    block_of_eight,
    dilated,
    global_tokens,
    alibi,
    soft_capped_causal,
    softmax_plus_one,
):
    spelling(_attend)
spelling(causal_triu_ones, name="causal_triu_ones_any_length", dynamic=True)
spelling(causal_bottom_right, extra=lambda: (floats(BATCH, HEADS, 7, HEAD, seed=7),), length=9)
spelling(prefix_lm, extra=lambda: (torch.tensor([0, 11]),))
spelling(documents, extra=lambda: (torch.arange(LENGTH).div(7, rounding_mode="floor").expand(BATCH, -1).contiguous(),))
for _attend in (padding_filled, padding_added, padding_log, padding_and_causal, padding_both_sides_guarded, two_masks):
    spelling(_attend, extra=_keep)
spelling(padding_finite_dead_sample, extra=_keep, buffers=lambda: {"alive": torch.tensor([[True], [False]])})
spelling(float_mask_argument, extra=lambda: (floats(BATCH, 1, LENGTH, LENGTH, seed=9),), grad_inputs=(0, 1))
spelling(alibi_baddbmm, buffers=lambda: {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])})
spelling(bucketed_bias, parameters=lambda: {"table": floats(32, HEADS, seed=10)})
spelling(gathered_bias, length=16, buffers=_swin, parameters=lambda: {"table": floats(49, HEADS, seed=10)})
spelling(
    gathered_bias_and_shift,
    length=16,
    buffers=_swin,
    parameters=lambda: {"table": floats(49, HEADS, seed=10)},
    extra=lambda: (torch.where(floats(2, 16, 16, seed=11) > 0.3, -100.0, 0.0),),
)
spelling(trained_bias, parameters=lambda: {"bias": floats(HEADS, LENGTH, LENGTH, seed=12)})
spelling(relative_keys, parameters=lambda: {"distance": floats(17, HEAD, seed=13)})
spelling(skewed_relative, parameters=lambda: {"rows": floats(LENGTH, HEAD, seed=13)})
spelling(sinks_concatenated, parameters=lambda: {"sinks": floats(HEADS, seed=14)})
