"""Which programs the Gluon kernels take, the numbers they get, and that the choice is the same before and in lowering."""

from __future__ import annotations

import math

import pytest
import torch

from fa_inductor import reference
from fa_inductor.bounds import Facts
from fa_inductor.masks import split_mask
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import select
from fa_inductor.templates.sm90.form import (
    backward_refusal,
    form_of,
    forward_form_of,
    padded,
    program_form_of,
    refusal,
)

CAUSAL = "kv_idx <= q_idx"


def spec(score: str, **more: str) -> AttentionSpec:
    return AttentionSpec.parse(f"attention(score={score}{''.join(f', {k}={v}' for k, v in more.items())})")


@pytest.mark.parametrize(
    ("score", "scale", "softcap", "band"),
    [
        ("score * 0.125", 0.125, None, (None, None)),
        ("score", 1.0, None, (None, None)),
        (f"where({CAUSAL}, score * 0.125, -inf)", 0.125, None, (None, 0)),
        ("where(q_idx > kv_idx, score * 0.125, -inf)", 0.125, None, (None, -1)),
        ("where(kv_idx <= q_idx + (kv_len - q_len), score, -inf)", 1.0, None, (None, 40)),
        (f"where(({CAUSAL}) & (q_idx - kv_idx < 256), tanh(score * 0.02) * 50.0, -inf)", 50.0, 0.02, (-255, 0)),
        (f"where(({CAUSAL}) & (q_idx - kv_idx < n1), score, -inf)", 1.0, None, (-8, 0)),
        ("where((kv_idx >= q_idx - 3) & (kv_idx >= q_idx - 5) & (kv_idx <= q_idx + 2), score, -inf)", 1.0, None, (-3, 2)),
        ("where(kv_idx <= q_idx + n0, score, -inf)", 1.0, None, (None, 2**30)),
    ],
)
def test_form_and_band(score: str, scale: float, softcap: float | None, band: tuple[int | None, int | None]) -> None:
    form = form_of(spec(score))
    assert not isinstance(form, str), form
    assert (form.scale, form.softcap) == (scale, softcap)
    assert form.band(100, 140, [2**40, 9]) == band
    env = reference.Env.full((1, 1, 100, 140), [], [2**40, 9], torch.device("cpu"), torch.float32)
    kept = split_mask(spec(score).score).keep
    mask = reference.evaluate(kept, env).broadcast_to(1, 1, 100, 140)[0, 0]
    distance = torch.arange(140)[None, :] - torch.arange(100)[:, None]
    low, high = band
    want = (distance >= (-(2**31) if low is None else low)) & (distance <= (2**31 if high is None else high))
    assert torch.equal(mask, want)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("score * -0.1", "the logit is"),
        ("score * 0.1 + f0[h, q_idx, kv_idx]", "captured tensors"),
        ("score * f0[()]", "captured tensors"),
        (f"where({CAUSAL}, score, -10000.0)", "masked logits are"),
        ("where(kv_idx < n0, score, -inf)", "no band"),
        ("where(kv_idx <= q_idx * 2, score, -inf)", "no band"),
        (f"where(({CAUSAL}) & (kv_idx // 64 == q_idx // 64), score, -inf)", "no band"),
        (f"where(({CAUSAL}) | (kv_idx < 4), score, -inf)", "band"),
        (f"where({CAUSAL}, exp(score), -inf)", "huge"),
        ("score * 100000.0 + 100000.0", "huge"),
    ],
)
def test_refused_forms(program: str, reason: str) -> None:
    found = form_of(spec(program))
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(
    ("score", "queries", "keys", "share"),
    [
        ("score", 100, 300, 1.0),
        (f"where({CAUSAL}, score, -inf)", 512, 512, 0.5),
        ("where(kv_idx <= q_idx + (kv_len - q_len), score, -inf)", 1, 512, 1.0),
        (f"where(({CAUSAL}) & (kv_idx > q_idx - 100), score, -inf)", 10000, 10000, 0.01),
        (f"where(({CAUSAL}) & (kv_idx > q_idx - n0), score, -inf)", 512, 512, 0.5),
        ("where(kv_idx > q_idx + kv_len, score, -inf)", 512, 512, 0.0),
    ],
)
def test_kept_scores(score: str, queries: int, keys: int, share: float) -> None:
    form = form_of(spec(score))
    assert not isinstance(form, str)
    assert form.kept(queries, keys) == pytest.approx(share * queries * keys, rel=0.02)


def test_sinks_and_dropout_are_refused() -> None:
    assert "sinks" in str(form_of(spec("score", sinks="[1.0]")))
    assert "dropout" in str(form_of(spec("score", dropout="(0.1, 0)")))


