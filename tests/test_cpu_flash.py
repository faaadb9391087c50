"""The ATen kernel against the dense oracle in float64, forward and backward, within twice a same-precision error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fa_inductor import cpu_flash, cpu_plan, reference
from fa_inductor.errors import ProgramError
from fa_inductor.expr import parse
from fa_inductor.intervals import Facts
from fa_inductor.spec import AttentionSpec

CAUSAL = "(kv_idx <= q_idx)"
BOTTOM_RIGHT = "(kv_idx <= (q_idx + (kv_len - q_len)))"
MIN = repr(torch.finfo(torch.float32).min)

#: program -> names of its captures, built by capture().
PROGRAMS: dict[str, list[str]] = {
    "attention(score=score * 0.3)": [],
    "attention(score=score * -0.3)": [],
    "attention(score=(score / 3.0) - 1.5)": [],
    "attention(score=(score + f0[h, q_idx, kv_idx]) * 0.3, layout='bmhd')": ["bias"],
    "attention(score=f0[h, q_idx, kv_idx] - (score * 0.3))": ["bias"],
    "attention(score=(score * 0.3) + (f0[h] * cast_float(kv_idx - q_idx)))": ["slopes"],
    f"attention(score=where({CAUSAL}, score * 0.3, -inf))": [],
    f"attention(score=where({CAUSAL}, score * 0.3, -inf), layout='bmhd')": [],
    f"attention(score=where({CAUSAL}, score * 0.3, {MIN}))": [],
    f"attention(score=where({CAUSAL}, score * 0.3, -1000.0))": [],
    f"attention(score=(score * 0.3) + where({CAUSAL}, 0.0, -10000.0))": [],
    f"attention(score=where({BOTTOM_RIGHT}, score * 0.3, -inf))": [],
    f"attention(score=where({BOTTOM_RIGHT}, score * 0.3, -inf), dead_rows='zero')": [],
    f"attention(score=where({BOTTOM_RIGHT}, score * 0.3, {MIN}))": [],
    f"attention(score=where({BOTTOM_RIGHT}, score * 0.3, -1e9))": [],
    f"attention(score=(score * 0.3) + where({BOTTOM_RIGHT}, 0.0, {MIN}))": [],
    f"attention(score=where({CAUSAL} & ((q_idx - kv_idx) < 100), score * 0.3, -inf))": [],
    "attention(score=where(abs(q_idx - kv_idx) < 40, score * 0.3, -1e9), dead_rows='zero')": [],
    f"attention(score=where({CAUSAL} | (kv_idx < 37), score * 0.3, -inf))": [],
    f"attention(score=where({CAUSAL} | (kv_idx < i0[b]), score * 0.3, -inf))": ["lengths"],
    f"attention(score=where(((q_idx // 64) == (kv_idx // 64)) & {CAUSAL}, score * 0.3, -inf), dead_rows='zero')": [],
    "attention(score=where(m0[b, kv_idx], score * 0.3, -inf))": ["padding"],
    "attention(score=where(m0[b, kv_idx], score * 0.3, -inf), dead_rows='zero')": ["padding"],
    f"attention(score=where(m0[b, kv_idx], score * 0.3, {MIN}))": ["padding"],
    "attention(score=(score * 0.3) + ((1.0 - cast_float(m0[b, kv_idx])) * -10000.0))": ["padding"],
    f"attention(score=where(m0[b, kv_idx] & {CAUSAL}, score * 0.3, -inf), dead_rows='zero')": ["padding"],
    f"attention(score=(score * 0.3) + where(m0[b, kv_idx] & {CAUSAL}, 0.0, {MIN}))": ["padding"],
    f"attention(score=(score * 0.3) + where(m0[b, kv_idx] & {BOTTOM_RIGHT}, 0.0, {MIN}))": ["padding"],
    "attention(score=where(m0[b, 0, q_idx, kv_idx], score * 0.3, -inf), dead_rows='zero')": ["opaque"],
    "attention(score=where(m0[b, 0, q_idx, kv_idx], score * 0.3, -1e9))": ["opaque"],
    "attention(score=(score * 0.3) + f0[b, 0, 0, kv_idx])": ["float_mask"],
    "attention(score=(score * 0.3) + f1[b, 0, 0, kv_idx])": ["slopes", "finite_mask"],
    "attention(score=where(i0[b, q_idx] == i0[b, kv_idx], score * 0.3, -inf))": ["documents"],
    "attention(score=score * f0[()])": ["scale"],
    "attention(score=(score / f0[h]) + -2.0)": ["slopes"],
    f"attention(score=where({CAUSAL}, (score * f0[h]) * 0.5, -inf))": ["slopes"],
    "attention(score=score * 0.3, sinks=[f0[h]])": ["slopes"],
    f"attention(score=where({CAUSAL} & ((q_idx - kv_idx) < 90), score * 0.3, -inf), sinks=[f0[h], -1.0])": ["slopes"],
    "attention(score=where(m0[b, kv_idx], score * 0.3, -inf), sinks=[f1[h]])": ["padding", "slopes"],
    "attention(score=where(kv_idx < n0, score * 0.3, -inf))": [],
}  # fmt: skip

#: (B, Hq, Hkv, M, N, Dqk, Dv); blocks have 512 rows, so the larger ones have inner and edge blocks.
SHAPES = [
    (2, 4, 2, 70, 70, 16, 16),
    (2, 2, 2, 1100, 1100, 8, 8),
    (2, 3, 1, 130, 90, 16, 8),
    (2, 2, 1, 60, 700, 8, 24),
    (1, 1, 1, 1, 33, 4, 4),
]


def capture(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    batch, heads, _, rows, cols = shape[:5]
    longest = max(rows, cols)
    if name == "padding":  # left padding; one sample keeps nothing, so that every row of it is dead
        lengths = torch.tensor([0 if batch > 1 else cols // 2, cols // 3])[:batch]
        return torch.arange(cols) >= cols - lengths[:, None]
    if name == "opaque":
        return torch.rand(batch, 1, rows, cols) > 0.5
    if name == "documents":
        return (torch.arange(longest) * 3 // longest).expand(batch, longest)
    if name == "lengths":
        return torch.tensor([5, cols // 2])[:batch]
    made = {
        "bias": lambda: torch.randn(heads, rows, cols),
        "slopes": lambda: torch.rand(heads) + 0.25,
        "float_mask": lambda: torch.zeros(batch, 1, 1, cols).masked_fill(
            torch.rand(batch, 1, 1, cols) > 0.8, -math.inf
        ),
        "finite_mask": lambda: torch.full((batch, 1, 1, cols), -1e4),  # every row lies at the fill, in each sample
        "scale": lambda: torch.tensor(0.37),
    }[name]()
    return made.to(dtype)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, heads, kv_heads, rows, cols, d_qk, d_v = shape
    made = (
        torch.randn(batch, n, h, d) for n, h, d in ((rows, heads, d_qk), (cols, kv_heads, d_qk), (cols, kv_heads, d_v))
    )
    return [t.to(dtype).transpose(1, 2) for t in made]


def rounded(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], sizes: list[int], spec: AttentionSpec) -> Tensor:
    """The oracle with the softmax weights rounded to the operands' dtype, as the kernel does for its second product."""
    eye = torch.eye(k.shape[2], dtype=torch.float32).expand(*v.shape[:2], -1, -1)
    probs = reference.attention(q.float(), k.float(), eye, captures, sizes, spec)[0].to(v.dtype)
    return torch.matmul(probs.float(), v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)).to(v.dtype)


