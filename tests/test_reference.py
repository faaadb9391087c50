"""The dense oracle against attention written out in eager PyTorch, and the Philox stream against Triton's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fa_inductor import philox, reference
from fa_inductor.errors import ProgramError
from fa_inductor.expr import parse
from fa_inductor.reference import Env, evaluate
from fa_inductor.spec import AttentionSpec

B, HQ, HKV, M, N, D, DV = 2, 4, 2, 5, 7, 8, 6


def operands(dtype: torch.dtype = torch.float64, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, HQ, M, D), (B, HKV, N, D), (B, HKV, N, DV)]
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def eager(q: Tensor, k: Tensor, v: Tensor, logits: object, sinks: Tensor | None = None) -> Tensor:
    """Attention as people write it: ``logits`` maps scores [B, Hq, M, N] to logits, sinks are [Hq]."""
    k, v = (t.repeat_interleave(HQ // HKV, 1) for t in (k, v))
    x = logits(q @ k.transpose(-1, -2))  # type: ignore[operator]
    if sinks is not None:
        x = torch.cat([x, sinks[None, :, None, None].expand(*x.shape[:3], 1)], -1)
    return x.softmax(-1)[..., : v.shape[2]] @ v


torch.manual_seed(0)  # the data below is made at import
ROW, COL = torch.arange(M)[:, None], torch.arange(N)[None]
BIAS, SLOPES = torch.randn(HQ, M, N, dtype=torch.float64), torch.rand(HQ, dtype=torch.float64) + 0.5
PADDING = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
TABLE, BUCKET = torch.randn(5, HQ, dtype=torch.float64), torch.randint(0, 5, (M, N))
TEMPERATURE = torch.tensor(0.4, dtype=torch.float64)
MIN = torch.finfo(torch.float32).min

#: program -> (captures, the logits in eager code)
FORMS = {
    "attention(score=score * 0.35)": ([], lambda s: s * 0.35),
    "attention(score=score / f0[()])": ([TEMPERATURE], lambda s: s / TEMPERATURE),
    "attention(score=where(kv_idx <= q_idx, score, -inf))": ([], lambda s: s.masked_fill(COL > ROW, -math.inf)),
    "attention(score=where(kv_idx <= (q_idx + (kv_len - q_len)), score, -inf), layout='bmhd')": (
        [], lambda s: s.masked_fill(COL > ROW + N - M, -math.inf)),
    "attention(score=(score * 0.35) + f0[h, q_idx, kv_idx])": ([BIAS], lambda s: s * 0.35 + BIAS),
    "attention(score=score + (cast_float(kv_idx) * f0[h]))": (
        [SLOPES], lambda s: s + COL.double() * SLOPES[:, None, None]),
    "attention(score=where(m0[b, kv_idx], score, -10000.0))": (
        [PADDING], lambda s: s.masked_fill(~PADDING[:, None, None], -1e4)),
    f"attention(score=score + where(m0[b, kv_idx], 0.0, {MIN!r}))": (
        [PADDING], lambda s: s + torch.where(PADDING, 0.0, MIN)[:, None, None]),
    "attention(score=score + f1[i0[q_idx, kv_idx], h])": (
        [BUCKET, TABLE], lambda s: s + TABLE[BUCKET].permute(2, 0, 1)),
    "attention(score=tanh(score / 5.0) * 5.0)": ([], lambda s: torch.tanh(s / 5) * 5),
    "attention(score=where(kv_idx < n0, score, -inf))": ([], lambda s: s.masked_fill(COL >= 4, -math.inf)),
    "attention(score=score + cast_float(m0[b, kv_idx]))": ([PADDING], lambda s: s + PADDING[:, None, None]),
    "attention(score=score + f0[0, h, 0, kv_idx])": ([BIAS[None]], lambda s: s + BIAS[:, :1]),
    "attention(score=score + f0[q_idx, kv_idx, h])": (
        [BIAS.permute(1, 2, 0)], lambda s: s + BIAS),
    "attention(score=score + f0[h, kv_idx, q_idx])": (
        [BIAS.transpose(1, 2)], lambda s: s + BIAS),
    "attention(score=score + f0[h, q_idx + kv_idx])": (
        [BIAS.flatten(1)], lambda s: s + BIAS.flatten(1)[:, ROW + COL]),
    "attention(score=score + f0[q_idx, q_idx])": (
        [BIAS[:, :, :5].sum(0)], lambda s: s + BIAS[:, :, :5].sum(0).diagonal()[:, None]),
}  # fmt: skip


@pytest.mark.parametrize("program", FORMS)
def test_forms(program: str) -> None:
    captures, logits = FORMS[program]
    spec, qkv = AttentionSpec.parse(program), operands()
    out, lse = reference.attention(*qkv, captures, [4], spec)
    torch.testing.assert_close(out, eager(*qkv, logits))
    scores = qkv[0] @ qkv[1].repeat_interleave(2, 1).mT
    torch.testing.assert_close(lse, logits(scores).logsumexp(-1).float())
    assert lse.dtype == torch.float32
    assert (out.transpose(1, 2) if spec.layout == "bmhd" else out).is_contiguous()


@pytest.mark.parametrize("program", FORMS)
def test_gradients_of_forms(program: str) -> None:
    captures, logits = FORMS[program]
    captures = [c.clone().requires_grad_() if c.is_floating_point() else c for c in captures]
    spec, qkv = AttentionSpec.parse(program), operands(grad=True)
    floats = [c for c in captures if c.is_floating_point()]
    grad = torch.randn(B, HQ, M, DV, dtype=torch.float64)
    out = reference.attention(*qkv, captures, [4], spec)[0]
    got = torch.autograd.grad(out, [*qkv, *floats], grad)
    needs = [True] * 3 + [c.is_floating_point() for c in captures]
    explicit = reference.attention_grads(grad, *(t.detach() for t in (*qkv,)), captures, [4], spec, needs)
    for g, e in zip(got, [g for g in explicit if g is not None], strict=True):
        torch.testing.assert_close(g, e)
    want = torch.autograd.grad(eager(*qkv, logits), qkv, grad)
    for g, w in zip(got, want, strict=False):
        torch.testing.assert_close(g, w)
    assert torch.autograd.gradcheck(
        lambda *t: reference.attention(t[0], t[1], t[2], _refill(captures, t[3:]), [4], spec)[0], (*qkv, *floats)
    )


def _refill(captures: list[Tensor], floats: tuple[Tensor, ...]) -> list[Tensor]:
    rest = iter(floats)
    return [next(rest) if c.is_floating_point() else c for c in captures]


def test_sinks() -> None:
    qkv = operands(grad=True)
    sinks = SLOPES.clone().requires_grad_()
    spec = AttentionSpec.parse("attention(score=score * 0.35, sinks=[f0[h]])")
    out, lse = reference.attention(*qkv, [sinks], [], spec)
    want = eager(*qkv, lambda s: s * 0.35, sinks)
    torch.testing.assert_close(out, want)
    for g, w in zip(
        torch.autograd.grad(out.sum(), [*qkv, sinks]), torch.autograd.grad(want.sum(), [*qkv, sinks]), strict=True
    ):
        torch.testing.assert_close(g, w)
    scores = qkv[0] @ qkv[1].repeat_interleave(2, 1).mT * 0.35
    torch.testing.assert_close(lse, torch.logaddexp(scores.logsumexp(-1), sinks[:, None]).detach().float())


@pytest.mark.parametrize("fill", ["-inf", "-1e9", "-5.0"])
@pytest.mark.parametrize("dead_rows", ["nan", "zero"])
def test_rows_without_a_key(fill: str, dead_rows: str) -> None:
    """-inf: NaN or 0 as asked; a finite fill: the average of v, or more of it, never special."""
    q, k, v = operands(grad=True)
    spec = AttentionSpec.parse(f"attention(score=where(kv_idx < (q_idx - 2), score, {fill}), dead_rows='{dead_rows}')")
    out, lse = reference.attention(q, k, v, [], [], spec)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    dead = out[:, :, :3]
    if fill != "-inf":
        torch.testing.assert_close(dead, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(dead))
        return
    assert (lse[:, :, :3] == -math.inf).all()
    assert dead.isnan().all() if dead_rows == "nan" else (dead == 0).all()
    assert all(g.isfinite().all() for g in grads) == (dead_rows == "zero")
    assert out[:, :, 3:].isfinite().all()


def test_nan_is_kept() -> None:
    q, k, v = operands()
    q[0, 1, 2] = math.nan
    for dead_rows in ("nan", "zero"):
        spec = AttentionSpec.parse(f"attention(score=score, dead_rows='{dead_rows}')")
        out, lse = reference.attention(q, k, v, [], [], spec)
        assert out[0, 1, 2].isnan().all()
        assert lse[0, 1, 2].isnan()
        assert out.isnan().sum() == DV


def test_empty() -> None:
    spec = AttentionSpec.parse("attention(score=where(kv_idx <= q_idx, score, -inf), sinks=[0.5])")
    q, k, v = operands(grad=True)
    out, lse = reference.attention(q, k[:, :, :0], v[:, :, :0], [], [], AttentionSpec())
    assert torch.equal(out, torch.zeros(B, HQ, M, DV, dtype=out.dtype))
    assert (lse == -math.inf).all()
    assert torch.autograd.grad(out.sum(), q)[0].abs().sum() == 0
    out, lse = reference.attention(q, k[:, :, :0], v[:, :, :0], [], [], spec)
    assert (out == 0).all()
    assert (lse == 0.5).all()
    for part in ((q[:, :, :0], k, v), (q[:0], k[:0], v[:0])):
        out, lse = reference.attention(*part, [], [], spec)
        assert out.shape == (*part[0].shape[:3], DV)
        assert lse.shape == part[0].shape[:3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Half operands and captures are read as float32: the result is within a rounding of float64's."""
    qkv, bias = operands(dtype), BIAS.to(dtype)
    spec = AttentionSpec.parse("attention(score=(score * 0.35) + f0[h, q_idx, kv_idx])")
    out, lse = reference.attention(*qkv, [bias], [], spec)
    exact, exact_lse = reference.attention(*(t.double() for t in qkv), [bias.double()], [], spec)
    assert out.dtype == dtype
    ulps = 16 if dtype == torch.float32 else 1  # float32 is also what the sums over keys and head_dim are rounded to
    assert (out.double() - exact).abs().max() <= ulps * torch.finfo(dtype).eps * exact.abs().max()
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-6)
    wide, _ = reference.attention(*qkv, [bias], [], spec, compute_dtype=torch.float64)
    assert wide.dtype == dtype