@pytest.mark.parametrize(
    ("dtype", "dims", "sizes", "reason"),
    [
        ("float32", (128, 128), (4096, 4096, 64), "float32"),
        ("bfloat16", (100, 128), (4096, 4096, 64), "16 bytes"),
        ("bfloat16", (64, 128), (4096, 4096, 64), "head dims"),
        ("bfloat16", (4096, 4096), (4096, 4096, 64), "head dims"),
        ("bfloat16", (128, 128), (1, 4096, 64), "few"),
        ("bfloat16", (64, 64), (4096, 4096, 64), ""),
        ("bfloat16", (64, 64), (2048, 2048, 512), "2048 keys"),
        ("bfloat16", (128, 128), (4096, 4096, 64), ""),
        ("float16", (192, 128), (4096, 4096, 64), ""),
        ("float16", (96, 80), (4096, 4096, 64), ""),
        ("bfloat16", (128, 128), (512, 512, 512), ""),
        ("bfloat16", (128, 128), (512, 512, 256), "GFLOP"),
        ("bfloat16", (128, 128), (1024, 1024, 256), ""),
        ("bfloat16", (128, 128), (512, 512, 64), "GFLOP"),
        ("bfloat16", (128, 128), (1024, 1024, 16), "GFLOP"),
    ],
)
def test_refusals(dtype: str, dims: tuple[int, int], sizes: tuple[int, int, int], reason: str) -> None:
    found = refusal(spec(f"where({CAUSAL}, score, -inf)"), dtype, *dims, *sizes)
    assert (reason in found) if reason else not found


@pytest.mark.parametrize(
    ("dims", "sizes", "reason"),
    [
        ((128, 128), (512, 512, 512), ""),
        ((64, 64), (4096, 4096, 64), ""),
        ((256, 200), (4096, 4096, 64), ""),
        ((192, 128), (4096, 4096, 64), "head dims"),
        ((128, 128), (512, 512, 64), "GFLOP"),
    ],
)
def test_backward_refusals(dims: tuple[int, int], sizes: tuple[int, int, int], reason: str) -> None:
    found = backward_refusal(spec(f"where({CAUSAL}, score, -inf)"), "bfloat16", *dims, *sizes)
    assert (reason in found) if reason else not found


SAME = "i0[b, q_idx] == i0[b, kv_idx]"


@pytest.mark.parametrize(
    ("program", "dim", "more", "reason"),
    [
        (f"where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", 128, {}, ""),
        (f"where(({CAUSAL}) & ({SAME}), score * 0.1, -inf)", 128, {}, ""),
        (f"where(({CAUSAL}) & ({SAME}), tanh(score * 0.1) * 9.0, -inf)", 64, {}, ""),
        ("where(m0[b, 0, q_idx, kv_idx], score * 0.1, -inf), dead_rows='zero'", 128, {}, ""),
        (f"where({CAUSAL}, score, -inf), sinks=[f0[h]]", 128, {"grad_slots": (0,)}, ""),
        ("score * f0[b, q_idx]", 64, {}, ""),
        ("score * f0[b, q_idx]", 128, {}, "for every query"),
        ("score * f0[h, q_idx, kv_idx]", 64, {}, "for every score"),
        ("where(m0[i1[q_idx], kv_idx], score, -inf)", 64, {}, "gathered"),
        ("score * 0.1 + f0[h, q_idx, kv_idx]", 128, {}, "huge"),
        (f"where({CAUSAL}, score * f0[h], -inf)", 128, {"grad_slots": (0,)}, "gradient of f0"),
        (f"where({SAME}, score, -inf)", 128, {"deterministic": True}, "fixed order"),
        (f"where({CAUSAL}, score * f0[h], -inf)", 128, {"deterministic": True}, "fixed order"),
        (f"where({CAUSAL}, score, -inf), sinks=[f0[h]]", 128, {"deterministic": True}, ""),
        ("where(m0[b, 0, q_idx, kv_idx], score * 0.1, -inf), dead_rows='zero'", 64, {}, "for every score"),
        (f"where(({CAUSAL}) & (kv_idx < n0), score, -inf), dead_rows='zero'", 128, {}, ""),
        (f"where(({CAUSAL}) | (kv_idx < i0[b]), score, -inf)", 128, {}, "not found"),
        ("where(i0[h, q_idx] == i0[h, kv_idx], score, -inf)", 128, {}, "not found"),
        (f"where({SAME}, score, -inf)", 256, {}, "above head dim 128"),
        (f"where({SAME}, score, -10000.0)", 128, {}, "masked logits are"),
        ("log1p(abs(score))", 128, {}, "log1p"),
        ("tanh(score) + sigmoid(score) + erf(score) + score", 128, {}, "terms"),
        ("score * 0.1, dropout=(0.1, 0)", 128, {}, "dropout"),
        ("minimum(score * 0.1, 1e-40)", 128, {}, "range"),
    ],
)
def test_backward_of_programs(program: str, dim: int, more: dict[str, object], reason: str) -> None:
    asked = AttentionSpec.parse(f"attention(score={program})")
    found = backward_refusal(asked, "bfloat16", dim, dim, 16384, 16384, 64, **more)  # type: ignore[arg-type]
    assert (reason in found) if reason else not found


