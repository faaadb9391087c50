"""The mask algebra against brute force: every bound holds, every exact bound is tight, every proof is true."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fa_inductor.bounds import KvBounds, block_range, key_loads, row_always_has_key
from fa_inductor.expr import Const, parse
from fa_inductor.intervals import Facts, bounds, linear, never_negative
from fa_inductor.masks import split_mask
from fa_inductor.reference import Env, evaluate

CAUSAL = "kv_idx <= q_idx"
BOTTOM_RIGHT = "kv_idx <= (q_idx + (kv_len - q_len))"
WINDOW = "((kv_idx <= q_idx) & ((q_idx - kv_idx) < 5))"
MASKS = {
    "causal": CAUSAL,
    "causal_other_way": "q_idx >= kv_idx",
    "not_future": "~(kv_idx > q_idx)",
    "bottom_right": BOTTOM_RIGHT,
    "shifted": "kv_idx < (q_idx + 3)",
    "window": WINDOW,
    "symmetric": "abs(q_idx - kv_idx) <= 3",
    "symmetric_not": "~(abs(kv_idx - q_idx) > 3)",
    "prefix": "((kv_idx <= q_idx) | (kv_idx < 4))",
    "prefix_window": f"({WINDOW} | (kv_idx < 2))",
    "limit": "kv_idx < 7",
    "run_time_limit": "kv_idx < n0",
    "chunk": "(q_idx // 4) == (kv_idx // 4)",
    "chunk_causal": "(((q_idx // 4) == (kv_idx // 4)) & (kv_idx <= q_idx))",
    "chunk_le": "(kv_idx // 3) <= (q_idx // 3)",
    "chunk_of_shifted": "((kv_idx + 1) // 3) >= (q_idx // 3)",
    "strided": "(2 * kv_idx) <= ((3 * q_idx) + 1)",
    "doubled": "((kv_idx * 2) - q_idx) > 1",
    "per_row_switch": "where(q_idx < 3, kv_idx <= q_idx, kv_idx < 2)",
    "modulo": "(((kv_idx - q_idx) % 2) == 0)",
    "modulo_causal": "((((kv_idx - q_idx) % 2) == 0) & (kv_idx <= q_idx))",
    "cut_both": "((kv_idx >= 2) & (kv_idx < (kv_len - 1)))",
    "impossible": "((kv_idx > q_idx) & (kv_idx < q_idx))",
    "min_of": "minimum(kv_idx, q_idx + 2) >= 1",
}
SIZES = [(6, 6), (1, 9), (9, 5), (5, 9), (8, 1)]


def table(text: str, q_len: int, kv_len: int) -> torch.Tensor:
    env = Env.full((1, 1, q_len, kv_len), [], [4], torch.device("cpu"), torch.float32)
    return evaluate(parse(text), env).expand(1, 1, q_len, kv_len)[0, 0]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_block_range_covers_every_kept_key(name: str, q_len: int, kv_len: int) -> None:
    keep, kept = parse(MASKS[name]), table(MASKS[name], q_len, kv_len)
    found = KvBounds.of(keep)
    for m0, m1 in itertools.combinations(range(q_len + 1), 2):
        low, high = block_range(keep, m0, m1, q_len, kv_len, [4])
        assert 0 <= low <= kv_len
        assert 0 <= high <= kv_len
        seen = kept[m0:m1].any(0).nonzero().flatten().tolist()
        assert all(low <= n < high for n in seen), (name, m0, m1, low, high, seen)
        if not found.rest and m1 == m0 + 1:  # exact bounds of one row are tight
            assert seen == list(range(low, high))


@pytest.mark.parametrize("name", [n for n in MASKS if "modulo" not in n])
def test_symbolic_block_bounds_agree_with_numbers(name: str) -> None:
    found = KvBounds.of(parse(MASKS[name]))
    low, high = found.block(parse("n7"), parse("n8"))
    full = found.block_full(parse("n7"), parse("n8"))
    for q_len, kv_len in SIZES:
        kept = table(MASKS[name], q_len, kv_len)
        for m0, m1 in itertools.combinations(range(q_len + 1), 2):
            env = Env(
                {},
                {"q_len": q_len, "kv_len": kv_len, "n0": 4, "n7": m0, "n8": m1},
                [],
                torch.device("cpu"),
                torch.float32,
            )
            lo, hi = int(evaluate(low, env)), int(evaluate(high, env))
            assert all(lo <= n < hi for n in kept[m0:m1].any(0).nonzero().flatten().tolist())
            if full is not None:
                lo, hi = (int(evaluate(e, env)) for e in full)
                assert kept[m0:m1, max(lo, 0) : max(hi, 0)].all()


def test_expected_bounds() -> None:
    def of(text: str) -> tuple[list[str], list[str], int]:
        k = KvBounds.of(parse(text))
        return [str(x) for x in k.lower], [str(x) for x in k.upper], len(k.rest)

    assert of(CAUSAL) == ([], ["(q_idx + 1)"], 0)
    assert of(WINDOW) == (["(q_idx - 4)"], ["(q_idx + 1)"], 0)
    assert of("((kv_idx <= q_idx) & m0[b, kv_idx])") == ([], ["(q_idx + 1)"], 1)
    assert of("kv_idx < i0[b]") == ([], ["i0[b]"], 0)
    assert of(MASKS["modulo"]) == ([], [], 1)
    assert of("f0[kv_idx] <= f0[q_idx]") == ([], [], 1)


def test_load_bounds_are_open_without_the_load() -> None:
    keep = parse("((kv_idx < i0[b]) & (kv_idx <= q_idx))")
    assert block_range(keep, 0, 3, 8, 8, []) == (0, 3)
    (load,) = key_loads(keep)
    assert str(load) == "i0[b]"
    _, high = KvBounds.of(keep).block(0, 4, frozenset([load]))
    assert "i0[b]" in str(high)


@pytest.mark.parametrize("name", MASKS)
def test_row_proofs_are_true(name: str) -> None:
    keep = parse(MASKS[name])
    for q_len, kv_len in SIZES:
        if row_always_has_key(keep, Facts(q_len, kv_len, (4,))):
            assert table(MASKS[name], q_len, kv_len).any(1).all()
    if row_always_has_key(keep):
        for q_len, kv_len in itertools.product(range(1, 7), range(1, 7)):
            assert table(MASKS[name], q_len, kv_len).any(1).all(), (name, q_len, kv_len)


def test_row_proofs_found() -> None:
    def proven(text: str, *numbers: int) -> bool:
        return row_always_has_key(parse(text), Facts(*numbers[:2], sizes=numbers[2:]))

    assert proven("True")
    assert proven(CAUSAL)
    assert proven(MASKS["prefix"])
    assert proven(MASKS["chunk_le"])
    assert not proven(BOTTOM_RIGHT)
    assert proven(BOTTOM_RIGHT, 4, 9)
    assert proven(BOTTOM_RIGHT, 9, 9)
    assert not proven(BOTTOM_RIGHT, 9, 4)
    assert not proven(WINDOW)
    assert proven(WINDOW, 9, 9)
    assert proven(WINDOW, 9, 5)
    assert not proven(WINDOW, 10, 5)
    assert proven(MASKS["chunk_causal"], 8, 8)
    assert not proven(MASKS["chunk_causal"])
    assert not proven("m0[b, kv_idx]", 4, 4)
    assert not proven(f"(({CAUSAL}) & m0[b, kv_idx])", 4, 4)
    assert proven(f"(({CAUSAL}) | m0[b, kv_idx])", 4, 4)
    assert proven("kv_idx < n0", 3, 5, 2)
    assert not proven("kv_idx < n0", 3, 5, 0)
    assert not proven("kv_idx < n0")
    assert not proven(MASKS["impossible"], 4, 4)
    assert not proven("False", 4, 4)


SPLITS = {
    "where(kv_idx <= q_idx, score * 0.5, -inf)": (CAUSAL, "score * 0.5", -math.inf, False),
    "where(kv_idx > q_idx, -1e9, score)": (CAUSAL, "score", -1e9, False),
    "where(~m0[b, kv_idx], -inf, score)": ("m0[b, kv_idx]", "score", -math.inf, False),
    "where(m0[b, kv_idx], where(kv_idx <= q_idx, score, -inf), -inf)": (
        "m0[b, kv_idx] & (kv_idx <= q_idx)", "score", -math.inf, False),
    "score + where(kv_idx <= q_idx, 0.0, -inf)": (CAUSAL, "score", -math.inf, False),
    "where(kv_idx <= q_idx, 0.0, -1e9) + score": (CAUSAL, "score", -1e9, True),
    "score + ((1.0 - cast_float(m0[b, kv_idx])) * -10000.0)": ("m0[b, kv_idx]", "score", -1e4, True),
    "score - (cast_float(m0[b, kv_idx]) * 10000.0)": ("~m0[b, kv_idx]", "score", -1e4, True),
    "score + ((1.0 - (cast_float(m0[b, kv_idx]) * cast_float(kv_idx <= q_idx))) * -1e9)": (
        "m0[b, kv_idx] & (kv_idx <= q_idx)", "score", -1e9, True),
    "where(kv_idx <= q_idx, score, -1e4) * 0.5": (CAUSAL, "score * 0.5", -5e3, False),
    "where(kv_idx <= q_idx, score, -inf) + f0[h, q_idx, kv_idx]": (
        CAUSAL, "score + f0[h, q_idx, kv_idx]", -math.inf, False),
    "where(kv_idx <= q_idx, score, -5.0) + f0[kv_idx]": (CAUSAL, "score + f0[kv_idx]", "f0[kv_idx] + -5.0", False),
    "where(m0[b, kv_idx], score, -inf) + where(kv_idx <= q_idx, 0.0, -inf)": (
        "m0[b, kv_idx] & (kv_idx <= q_idx)", "score", -math.inf, False),
    "tanh(score) * 30.0": ("True", "tanh(score) * 30.0", None, False),
    "score + where(kv_idx <= q_idx, 0.0, -100.0)": ("True", "score + where(kv_idx <= q_idx, 0.0, -100.0)", None, False),
    "where(kv_idx <= q_idx, score, -inf) * -1.0": ("True", "where(kv_idx <= q_idx, score, -inf) * -1.0", None, False),
    "where(kv_idx <= q_idx, score, score * 2.0)": ("True", "where(kv_idx <= q_idx, score, score * 2.0)", None, False),
    "score + (cast_float(m0[b, kv_idx]) * -inf)": (
        "True", "score + (cast_float(m0[b, kv_idx]) * -inf)", None, False),  # 0 * -inf is NaN
    "score + (cast_float(m0[b, kv_idx]) * 1.0)": ("True", "score + (cast_float(m0[b, kv_idx]) * 1.0)", None, False),
}  # fmt: skip


@pytest.mark.parametrize("text", SPLITS)
def test_split(text: str) -> None:
    keep, live, fill, additive = SPLITS[text]
    got = split_mask(parse(text))
    assert got.keep == parse(keep)
    assert got.live == parse(live)
    assert got.fill == (parse(fill) if isinstance(fill, str) else None if fill is None else Const(fill))
    assert got.additive is additive


@pytest.mark.parametrize(
    "text",
    [
        *SPLITS,
        "where(m0[b, kv_idx], where(kv_idx <= q_idx, score, -5.0), -7.0)",
        "where(m0[b, kv_idx], score + where(kv_idx <= q_idx, 0.0, -1e4), -inf)",
        "(score + where(kv_idx <= q_idx, 0.0, -2e4)) + where(m0[b, kv_idx], 0.0, -1e4)",
        "where(m0[b, kv_idx], score, -3.0) + where(kv_idx <= q_idx, 0.0, -inf)",
        "where(m0[b, kv_idx], score, -3.0) + where(kv_idx <= q_idx, 0.0, -1e4)",
        "where(m0[b, kv_idx], score, -inf) + where(kv_idx <= q_idx, 0.0, -1e4)",
        "(score + where(kv_idx <= q_idx, 0.0, -1e4)) + where(m0[b, kv_idx], 0.0, -inf)",
        "where(f0[kv_idx] < 0.0, -1.0, score)",
    ],
)
def test_split_keeps_the_value(text: str) -> None:
    """where(keep, live, fill or live + fill) is the score itself, everywhere, in float64."""
    torch.manual_seed(0)
    score = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    loads = {"m0": torch.rand(2, 6) > 0.4, "f0[h": torch.randn(3, 5, 6), "f0[kv": torch.randn(6)}
    captures = [t for key, t in loads.items() if key in text][:1]
    env = Env.full((2, 3, 5, 6), captures, [], score.device, score.dtype, score)
    got = split_mask(parse(text))
    value = evaluate(got.live, env)
    if got.fill is not None:
        fill = evaluate(got.fill, env)
        value = torch.where(evaluate(got.keep, env), value, value + fill if got.additive else fill)
    torch.testing.assert_close(
        value.expand(score.shape), evaluate(parse(text), env).expand(score.shape), equal_nan=True
    )


def test_linear_forms_and_intervals() -> None:
    assert str(linear(parse("((q_idx + 3) - (2 * (q_idx - kv_len)))")).expr()) == str(
        parse("(((kv_len * 2) - q_idx) + 3)")
    )
    assert linear(parse("((4 * q_idx) + 6) // 2")) == linear(parse("(2 * q_idx) + 3"))
    box = {parse("q_idx"): (Const(2), Const(5))}
    assert bounds(parse("10 - (3 * q_idx)"), box) == (Const(-5), Const(4))
    assert bounds(parse("(q_idx - q_idx) + 1"), box) == (Const(1), Const(1))
    assert bounds(parse("i0[q_idx]"), box) == (None, None)
    assert bounds(parse("minimum(i0[q_idx], q_idx)"), box) == (None, Const(5))
    assert bounds(parse("maximum(i0[q_idx], q_idx)"), box) == (Const(2), None)
    assert never_negative(parse("q_idx"), Facts())
    assert not never_negative(parse("q_idx - 1"), Facts())
    assert never_negative(parse("(q_len - 1) - q_idx"), Facts())
    assert not never_negative(parse("kv_len - q_len"), Facts())
    assert never_negative(parse("q_idx - ((q_idx // 4) * 4)"), Facts())
    assert not never_negative(parse("n0"), Facts())
