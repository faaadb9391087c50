"""The score algebra's terms: text and parser, folding, kinds, derivatives against torch's autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_inductor import expr as ex
from fa_inductor.derivative import d_load, d_score, derivative, selects
from fa_inductor.errors import ProgramError
from fa_inductor.expr import (
    BOOL,
    FLOAT,
    FUNCTIONS,
    INT,
    SCORE,
    Const,
    Expr,
    Load,
    Sym,
    call,
    parse,
    substitute,
    to_text,
)
from fa_inductor.reference import Env, evaluate
from fa_inductor.spec import AttentionSpec

SHAPE = (2, 3, 4, 5)
UNARY = ["abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf",
         "relu", "floor", "reciprocal", "neg"]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "minimum", "maximum", "pow"]


def env_of(score: torch.Tensor, bias: torch.Tensor) -> Env:
    captures = [bias, torch.tensor([2, 0, 1]), torch.tensor([[True, False, True, True, False]] * 2)]
    return Env.full(SHAPE, captures, [3], score.device, score.dtype, score)


# ------------------------------------------------------------------------------------------------------- random terms
numbers = st.sampled_from([-3, -1, 0, 1, 2, 5])
floats = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 1e30, math.inf, -math.inf, math.nan])


def terms(kind: str) -> st.SearchStrategy[Expr]:
    """Expressions of one kind, built with call(), hence folded."""
    return st.deferred(lambda: _TERMS[kind])


def _calls(kind: str) -> list[st.SearchStrategy[Expr]]:
    def of(fn: str, *kinds: str) -> st.SearchStrategy[Expr]:
        return st.tuples(*(terms(k) for k in kinds)).map(lambda args: call(fn, *args))

    if kind == INT:
        return [*(of(f, INT, INT) for f in ("add", "sub", "mul", "minimum", "maximum")), of("neg", INT), of("abs", INT),
                st.tuples(terms(INT), st.sampled_from([1, 2, 3])).map(lambda a: call("floordiv", a[0], Const(a[1]))),
                st.tuples(terms(INT), st.sampled_from([1, 2, 3])).map(lambda a: call("mod", a[0], Const(a[1]))),
                of("where", BOOL, INT, INT), of("cast_int", BOOL)]  # fmt: skip
    if kind == BOOL:
        return [*(of(f, INT, INT) for f in ("lt", "le", "gt", "ge", "eq", "ne")),
                *(of(f, FLOAT, FLOAT) for f in ("lt", "le", "gt", "ge", "eq", "ne")),
                of("and_", BOOL, BOOL), of("or_", BOOL, BOOL), of("not_", BOOL), of("isnan", FLOAT),
                of("where", BOOL, BOOL, BOOL), of("cast_bool", INT)]  # fmt: skip
    return [*(of(f, FLOAT) for f in ("abs", "tanh", "sigmoid", "sin", "relu", "neg", "exp", "reciprocal")),
            *(of(f, FLOAT, FLOAT) for f in ("add", "sub", "mul", "div", "minimum", "maximum")),
            of("where", BOOL, FLOAT, FLOAT), of("cast_float", BOOL), of("cast_float", INT)]  # fmt: skip


_LEAVES: dict[str, st.SearchStrategy[Expr]] = {
    INT: st.one_of(
        numbers.map(Const), st.sampled_from([Sym(n) for n in ("b", "h", "q_idx", "kv_idx", "q_len", "kv_len", "n0")]),
        st.just(Load(1, (Sym("h"),), INT)),
    ),
    BOOL: st.one_of(st.booleans().map(Const), st.just(Load(2, (Sym("b"), Sym("kv_idx")), BOOL))),
    FLOAT: st.one_of(
        floats.map(Const), st.just(SCORE), st.just(Load(0, (Sym("h"), Sym("q_idx"), Sym("kv_idx")), FLOAT))
    ),
}  # fmt: skip
_TERMS: dict[str, st.SearchStrategy[Expr]] = {
    k: st.one_of(_LEAVES[k], _LEAVES[k], *_calls(k)) for k in (INT, BOOL, FLOAT)
}


@given(st.one_of(*(terms(k) for k in (INT, BOOL, FLOAT))))
@settings(max_examples=150, deadline=None)
def test_parse_is_the_inverse_of_text(e: Expr) -> None:
    again = parse(str(e))
    assert again == e
    assert hash(again) == hash(e)
    assert parse(to_text(e)) == e
    assert again.kind == e.kind


@given(st.one_of(*(terms(k) for k in (INT, BOOL, FLOAT))))
@settings(max_examples=150, deadline=None)
def test_substituting_numbers_folds_to_the_same_value(e: Expr) -> None:
    """Folding never changes a value: evaluating the symbols and folding them to numbers first is the same."""
    torch.manual_seed(0)
    env = env_of(torch.randn(SHAPE, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64))
    at = {"b": 1, "h": 2, "q_idx": 3, "kv_idx": 0}
    table: dict[Expr, Expr] = {Sym(n): Const(i) for n, i in at.items()}
    table |= {Sym("q_len"): Const(4), Sym("kv_len"): Const(5), Sym("n0"): Const(3)}
    assert env.score is not None
    table[SCORE] = Const(float(env.score[1, 2, 3, 0]))
    table[Load(0, (Sym("h"), Sym("q_idx"), Sym("kv_idx")), FLOAT)] = Const(float(env.captures[0][2, 3, 0]))
    table[Load(1, (Sym("h"),), INT)] = Const(int(env.captures[1][2]))
    table[Load(2, (Sym("b"), Sym("kv_idx")), BOOL)] = Const(bool(env.captures[2][1, 0]))
    folded = evaluate(substitute(e, table), env)
    plain = evaluate(e, env).expand(SHAPE)[1, 2, 3, 0]
    torch.testing.assert_close(folded.reshape(-1)[0], plain, equal_nan=True, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- derivatives
def check_derivatives(text: str, score: torch.Tensor, bias: torch.Tensor) -> None:
    e, load = parse(text), parse("f0[h, q_idx, kv_idx]")
    assert isinstance(load, Load)
    s, f = score.clone().requires_grad_(), bias.clone().requires_grad_()
    value = evaluate(e, env_of(s, f)).expand(SHAPE)
    want_s, want_f = (
        torch.autograd.grad(value.sum(), (s, f), allow_unused=True) if value.requires_grad else (None, None)
    )
    env = env_of(score, bias)
    got_s = evaluate(d_score(e), env).expand(SHAPE)
    got_f = evaluate(d_load(e, load), env).expand(SHAPE).sum(0)
    for got, want in ((got_s, want_s), (got_f, want_f)):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, equal_nan=True)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("fn", UNARY)
def test_derivative_of_unary(fn: str, positive: bool) -> None:
    torch.manual_seed(0)
    score, bias = torch.randn(SHAPE, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    if positive:
        score, bias = score.abs() + 0.1, bias.abs() + 0.1
    text = {"neg": "(-{})"}.get(fn, fn + "({})")
    check_derivatives(text.format("(score * 0.5) + f0[h, q_idx, kv_idx]"), score, bias)
    check_derivatives(text.format("score") + " * f0[h, q_idx, kv_idx]", score, bias)


@pytest.mark.parametrize("fn", UNARY)
def test_derivative_of_unary_at_zero(fn: str) -> None:
    zero = torch.zeros(SHAPE, dtype=torch.float64)
    text = {"neg": "(-score)"}.get(fn, f"{fn}(score)")
    check_derivatives(text, zero, zero[0])


@pytest.mark.parametrize("fn", BINARY)
def test_derivative_of_binary(fn: str) -> None:
    torch.manual_seed(0)
    text = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}"}.get(fn, fn + "({}, {})")
    for make in (torch.randn, torch.rand):
        score, bias = make(SHAPE, dtype=torch.float64), make(3, 4, 5, dtype=torch.float64)
        check_derivatives(text.format("score", "f0[h, q_idx, kv_idx]"), score, bias)
        check_derivatives(text.format("f0[h, q_idx, kv_idx]", "score"), score, bias)
        check_derivatives(text.format("score * score", "score"), score, bias)
        check_derivatives(text.format("score", "2.0"), score, bias)
        check_derivatives(text.format("score", "3.0"), score, bias)
        check_derivatives(text.format("2.0", "score"), score, bias)
    tied = torch.ones(SHAPE, dtype=torch.float64)
    check_derivatives(text.format("score", "f0[h, q_idx, kv_idx]"), tied, tied[0])


@pytest.mark.parametrize(
    "text",
    [
        "pow(score, 0.0)",
        "pow(score, 0.5)",
        "where(kv_idx <= q_idx, tanh(score / 30.0) * 30.0, -inf)",
        "where(m2[b, kv_idx], score * 2.0, f0[h, q_idx, kv_idx])",
        "where(score > 0.0, score, score * f0[h, q_idx, kv_idx])",
        "score + (cast_float(kv_idx - q_idx) * f0[h, q_idx, kv_idx])",
        "cast_float(score > 0.0) * score",
        "score * 0.5",
        "f0[h, q_idx, kv_idx]",
    ],
)
def test_derivative_of_forms(text: str) -> None:
    torch.manual_seed(0)
    check_derivatives(text, torch.randn(SHAPE, dtype=torch.float64).abs(), torch.randn(3, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(where(kv_idx > q_idx, -inf, score + f0[h]) + 1.0) * 0.5", "where(kv_idx > q_idx, 0.0, 0.5)"),
        ("-where(kv_idx > q_idx, 3.0, f0[h] * 2.0) / score", "where(kv_idx > q_idx, 0.0, -2.0 / score)"),
        (
            "where(kv_idx > q_idx, 2.0, where(score > 0.0, f0[h], -1.0)) * 0.5",
            "where(kv_idx > q_idx, 0.0, where(score > 0.0, 0.5, 0.0))",
        ),
        (
            "(where(kv_idx > q_idx, 2.0, f0[h]) + where(kv_idx == q_idx, -inf, f0[h] * 4.0)) * 0.5",
            "where(kv_idx > q_idx, 0.0, 0.5) + where(kv_idx == q_idx, 0.0, 2.0)",
        ),
    ],
)
def test_the_zero_of_a_mask_stays_outermost(text: str, expected: str) -> None:
    """Whoever multiplies by it can select, so that a NaN of a masked entry does not pass."""
    assert str(d_load(parse(text), parse("f0[h]"))) == str(parse(expected))


def test_a_factor_of_zeros_and_ones_multiplies() -> None:
    """Eager code multiplies the gradient by it, and NaN times 0 is NaN."""
    d = d_score(parse("score * 0.5 * where(kv_idx <= q_idx, 1.0, 0.0)"))
    assert not selects(d)
    assert "where" in str(d)
    relu = d_score(parse("relu(score * 0.5)"))
    assert selects(relu)  # autograd's formula selects


def test_every_function_is_differentiated_or_has_no_derivative() -> None:
    no_float = {"floordiv", "mod", "and_", "or_", "not_", "isnan", "cast_int", "cast_bool", "cast_float", "where",
                "lt", "le", "gt", "ge", "eq", "ne"}  # fmt: skip
    assert set(FUNCTIONS) - no_float == {*UNARY, *BINARY}


def test_derivative_errors() -> None:
    with pytest.raises(ProgramError, match="kind int"):
        derivative(parse("q_idx"), SCORE)
    with pytest.raises(ProgramError, match="no derivative"):
        d_load(parse("score"), Load(1, (Sym("h"),), INT))


def test_a_plain_scale_has_a_constant_derivative() -> None:
    assert d_score(parse("where(kv_idx <= q_idx, score * 0.125, -inf)")) == parse("where(kv_idx <= q_idx, 0.125, 0.0)")
    assert d_score(parse("(score * 0.125) + f0[h]")) == Const(0.125)


# ------------------------------------------------------------------------------------------------------------- kinds
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        ("add", ("score", "q_idx")),
        ("and_", ("q_idx", "True")),
        ("where", ("q_idx", "score", "score")),
        ("where", ("True", "score", "q_idx")),
        ("div", ("q_idx", "kv_idx")),
        ("floordiv", ("score", "score")),
        ("tanh", ("q_idx",)),
        ("isnan", ("q_idx",)),
        ("add", ("True", "False")),
        ("add", ("score",)),
        ("nothing", ("score",)),
    ],
)
def test_kinds_are_checked(fn: str, args: tuple[str, ...]) -> None:
    with pytest.raises(ProgramError):
        call(fn, *(parse(a) for a in args))


@pytest.mark.parametrize(
    "text",
    ["", "score +", "foo", "f0", "x0[b]", "score if b else h", "__import__('os')", "score ** 2", "f0[b:2]", "'a'",
     "1 < 2 < 3", "tanh(x=score)", "score.real", "[score]"],
)  # fmt: skip
def test_parser_refuses(text: str) -> None:
    with pytest.raises(ProgramError):
        parse(text)


def test_numbers_of_different_kinds_differ() -> None:
    assert len({Const(1), Const(1.0), Const(True)}) == 3
    assert Const(math.nan) == Const(math.nan)
    assert Const(0.0) != Const(-0.0)


def test_folding_keeps_nan_and_infinity() -> None:
    for text in ("score * 0.0", "score - score", "score / score", "0.0 / 0.0"):
        e = parse(text)
        assert isinstance(e, ex.Call)
        assert not isinstance(call(e.fn, *e.args), Const)


# -------------------------------------------------------------------------------------------------------------- spec
@pytest.mark.parametrize(
    "program",
    [
        "attention(score=score)",
        "attention(score=where(kv_idx <= q_idx, score * 0.125, -inf), dead_rows='zero', layout='bmhd')",
        "attention(score=score, sinks=[f0[h], -1.5], dropout=(0.1, 1))",
    ],
)
def test_program_text_round_trip(program: str) -> None:
    spec = AttentionSpec.parse(program)
    assert spec.program == program
    assert AttentionSpec.parse(spec.program) == spec


@pytest.mark.parametrize(
    "program",
    [
        "score",
        "attention(score=1.0)",
        "attention(score=q_idx)",
        "attention(score=score, sinks=[score])",
        "attention(score=score, sinks=[f0[kv_idx]])",
        "attention(score=score, dropout=(0.1, -1))",
        "attention(score=score, dropout=(1.0, 0))",
        "attention(score=score, layout='hbmd')",
        "attention(score=score, dead_rows='inf')",
        "attention(score=score, extra=1)",
        "attention(score",
        "attention(score=score, layout=b)",
        "attention(score=score, dropout=1)",
        "attention(score=score, sinks=f0[h])",
        "attention(score=score, **b)",
    ],
)
def test_bad_programs(program: str) -> None:
    with pytest.raises(ProgramError):
        AttentionSpec.parse(program)
