"""FP8 attention on a GPU: the cast, the Gluon and the general kernel, and both inside torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_inductor
from fa_inductor import fp8, reference
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import direct, select, tiles
from fa_inductor.templates.program import Program
from fa_inductor.templates.quantise import fp8_problem, quantise
from fa_inductor.templates.sm90 import form, fp8_launch
from tests.templates import families

pytestmark = pytest.mark.gpu

CAUSAL = "kv_idx <= q_idx"
PROGRAMS = {
    "plain": "score=score * 0.1",
    "causal": f"score=where({CAUSAL}, score * 0.1, -inf)",
    "window": f"score=where(({CAUSAL}) & (kv_idx > q_idx - 100), score * 0.1, -inf)",
    "band_zero": "score=where((kv_idx <= q_idx + 30) & (kv_idx >= q_idx - 40), score * 0.1, -inf), dead_rows='zero'",
    "softcap": f"score=where({CAUSAL}, tanh(score * 0.02) * 50.0, -inf), layout='bmhd'",
}
#: (batch, query heads, key heads, queries, keys)
SHAPES = [(2, 4, 2, 63, 129), (1, 3, 3, 300, 300), (2, 2, 1, 129, 1000), (1, 2, 2, 1000, 257), (1, 32, 8, 700, 700)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    monkeypatch.setattr(form, "FEWEST", 1)  # short sequences and little work test the same code
    monkeypatch.setattr(form, "LEAST_FP8_WORK", 0.0)
    monkeypatch.setattr(select, "FP8_FEWEST", 1)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for compute capability 9.0")


def operands(shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    b, hq, hkv, m, n = shape
    parts = ((m, hq, dims[0]), (n, hkv, dims[0]), (n, hkv, dims[1]))
    return [torch.randn(b, length, h, d, device="cuda", dtype=dtype).transpose(1, 2) for length, h, d in parts]


def slope(program: str) -> float:
    """The largest change of a logit with its score."""
    return 1.0 if "tanh" in program else 0.2 if "0.2" in program else 0.1


def check(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, format: str, program: str, exact: Any = None) -> None:
    """Against what the kernel's own cast made of the operands: the weights alone are rounded besides."""
    small = [t.double() for t in fp8.widened(quantise(q, k, v, format))]
    captures, sizes = exact or ([], [])
    want, want_lse = reference.attention(*small, captures, sizes, AttentionSpec.parse(program))
    kept = torch.isfinite(want_lse)
    assert families.error(out[kept], want[kept]) < 0.035
    # Products of integers are exact. Of 32 products of e4m3 and the sum so far, tensor cores of sm_90 keep 13 bits below the
    # largest one's first and cut off the rest. What D + D / 32 addends lose, about a third of a unit each and of either sign,
    # adds up to about a unit of the largest score for D = 128; four of them are allowed.
    scores = small[0] @ small[1].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    drift = 0.0 if format == "int8-e4m3" else 4 * 2.0**-13 * slope(program) * scores.abs().max().item()
    torch.testing.assert_close(lse.double()[kept], want_lse.double()[kept], rtol=1e-5, atol=1e-5 + drift)
    assert torch.equal(torch.isnan(out), torch.isnan(want))


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_cast(dim: int, format: str) -> None:
    q, k, v = operands((2, 4, 2, 70, 300), (dim, dim), torch.bfloat16)
    k[0, 0, 3, 5], q[0, 0, 4], v[1, 1] = 3e38, 0.0, 0.0
    made, want = quantise(q, k, v, format), fp8.cast_operands(q, k, v, format)
    for got, true in zip(made.tensors()[:3], want.tensors()[:3], strict=True):
        assert torch.isfinite(got.float()).all()
        # A last bit of the rotation's sums moves a rounding here and there.
        assert (got.float() != true.float()).float().mean() <= (0.0 if format == "e4m3" else 1e-3)
    for got, true in zip(made.tensors()[3:], want.tensors()[3:], strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (96, 96), (256, 256)])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_gluon(name: str, dims: tuple[int, int]) -> None:
    hopper()
    program = f"attention({PROGRAMS[name]})"
    for i, shape in enumerate(SHAPES):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        q, k, v = operands(shape, dims, dtype)
        for format in (fp8.FORMATS[i % 2], "int8-e4m3"):
            for _ in range(2):  # the second call goes past the jit to the compiled kernel
                out, lse = fp8_launch.attention(q, k, v, [], program, format)
            assert out.dtype == dtype
            check(out, lse, q, k, v, format, program)


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("name", ["causal", "softcap_bias", "padding_causal_finfo", "sinks_window", "run_time_sizes"])
def test_general(name: str, format: str) -> None:
    family = families.BY_NAME[name].with_shape(2, 4, 2, 137, 250, 64, 128)
    o = families.draw(family, torch.bfloat16, "cuda")
    spec = family.spec()
    problem = fp8_problem(direct.problem_of(o.q, o.k, o.v, o.captures, family.sizes))
    arch = select.architecture(torch.cuda.get_device_capability())
    assert arch is not None
    for config in tiles.choose(Program.of(spec, problem), problem, arch, "forward"):
        out, lse = direct.fp8_forward(o.q, o.k, o.v, o.captures, family.sizes, spec, config, format)
        check(out, lse, o.q, o.k, o.v, format, family.program, (o.captures, family.sizes))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return torch.softmax((q @ k.transpose(-1, -2) * 0.1).masked_fill(~keep, float("-inf")), -1) @ v + 1.0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "general"])
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_compiled(format: str, kernel: str, dynamic: bool) -> None:
    q, k, v = operands((2, 4, 2, 700, 700), (128, 128), torch.bfloat16)
    options = {"fp8": format, "kernel": kernel, "strict": True}
    if dynamic:
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 2)
    with torch.no_grad():
        report = fa_inductor.explain(attention, options=options)(q, k, v)
        out = torch.compile(attention, backend="fa_inductor", options=options)(q, k, v)
        (site,) = report.sites
        assert site.fp8 == format
        assert site.template.endswith("fp8")
        want = attention(q.double(), k.double(), v.double()) - 1.0
    assert 1e-3 < families.error(out - 1.0, want) < 0.07


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(512, 1024)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 128)).transpose(1, 2) for t in self.qkv(x).split([512, 256, 256], -1))
        return attention(q, k, v)


