"""Look-alikes keep their own meaning, and the report says why they were left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiling import fuse, rewriting
from tests.patterns.forms import Draw
from tests.patterns.lookalikes import LOOKALIKES


def leaves(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fresh float32 leaves with gradient; others as they are."""
    real = tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    return tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in real)


def values(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalike(name: str) -> None:
    case = LOOKALIKES[name]
    inputs = case.draw(Draw())
    ours, theirs = leaves(inputs), leaves(inputs)
    compiled, backend = fuse(case.fn, rewriting())
    torch.manual_seed(0)
    got = (*values(compiled(*ours)), *ours)
    torch.manual_seed(0)
    expected = (*values(case.fn(*theirs)), *theirs)
    assert backend.fused == 0, [site.program for site in backend.report.fused]
    if case.reason is None:
        assert backend.report.sites == []
    else:
        assert any(case.reason in reason for reason in backend.reasons), backend.reasons
        assert all(site.source or site.node for site in backend.report.unfused)
    for g, e in zip(got, expected, strict=True):
        assert g.requires_grad == e.requires_grad
        if g.device.type != "meta":
            torch.testing.assert_close(g, e, equal_nan=True)


def test_every_softmax_that_heads_talk_around_is_a_site() -> None:
    """Two attentions of one model, mixed before and after their softmax: two sites, each at the line of its product."""

    def both(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
        before, after = (LOOKALIKES[f"talking_heads_{side}_by_a_layer"].fn for side in ("before", "after"))
        return before(q, k, v, mix) + after(q, k, v, mix)

    compiled, backend = fuse(both, rewriting())
    compiled(*leaves(LOOKALIKES["talking_heads_before_by_a_layer"].draw(Draw())))
    first, second = backend.report.sites
    assert "between the product of queries and keys and the softmax" in first.reason
    assert "between the softmax and the product with V" in second.reason
    assert (first.node, second.node) == ("linear", "linear_1")
    assert "F.linear(scores(q, k).permute" in first.source
    assert "F.linear(scores(q, k).softmax(-1)" in second.source
    assert str(backend.report).count("rejected  ") == 2


def test_talking_heads_with_run_time_sizes() -> None:
    case = LOOKALIKES["talking_heads_before"]
    compiled, backend = fuse(case.fn, rewriting(), dynamic=True)
    compiled(*leaves(case.draw(Draw())))
    (reason,) = backend.reasons
    assert reason.startswith("einsum mixes the scores over heads (axis 1 of [")


def test_there_are_enough() -> None:
    """A look-alike that is lost from the table would be lost in silence."""
    assert sum(case.reason is not None for case in LOOKALIKES.values()) >= 50
