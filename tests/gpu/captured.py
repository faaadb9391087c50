"""Programs with captured tensors or a logit of their own, for the tests of the Gluon kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

CAUSAL = "q_idx >= kv_idx"


def _slopes(_batch: int, heads: int, _m: int, _n: int) -> list[Tensor]:
    return [torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])]


def _documents(batch: int, _heads: int, m: int, n: int) -> list[Tensor]:
    """Of random lengths; the last batch is one document."""
    ids = (torch.rand(batch, max(m, n)) < 0.01).long().cumsum(1)
    ids[-1] = 7
    return [ids]


def _padding(batch: int, _heads: int, _m: int, n: int) -> list[Tensor]:
    keep = torch.ones(batch, n, dtype=torch.bool)
    keep[0, : n // 3] = False
    keep[1:, n - n // 4 :] = False
    return [keep]


def _lengths(batch: int, _heads: int, _m: int, n: int) -> list[Tensor]:
    return [torch.randint(0, n + 1, (batch,))]


def _rows(batch: int, heads: int, m: int, n: int) -> list[Tensor]:
    return [torch.rand(batch, m) + 0.5, torch.rand(heads, n) + 0.5]


def _tile(batch: int, _heads: int, m: int, n: int) -> list[Tensor]:
    keep = torch.rand(batch, 1, m, n) < 0.7
    keep[:, :, m // 2] = False
    return [keep]


def _buckets(batch: int, heads: int, m: int, _n: int) -> list[Tensor]:
    return [torch.rand(heads, 8) + 0.5, torch.randint(0, 8, (batch, m))]


#: Programs with captured tensors or a logit of their own, and what draws the tensors for (batch, heads, queries, keys).
CAPTURED: dict[str, tuple[str, Callable[[int, int, int, int], list[Tensor]] | None]] = {
    "alibi": (f"score=where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", _slopes),
    "alibi_both_sides": ("score=score * 0.1 - f0[h] * cast_float(abs(kv_idx - q_idx))", _slopes),
    "alibi_window": (
        f"score=where(({CAUSAL}) & (q_idx - kv_idx < 100), score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", _slopes
    ),
    "documents": (f"score=where(({CAUSAL}) & (i0[b, q_idx] == i0[b, kv_idx]), score * 0.1, -inf)", _documents),
    "documents_both_sides": ("score=where(i0[b, q_idx] == i0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", _documents),
    "documents_before": ("score=where(i0[b, q_idx] >= i0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", _documents),
    "padding": (f"score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.1, -inf)", _padding),
    "padding_zero": ("score=where(m0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", _padding),
    "padding_causal_zero": (f"score=where(({CAUSAL}) & m0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", _padding),
    "lengths": (f"score=where(({CAUSAL}) & (kv_idx < i0[b]), score * 0.1, -inf), dead_rows='zero'", _lengths),
    "prefix": (f"score=where(({CAUSAL}) | (kv_idx < i0[b]), score * 0.1, -inf)", _lengths),
    "chunks": (f"score=where(({CAUSAL}) & (kv_idx // 96 == q_idx // 96), score * 0.1, -inf)", None),
    "softcap_documents": (
        f"score=where(({CAUSAL}) & (i0[b, q_idx] == i0[b, kv_idx]), tanh(score * 0.02) * 20.0, -inf), dead_rows='zero'",
        _documents,
    ),
    "softcap_alibi": (
        f"score=where({CAUSAL}, tanh(score * 0.02) * 20.0 + f0[h] * cast_float(kv_idx - q_idx), -inf)", _slopes
    ),
    "sinks": (f"score=where({CAUSAL}, score * 0.1, -inf), sinks=[f0[h]]", _slopes),
    "sinks_window": (f"score=where(({CAUSAL}) & (q_idx - kv_idx < 100), score * 0.1, -inf), sinks=[f0[h]]", _slopes),
    "temperature": (f"score=where({CAUSAL}, score * f0[h], -inf)", _slopes),
    "by_row_and_key": (f"score=where({CAUSAL}, score * f0[b, q_idx] * f1[h, kv_idx], -inf)", _rows),
    "buckets": (f"score=where({CAUSAL}, score * f0[h, i1[b, q_idx]], -inf)", _buckets),
    "mask_of_every_score": ("score=where(m0[b, 0, q_idx, kv_idx], score * 0.1, -inf), dead_rows='zero'", _tile),
    "clipped": ("score=minimum(maximum(score * 0.3, -1.0), 1.0)", None),
}  # fmt: skip


def _real(batch: int, _heads: int, _m: int, n: int) -> list[Tensor]:
    """1 where a token is real; the last of several batches has none."""
    real = torch.ones(batch, n, dtype=torch.int64)
    real[0, n - n // 3 :] = 0
    if batch > 1:
        real[-1] = 0
    return [real]


def _sinks(batch: int, heads: int, m: int, _n: int) -> list[Tensor]:
    return [torch.randn(heads), torch.randn(batch, m)]


def _bias(_batch: int, heads: int, m: int, n: int) -> list[Tensor]:
    """Some of it masks: a row as a whole, keys of some rows by -inf or by the least number."""
    found = torch.randn(heads, m, n).bfloat16()
    found[:, m // 2] = -math.inf
    found[0, :, : n // 3] = -math.inf
    found[-1, : m // 3, n // 2 :] = torch.finfo(torch.bfloat16).min
    return [found]


def _bias_of_batches(batch: int, _heads: int, m: int, n: int) -> list[Tensor]:
    """Rows lie apart, and queries side by side."""
    return [torch.randn(batch, 1, n, m + 3).transpose(2, 3)[:, :, :m]]


#: What the forward alone takes.
FORWARD = {
    "lengths_alone": ("score=where(kv_idx < i0[b], score * 0.1, -inf), dead_rows='zero'", _lengths),
    "several_sinks": (f"score=where({CAUSAL}, score * 0.1, -inf), sinks=[f0[h], f1[b, q_idx], 0.5]", _sinks),
    "padding_added": ("score=score * 0.1 + (1.0 - cast_float(i0[b, kv_idx])) * -3.3e38", _real),
    "padding_added_causal": (
        f"score=where({CAUSAL}, score * 0.1 + (1.0 - cast_float(i0[b, kv_idx])) * -3.3e38, -inf)", _real
    ),
    "bias": ("score=score * 0.1 + f0[h, q_idx, kv_idx], dead_rows='zero'", _bias),
    "bias_nan": ("score=tanh(score * 0.02) * 20.0 - f0[b, 0, q_idx, kv_idx] * -1.5", _bias_of_batches),
    "padding_finite": ("score=where(i0[b, kv_idx] != 0, score * 0.1, -1e9)", _real),
}  # fmt: skip