@pytest.mark.parametrize("kernel", ["auto", "general"])
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_compiled_projection(format: str, kernel: str) -> None:
    layer = Layer().to("cuda", torch.bfloat16)
    x = torch.randn(2, 700, 512, device="cuda", dtype=torch.bfloat16)
    options = {"fp8": format, "kernel": kernel, "fp8_projection": True, "strict": True}
    with torch.no_grad():
        (site,) = fa_inductor.explain(layer, options=options)(x).sites
        out = torch.compile(layer, backend="fa_inductor", options=options)(x)
        assert "cast in the projection" in site.template
        want = layer.double()(x.double()) - 1.0
    assert 1e-3 < families.error(out - 1.0, want) < 0.07


def test_without_the_option_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("FP8 without being asked for")

    monkeypatch.setattr(fp8_launch, "attention", refuse)
    q, k, v = operands((2, 4, 2, 700, 700), (128, 128), torch.bfloat16)

    def trained(options: dict[str, str] | None) -> Tensor:
        torch._dynamo.reset()
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.compile(attention, backend="fa_inductor", options=options)(*leaves).detach()

    assert torch.equal(trained({"fp8": "e4m3"}), trained(None))
    torch._dynamo.reset()
    run: Callable[..., Tensor] = torch.compile(attention, backend="fa_inductor")
    with torch.no_grad():
        # Not the bits of the one that is trained: an addition that is fused behind the kernel may be one rounding with it.
        out = run(q, k, v)
    want = attention(q.double(), k.double(), v.double())
    assert families.error(out, want) < 0.01


def test_many_keys_add_up() -> None:
    """The tensor cores of sm_90 add FP8 products with few bits; that shows no worse with many keys."""
    hopper()
    q, k, v = (torch.randn(1, 2, 16384, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v += 1.0  # a mean that must not drift
    few, program = q[:, :, :256], "attention(score=score * 0.088)"
    out, _ = fp8_launch.attention(few, k, v, [], program, "e4m3")
    small = [t.double() for t in fp8.widened(quantise(few, k, v, "e4m3"))]
    want, _ = reference.attention(*small, [], [], AttentionSpec.parse(program))
    # Sums in the tensor cores are of one tile of 128 keys, four steps of 32 products and the sum so far. A step cuts off at most
    # 33 units of 2^-13 of the sum, which has grown to 1/4 ... 4/4: 33 * 2.5 * 2^-13 = 1.0 % of it, half of that on average.
    assert -0.01 < (out.double() - want).mean().item() < 1e-3
