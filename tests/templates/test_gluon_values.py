"""Values of the Gluon kernels on the CPU, run by :mod:`tests.templates.gluon_threads`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import fp8, reference
from fa_inductor.spec import AttentionSpec
from tests.templates.families import error
from tests.templates.gluon_threads import Descriptor, Pointer, launch

pytest.importorskip("triton")


@dataclass(frozen=True)
class Case:
    """A program and its form; (batch, query heads, key heads, queries, keys); (Dqk, Dv); constants that are no default.

    ``apart``: what the keys are shifted by, and the queries in the other direction, so that all scores are negative.
    """

    program: str
    form: dict[str, Any]
    shape: tuple[int, int, int, int, int]
    dims: tuple[int, int] = (64, 64)
    constants: dict[str, Any] = field(default_factory=dict)
    programs: int = 2
    apart: float = 0.0


_CAUSAL = "score=where(kv_idx <= q_idx, score * 0.1, -inf)"
_BAND = "score=where((kv_idx <= q_idx + 30) & (kv_idx >= q_idx - 40), score * 0.1, -inf)"
CASES = {
    "plain": Case("score=score * 0.1", {}, (1, 2, 1, 130, 300)),
    "causal": Case(_CAUSAL, {"high": 0}, (2, 2, 1, 300, 300), (64, 128)),
    "causal_even": Case(_CAUSAL, {"high": 0}, (1, 2, 2, 300, 512), constants={"DYNAMIC": False}),
    "causal_three": Case(_CAUSAL, {"high": 0}, (1, 2, 1, 400, 400), constants={"CONSUMERS": 3}),
    "causal_short": Case(
        _CAUSAL, {"high": 0}, (1, 2, 1, 256, 256), constants={"KEYS": 64, "PING_PONG": False, "DYNAMIC": False}
    ),
    "band": Case(f"{_BAND}", {"low": -40, "high": 30}, (1, 2, 1, 400, 290), constants={"PING_PONG": False}),
    "band_zero": Case(
        f"{_BAND}, dead_rows='zero'", {"low": -40, "high": 30}, (1, 2, 1, 400, 290), constants={"KEYS": 64, "CONSUMERS": 3}
    ),
    "softcap": Case(
        "score=where(kv_idx <= q_idx, tanh(score * 0.02) * 50.0, -inf)", {"high": 0, "cap": 0.02, "scale": 50.0},
        (1, 4, 2, 260, 390), (128, 64), {"KEYS": 64}, 3,
    ),
    "negative": Case("score=score * 0.1", {}, (1, 1, 1, 130, 500), apart=0.9),
    "very_negative": Case(_CAUSAL, {"high": 0}, (1, 2, 1, 300, 300), apart=2.0),
}  # fmt: skip


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, keys = case.shape
    q, k, v = (
        torch.randn(batch, h, n, d)
        for h, n, d in ((heads, queries, case.dims[0]), (kv_heads, keys, case.dims[0]), (kv_heads, keys, case.dims[1]))
    )
    v[:, :, :128] *= 30.0  # the scales of the blocks of keys differ
    return q - case.apart, k + case.apart, v


def constants(case: Case, **more: Any) -> dict[str, Any]:
    made = {"KEYS": 128, "STAGES": 2, "CONSUMERS": 2, "SECTION": 3, "DYNAMIC": True, "REGISTERS": 0, "PING_PONG": True}
    made |= case.constants
    flags = {"HAS_LOW": "low" in case.form, "HAS_HIGH": "high" in case.form, "SOFTCAP": "cap" in case.form}
    return {**made, **flags, "EVEN": case.shape[4] % made["KEYS"] == 0, "DEAD_ZERO": "zero" in case.program, **more}


def numbers(case: Case) -> list[Any]:
    batch, heads, kv_heads, queries, keys = case.shape
    low, high = case.form.get("low", 0), case.form.get("high", 0)
    integers = (queries, keys, low, high, heads, batch * heads, heads // kv_heads)
    scale = case.form.get("scale", 0.1) * math.log2(math.e)
    return [Pointer(torch.zeros(1, dtype=torch.int64)), scale, case.form.get("cap", 0.0), *map(torch.tensor, integers)]


def check(out: Tensor, lse: Tensor, operands: tuple[Tensor, ...], case: Case, bound: float) -> None:
    true, true_lse = reference.attention(*operands, [], [], AttentionSpec.parse(f"attention({case.program})"))
    kept = torch.isfinite(true_lse)
    assert error(out[kept], true[kept]) < bound
    torch.testing.assert_close(lse.view_as(true_lse), true_lse, rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.isnan(out), torch.isnan(true))


def results(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, heads, _, queries, _ = case.shape
    return torch.full((batch, heads, queries, case.dims[1]), 7.0, dtype=dtype), torch.full((batch * heads * queries,), 7.0)


@pytest.mark.parametrize(("format", "two_levels"), [("e4m3", False), ("e4m3", True), ("int8-e4m3", False)])
@pytest.mark.parametrize("name", list(CASES))
def test_fp8(name: str, format: str, two_levels: bool) -> None:
    run_fp8(CASES[name], format, two_levels)


#: With head dims at which the output is computed in parts.
WIDE = {
    "plain": Case("score=score * 0.1", {}, (1, 2, 1, 130, 300), (256, 256), {"KEYS": 64}),
    "causal": Case(_CAUSAL, {"high": 0}, (1, 2, 2, 200, 256), (256, 256), {"KEYS": 64, "PING_PONG": False}),
    "band_zero": Case(
        f"{_BAND}, dead_rows='zero'", {"low": -40, "high": 30}, (1, 2, 1, 300, 190), (256, 128), {"KEYS": 64, "DYNAMIC": False}
    ),
}


@pytest.mark.parametrize("format", ["e4m3", "int8-e4m3"])
@pytest.mark.parametrize("name", list(WIDE))
def test_fp8_in_parts(name: str, format: str) -> None:
    run_fp8(WIDE[name], format, True, 4)


def run_fp8(case: Case, format: str, two_levels: bool, parts: int = 1) -> None:
    from fa_inductor.templates.sm90.gluon_fp8 import fp8_forward

    q, k, v = operands(case)
    small = fp8.cast_operands(q, k, v, format)
    index = torch.arange(small.v.shape[3])
    place = (index & -16) | ((index & 6) << 1) | ((index & 8) >> 2) | (index & 1)
    v8 = torch.empty_like(small.v)
    v8[..., place] = small.v
    out, lse = results(case, torch.float32)
    made = constants(case, TWO_LEVELS=two_levels, PARTS=parts, RAISES=two_levels or format != "e4m3", SCALE_KEYS=128)
    (d, dv), keys = case.dims, made["KEYS"]
    tiles = ((small.q, 64, d), (small.k, keys, d), (v8, dv, keys), (out, 64, dv))
    arguments = [Descriptor(t, (1, 1, *tile)) for t, *tile in tiles]
    arguments += [Pointer(t.flatten()) for t in (lse, small.q_scale, small.k_scale, small.v_scale)]
    launch(fp8_forward, case.programs, [*arguments, *numbers(case)], made)
    # The weights alone are rounded besides.
    check(out, lse, fp8.rounded(q, k, v, format), case, 0.03)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_16_bit(name: str, stream: bool) -> None:
    from fa_inductor.templates.sm90 import gluon_forward, gluon_stream

    case = CASES[name]
    q, k, v = (t.half() for t in operands(case))
    out, lse = results(case, torch.float16)
    made = constants(case, **({"CONSUMERS": 2, "MASKED": False, "SINKS": 0} if stream else {"OWN_O": True}))
    flash_forward = (gluon_stream if stream else gluon_forward).flash_forward
    (d, dv), keys = case.dims, made["KEYS"]
    tiles = ((q, 64, d), (k, keys, d), (v, keys, dv), (out, 64, dv))
    arguments = [*(Descriptor(t, (1, 1, *tile)) for t, *tile in tiles), Pointer(lse)]
    launch(flash_forward, case.programs, [*arguments, *numbers(case), *([None, None] if stream else [])], made)
    check(out.float(), lse, (q.float(), k.float(), v.float()), case, 1e-3)


@pytest.mark.parametrize(
    ("changes", "dims", "stream"),
    [
        ({}, (128, 128), True),
        ({"HAS_LOW": True}, (128, 128), False),
        ({"SOFTCAP": True}, (128, 128), False),
        ({"EVEN": False}, (128, 128), False),
        ({}, (128, 64), False),
        ({}, (256, 256), False),
    ],
)
def test_which_kernel(changes: dict[str, bool], dims: tuple[int, int], stream: bool) -> None:
    """One loop for what was timed so and fits into shared memory; the constants are those that the kernel has."""
    from fa_inductor.templates.sm90 import gluon_forward, gluon_stream, launch

    flags = {"EVEN": True, "HAS_LOW": False, "HAS_HIGH": True, "SOFTCAP": False, "DEAD_ZERO": False, **changes}
    kernel, made = launch.kernel_of(launch.config_of(128, 512, True), *dims, None, flags)
    assert kernel is (gluon_stream if stream else gluon_forward).flash_forward
    assert set(kernel.arg_names[-len(made) :]) == set(made)
    for config in (launch.config_of(128, 4096, True), launch.config_of(128, 512, False)):
        assert launch.kernel_of(config, *dims, None, flags)[0] is gluon_forward.flash_forward


BACKWARD = {
    "plain": Case("score=score * 0.1", {}, (1, 2, 1, 130, 300)),
    "causal": Case(_CAUSAL, {"high": 0}, (2, 2, 1, 300, 300), (64, 64)),
    "causal_even": Case(_CAUSAL, {"high": 0}, (1, 2, 2, 200, 256), (128, 128)),
    "band": Case(_BAND, {"low": -40, "high": 30}, (1, 2, 1, 300, 190)),
    "band_zero": Case(f"{_BAND}, dead_rows='zero'", {"low": -40, "high": 30}, (1, 2, 1, 300, 190), (128, 64)),
    "softcap": Case(
        "score=where(kv_idx <= q_idx, tanh(score * 0.02) * 50.0, -inf)", {"high": 0, "cap": 0.02, "scale": 50.0},
        (1, 2, 1, 130, 200), (64, 64),
    ),
    "wide": Case("score=score * 0.1", {}, (1, 2, 1, 70, 130), (256, 256)),
    "wide_causal": Case(_CAUSAL, {"high": 0}, (1, 2, 1, 200, 200), (256, 256)),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", list(BACKWARD))
def test_backward(name: str, deterministic: bool) -> None:
    from fa_inductor.templates.sm90 import backward_launch as launched
    from fa_inductor.templates.sm90.gluon_backward import flash_backward
    from fa_inductor.templates.sm90.gluon_backward_wide import flash_backward_wide

    case = BACKWARD[name]
    batch, heads, kv_heads, queries, keys = case.shape
    (d, dv), cap = case.dims, case.form.get("cap")
    config = (launched.CONFIGS if cap is None else launched.SOFTCAP_CONFIGS)[d]
    q, k, v = (t.half() for t in operands(case))
    v /= 30.0
    grad = torch.randn(batch, heads, queries, dv).half()
    spec = AttentionSpec.parse(f"attention({case.program})")
    exact = [t.float() for t in (q, k, v)]
    out, lse = reference.attention(*exact, [], [], spec)
    want = reference.attention_grads(grad.float(), *exact, [], [], spec, [True, True, True])

    rows = -(-queries // config.rows) * config.rows
    log2_denom, delta = torch.full((batch * heads, rows), math.inf), torch.zeros(batch * heads, rows)
    log2_denom[:, :queries] = lse.reshape(-1, queries) * math.log2(math.e)
    if "zero" in case.program:
        log2_denom[log2_denom == -math.inf] = math.inf
    delta[:, :queries] = (out * grad).sum(-1).reshape(-1, queries)
    dq, dk, dv_ = torch.zeros(batch * heads * rows, d), torch.full_like(k, 7.0), torch.full_like(v, 7.0)
    wide, high = (config.width(n) for n in case.dims), config.rows
    d_tile, v_tile = wide
    tiles = [(q, high, d_tile), (k, 64, d_tile), (v, 64, v_tile), (grad, high, v_tile)]
    arguments: list[Any] = [Descriptor(t, (1, 1, *tile)) for t, *tile in tiles]
    arguments += [Descriptor(t, (1, high)) for t in (log2_denom, delta)]
    arguments += [Descriptor(dq, (64, config.dq_columns(d)))]
    arguments += [Descriptor(t, (1, 1, 64, n)) for t, n in ((dk, d_tile), (dv_, v_tile))]
    low, up = case.form.get("low", 0), case.form.get("high", 0)
    scale = case.form.get("scale", 0.1)
    integers = (queries, keys, low, up, kv_heads, batch * kv_heads, heads // kv_heads)
    turns = Pointer(torch.zeros(1 + batch * heads * rows // config.rows, dtype=torch.int32))
    arguments += [scale * math.log2(math.e), cap or 0.0, *map(torch.tensor, integers), turns if deterministic else None]
    dead = "low" in case.form and "zero" not in case.program
    flags = {"EVEN": keys % config.keys == 0, "SKIP": not dead, "HAS_LOW": "low" in case.form, "HAS_HIGH": "high" in case.form}
    programs = -(-keys // config.keys) * batch * kv_heads
    kernel = flash_backward_wide if config.wide else flash_backward
    made = {**config.constants(deterministic), **flags, "SOFTCAP": cap is not None}
    if not config.wide:
        arguments += [None, None]
        made |= launched.NO_PROGRAM
    launch(kernel, programs, arguments, made)
    dq = dq.view(batch, heads, rows, d)[:, :, :queries] * scale * (cap or 1.0)
    for found, true in zip((dq, dk, dv_), want, strict=True):
        assert true is not None
        assert torch.equal(torch.isnan(found), torch.isnan(true))
        kept = ~torch.isnan(true)
        assert error(found[kept].float(), true[kept]) < 3e-3