@pytest.mark.parametrize(
    ("program", "dim", "reason"),
    [
        (f"where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", 128, ""),
        (f"where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", 256, ""),
        (f"where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)", 64, "terms"),
        ("score * 0.1 - f0[h] * cast_float(abs(kv_idx - q_idx))", 64, "terms"),
        (f"where(({CAUSAL}) & ({SAME}), score * 0.1, -inf)", 128, ""),
        (f"where(({CAUSAL}) & ({SAME}), score * 0.1, -inf)", 64, "more registers"),
        (f"where({SAME}, score * 0.1, -inf)", 64, "more registers"),
        (f"where({SAME}, score * 0.1, -inf)", 256, "not timed"),
        ("where(m0[b, kv_idx], score * 0.1, -inf), dead_rows='zero'", 64, ""),
        ("where(kv_idx < i0[b], score * 0.1, -inf), dead_rows='zero'", 64, ""),
        ("where(m0[b, kv_idx], score * 0.1, -1e9)", 64, ""),
        ("where(m0[b, kv_idx], score * 0.1, -5.0)", 128, "masked logits are -5.0"),
        ("where(m0[b, h, kv_idx], score * 0.1, -1e9)", 128, "may be all that a row has"),
        (f"where(({CAUSAL}) & m0[b, kv_idx], score * 0.1, -1e9)", 128, "may be all that a row has"),
        ("score * 0.1 + (1.0 - cast_float(i0[b, kv_idx])) * -3e38", 128, ""),
        ("score * 0.1 + f0[b, h, kv_idx]", 128, "not a tensor of a value for every score"),
        ("score * 0.1 + f0[h, q_idx, kv_idx]", 128, ""),
        ("score * 0.1 - f0[b, 0, q_idx, kv_idx]", 128, ""),
        ("score * 0.1 - f0[b, 0, q_idx, kv_idx] * 2.0", 128, "for every score"),
        ("tanh(score * 0.02) * 30.0 + f0[h, q_idx, kv_idx]", 128, ""),
        ("score * 0.1 + f0[h, q_idx, kv_idx]", 64, "timed at head dim 128"),
        ("score * 0.1 + f0[h, q_idx, kv_idx]", 256, "timed at head dim 128"),
        ("score * 0.1 + f0[h, q_idx, kv_idx] + f1[b, 0, q_idx, kv_idx]", 128, "huge"),
        ("score * 0.1 + f0[h, kv_idx, q_idx]", 128, "gathered"),
        ("score * 0.1 + f0[h, q_idx, kv_idx] + f1[h, kv_idx]", 128, "huge"),
        (f"where({CAUSAL}, score * 0.1 + f0[h, q_idx, kv_idx], -inf)", 128, "under a mask"),
        ("where(m0[b, kv_idx], score * 0.1 + f1[h, q_idx, kv_idx], -inf)", 128, "under a mask"),
        ("score * 0.1 + f0[h, q_idx, kv_idx], sinks=[f1[h]]", 128, "sinks"),
        ("score * 0.1 + f0[b, kv_idx], sinks=[f1[h]]", 128, "sinks"),
        (f"where({CAUSAL}, score, -inf), sinks=[f0[h]]", 128, ""),
        ("score * f0[h, kv_idx]", 128, "for every key"),
        ("score * f0[h, q_idx, kv_idx]", 128, "for every score"),
        ("where(m0[b, 0, q_idx, kv_idx], score * 0.1, -inf), dead_rows='zero'", 128, ""),
        ("where(m0[b, 0, q_idx, kv_idx], score * 0.1, -inf), dead_rows='zero'", 64, "for every score"),
        ("where(m0[i1[q_idx], kv_idx], score, -inf)", 128, "gathered"),
        (f"where(({CAUSAL}) | (kv_idx < i0[b]), score, -inf)", 128, "not found"),
        ("log1p(abs(score))", 128, "log1p"),
        ("score * 0.1, dropout=(0.1, 0)", 128, "dropout"),
        ("minimum(score * 0.1, 1e-40)", 128, "range"),
    ],
)
def test_forward_of_programs(program: str, dim: int, reason: str) -> None:
    asked = AttentionSpec.parse(f"attention(score={program})")
    found = refusal(asked, "bfloat16", dim, dim, 16384, 16384, 64)
    assert (reason in found) if reason else not found


