"""What the templates read out of a program, what they refuse, and the text they print. No compiler involved."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fa_inductor.expr import KV_IDX, Q_IDX, SCORE, Const, parse
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import configs, select, tiles
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.forward import forward_kernel, packs_heads
from fa_inductor.templates.program import Program, may_be_huge, pull_factor, pull_scale
from fa_inductor.templates.rendering import Problem, padded_dim
from fa_inductor.templates.score_codegen import CaptureInfo, ScorePrinter, Unprintable, float_literal, is_nonnegative
from fa_inductor.templates.standalone import complete
from tests.templates.families import BY_NAME, FAMILIES, Family

CAUSAL = "attention(score=where(q_idx >= kv_idx, score * 0.125, -inf))"


@pytest.mark.parametrize(
    ("text", "body", "scale"),
    [
        ("score * 0.5", "score", 0.5),
        ("score * -0.5", "(-score)", 0.5),
        ("where(q_idx >= kv_idx, score * 0.5, -inf)", "where(q_idx >= kv_idx, score, -inf)", 0.5),
        ("where(q_idx >= kv_idx, score * 0.5, -1.0)", "where(q_idx >= kv_idx, score * 0.5, -1.0)", 1.0),
        ("tanh(score) * 30.0", "tanh(score)", 30.0),
        ("score * 0.5 + f0[kv_idx]", "((score * 0.5) + f0[kv_idx])", 1.0),
    ],
)
def test_pull_scale(text: str, body: str, scale: float) -> None:
    assert pull_scale(parse(text)) == (parse(body), scale)


def test_pull_factor() -> None:
    assert pull_factor(parse("where(q_idx >= kv_idx, 0.5, 0.0)")) == (parse("where(q_idx >= kv_idx, 1.0, 0.0)"), 0.5)
    assert pull_factor(Const(-0.25)) == (Const(1.0), -0.25)


@pytest.mark.parametrize(
    ("text", "huge"),
    [
        ("score * 0.125", False),
        ("where(m0[kv_idx], score, -inf)", False),
        ("where(m0[kv_idx], score, -10000.0)", True),
        ("score + f0[kv_idx]", True),
        ("score * f0[()]", False),
        ("score + f0[h] * cast_float(kv_idx - q_idx)", False),
        ("score + (1.0 - cast_float(m0[kv_idx])) * -1e9", True),
        ("tanh(score + f0[kv_idx])", False),
        ("exp(score)", True),
    ],
)
def test_may_be_huge(text: str, huge: bool) -> None:
    assert may_be_huge(parse(text)) == huge


def test_finite_fill_that_vanishes_becomes_infinite() -> None:
    causal = AttentionSpec.parse("attention(score=where(q_idx >= kv_idx, score * 0.125, -1e9))")
    program = Program.of(causal, Problem(64, 64, 1))
    assert program.masked.fill_value == -math.inf
    assert not program.wide
    assert program.may_skip(backward=True)


@pytest.mark.parametrize(
    "name", ["dead_1e9", "dead_minus_5", "padding_causal_finfo", "padding_added_finfo", "bottom_right_dead_nan"]
)
def test_rows_without_keys_forbid_skipping(name: str) -> None:
    """A row that may be left without a key averages V (finite fill) or is NaN, and every key then gets a gradient."""
    program = Program.of(BY_NAME[name].spec(), Problem(64, 64, 1))
    assert not program.may_skip(backward=True)


def test_documents_keep_the_diagonal() -> None:
    spec = BY_NAME["document"].spec()
    assert Program.of(spec, Problem(64, 64, 1, square=True)).may_skip(backward=True)
    assert not Program.of(spec, Problem(64, 64, 1)).may_skip(backward=True)
    assert tiles.leaves_tiles_out(Program.of(spec, Problem(64, 64, 1)), backward=False)


def test_full_tiles_leave_the_mask_out() -> None:
    program = Program.of(AttentionSpec.parse(CAUSAL), Problem(64, 64, 1))
    plan = tiles.plan(program, Problem(64, 64, 1), keys=True, backward=False)
    assert program.body(plan.full) == SCORE
    assert (plan.start, plan.stop) == ("tile_lo", "tile_hi")
    assert plan.edge == "(start_n + BLOCK_N > full_hi)"


def test_padding_stays_in_full_tiles() -> None:
    problem = Problem(64, 64, 1, (CaptureInfo(2),))
    program = Program.of(BY_NAME["padding_dead_zero"].spec(), problem)
    plan = tiles.plan(program, problem, keys=True, backward=False)
    assert str(plan.full) == "where(m0[b, kv_idx], score * 0.2, -inf)"


def test_floor_division_of_what_may_be_negative() -> None:
    printer = ScorePrinter()
    printer.emit(parse("(kv_idx - q_idx) // 3"))
    assert any("tl.where" in line for line in printer.lines)
    printer = ScorePrinter()
    printer.emit(parse("q_idx // 3"))
    assert printer.lines == ["t0 = q_idx // 3"]
    assert is_nonnegative(parse("q_idx * kv_len + kv_idx"))
    assert not is_nonnegative(parse("n0"))


def test_products_of_indices_are_64_bit() -> None:
    printer = ScorePrinter()
    printer.emit(parse("q_idx * kv_len + kv_idx"))
    assert "tl.int64" in printer.lines[0]


def test_loads_are_masked_unless_proven_inside() -> None:
    load = parse("f0[h, q_idx - kv_idx]")
    printer = ScorePrinter([CaptureInfo(2, (frozenset({"h"}), frozenset()), (4, 9))])
    printer.emit(load)
    assert "CAP0_N0" not in "\n".join(printer.lines)
    assert "(t0 >= 0) & (t0 < CAP0_N1)" in "\n".join(printer.lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, 'float("inf")'), (-math.inf, 'float("-inf")'), (math.nan, 'float("nan")'), (0.5, "0.5"),
        (-1.7e308, 'float("-inf")'), (2.0**-140, f"tl.full([], {2.0**-140!r}, tl.float32)"),
    ],
)  # fmt: skip
def test_float_literals(value: float, text: str) -> None:
    assert float_literal(value) == text


def test_variable_exponent_is_refused() -> None:
    with pytest.raises(Unprintable):
        ScorePrinter().emit(parse("pow(score, f0[h])"))


def test_rendering_is_deterministic() -> None:
    for family in FAMILIES:
        problem = Problem(32, 32, 2, tuple(CaptureInfo(len(n.index)) for n in family.spec().loads()[:1]))
        if family.spec().dropout_p or len({n.slot for n in family.spec().loads()}) > 1:
            continue
        config = tiles.choose(Program.of(family.spec(), problem), problem, 80, "forward")[0]
        first = complete(forward_kernel(family.spec(), problem, config)).source
        forward_kernel.cache_clear()
        assert complete(forward_kernel(family.spec(), problem, config)).source == first
        compile(first, family.name, "exec")


@pytest.mark.parametrize(
    ("text", "lean"),
    [
        ("score * 0.1", True),
        ("where(kv_idx <= q_idx + 5, score * 0.1, -inf)", True),
        ("where(kv_idx <= q_idx + n0, score * 0.1, -inf)", False),
        ("where((kv_idx <= q_idx) & (kv_idx > q_idx - 9), score * 0.1, -inf)", False),
        ("where((kv_idx <= q_idx) | (kv_idx < 9), score * 0.1, -inf)", False),
        ("where(kv_idx <= q_idx, score * 0.1, -5.0)", False),
        ("tanh(score) * 0.1", False),
        ("score * 0.1 + f0[h]", False),
        ("score * 0.1, sinks=[f0[h]]", False),
        ("score * 0.1, dropout=(0.5, 0)", False),
    ],
)
def test_lean_programs_have_larger_tiles(text: str, lean: bool) -> None:
    spec, problem = AttentionSpec.parse(f"attention(score={text})"), Problem(64, 64, 1)
    program = Program.of(spec, problem)
    assert program.lean == lean
    tallest = tiles.choose(program, problem, 80, "dq")[0]
    assert (tallest.block_m == 128) == lean
    # Not around a loop over the heads of a group, and not where shared memory is small.
    grouped = Problem(64, 64, 4, tma=True)
    assert tiles.choose(program, grouped, 100, "dkdv")[0].block_n == 64
    assert tiles.choose(program, problem, 80, "dq", 99 * 1024)[0].block_m == 64


#: Kernels whose first tile is another with 99 KiB than with 163.
DIFFERENT = {("forward", 128), ("forward", 256), *(("dkdv", d) for d in (64, 256)), *(("dq", d) for d in (64, 128, 256))}
DIFFERENT |= {("rows", d) for d in (64, 128, 256)}


@pytest.mark.parametrize("which", configs.PASSES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_shared_memory_of_the_device_decides(which: str, dim: int) -> None:
    use = configs.Use(80, 2, dim, dim, lean=True)
    most = configs.candidates(use, which)
    for shared, expected in ((None, most), (163 * 1024, most), (227 * 1024, most)):
        assert configs.candidates(replace(use, shared=shared), which) == expected
    small = configs.candidates(replace(use, shared=99 * 1024), which)
    assert len(set(small)) == len(small) >= 2
    assert (small[0] != most[0]) == ((which, dim) in DIFFERENT)


def test_heads_are_packed_for_few_queries_only() -> None:
    few = Problem(64, 64, 4, rows=1)
    chosen = tiles.choose(Program.of(AttentionSpec.parse(CAUSAL), few), few, 90, "forward")[0]
    assert packs_heads(few, chosen)
    many = Problem(64, 64, 4, rows=100)
    chosen = tiles.choose(Program.of(AttentionSpec.parse(CAUSAL), many), many, 90, "forward")[0]
    assert not packs_heads(many, chosen)


@pytest.mark.parametrize(
    ("program", "uneven"),
    [
        ("attention(score=where(kv_idx < i0[b], score * 0.088, -inf))", True),
        ("attention(score=where(m0[b, kv_idx], score * 0.088, -inf))", True),
        ("attention(score=(score * 0.088) + where(kv_idx <= i0[b], 0.0, -3.3895313892515355e+38))", True),
        ("attention(score=where(kv_idx <= i0[0], score * 0.088, -inf))", False),
        ("attention(score=where(kv_idx < i0[b], score * 0.088, -5.0))", False),
        ("attention(score=score * 0.088 + f0[b])", False),
    ],
)
def test_sequences_that_see_unequal_numbers_of_keys(program: str, uneven: bool) -> None:
    rank = 2 if "m0" in program else 1
    problem = Problem(128, 128, 4, rows=1, captures=(CaptureInfo(rank, (frozenset({"b"}),) * rank),), wide_captures=(False,))
    assert Program.of(AttentionSpec.parse(program), problem).uneven == uneven


@pytest.mark.parametrize(("dim", "pad"), [(1, 16), (16, 16), (17, 32), (80, 128), (512, 512)])
def test_padded_dim(dim: int, pad: int) -> None:
    assert padded_dim(dim) == pad


def _request(family: Family, **changes: object) -> select.Request:
    fields = {"spec": family.spec(), "dtype": "bfloat16", "qk_dim": 64, "v_dim": 64, "capability": (9, 0), **changes}
    return select.Request(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "template"),
    [
        ({}, "sm90-tma"), ({"tma": False}, "sm90-pointer"), ({"capability": (8, 6)}, "sm80-pointer"),
        ({"capability": (10, 0)}, "sm100-tma"), ({"capability": (12, 0)}, "sm80-pointer"),
        ({"dtype": "float32"}, "sm90-pointer"),
    ],
)  # fmt: skip
def test_supported(changes: dict, template: str) -> None:
    assert select.supports(_request(BY_NAME["causal"], **changes)) == select.Supported(template)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("causal", {"capability": (7, 5)}, "older than 8.0"),
        ("causal", {"dtype": "float64"}, "operands are float64"),
        ("causal", {"qk_dim": 513}, "head_dim of query and key is 513"),
        ("causal", {"v_dim": 1024}, "head_dim of value is 1024"),
        ("alibi", {"backward": True, "deterministic": True, "grad_slots": (0,)}, "use_deterministic_algorithms"),
        ("relative", {"backward": True, "grad_slots": (0,), "keys": 144}, "an atomic addition a score, which with 144 keys"),
    ],
)
def test_refusals(name: str, changes: dict, words: str) -> None:
    answer = select.supports(_request(BY_NAME[name], **changes))
    assert isinstance(answer, select.Unsupported)
    assert words in answer.reason


@pytest.mark.parametrize(("name", "keys"), [("relative", 1024), ("relative", None), ("sinks", 144), ("bias_full", 144)])
def test_atomics_that_pay(name: str, keys: int | None) -> None:
    request = _request(BY_NAME[name], backward=True, grad_slots=(0,), keys=keys)
    assert isinstance(select.supports(request), select.Supported)


def test_unique_gradients_are_deterministic() -> None:
    changes = {"backward": True, "deterministic": True, "grad_slots": (0,)}
    assert isinstance(select.supports(_request(BY_NAME["bias_full"], **changes)), select.Supported)


def test_alibi_in_floats() -> None:
    """The distance is a difference of floats where every index is exact in float32, and the slope takes the scale in."""
    spec = AttentionSpec.parse("attention(score=score * 0.5 + f0[h] * cast_float(kv_idx - q_idx))")
    short = Program.of(spec, Problem(64, 64, 1, rows=4096, cols=4096))
    assert short.body(short.spec.score) == parse("score + ((f0[h] * 2.0) * (cast_float(kv_idx) - cast_float(q_idx)))")
    assert short.scale == 0.5
    for rows in (None, 2**24):
        assert Program.of(spec, Problem(64, 64, 1, rows=rows, cols=rows)).spec == spec


def test_a_bias_is_not_divided_by_the_scale() -> None:
    assert pull_scale(parse("score * 0.5 + f0[kv_idx]"))[1] == 1.0
    assert pull_scale(parse("score * 0.5 - cast_float(kv_idx)")) == (parse("score - cast_float(kv_idx) * 2.0"), 0.5)


def test_sinks_need_no_wide_logits() -> None:
    problem = Problem(64, 64, 1)
    assert not Program.of(BY_NAME["sinks"].spec(), problem).wide
    assert Program.of(BY_NAME["sinks_dead_1e9"].spec(), problem).wide


@pytest.mark.parametrize(
    ("name", "shared"), [("bias_heads", True), ("bias_full", False), ("bias_batch", False), ("alibi", False)]
)
def test_shares_batches(name: str, shared: bool) -> None:
    assert Program.of(BY_NAME[name].spec(), Problem(64, 64, 1)).shares_batches == shared


@pytest.mark.parametrize(
    ("name", "slots"), [("documents_long", (0,)), ("positions_long", (0, 1)), ("padding_turned_long", (0,))]
)
def test_summaries(name: str, slots: tuple[int, ...]) -> None:
    """Masks from captured rows are read in summaries; in tiles that those show to be whole no mask is left."""
    family = BY_NAME[name]
    covers = (frozenset({"b"}), frozenset({"q_idx", "kv_idx"}))
    captures = tuple(CaptureInfo(2, covers, (2, 400)) for _ in slots)
    long, few = (Problem(64, 64, 1, captures, rows=n, cols=400, square=True) for n in (400, 128))
    program = Program.of(family.spec(), long)
    assert tiles.summarised_slots(program, long) == slots
    assert tiles.summarised_slots(program, few) == ()
    # Padding says nothing of the queries, which the dK/dV kernel visits.
    for keys in (True,) if name == "padding_turned_long" else (True, False):
        plan = tiles.plan(program, long, keys=keys, backward=True)
        assert plan.arguments
        assert plan.edge
        assert not plan.full.depends_on(Q_IDX, KV_IDX)
        assert tiles.plan(program, few, keys=keys, backward=True).arguments == ()


def test_bias_through_descriptors() -> None:
    spec = BY_NAME["bias_heads"].spec()
    covers = (frozenset(), frozenset({"h"}), frozenset({"q_idx"}), frozenset({"kv_idx"}))
    for tma in (False, True):
        problem = Problem(64, 64, 1, (CaptureInfo(4, covers, (1, 4, 64, 64), tma),), tma=True)
        text = forward_kernel(spec, problem, TileConfig(64, 64, 4, 2, tma=True)).text
        assert ("bias0_desc.load([q_first, start_n])" in text) == tma
        assert "bias0_desc" not in forward_kernel(spec, problem, TileConfig(64, 64, 4, 2)).text
