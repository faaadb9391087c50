"""Hand-written softmaxes, sinks and guards that were once taken for what they are not, smallest form each.

Each form runs compiled and must equal eager in values, NaN pattern and gradients; `FUSES` names those that are attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz.oracle import check

INF = math.inf
MIN = torch.finfo(torch.float32).min

FORMS: dict[str, Callable[..., Tensor]] = {}
FUSES: set[str] = set()
#: Forms whose eager gradients are NaN.
VALUES_ONLY: set[str] = set()
HALF: set[str] = set()


def form(fuses: bool = False, grad: bool = True, half: bool = False) -> Callable:
    """A function of q, k, v [2, 2, 6, 8], ``m`` bool [2, 1, 6, 6] with query row 0 all True and ``r`` bool [2, 1, 6, 1]."""

    def register(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        FORMS[fn.__name__] = fn
        FUSES.update({fn.__name__} if fuses else ())
        VALUES_ONLY.update(() if grad else {fn.__name__})
        HALF.update({fn.__name__} if half else ())
        return fn

    return register


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.5


def exponentials(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


def total(e: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True)


# --------------------------------------------------------------------------------- the quotient is not of the same element
@form()
def quotient_of_swapped_batch_and_heads(q, k, v, m, r):
    e = exponentials(scores(q, k))
    return (e.transpose(0, 1) / total(e).transpose(0, 1)) @ v


@form()
def quotient_of_flipped_keys(q, k, v, m, r):
    e = exponentials(scores(q, k))
    return (e.flip(-1) / total(e)) @ v


@form()
def quotient_of_transposed_scores(q, k, v, m, r):
    e = exponentials(scores(q, k))
    return (e.mT / total(e).mT) @ v


@form()
def logsumexp_taken_off_flipped_batches(q, k, v, m, r):
    s = scores(q, k)
    return (s.flip(0) - s.logsumexp(-1, keepdim=True).flip(0)).exp() @ v


@form()
def quotient_of_one_head(q, k, v, m, r):
    e = exponentials(scores(q, k))
    return (e[:, 1] / total(e)[:, 1]) @ v[:, 1]


# -------------------------------------------------------------------------------------------- guards that do not hold everywhere
@form()
def guard_of_some_heads(q, k, v, m, r):
    p = scores(q, k).softmax(-1)
    return torch.where(torch.tensor([True, False])[:, None, None], p.masked_fill(r, 0.0), p) @ v


@form()
def guard_of_some_rows_written_back(q, k, v, m, r):
    p = scores(q, k).softmax(-1).clone()
    p[:, :, :3] = p[:, :, :3].masked_fill(r[:, :, :3], 0.0)
    return p @ v


@form()
def mask_repeated_for_some_heads(q, k, v, m, r):
    p = scores(q, k).masked_fill(m, MIN).softmax(-1)
    return torch.where(torch.tensor([True, False])[:, None, None], p.masked_fill(m, 0.0), p) @ v


@form(grad=False)
def nan_to_num_for_some_heads(q, k, v, m, r):
    p = scores(q, k).masked_fill(m, -INF).softmax(-1)
    return torch.where(torch.tensor([True, False])[:, None, None], p.nan_to_num(0.0), p) @ v


@form()
def nan_test_of_a_guarded_copy(q, k, v, m, r):
    p = scores(q, k).softmax(-1)
    return p.masked_fill(p.masked_fill(r, 0.0).isnan(), 0.0) @ v


@form(grad=False)
def nan_test_of_a_masked_copy(q, k, v, m, r):
    p = scores(q, k).masked_fill(m, -INF).softmax(-1)
    return torch.where(p.masked_fill(m, 0.0).isnan(), 0.0, p) @ v


# ------------------------------------------------------------------------------------------------ masks after the softmax
@form()
def repeated_mask_over_huge_scores(q, k, v, m, r):
    s = scores(q, k)
    s = torch.where(s > 1, s, MIN).masked_fill(m, MIN)
    return s.softmax(-1).masked_fill(m, 0.0) @ v


@form(grad=False)
def repeated_mask_over_logarithms(q, k, v, m, r):
    s = (scores(q, k) - 1).relu().log().masked_fill(m, -INF)
    return s.softmax(-1).masked_fill(m, 0.0) @ v


@form()
def repeated_mask_over_scores_as_low(q, k, v, m, r):
    s = (scores(q, k).clamp(max=1) - 1e31).masked_fill(m, -1e31)
    return s.softmax(-1).masked_fill(m, 0.0) @ v


# --------------------------------------------------------------------------------------------------------- sinks and shifts
@form()
def maximum_taken_off_twice(q, k, v, m, r):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    e = (s - top - top).exp()
    return (e / (total(e) + (q[..., :1] - top).exp())) @ v


@form(grad=False)
def deferred_division_of_cleaned_exponentials(q, k, v, m, r):
    e = scores(q, k).masked_fill(m, -INF).exp()
    return (e.nan_to_num(0.0) @ v) / total(e)


@form(grad=False)
def maximum_of_masked_scores_off_the_others(q, k, v, m, r):
    s = scores(q, k)
    e = (s - s.masked_fill(m, -INF).amax(-1, keepdim=True)).exp()
    return (e / total(e)) @ v


@form(fuses=True)
def maximum_before_masking(q, k, v, m, r):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    e = (s.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -INF) - top).exp()
    return (e / total(e)) @ v


@form(fuses=True, half=True, grad=False)
def epsilon_that_vanishes_in_float16(q, k, v, m, r):
    e = scores(q, k).masked_fill(m, -INF).exp()
    return (e / (total(e) + 1e-9)) @ v


@form()
def sink_of_another_batch(q, k, v, m, r):
    e = scores(q[:1], k[:1]).exp()
    return (e / (total(e) + q[:, :1, :1, :1].exp())) @ v


@form(grad=False)
def dead_rows_of_the_other_batch(q, k, v, m, r):
    s = scores(q, k).masked_fill(m & torch.tensor([True, False])[:, None, None, None], -INF)
    dead = (s == -INF).all(-1, keepdim=True)
    return s.softmax(-1).flip(0).masked_fill(dead, 0.0).flip(0) @ v


@form(grad=False)
def maximum_and_an_infinite_number_taken_off(q, k, v, m, r):
    s = scores(q, k)
    return (s - (s.amax(-1, keepdim=True) + torch.where(r, INF, 0.0))).softmax(-1) @ v


@form(grad=False)
def maximum_times_a_huge_number_taken_off(q, k, v, m, r):
    s = scores(q, k)
    return (s - s.amax(-1, keepdim=True) * 1e39).softmax(-1) @ v


@form(grad=False)
def maximum_bounded_by_an_infinite_value(q, k, v, m, r):
    s = scores(q, k)
    return (s - torch.maximum(s.amax(-1, keepdim=True), torch.where(r, INF, 0.0))).softmax(-1) @ v


# -------------------------------------------------------------------------------------------------------------- gradients
def _no_grad(fn: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return fn()


@form()
def sum_without_gradient(q, k, v, m, r):
    e = scores(q, k).exp()
    return (e / _no_grad(lambda: total(e))) @ v


@form()
def deferred_sum_without_gradient(q, k, v, m, r):
    e = scores(q, k).exp()
    return (e @ v) / _no_grad(lambda: total(e))


@form()
def logsumexp_without_gradient(q, k, v, m, r):
    s = scores(q, k)
    return (s - _no_grad(lambda: s.logsumexp(-1, keepdim=True))).exp() @ v


@form()
def second_exponential_without_gradient(q, k, v, m, r):
    s = scores(q, k)
    return (s.exp() / total(_no_grad(lambda: s.exp()))) @ v


@form()
def second_scores_without_gradient(q, k, v, m, r):
    return (scores(q, k).exp() / total(_no_grad(lambda: scores(q, k)).exp())) @ v


@form()
def sink_without_gradient(q, k, v, m, r):
    e, t = scores(q, k).exp(), v[..., :1]
    return (e / (total(e) + _no_grad(lambda: t.exp()))) @ v


@form()
def guard_without_gradient(q, k, v, m, r):
    p = scores(q, k).softmax(-1)
    return _no_grad(lambda: p.masked_fill(r, 0.0)) @ v


@form()
def maximum_detached_for_the_sink_alone(q, k, v, m, r):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    return (e / (total(e) + (-top.detach()).exp())) @ v


@form()
def maximum_detached_for_the_keys_alone(q, k, v, m, r):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    e = (s - top.detach()).exp()
    return (e / (total(e) + (-top).exp())) @ v


@form(fuses=True)
def maximum_detached_for_both(q, k, v, m, r):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True).detach()
    e = (s - top).exp()
    return (e / (total(e) + (-top).exp())) @ v


@form(fuses=True)
def padded_queries_zeroed(q, k, v, m, r):
    """Rows without keys that a guard zeroes: NaN must not come back through the gradient of v."""
    return scores(q, k).masked_fill(r, -INF).softmax(-1).masked_fill(r, 0.0) @ v


@form(fuses=True, grad=False)
def padded_queries_zeroed_and_other_rows_without_keys(q, k, v, m, r):
    return scores(q, k).masked_fill(r | m, -INF).softmax(-1).masked_fill(r, 0.0) @ v


@form(fuses=True)
def transposed_onto_itself(q, k, v, m, r):
    return scores(q, k).transpose(1, 1).swapaxes(2, 2).softmax(-1) @ v


@form(fuses=True)
def triangle_of_a_single_key_zeroes_nothing(q, k, v, m, r):
    """Rows without keys stay NaN, and so do their gradients."""
    return scores(q, k[:, :, :1]).masked_fill(r, -INF).softmax(-1).tril() @ v[:, :, :1]


@form(fuses=True)
def triangle_beyond_all_keys_zeroes_nothing(q, k, v, m, r):
    return scores(q, k).masked_fill(r, -INF).softmax(-1).triu(-5) @ v


@form()
def triangle_that_zeroes_one_weight(q, k, v, m, r):
    return scores(q, k).masked_fill(r, -INF).softmax(-1).triu(-4) @ v


# ------------------------------------------------------------------------- exp of numbers that lift a logit without a shift
def held(s: Tensor, v: Tensor) -> Tensor:
    return (s.exp() / (total(s.exp()) + 0.1)) @ v


@form(grad=False)
def large_fill_turned_around(q, k, v, m, r):
    return held((1 - scores(q, k).masked_fill(m, -1e4)).clamp_min(-2.0), v)


@form(grad=False)
def infinite_fill_turned_around(q, k, v, m, r):
    return held(1 - scores(q, k).masked_fill(m, -INF), v)


@form(grad=False)
def large_bias_of_a_mask_taken_off(q, k, v, m, r):
    return held(scores(q, k) - m.float() * -1e4, v)


@form(grad=False)
def large_fill_where_every_row_has_a_key(q, k, v, m, r):
    s = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), scores(q, k), 1e4)
    return (s.exp() / total(s.exp())) @ v


@form(fuses=True)
def low_fill_beside_a_sink_that_is_a_number(q, k, v, m, r):
    return held(scores(q, k).masked_fill(m, -1e4), v)


@form(fuses=True)
def low_bias_beside_a_sink_that_is_a_number(q, k, v, m, r):
    return held(scores(q, k) + (1.0 - (~m).float()) * -1e4, v)


@form(fuses=True)
def slopes_times_distances_beside_a_sink_that_is_a_number(q, k, v, m, r):
    distances = -(torch.arange(6)[:, None] - torch.arange(6)).abs()
    return held(scores(q, k) + m[:, :, 0, :1, None].float() * distances, v)


@pytest.mark.parametrize("name", FORMS)
def test_once_wrong(name: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if name in HALF else torch.float32
    operands: list[Any] = [torch.randn(2, 2, 6, 8).to(dtype).requires_grad_(name not in VALUES_ONLY) for _ in range(3)]
    m = torch.rand(2, 1, 6, 6) < 0.3
    m[:, :, 0] = True
    m[:, :, 1:, 2] = False
    r = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool).view(1, 1, 6, 1).repeat(2, 1, 1, 1)
    r[1, 0, 5] = True
    made = check(FORMS[name], [*operands, m, r], dtype=dtype)
    assert not any(s.reason.startswith("analysis failed") for s in made.sites)
    assert made.fused == (name in FUSES), [(s.status, s.reason, s.program) for s in made.sites]