def assert_within(got: Tensor, exact: Tensor, same_precision: Tensor, what: str) -> None:
    """|got - exact| is at most twice |same_precision - exact| at its largest, and a rounding of the largest value."""
    assert torch.equal(got.isnan(), exact.isnan()), f"{what}: NaN in different places"
    assert torch.equal(got.isinf(), exact.isinf()), f"{what}: inf in different places"
    if got.numel() == 0 or not exact.isfinite().any():
        return
    error, budget = ((t.double() - exact)[exact.isfinite()].abs().max().item() for t in (got, same_precision))
    # float64 is its own oracle: there the order of a sum over a thousand keys is all the error there is.
    ulps = 1024 if got.dtype == torch.float64 else 4
    rounding = ulps * torch.finfo(got.dtype).eps * exact[exact.isfinite()].abs().max().item()
    assert error <= 2 * budget + rounding, f"{what}: error {error:.3e}, same-precision error {budget:.3e}"


FORWARD = [
    *((torch.float32, s) for s in SHAPES),
    *((torch.bfloat16, s) for s in (SHAPES[0], SHAPES[2])),
    (torch.float16, SHAPES[2]),
    (torch.float64, SHAPES[3]),
]


@pytest.mark.parametrize(("dtype", "shape"), FORWARD, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_forward(program: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec.parse(program)
    q, k, v = operands(shape, dtype)
    captures = [capture(n, shape, dtype) for n in PROGRAMS[program]]
    sizes = [max(1, shape[4] // 2)]
    assert cpu_flash.supports(spec, q, k, v, captures) is None
    out, lse = cpu_flash.forward(q, k, v, captures, sizes, spec)
    exact, exact_lse = reference.attention(q, k, v, captures, sizes, spec, torch.float64)
    exact = reference.attention(q.double(), k.double(), v.double(), captures, sizes, spec)[0]
    same, same_lse = reference.attention(q, k, v, captures, sizes, spec)
    if dtype in (torch.bfloat16, torch.float16):
        same = rounded(q, k, v, captures, sizes, spec)
    assert out.shape == exact.shape
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous() if spec.layout == "bmhd" else out.is_contiguous()
    assert_within(out, exact, same, "out")
    if dtype in (torch.bfloat16, torch.float16):  # the op's exp has 20 bits there; a weight is rounded far coarser
        same_lse = same_lse + torch.finfo(dtype).eps / 8
    assert_within(lse, exact_lse.double(), same_lse, "lse")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (1, 2, 1, 600, 600, 8, 8)), (torch.float32, SHAPES[2]), (torch.bfloat16, SHAPES[0])],
    ids=str,
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_backward(program: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec.parse(program)
    q, k, v = operands(shape, dtype)
    captures = [capture(n, shape, dtype) for n in PROGRAMS[program]]
    sizes = [max(1, shape[4] // 2)]
    trainable = {"scale", "slopes"} if "cast_float(kv_idx" not in program else set()
    needs = [True, True, True, *(n in trainable for n in PROGRAMS[program])]
    assert cpu_flash.supports(spec, q, k, v, captures, needs) is None
    out, lse = cpu_flash.forward(q, k, v, captures, sizes, spec)
    grad = torch.randn_like(out)
    got = cpu_flash.backward(grad, q, k, v, out, lse, captures, sizes, spec, needs)
    exact = reference.attention_grads(
        grad.double(), *(t.double() for t in (q, k, v)), [c.double() if c.is_floating_point() else c for c in captures],
        sizes, spec, needs,
    )  # fmt: skip
    same = reference.attention_grads(grad, q, k, v, captures, sizes, spec, needs)
    exact_lse_size = max(lse[lse.isfinite() & (lse.abs() < cpu_flash.LSE_LIMIT)].abs().tolist(), default=0.0)
    for name, need, g, e, s in zip("qkv0123", needs, got, exact, same, strict=False):
        assert (g is None) == (not need)
        if g is not None:
            largest = e[e.isfinite()].abs().max() if e.isfinite().any() else 0.0
            # bfloat16: the op rounds p and ds for its products. float32: it takes p from lse, half an ulp of which is
            # lost.
            lost = 2**-7 if dtype == torch.bfloat16 else torch.finfo(dtype).eps * exact_lse_size
            s = s + largest * (lost if name in "qkv" else 8 * lost)  # a capture's gradient sums over rows that cancel
            assert g.dtype == dtype
            assert g.shape == e.shape
            assert_within(g, e, s, f"gradient of {name}")


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "program", [f"attention(score=where({CAUSAL}, score * 0.3, -inf))", "attention(score=score * 0.3)"]
)
def test_non_finite_operands(program: str, value: float, where: str) -> None:
    torch.manual_seed(0)
    spec, t = (
        AttentionSpec.parse(program),
        dict(zip("qkv", operands((1, 2, 2, 40, 40, 8, 8), torch.float32), strict=True)),
    )
    t[where][0, 1, 17, 3] = value
    out, lse = cpu_flash.forward(*t.values(), [], [], spec)
    exact, exact_lse = reference.attention(*t.values(), [], [], spec)
    torch.testing.assert_close(out, exact, equal_nan=True)
    torch.testing.assert_close(lse, exact_lse, equal_nan=True)
    grad = torch.randn_like(out)
    got = cpu_flash.backward(grad, *t.values(), out, lse, [], [], spec, [True] * 3)
    for g, e in zip(got, reference.attention_grads(grad, *t.values(), [], [], spec, [True] * 3), strict=True):
        torch.testing.assert_close(g, e, equal_nan=True)


def test_live_logits_below_the_fill() -> None:
    """Rows whose kept logits lie at or below the fill attend to excluded keys too: found, and computed densely."""
    spec = AttentionSpec.parse(f"attention(score=where({CAUSAL}, score * 100.0, -1000.0))")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
    q[0, 0, :5] = -k[0, 0, :1]  # scores of about -8 * 100 with key 0
    out, _ = cpu_flash.forward(q, k, v, [], [], spec)
    exact = reference.attention(q.double(), k.double(), v.double(), [], [], spec)[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    masked = reference.attention(
        q, k, v, [], [], AttentionSpec.parse(f"attention(score=where({CAUSAL}, score * 100.0, -inf))")
    )[0]
    assert not torch.allclose(out, masked, atol=1e-2)  # the rows are not what -inf would give


EMPTY = [(2, 2, 1, 5, 0, 8, 8), (2, 2, 1, 0, 5, 8, 8), (0, 2, 1, 5, 5, 8, 8), (1, 2, 2, 5, 5, 0, 8)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    spec = AttentionSpec.parse(f"attention(score=where({CAUSAL}, score * 0.3, -inf))")
    q, k, v = operands(shape, torch.float32)
    out, lse = cpu_flash.forward(q, k, v, [], [], spec)
    exact, exact_lse = reference.attention(q, k, v, [], [], spec)
    assert torch.equal(out, exact)
    assert torch.equal(lse, exact_lse)
    for g, e in zip(
        cpu_flash.backward(out, q, k, v, out, lse, [], [], spec, [True] * 3),
        reference.attention_grads(out, q, k, v, [], [], spec, [True] * 3),
        strict=True,
    ):
        assert torch.equal(g, e)


def test_excluded_logits_above_an_added_fill() -> None:
    """An added fill does not exclude a key whose score is larger still."""
    spec = AttentionSpec.parse(f"attention(score=(score * 100.0) + where({CAUSAL}, 0.0, -1000.0))")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
    q[0, 0, :5] = k[0, 0, 40:41]  # scores of some 1000s with a key that is excluded
    k[0, 0, 40] *= 10
    out, lse = cpu_flash.forward(q, k, v, [], [], spec)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), [], [], spec)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-4)
    grad = torch.randn_like(out)
    got = cpu_flash.backward(grad, q, k, v, out, lse, [], [], spec, [True] * 3)
    for g, e in zip(got, reference.attention_grads(grad, q, k, v, [], [], spec, [True] * 3), strict=True):
        assert g is not None
        assert e is not None
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-3 * e.abs().max().item())


def test_strides() -> None:
    """Column-major, expanded, overlapping and length-1 operands, some of which the op itself reads wrongly."""
    torch.manual_seed(0)
    spec = AttentionSpec.parse("attention(score=score * 0.3)")
    base = torch.randn(2, 2, 24, 8)
    overlapping = torch.randn(2, 2, 64).as_strided((2, 2, 24, 8), (128, 64, 1, 1))
    variants = [
        base.mT.contiguous().mT, base[:1].expand(2, -1, -1, -1), base[:, :1].expand(-1, 2, -1, -1),
        base[:, :, :1].expand(-1, -1, 24, -1), base[..., :1].expand(-1, -1, -1, 8), overlapping, base.flip(2)[:, :,
        ::2], base[:, :, :1], base[:, :, :1].as_strided((2, 2, 1, 8), (384, 192, 1, 1)),
    ]  # fmt: skip
    for x in variants:
        for q, k, v in ((x, base, base), (base, x, x)):
            out, lse = cpu_flash.forward(q, k, v, [], [], spec)
            exact, exact_lse = reference.attention(q, k, v, [], [], spec)
            torch.testing.assert_close(out, exact)
            torch.testing.assert_close(lse, exact_lse)
            grad = torch.randn_like(out)[..., :1].expand(out.shape)
            got = cpu_flash.backward(grad, q, k, v, out, lse, [], [], spec, [True] * 3)
            for g, e in zip(got, reference.attention_grads(grad, q, k, v, [], [], spec, [True] * 3), strict=True):
                torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_left_padding_longer_than_a_key_tile() -> None:
    """The op walks keys in tiles of up to 512: whole tiles of -inf before the first live key must not matter."""
    torch.manual_seed(0)
    spec = AttentionSpec.parse("attention(score=where(m0[b, kv_idx], score * 0.3, -inf))")
    q, k, v = (torch.randn(2, 2, 1400, 8) for _ in range(3))
    mask = torch.arange(1400) >= torch.tensor([1300, 0])[:, None]
    out, lse = cpu_flash.forward(q, k, v, [mask], [], spec)
    exact, exact_lse = reference.attention(q, k, v, [mask], [], spec)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse)


REASONS = {
    "attention(score=tanh(score * 0.02) * 50.0)": "not score * scale + bias",
    "attention(score=score * score)": "not score * scale + bias",
    "attention(score=score * f0[kv_idx])": "scale depends on the key",
    "attention(score=where(score > 0.0, score, -inf))": "mask depends on the score",
    "attention(score=where(kv_idx <= q_idx, score, -10.0))": "still attend",
    "attention(score=where(kv_idx <= q_idx, score, -999.0))": "exact for fills of -1000 and below",
    "attention(score=where(kv_idx <= q_idx, score, nan))": "still attend",
    "attention(score=where(kv_idx <= q_idx, score, f0[kv_idx]))": "is no number known here",
    "attention(score=score, dropout=(0.1, 0))": "dropout",
}


@pytest.mark.parametrize("program", REASONS)
def test_declines(program: str) -> None:
    spec, t = AttentionSpec.parse(program), torch.randn(1, 1, 4, 4)
    captures = [torch.tensor([1, 2]) if "dropout" in program else torch.randn(4)]
    assert REASONS[program] in str(cpu_flash.supports(spec, t, t, t, captures))
    with pytest.raises(ProgramError, match="cannot run"):
        cpu_flash.forward(t, t, t, captures, [], spec)


def test_declines_operands_and_gradients() -> None:
    spec, t = AttentionSpec.parse("attention(score=score + f0[h, q_idx, kv_idx])"), torch.randn(1, 1, 4, 4)
    bias = torch.randn(1, 4, 4)
    assert cpu_flash.supports(spec, t, t, t, [bias], [True, True, True, False]) is None
    assert "needs a gradient" in str(cpu_flash.supports(spec, t, t, t, [bias], [False, False, False, True]))
    assert "meta" in str(cpu_flash.supports(spec, t.to("meta"), t, t, [bias]))
    assert "captured" in str(cpu_flash.supports(spec, t, t, t, [bias.to("meta")]))
    assert "int64" in str(cpu_flash.supports(spec, t.long(), t, t, [bias]))
    assert "float64" in str(cpu_flash.supports(spec, *[t.double()] * 3, [bias], [True] * 3 + [False]))
    with pytest.raises(ProgramError, match="no gradient"):
        cpu_flash.backward(t, t, t, t, t, t[..., 0], [bias], [], spec, [True] * 4)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is ever made for more than one block of rows, nor for keys that the mask rules out."""
    seen: list[tuple[int, int]] = []

    def spy(q: Tensor, k: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        mask = kwargs["attn_mask"]
        assert mask is None or mask.numel() <= cpu_flash.BLOCK_M * k.shape[2]
        seen.append((q.shape[2], k.shape[2]))
        return flash(q, k, *args, **kwargs)

    flash = cpu_flash.FLASH
    monkeypatch.setattr(cpu_flash, "FLASH", spy)
    q, k, v = (torch.randn(1, 1, 2048, 8) for _ in range(3))
    cpu_flash.forward(q, k, v, [], [], AttentionSpec.parse(f"attention(score=where({CAUSAL}, score, -inf))"))
    assert seen == [(2048, 2048)]
    seen.clear()
    window = f"attention(score=where({CAUSAL} & ((q_idx - kv_idx) < 100), score, -inf))"
    cpu_flash.forward(q, k, v, [], [], AttentionSpec.parse(window))
    assert seen == [(512, 512), (512, 611), (512, 611), (512, 611)]


def test_plan_of_a_huggingface_causal_mask() -> None:
    plan = cpu_plan.plan_of(AttentionSpec(parse(f"(score * 0.125) + where(({CAUSAL} & m0[b, kv_idx]), 0.0, {MIN})")))
    assert plan.causal
    assert plan.additive
    assert plan.bias is None
    assert str(plan.rest) == "m0[b, kv_idx]"


def test_sizes_at_hand_reveal_causality() -> None:
    def causal(mask: str, q_len: int, kv_len: int, offset: int) -> bool:
        spec = AttentionSpec(parse(f"where({mask}, score, -inf)"))
        return cpu_plan.plan_of(spec, Facts(q_len, kv_len, (offset,))).causal

    for mask in ("((q_idx - kv_idx) >= 0)", "(kv_idx < (q_idx + 1))", "~(kv_idx > q_idx)"):
        assert causal(mask, 5, 9, 4)
    for mask in (BOTTOM_RIGHT, "(kv_idx <= (q_idx + n0))"):
        assert causal(mask, 9, 9, 0)
        assert not causal(mask, 5, 9, 4)


def test_profitable() -> None:
    def reason(text: str, q_len: int, kv_len: int, training: bool = False) -> str | None:
        return cpu_flash.profitable(AttentionSpec(parse(text)), torch.float32, q_len, kv_len, 64, training)

    causal = f"where({CAUSAL}, score, -inf)"
    assert reason(causal, 1024, 1024) is None
    assert reason(causal, 1024, 1024, training=True) is None
    assert "too few" in str(reason(causal, 128, 128))
    assert "too few" in str(reason(causal, 1, 4096))
    assert "too few" in str(reason(causal, 512, 512, training=True))
    assert reason("score * 0.5", 256, 256) is None
    assert "too few" in str(reason("score * 0.5", 256, 256, training=True))
    assert reason("score + f0[h, q_idx, kv_idx]", 1024, 1024) is None


@pytest.mark.parametrize("heads", [1, 2])
def test_plain_rows_that_only_the_general_path_gets_right(heads: int) -> None:
    """Scores of -inf throughout a row, an lse of 0 by chance, and infinite values: by eager code, element by element."""
    spec = AttentionSpec(parse("score * 0.3"))
    q, k, v = (torch.randn(1, heads, 33, 8).abs() for _ in range(3))
    q[0, 0, 3], q[0, 0, 5] = -1e20, 0.0
    k[0, 0] *= 1e20
    v[0, 0, 4, 2] = math.inf
    expected = (q @ k.mT * 0.3).softmax(-1) @ v
    torch.testing.assert_close(cpu_flash.forward(q, k, v, [], [], spec)[0], expected, equal_nan=True)
    one = torch.zeros(1, heads, 1, 8)
    torch.testing.assert_close(cpu_flash.forward(one, one, v[:, :, :1], [], [], spec)[0], v[:, :, :1])


def test_scale_beyond_float32() -> None:
    q = torch.empty(1, 1, 512, 8)
    reason = cpu_plan.supports(AttentionSpec(parse("score * 1e39")), q, q, q, [])
    assert reason is not None
    assert "no float32 number" in reason


@pytest.mark.parametrize("sink", ["", ", sinks=[2.5]"])
def test_gradient_of_a_scale_cancels_as_well_as_eagerly(sink: str) -> None:
    """It sums over all rows what a row's rounding adds to dq, times scores of order ten."""
    ours, eager = [], []
    for seed in range(12):
        gen = torch.Generator().manual_seed(seed)
        q, k, v, grad = (torch.randn(2, 2, 5, 33, generator=gen, dtype=torch.float64) for _ in range(4))
        scale = torch.rand(1, generator=gen, dtype=torch.float64) * 2 + 0.5
        spec = AttentionSpec.parse(f"attention(score=score * f0[0]{sink})")

        single = [x.float() for x in (q, k, v, grad, scale)]
        out, lse = cpu_flash.forward(*single[:3], [single[4]], [], spec)
        needs = [False, False, False, True]
        got = cpu_flash.backward(single[3], *single[:3], out, lse, [single[4]], [], spec, needs)[3]
        exact = _gradient_of_the_scale(*[x.double() for x in single], sink)
        ours.append(float((got.double() - exact).abs()))
        eager.append(float((_gradient_of_the_scale(*single, sink).double() - exact).abs()))
    assert sum(ours) < sum(eager)


def _gradient_of_the_scale(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: Tensor, sink: str) -> Tensor:
    scale.requires_grad_()
    scores = q @ k.mT * scale
    if sink:
        scores = torch.nn.functional.pad(scores, (0, 1), value=2.5)
    out = torch.softmax(scores, -1)[..., : k.shape[2]] @ v
    return torch.autograd.grad((out * grad).sum(), scale)[0]
