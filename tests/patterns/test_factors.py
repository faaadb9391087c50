"""Factors of the probabilities that are the same for every key of a row: fused, values and gradients as eager code has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_inductor import explain
from tests.compiling import agree, fuse, normal, rewriting
from tests.patterns.forms import BATCH, DIM, HEADS, INF, KEYS, ROWS, scores


def qkv(grad: bool = True) -> tuple[Tensor, ...]:
    return normal(BATCH, HEADS, ROWS, DIM, grad=grad), *(normal(BATCH, HEADS, KEYS, DIM, grad=grad) for _ in range(2))


def weights(q: Tensor, k: Tensor) -> Tensor:
    return scores(q, k).softmax(-1)


def by_heads(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (weights(q, k) * gate) @ v


def expanded(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (weights(q, k) * gate.expand(-1, -1, -1, KEYS).contiguous()) @ v


def transposed_product(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return v.mT @ (gate * weights(q, k)).mT


def grouped(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    return (weights(q, k) * gate) @ v


def into_flat_heads(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return torch.einsum("bhmn,bhnd->bmhd", weights(q, k) * gate, v).flatten(2)


def rows_of_another_order(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """The gate is [B, H, M, 1] here and [H, B, M, 1] where it multiplies."""
    return (weights(q, k).transpose(0, 1) * gate.transpose(0, 1)).transpose(0, 1) @ v


def two_and_a_number(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (gate * weights(q, k) * torch.sigmoid(gate) / 3) @ v


def over_a_count(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """A divisor of at least one makes nothing infinite."""
    count = (gate > 0).sum((1, 2), keepdim=True)
    return (weights(q, k) * (gate / count.clamp(min=1))) @ v


def of_a_layer(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (weights(q, k) * torch.nn.functional.linear(q, gate[0, 0, :1].expand(1, DIM)) ** 2) @ v


def cut_off(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (weights(q, k) * gate.detach()) @ v


def in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return checkpoint(by_heads, q, k, v, gate, use_reentrant=False)


SPELLINGS: list[Callable[..., Tensor]] = [
    by_heads, expanded, transposed_product, grouped, into_flat_heads, rows_of_another_order, two_and_a_number, over_a_count,
    of_a_layer, cut_off, in_a_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
def test_spelling(fn: Callable[..., Tensor]) -> None:
    agree(fn, *qkv(), normal(BATCH, HEADS, ROWS, 1))


def numbers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape)


GATES: dict[str, Callable[[], Tensor]] = {
    "of no dimension": lambda: torch.tensor(0.3, dtype=torch.float64, requires_grad=True),
    "of integers": lambda: numbers(HEADS, 1, 1),
    "of bool": lambda: numbers(BATCH, 1, ROWS, 1) > 0,
    "of float32": lambda: torch.randn(BATCH, 1, 1, 1, requires_grad=True),
    "with more batches": lambda: normal(3, 1, 1, 1, 1),
}


@pytest.mark.parametrize("name", GATES)
def test_gate(name: str) -> None:
    agree(by_heads, *qkv(), GATES[name]())


def test_run_time_sizes() -> None:
    agree(by_heads, *qkv(), normal(BATCH, HEADS, ROWS, 1), dynamic=True)


def test_nothing_else_is_trained() -> None:
    agree(by_heads, *qkv(grad=False), normal(HEADS, 1, 1))


def test_nan_in_a_gate_reaches_its_row_alone() -> None:
    gate = normal(BATCH, HEADS, ROWS, 1, grad=False)
    gate[0, 1, 2] = float("nan")
    agree(by_heads, *qkv(), gate)


@pytest.mark.parametrize("fill", [-INF, -1e30])
def test_rows_without_keys(fill: float) -> None:
    """Their weights are NaN, or alike; zero times NaN is NaN."""

    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        return (scores(q, k).masked_fill(~keep, fill).softmax(-1) * gate) @ v

    keep = torch.rand(BATCH, 1, ROWS, KEYS) < 0.7
    keep[..., 0] = True
    keep[1, :, 3] = False
    gate = normal(BATCH, HEADS, ROWS, 1, grad=False)
    gate[:, :, 3] = 0.0
    agree(fn, *qkv(), keep, gate.requires_grad_())


def test_written_in_place() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return weights(q, k).mul_(gate) @ v

    agree(fn, *qkv(grad=False), normal(HEADS, 1, 1, grad=False))


def half_of_the_heads(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    p = weights(q, k) * 1.0
    p[:, :2] = p[:, :2] * gate[:, :2]
    return p @ v


def overwritten_before_the_product(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    p = weights(q, k) * gate
    gate.mul_(2)
    return p @ v


@pytest.mark.parametrize("fn", [half_of_the_heads, overwritten_before_the_product], ids=lambda fn: fn.__name__)
def test_left_alone(fn: Callable[..., Tensor]) -> None:
    agree(fn, *qkv(grad=False), normal(BATCH, HEADS, ROWS, 1, grad=False), fused=0)


def without_gradient(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    p = weights(q, k)
    with torch.no_grad():
        p = p * gate
    return p @ v


def before_a_deferred_division(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e * gate) @ v / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("fn", [without_gradient, before_a_deferred_division], ids=lambda fn: fn.__name__)
def test_left_alone_in_training(fn: Callable[..., Tensor]) -> None:
    agree(fn, *qkv(), normal(BATCH, HEADS, ROWS, 1), fused=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_of_the_output(dtype: torch.dtype) -> None:
    """float32 weights and gates beside 16-bit values, by hand and under autocast."""

    def by_hand(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return (scores(q, k).softmax(-1, dtype=torch.float32) * gate.float()).to(q.dtype) @ v

    def run(fn: Callable[..., Tensor], how: Any, *inputs: Tensor) -> None:
        compiled, backend = fuse(fn, rewriting())
        with how:
            got, expected = compiled(*inputs), fn(*inputs)
        assert backend.fused == 1, backend.reasons
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.02)  # of dtype as well

    inputs = [x.detach().to(dtype) for x in (*qkv(), torch.rand(BATCH, HEADS, ROWS, 1))]
    run(by_hand, torch.no_grad(), *inputs)
    torch._dynamo.reset()
    run(by_heads, torch.autocast("cpu", torch.bfloat16), *(x.float() for x in inputs))


@pytest.mark.parametrize("factor", [100.0, torch.tensor([100000]), torch.tensor(2.0)], ids=["number", "integers", "floats"])
def test_what_may_overflow_half_is_not_followed_by_a_guard(factor: float | Tensor) -> None:
    """Infinite weights that are replaced before the product with V are no infinite outputs that are replaced."""

    def fn(q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor) -> Tensor:
        return (weights(q, k) * factor).nan_to_num(0.0, 0.0, 0.0) @ v

    (site,) = explain(fn)(*(x.half() for x in qkv(False)), factor).sites
    assert site.status == "rejected"
    assert "nan_to_num" in site.reason


def test_a_number_that_half_does_not_hold() -> None:
    (site,) = explain(lambda q, k, v: (weights(q, k) * 1e5) @ v)(*(x.half() for x in qkv(False))).sites
    assert site.status == "rejected"