def test_bias_of_lengths_inside_of_a_tile() -> None:
    asked = spec("score * 0.1 + f0[h, q_idx, kv_idx]")
    assert "whole tiles" in refusal(asked, "bfloat16", 128, 128, 4096, 4000, 256)
    assert not refusal(asked, "bfloat16", 128, 128, 4000, 4096, 256)


def test_padding_of_lengths_inside_of_a_tile() -> None:
    asked = spec("where(m0[b, kv_idx], score * 0.1, -inf)")
    assert "registers" in refusal(asked, "bfloat16", 64, 64, 4096, 4000, 256)
    assert not refusal(asked, "bfloat16", 64, 64, 4000, 4096, 256)
    assert not refusal(asked, "bfloat16", 128, 128, 4096, 4000, 256)


def test_what_is_added_for_a_key_is_told_apart() -> None:
    form = forward_form_of(spec(f"where({CAUSAL}, score * 0.1 - f0[b, kv_idx], -inf)"))
    assert not isinstance(form, str)
    assert (form.scale, form.plain, form.wide, str(form.term)) == (0.1, True, True, "(-f0[b, kv_idx])")
    form = forward_form_of(spec("score * 0.1 + where(m0[b, kv_idx], 0.0, -1e9)"))
    assert not isinstance(form, str)
    assert form.wide
    assert form.fill is None


def test_short_documents_are_left_to_the_general_kernels() -> None:
    asked = spec(f"where(({CAUSAL}) & ({SAME}), score * 0.1, -inf)")
    assert "GFLOP" in backward_refusal(asked, "bfloat16", 128, 128, 4096, 4096, 64)
    assert not backward_refusal(asked, "bfloat16", 128, 128, 16384, 16384, 64)


def test_program_forms() -> None:
    keep = f"({CAUSAL}) & (q_idx - kv_idx < 9) & ({SAME}) & (kv_idx < i1[b])"
    form = program_form_of(spec(f"where({keep}, tanh(score * 0.1) * 9.0, -inf)"))
    assert not isinstance(form, str)
    assert form.band(100, 100, []) == (-8, 0)
    assert (form.scale, form.softcap, form.plain) == (9.0, 0.1, True)
    assert str(form.rest) == f"(({SAME}) & (kv_idx < i1[b]))"


def request(score: str, capability: tuple[int, int] = (9, 0), **more: object) -> select.Request:
    fields = {"queries": 4096, "keys": 4096, "heads": 64, **more}
    return select.Request(spec(score), "bfloat16", 128, 128, capability, **fields)  # type: ignore[arg-type]


def template(asked: select.Request) -> str:
    answer = select.supports(asked)
    assert isinstance(answer, select.Supported)
    return answer.template


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = f"where({CAUSAL}, score, -inf)"
    assert template(request(causal)) == select.HOPPER
    assert template(request(causal, tma=False)) == "sm90-pointer"
    assert template(request(causal, (8, 0))) == "sm80-pointer"
    assert template(request(causal, (10, 0))) == "sm100-tma"
    assert template(request(causal, queries=None)) == template(request(causal, heads=None)) == "sm90-tma"
    assert template(request(causal, heads=1)) == "sm90-tma"
    assert template(request(f"where(({CAUSAL}) & (kv_idx > q_idx - 64), score, -inf)")) == "sm90-tma"
    # A finite fill vanishes where every row is proven to keep a key.
    assert template(request(f"where({CAUSAL}, score, -1e9)")) == select.HOPPER
    assert template(request("where(kv_idx <= q_idx - n0, score, -1e9)")) == "sm90-tma"
    bottom_right = "where(kv_idx <= q_idx + (kv_len - q_len), score, -1e9)"
    assert template(request(bottom_right)) == "sm90-tma"
    assert template(request(bottom_right, facts=Facts(4096, 4096))) == select.HOPPER
    alibi = f"where({CAUSAL}, score * 0.1 + f0[h] * cast_float(kv_idx - q_idx), -inf)"
    assert template(request(alibi)) == template(request(alibi, backward=True)) == select.HOPPER
    assert template(request(alibi, backward=True, grad_slots=(0,))) == f"{select.HOPPER}, backward sm90-tma"
    # Within documents every row keeps its own key where there are as many keys as queries, and the finite fill vanishes.
    documents = f"where(({CAUSAL}) & ({SAME}), score * 0.1, -1e9)"
    sizes = {"queries": 16384, "keys": 16384, "backward": True}
    assert template(request(documents, **sizes)) == "sm90-tma"
    assert template(request(documents, facts=Facts(16384, 16384), **sizes)) == select.HOPPER
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    assert template(request(causal)) == "sm90-tma"


def test_padded() -> None:
    assert [padded(d) for d in (1, 64, 65, 96, 128, 192, 256, 257)] == [64, 64, 128, 128, 128, 256, 256, 512]
    assert math.log2(padded(200)).is_integer()