def test_blocks_agree_with_the_whole() -> None:
    e = parse("where((kv_idx + q_idx) % 3 == 0, f0[h, q_idx, kv_idx], cast_float(b) + f1[kv_idx])")
    env = Env.full((B, HQ, M, N), [BIAS, BIAS[0, 0]], [], BIAS.device, BIAS.dtype)
    whole = evaluate(e, env).expand(B, HQ, M, N)
    part = evaluate(e, env.block(b=(1, 1), q_idx=(2, 3), kv_idx=(1, 4)))
    torch.testing.assert_close(part.expand(1, HQ, 3, 4), whole[1:, :, 2:5, 1:5])


def test_loads_outside_their_tensor_read_zero() -> None:
    halves = BIAS[0, 0, :4], BIAS[0, 0, 4:]
    env = Env.full((1, 1, 1, N), [*halves, halves[0] > 0], [4], BIAS.device, BIAS.dtype)
    joined = evaluate(parse("where(kv_idx < n0, f0[kv_idx], f1[kv_idx - n0])"), env)
    torch.testing.assert_close(joined.flatten(), BIAS[0, 0])
    assert (evaluate(parse("f1[kv_idx - 10]"), env) == 0).all()
    assert not evaluate(parse("m2[kv_idx + 4]"), env).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f3[h]", "slot 3"),
        ("f0[h]", "expected 3 indices"),
        ("i0[h, q_idx, kv_idx]", "kind float"),
        ("cast_float(n2)", "n2"),
        ("score", "no scores"),
    ],
)
def test_errors(text: str, message: str) -> None:
    env = Env.full((B, HQ, M, N), [BIAS], [1], BIAS.device, BIAS.dtype)
    with pytest.raises(ProgramError, match=message):
        evaluate(parse(text), env)


