"""Attention that was once rewritten wrongly or crashed, smallest form each. What may fuse must equal eager; see ``NEVER``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.oracle import WrongValue, check

INF = math.inf
BF16, HALF = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """``fn(q, k, v, *extra())`` on operands of shape [2, 2, 6, 8]."""

    fn: Callable
    extra: Callable[[], Sequence[Tensor]] = tuple
    dtype: torch.dtype = torch.float32
    grad: bool = True
    exact: Callable | None = None
    dynamic: bool = False


def attend(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    return F.softmax(change(q @ k.transpose(-1, -2) * 0.3), dim=-1) @ v


def dropping(mask: Callable[..., Tensor], fill: float = -1e9) -> Callable:
    """Attention whose scores are ``fill`` where ``mask(*extra)`` holds."""
    return lambda q, k, v, *extra: attend(q, k, v, lambda s: s.masked_fill(mask(*extra), fill))


def changed(change: Callable[..., Tensor]) -> Callable:
    return lambda q, k, v, *extra: attend(q, k, v, lambda s: change(s, *extra))


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, None], x[None, :]


def positions(dtype: torch.dtype, step: int = 1) -> tuple[Tensor, Tensor]:
    return pairs(torch.arange(6, dtype=dtype) * step)


def rows_without_key(fill: float) -> Tensor:
    """[6, 6], 0 or ``fill``; row 0 has only fills."""
    return torch.tensor([[fill] * 6] + [[fill, 0.0] * 3] * 5)


# ------------------------------------------------------------------------------------------- integers that wrap around
def _uint8_difference() -> Tensor:
    a, b = positions(torch.uint8)
    return (a - b) <= 2


def _int8_product() -> Tensor:
    a, b = positions(torch.int8, 40)
    return a < b


def _int8_cast() -> Tensor:
    a, b = pairs((torch.arange(6) * 60).to(torch.int8))
    return a < b


def _int32_product() -> Tensor:
    a, b = positions(torch.int32, 1_000_000_000)
    return a < b


def _int8_cumsum() -> Tensor:
    return torch.full((6,), 60, dtype=torch.int8).cumsum(0, dtype=torch.int8)[None] > 0


INTEGERS = {
    "uint8 difference": Case(dropping(_uint8_difference)),
    "int8 product": Case(dropping(_int8_product)),
    "int8 cast": Case(dropping(_int8_cast)),
    "int32 product": Case(dropping(_int32_product)),
    "int8 cumsum": Case(dropping(_int8_cumsum)),
    "captured uint8 difference": Case(dropping(lambda p: (p[:, None] - p[None]) > 2), lambda: [torch.arange(6, dtype=torch.uint8)]),
    "captured int8 sum": Case(dropping(lambda p: (p[:, None] + p[None]) > 0), lambda: [torch.arange(6, dtype=torch.int8) * 20]),
    "captured uint8 negation": Case(
        changed(lambda s, m: s + (-m) * 0.01), lambda: [torch.arange(36, dtype=torch.uint8).view(6, 6)]
    ),
    "float cast to uint8": Case(
        dropping(lambda x: x.to(torch.uint8)[None] > x.to(torch.uint8)[:, None]),
        lambda: [torch.tensor([1.0, 300.0, 2.0, 500.0, 3.0, 255.0])],
    ),
    "int64 cast to int8": Case(
        dropping(lambda x: x.to(torch.int8)[None] > x.to(torch.int8)[:, None]),
        lambda: [torch.tensor([1, 300, 2, 500, 3, 255])],
    ),
}

# ----------------------------------------------------------------------------------- comparisons of values that round
ROUNDING = {
    # In float16 its smallest number leaves nothing of a score, and a row of nothing else weighs all keys alike.
    "float16 fill that is added": Case(
        changed(lambda s, m: s + (1.0 - m.to(s.dtype)) * torch.finfo(s.dtype).min),
        lambda: [torch.tensor([[1, 1, 0, 1, 0, 1], [0] * 6])[:, None, None]], dtype=HALF,
    ),
    "float16 fill that a product adds": Case(
        lambda q, k, v, m: F.softmax(
            torch.baddbmm(
                ((1.0 - m.to(q.dtype)) * torch.finfo(q.dtype).min).expand(2, 2, 6, 6).reshape(4, 6, 6),
                q.reshape(4, 6, 8), k.reshape(4, 6, 8).mT, alpha=0.3,
            ).view(2, 2, 6, 6), dim=-1,
        ) @ v,
        lambda: [torch.tensor([[1, 1, 0, 1, 0, 1], [0] * 6])[:, None, None]], dtype=HALF,
    ),
    "two float16 fills": Case(
        changed(
            lambda s, m: s.masked_fill(torch.ones(6, 6).triu(1) > 0, torch.finfo(s.dtype).min)
            + (1.0 - m.to(s.dtype)) * torch.finfo(s.dtype).min
        ),
        lambda: [torch.tensor([[1, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1]])[:, None, None]], dtype=HALF,
    ),
    "float64 times": Case(
        dropping(lambda t: t[:, None] < t[None]), lambda: [torch.arange(6, dtype=torch.float64) + 1.7e9], grad=False
    ),
    "large integers as float64": Case(
        dropping(lambda t: t.double()[:, None] < t.double()[None]), lambda: [torch.arange(6) + 2**40]
    ),
    "number compared in bfloat16": Case(
        dropping(lambda x: x[None] > 0.1), lambda: [torch.full((6,), 0.1, dtype=BF16)], grad=False
    ),
    "rounded before the comparison": Case(
        dropping(lambda x: x.to(BF16)[None] == x.to(BF16)[:, None]),
        lambda: [torch.tensor([1.0, 1.0001, 2.0, 2.0001, 3.0, 3.0001])], exact=None,
    ),
    "sum in bfloat16 compared": Case(
        dropping(lambda x: (x + 0.001)[None] > x[:, None]), lambda: [torch.tensor([1.0, 1.25, 2.0, 2.25, 3.0, 3.0]).to(BF16)],
        grad=False, exact=dropping(lambda x: x[None] > x[:, None]),
    ),
    "underflow in a cast to half": Case(
        dropping(lambda m: m.half().bool()), lambda: [torch.tensor([0.0, -0.0, 1e-30, 0.0, 0.5, 1.0])],
        exact=dropping(lambda m: m.abs() > 1e-20),
    ),
    "old HF padding mask": Case(
        changed(lambda s, m: s + (1.0 - m[:, None, None].float()).masked_fill((1.0 - m[:, None, None].float()).bool(), -1e4)),
        lambda: [torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])],
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------- casts that change values
def _kv_through(dtype: torch.dtype) -> tuple[Callable, Callable]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k.to(dtype).to(q.dtype), v.to(dtype).to(q.dtype))

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k.float().to(dtype).to(q.dtype), v.float().to(dtype).to(q.dtype))

    return fn, exact


def _filled_then_half(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    wide = (q.float() @ k.float().mT).masked_fill(m != 0, torch.finfo(torch.float32).min)
    return F.softmax(wide.to(HALF if q.dtype is HALF else q.dtype), dim=-1) @ v


def _infinite(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return F.softmax((q @ k.mT).masked_fill(m != 0, -INF), dim=-1) @ v


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        s = q @ k.mT
        with torch.autocast("cpu", enabled=False):
            p = F.softmax(s.float(), dim=-1)
        return p @ v


_fp8, _fp8_exact = _kv_through(torch.float8_e4m3fn)
_bf16, _bf16_exact = _kv_through(BF16)
CASTS = {
    "fp8 keys and values": Case(_fp8, grad=False, exact=_fp8_exact),
    "bfloat16 keys and values": Case(_bf16, grad=False, exact=_bf16_exact),
    "fill becomes infinite": Case(
        _filled_then_half, lambda: [rows_without_key(1.0)], HALF, grad=False, exact=_infinite
    ),
    "captured fill becomes infinite": Case(
        lambda q, k, v, m: F.softmax(q @ k.mT + m.to(q.dtype), dim=-1) @ v, lambda: [rows_without_key(-1e9)], HALF, grad=False,
        exact=_infinite,
    ),
    "float32 minimum in bfloat16": Case(
        lambda q, k, v, m: F.softmax(q @ k.mT + ((m != 0) * torch.finfo(torch.float32).min).to(q.dtype), dim=-1) @ v,
        lambda: [rows_without_key(1.0)], BF16, grad=False, exact=_infinite,
    ),
    "integer denominator": Case(
        lambda q, k, v: _sum_as_integer(torch.exp(q @ k.mT * 0.3)) @ v, grad=False
    ),
    "softmax outside of autocast": Case(
        _autocast, dtype=BF16, grad=False, exact=lambda q, k, v: F.softmax(q @ k.mT, dim=-1) @ v
    ),
}  # fmt: skip


def _sum_as_integer(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True, dtype=torch.int64)


# ----------------------------------------------------------------------------------------------------------- gradients
def _alibi_without_grad(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    a, b = positions(torch.int64)
    with torch.no_grad():
        bias = slopes[:, None, None] * (b - a)
    return attend(q, k, v, lambda s: s + bias)


def _scale_without_grad(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    with torch.no_grad():
        doubled = scale * 2
    return attend(q, k, v, lambda s: s * doubled)


def _trained(*shape: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape).requires_grad_()]


GRADIENTS = {
    # Eager code's output requires no gradient.
    "trained threshold": Case(
        dropping(lambda t: (t > 0.1) & (torch.arange(6) > 0), -INF), lambda: [torch.randn(6, 1, requires_grad=True)], grad=False
    ),
    "bias made without grad": Case(_alibi_without_grad, _trained(2)),
    "scale made without grad": Case(_scale_without_grad, _trained(1)),
    "clamped temperature at its bound": Case(
        changed(lambda s, t: s * t.clamp(max=2.0).exp()), lambda: [torch.full((2, 1, 1), 2.0, requires_grad=True)]
    ),
    "clamped bias at its bound": Case(
        changed(lambda s, t: s + t.relu() + t.clamp(min=0)), lambda: [torch.zeros(6, 6, requires_grad=True)]
    ),
}


# ------------------------------------------------------------------------------------------------------ memory written
def _through_detach(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m = torch.zeros(6, 6)
    m.detach()[2, 3] = -INF
    return attend(q, k, v, lambda s: s + m)


def _through_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = k.clone()
    k.data.mul_(0.1)
    return attend(q, kept, v)


def _through_other_input(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
    kept = k.clone()
    other.mul_(0.1)
    return attend(q, kept, v)


def _bias_written_after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = attend(q, k, v, lambda s: s + bias)
    bias.add_(torch.arange(6.0))
    return out


def _running_mean(q: Tensor, k: Tensor, v: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    bias = mean.clone()
    F.batch_norm(q.transpose(1, 2), mean, variance, training=True)
    return attend(q, k, v, lambda s: s + bias)


def _renormalised(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = table.clone()
    F.embedding(torch.arange(6), table, max_norm=0.1)
    return attend(q, k, v, lambda s: s + bias)


@torch.library.custom_op("fa_inductor_fuzz::halve", mutates_args=["x"])
def _halve(x: Tensor) -> None:
    x.mul_(0.5)


def _packet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = k.clone()
    torch.ops.fa_inductor_fuzz.halve(k)
    return attend(q, kept, v)


def _list_of_writes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = k.clone()
    torch._foreach_mul_([k, v], 2.0)
    return attend(q, kept, v)


WRITES = {
    "running statistics": Case(_running_mean, lambda: [torch.randn(6), torch.ones(6)]),
    "renormalised rows": Case(_renormalised, lambda: [torch.randn(6, 6)]),
    "custom op": Case(_packet, grad=False),
    "list of tensors": Case(_list_of_writes, grad=False),
    "through detach": Case(_through_detach),
    "through data": Case(_through_data, grad=False),
    "after the site": Case(_bias_written_after, lambda: [torch.randn(6, 6)]),
}


def test_write_through_an_input_that_shares_storage() -> None:
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    made = check(_through_other_input, [q, k, v, k.view(2, 2, 48)])
    assert [s.reason for s in made.sites if "memory that two inputs" in s.reason]


def test_keys_written_after_a_site_that_trains_values_only() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        k.mul_(0.5)
        return out

    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    made = check(fn, [q, k, v.requires_grad_()])
    assert "written in place after the attention" in made.sites[0].reason


# ------------------------------------------------------------------------------------------------ softmax that is none
def _divided(s: Tensor, shift: Tensor | float) -> Tensor:
    e = torch.exp(s - shift)
    return e / e.sum(-1, keepdim=True)


def _masked(q: Tensor, k: Tensor, m: Tensor, fill: float) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(m != 0, fill)


def _log_sum(fill: float) -> Callable:
    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        s = _masked(q, k, m, fill)
        return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v

    return fn


def _maximum_of_unmasked(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return _divided(_masked(q, k, m, -1e9), (q @ k.mT * 0.3).amax(-1, keepdim=True)) @ v


def _mean_of_masked(s: Tensor) -> Tensor:
    s = s.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -INF)
    return s - s.mean(-1, keepdim=True)


def _dead() -> list[Tensor]:
    return [rows_without_key(1.0)]


NO_SOFTMAX = {
    "logsumexp of huge fills": Case(_log_sum(-3.4e38), _dead),
    "exp that vanishes": Case(lambda q, k, v, m: _divided(_masked(q, k, m, -1e4), 0.0) @ v, _dead),
    "maximum of the unmasked": Case(_maximum_of_unmasked, _dead),
    "maximum of all rows": Case(
        lambda q, k, v, m: _divided(_masked(q, k, m, -1e9), _masked(q, k, m, -1e9).amax((-1, -2), keepdim=True)) @ v, _dead
    ),
    "mean of masked scores": Case(changed(_mean_of_masked)),
    "dropout of everything": Case(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, dim=-1), 1.0) @ v),
    "minus infinity times zero": Case(changed(lambda s: s + (1 - torch.ones(6, 6).tril()) * -INF)),
    "relu of integers": Case(changed(lambda s: s - (torch.arange(6)[:, None] - torch.arange(6)).relu() * 0.3)),
    "complex bias": Case(changed(lambda s, c: s + c.abs()), lambda: [torch.randn(6, 6, dtype=torch.complex64)]),
}  # fmt: skip

CASES = {**INTEGERS, **ROUNDING, **CASTS, **GRADIENTS, **WRITES, **NO_SOFTMAX}
#: Cases in which a fused op would be wrong whatever it captures.
NEVER = {
    "after the site", "logsumexp of huge fills", "exp that vanishes", "maximum of the unmasked", "maximum of all rows",
    "mean of masked scores", "dropout of everything", "running statistics", "renormalised rows", "integer denominator",
}  # fmt: skip


def inductor_drops_rounding() -> bool:
    """Whether plain Inductor drops float32 -> bfloat16 -> float32 before an attention, as in torch 2.11 (``pointless_convert``)."""
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    rounded = _bf16(q, k, v)
    kept = torch.compile(_bf16)(q, k, v)
    return float((kept - rounded).abs().max()) > 1e-4


@pytest.mark.parametrize("name", CASES)
def test_once_wrong(name: str) -> None:
    case = CASES[name]
    operands: list[Any] = [torch.randn(2, 2, 6, 8).to(case.dtype).requires_grad_(case.grad) for _ in range(3)]
    try:
        made = check(case.fn, [*operands, *case.extra()], exact_fn=case.exact, dtype=case.dtype, dynamic=case.dynamic)
    except WrongValue:
        if name == "bfloat16 keys and values" and inductor_drops_rounding():
            pytest.skip("Inductor of this torch drops the rounding behind the backend's back")
        raise
    assert not any(s.reason.startswith("analysis failed") for s in made.sites)
    assert made.fused == (0 if name in NEVER else 1), [(s.status, s.reason) for s in made.sites]
