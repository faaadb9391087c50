"""Uses the probabilities elsewhere too, or changes them before the product with V."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.patterns.forms import HEADS, scores
from tests.patterns.lookalikes.base import OTHER_AXIS, lookalike, plus


@lookalike("probabilities are returned or used elsewhere")
def weights_returned(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p


@lookalike("probabilities are also used by clamp_min")
def entropy_of_the_weights(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, -(p * p.clamp_min(1e-6).log()).sum(-1)


@lookalike("scores are returned or used elsewhere")
def scores_returned(q, k, v):
    s = scores(q, k)
    return s.softmax(-1) @ v, s


@lookalike("scores are returned or used elsewhere")
def z_loss_of_the_scores(q, k, v):
    s = scores(q, k)
    return s.softmax(-1) @ v, s.square().mean()


@lookalike("more than one tensor")
def weights_used_twice(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p @ k


@lookalike("the scores are also used by _softmax")
def scores_in_two_softmaxes(q, k, v):
    s = scores(q, k)
    return s.softmax(-1) @ v + s.softmax(-2) @ v


@lookalike("changed by mul", plus(8))
def gate_of_the_keys(q, k, v, gate):
    return (scores(q, k).softmax(-1) * gate) @ v


@lookalike("changed by mul", plus(HEADS, 8, 1))
def gate_of_some_heads(q, k, v, gate):
    p = scores(q, k).softmax(-1)
    return torch.where(torch.arange(HEADS)[:, None, None] < 2, p * gate, p) @ v


@lookalike("changed by amax")
def gate_of_the_weights(q, k, v):
    p = scores(q, k).softmax(-1)
    return (p * p.amax(-1, keepdim=True)) @ v


@lookalike("multiplied by what is computed from the scores")
def gate_of_the_scores(q, k, v):
    s = scores(q, k)
    return (s.softmax(-1) * s.amax(-1, keepdim=True)) @ v


@lookalike("changed by div", plus(HEADS, 8, 1))
def divided_by_a_number_a_row(q, k, v, count):
    """Where the number is 0 a masked weight is 0 / 0, the output divided by 0 is infinite."""
    return (scores(q, k).softmax(-1) / count) @ v


@lookalike("changed by nan_to_num", plus(HEADS, 8, 1))
def nan_of_a_gate_becomes_zero(q, k, v, gate):
    return (scores(q, k).softmax(-1) * gate).nan_to_num(0.0) @ v


@lookalike("multiplied by a factor that may be infinite: reciprocal", plus(HEADS, 8, 1))
def divided_by_the_number_of_keys(q, k, v, gate):
    """A row without keys weighs all alike: infinity times v of both signs adds up to NaN, and an output times infinity does not."""
    keep = gate > 0
    p = scores(q, k).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1)
    return ((p * (1.0 / keep.sum(-1, keepdim=True))) @ v).nan_to_num(0.0, 0.0, 0.0)


@lookalike("multiplied by a factor that may be infinite: reciprocal", plus(HEADS, 8, 1))
def divided_by_a_bound_that_float16_does_not_hold(q, k, v, gate):
    return (scores(q, k).softmax(-1) * (1.0 / gate.clamp(min=1e-9).half()).to(q.dtype)) @ v


@lookalike("linear between the scores and the softmax", plus(8, 8))
def linear_layer_on_the_keys(q, k, v, weight):
    return F.linear(scores(q, k), weight).softmax(-1) @ v


@lookalike("multiplied by a factor that may be infinite: log", plus(HEADS, 8, 1))
def logarithm_as_a_gate(q, k, v, gate):
    return (scores(q, k).softmax(-1) * gate.abs().log()) @ v


@lookalike("multiplied by a factor that may be infinite: div", plus(HEADS, 8, 1))
def gate_over_its_clamp_at_zero(q, k, v, gate):
    return (scores(q, k).softmax(-1) * (gate / gate.clamp(min=0.0))) @ v


@lookalike("zeroed behind a factor of the probabilities that may be infinite", plus(HEADS, 8, 1))
def infinite_gates_zeroed(q, k, v, gate):
    """Eager code has a finite gradient of v: the weights that multiply it are 0."""
    p = scores(q, k).softmax(-1) * gate.detach()
    return p.masked_fill(gate <= 0, 0.0) @ v


@lookalike("masked after the softmax, otherwise")
def masked_after_softmax(q, k, v):
    return scores(q, k).softmax(-1).tril() @ v


@lookalike("changed by gt")
def thresholded_after_softmax(q, k, v):
    p = scores(q, k).softmax(-1)
    return torch.where(p > 0.1, p, 0.0) @ v


@lookalike("both operands of the product with V depend on the probabilities")
def values_depend_on_weights(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ (v * p.mean())


@lookalike("both operands of the product with V depend on the probabilities")
def weights_squared(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ p


@lookalike("probabilities are changed by pow")
def renormalised_with_another_temperature(q, k, v):
    p = scores(q, k).softmax(-1).pow(2)
    return (p / p.sum(-1, keepdim=True)) @ v


@lookalike("probabilities are changed by sub")
def difference_of_two_softmaxes(q, k, v):
    return (scores(q, k).softmax(-1) - 0.5 * scores(k, q).softmax(-1)) @ v


@lookalike("probabilities are changed by argmax")
def hardened_straight_through(q, k, v):
    p = scores(q, k).softmax(-1)
    hard = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
    return (hard - p.detach() + p) @ v


@lookalike("changed by roll")
def rows_rolled(q, k, v):
    return scores(q, k).softmax(-1).roll(1, -2) @ v


@lookalike("changed by roll")
def keys_rolled(q, k, v):
    return scores(q, k).softmax(-1).roll(1, -1) @ v


@lookalike(OTHER_AXIS)
def rows_flipped(q, k, v):
    return scores(q, k).softmax(-1).flip(-1) @ v


@lookalike("changed by mul")
def rounded_weights(q, k, v):
    return ((scores(q, k).softmax(-1) * 255).round() / 255) @ v


@lookalike("the product with V adds another tensor")
def product_added_to_another(q, k, v):
    p = scores(q, k).softmax(-1).flatten(0, 1)
    return torch.baddbmm(v.flatten(0, 1), p, v.flatten(0, 1))


@lookalike("changed by bernoulli")
def feature_dropout_of_weights(q, k, v):
    return F.dropout2d(scores(q, k).softmax(-1), 0.3) @ v


@lookalike("changed by native_dropout")
def everything_dropped(q, k, v):
    return F.dropout(scores(q, k).softmax(-1), 1.0) @ v


@lookalike("changed by _softmax")
def double_softmax(q, k, v):
    return scores(q, k).softmax(-1).softmax(-1) @ v


@lookalike("changed by max")
def gumbel_softmax(q, k, v):
    return F.gumbel_softmax(scores(q, k), hard=True) @ v


@lookalike("normalises over other keys than the product with V")
def probabilities_of_fewer_keys(q, k, v):
    """The last half of the softmax takes its share and is dropped: too many to be sinks."""
    k = torch.cat([k, k, k], dim=2)
    return scores(q, k).softmax(-1)[..., : v.shape[-2]] @ v