# ------------------------------------------------------------------------------------------------------------ dropout
def test_dropout_mask_and_scale() -> None:
    """With v the identity the output is the dropped probability matrix: each weight is 0 or p / (1 - dropout_p)."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 33, 8), torch.randn(2, 3, 40, 8)
    eye = torch.eye(40).expand(2, 3, -1, -1)
    seed = torch.tensor([12345678901234, 99])
    plain = reference.attention(q, k, eye, [], [], AttentionSpec())[0]
    out = reference.attention(q, k, eye, [seed], [], AttentionSpec.parse("attention(score=score, dropout=(0.3, 0))"))[0]
    keep = philox.keep_mask(seed, 0.3, (2, 3, 33, 40))
    torch.testing.assert_close(out, plain * keep / 0.7)
    assert abs(keep.double().mean().item() - 0.7) < 0.015
    other = philox.keep_mask(torch.tensor([12345678901235, 99]), 0.3, (2, 3, 33, 40))
    assert abs((keep == other).double().mean().item() - 0.58) < 0.02  # independent streams agree 0.7^2 + 0.3^2
    shifted = philox.keep_mask(torch.tensor([12345678901234, 100]), 0.3, (2, 3, 33, 40))
    assert torch.equal(shifted.flatten()[:-1], keep.flatten()[1:])


_TRITON = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import json, sys, torch, triton, triton.language as tl
@triton.jit
def kernel(seed, out, base, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.rand(tl.load(seed), (base + i).to(tl.int64)))
cases = json.loads(sys.argv[1]); result = []
for seed, base in cases:
    out = torch.empty(64)
    kernel[(1,)](torch.tensor([seed]), out, torch.tensor(base).item(), 64)
    result.append(out.view(torch.int32).tolist())
print(json.dumps(result))
"""


def test_philox_equals_tritons(tmp_path: object) -> None:
    pytest.importorskip("triton")
    cases = [(0, 0), (1, 5), (2**31 + 7, 2**32 - 3), (2**61 + 12345, 2**40 + 1), (-5, 17), (2**62 - 1, 2**62 - 70)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    script = os.path.join(str(tmp_path), "stream.py")  # Triton reads a kernel's source from its file
    with open(script, "w") as f:
        f.write(_TRITON)
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (seed, base), bits in zip(cases, json.loads(done.stdout), strict=True):
        offset = torch.arange(base, base + 64)
        got = philox.rand(torch.tensor(seed), offset)
        assert got.view(torch.int32).tolist() == bits, (seed, base)
        assert ((got >= 0) & (got < 1)).all()


def test_philox_known_answer() -> None:
    """Random123's known-answer test of philox4x32-10 for a zero key and counter: first word 6627e8d5."""
    zero = torch.tensor(0)
    assert int(philox.philox_4x32(zero, zero)) == 0x6627E8D5
