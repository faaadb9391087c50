"""FP8 attention without a GPU: what the casts compute, the op, and who gets FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import fp8
from fa_inductor.config import Options
from fa_inductor.errors import ProgramError
from fa_inductor.report import SiteReport
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import quantise, select
from fa_inductor.templates.select import Request, Supported, Unsupported
from tests.compiling import Fusing, fuse

PROGRAM = "attention(score=where(kv_idx <= q_idx, score * 0.125, -inf))"
TOP = quantise.E4M3_MAX


def operands(queries: int = 600, keys: int = 600, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, h, n, dim, dtype=dtype) for h, n in ((4, queries), (2, keys), (2, keys))]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# ------------------------------------------------------------------------------------------------------------------- casts
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_a_cast_rounds(format: str) -> None:
    q, k, v = operands(70, 150)
    q8, k8, v8 = fp8.rounded(q, k, v, format)
    # Half a unit in the last of four significant bits at most, a third of that on average.
    assert 0.02 < relative(v8, v) < 0.03
    if format != "e4m3":
        assert relative(q8, q) > 0.5
        matrix = fp8.hadamard(64)
        q8, k8 = q8 @ matrix, k8 @ matrix
    low, high = (0.002, 0.012) if format == "int8-e4m3" else (0.02, 0.03)
    assert low < relative(q8, q) < high
    assert low < relative(k8, k) < high


def test_rotations_keep_products() -> None:
    for dim, group in ((64, 64), (96, 32), (256, 128), (80, 16)):
        assert quantise.rotation(dim) == group
        matrix = fp8.hadamard(group).double()
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(group, dtype=torch.float64))


def test_scales_are_of_queries_and_of_blocks_of_keys() -> None:
    q, k, v = operands(70, 150)
    made = fp8.cast_operands(q, k, v, "e4m3")
    assert made.q_scale.shape == (2, 4, 70)
    assert made.k_scale.shape == made.v_scale.shape == (2, 2, 2)
    assert made.v.shape == (2, 2, 64, 256)
    assert not made.v[..., 150:].float().any()
    torch.testing.assert_close(made.q_scale, q.float().abs().amax(3) / TOP)
    torch.testing.assert_close(made.k_scale[..., 1], k[:, :, 128:].float().abs().amax((2, 3)) / TOP)
    assert made.k.float().abs().amax() == TOP


def test_nothing_finite_overflows() -> None:
    q, k, v = operands(8, 8, dtype=torch.float32)
    q[0, 0, 0, 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = 3e38, -3e38, 3e38
    q[0, 1], v[1, 1] = 0.0, 0.0
    for t in fp8.cast_operands(q, k, v, "e4m3").tensors():
        assert torch.isfinite(t.float()).all()
    q8, _, v8 = fp8.rounded(q, k, v, "e4m3")
    assert not q8[0, 1].any()
    assert not v8[1, 1].any()


def test_infinities_saturate_and_nan_stays() -> None:
    q, k, v = operands(8, 8, dtype=torch.float32)
    v[0, 0, 3, 5], v[0, 0, 4, 5], v[0, 0, 5, 5] = torch.inf, -torch.inf, torch.nan
    _, _, v8 = fp8.rounded(q, k, v, "e4m3")
    top = v[0, 0][torch.isfinite(v[0, 0])].abs().max()
    torch.testing.assert_close(v8[0, 0, 3:5, 5], torch.stack([top, -top]))
    assert v8[0, 0, 5, 5].isnan()


def test_nan_makes_the_scale_of_integers_nan() -> None:
    q, k, v = operands(8, 8, dtype=torch.float32)
    q[0, 0, 3, 5], k[1, 1, 4, 5] = torch.nan, torch.nan
    q8, k8, _ = fp8.rounded(q, k, v, "int8-e4m3")
    assert q8[0, 0, 3].isnan().all()
    assert not q8[0, 0, :3].isnan().any()
    assert k8[1, 1].isnan().all()
    assert not k8[0].isnan().any()


# ---------------------------------------------------------------------------------------------------------------------- op
@pytest.mark.parametrize("format", fp8.FORMATS)
def test_op(format: str) -> None:
    q, k, v = operands(150, 150)
    out, lse = fp8.fp8_attention(q, k, v, [], [], PROGRAM, "reference", format)
    assert out.dtype == q.dtype
    exact = torch.ops.fa_inductor.flash_attention(q.double(), k.double(), v.double(), [], [], PROGRAM, "reference")
    assert 1e-3 < relative(out, exact[0]) < 0.06
    assert relative(lse, exact[1]) < 0.01
    torch.library.opcheck(fp8.fp8_attention, (q, k, v, [], [], PROGRAM, "reference", format), test_utils="test_faketensor")
    torch.library.opcheck(fp8.fp8_operands, (q, k, v, format), test_utils="test_faketensor")


def test_op_refuses_gradients_and_unknown_formats() -> None:
    q, k, v = operands(8, 8)
    with pytest.raises(ProgramError, match="unknown FP8 format 'e5m2'"):
        fp8.fp8_attention(q, k, v, [], [], PROGRAM, "reference", "e5m2")
    out, _ = fp8.fp8_attention(q.requires_grad_(), k, v, [], [], PROGRAM, "reference", "e4m3")
    with pytest.raises(NotImplementedError, match="is for inference"):
        out.float().sum().backward()


# --------------------------------------------------------------------------------------------------------- option and report
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v


def site(fn: Callable, inputs: list[Tensor], grad: bool = False, **options: Any) -> tuple[SiteReport, Tensor]:
    compiled, backend = fuse(fn, Fusing(Options(**{"kernel": "reference", **options})))
    with torch.set_grad_enabled(grad):
        out = compiled(*inputs)
    (found,) = backend.report.sites
    return found, out


def test_end_to_end() -> None:
    inputs = operands()
    plain, exact = site(attention, inputs)
    assert plain.fp8 == ""
    assert "FP8" not in str(plain)
    for format in fp8.FORMATS:
        found, out = site(attention, inputs, fp8=format, strict=True)
        assert found.status == "fused"
        assert found.fp8 == format
        assert f"FP8 {format}" in str(found)
        assert 1e-3 < relative(out, exact) < 0.06


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "operands are float32"),
        ({"dim": 40}, "head_dim 40"),
        ({"dim": 16}, "head_dim 16"),
        ({"queries": 64}, "64 queries: below 512"),
        ({"keys": 64}, "64 keys: below 512"),
    ],
)
def test_what_cannot_runs_as_without(change: dict[str, Any], reason: str) -> None:
    inputs = operands(**change)
    _, exact = site(attention, inputs)
    torch._dynamo.reset()
    found, out = site(attention, inputs, fp8="e4m3")
    assert found.status == "fused"
    assert found.fp8.startswith("not FP8: ")
    assert reason in found.fp8
    assert torch.equal(out, exact)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="(?s)StrictModeError.*stayed out of FP8.*" + reason):
        site(attention, inputs, fp8="e4m3", strict=True)


def test_training_and_cpu() -> None:
    inputs = [t.requires_grad_() for t in operands()]
    found, out = site(attention, inputs, grad=True, fp8="e4m3")
    assert found.fp8 == "not FP8: gradients are wanted, and FP8 attention has none"
    out.float().sum().backward()
    torch._dynamo.reset()
    found, _ = site(attention, operands(), kernel="auto", fp8="e4m3")
    assert found.fp8 == "not FP8: operands are on cpu"


# -------------------------------------------------------------------------------------------------------------- projections
class Layer(torch.nn.Module):
    """Attention whose q, k and v come from linear layers, spelled in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v = (torch.nn.Linear(48, n, bias=kind != "no_bias") for n in (256, 128, 128))
        self.qkv = torch.nn.Linear(48, 512)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Any:
        def heads(t: Tensor) -> Tensor:
            return t.view(x.shape[0], x.shape[1], -1, 64).transpose(1, 2)

        if self.kind == "packed":
            q, k, v = self.qkv(x)[..., :384].view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.kind == "interleaved":
            q, k, v = self.qkv(x)[..., :384].view(*x.shape[:2], 2, 3, 64).permute(3, 0, 2, 1, 4).unbind(0)
        elif self.kind == "split":
            q, k, v = map(heads, self.qkv(x).split([256, 128, 128], -1))
        else:
            q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        if self.kind == "norm":
            q = self.norm(q)
        if self.kind == "other_source":
            v = heads(self.v(x * 2.0))
        group = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
        out = torch.softmax(q @ keys.transpose(-1, -2) * 0.125, -1) @ values
        out = out.transpose(1, 2).flatten(2)
        if self.kind == "written":
            out = out.sum() + x.mul_(2.0)
        return (out, k) if self.kind == "cache" else out


CAST = "cast in the projection"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("separate", CAST),
        ("no_bias", CAST),
        ("packed", CAST),
        ("split", CAST),
        ("interleaved", "are not heads of neighbouring features"),
        ("norm", "between q and a linear layer lies layer_norm"),
        ("other_source", "projections of different hidden states"),
        ("cache", "is used by more than the attention"),
        ("written", "is written in place after the projection"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_projection(kind: str, says: str, batch: int) -> None:
    layer, x = Layer(kind).bfloat16(), torch.randn(batch, 520, 48, dtype=torch.bfloat16)
    apart, want = site(layer, [x.clone()], fp8="e4m3")
    torch._dynamo.reset()
    found, got = site(layer, [x.clone()], fp8="e4m3", fp8_projection=True)
    assert "cast" not in apart.template
    assert says in found.template
    assert found.fp8 == "e4m3"
    for ours, theirs in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
        assert torch.equal(ours, theirs)


def test_projection_of_dynamic_lengths() -> None:
    layer = Layer("packed").bfloat16()
    compiled, backend = fuse(layer, Fusing(Options(kernel="reference", fp8="e4m3", fp8_projection=True)), dynamic=True)
    with torch.no_grad():
        for length in (520, 600, 700):
            x = torch.randn(2, length, 48, dtype=torch.bfloat16)
            assert relative(compiled(x), layer(x)) < 0.06
    assert all(CAST in s.template for s in backend.report.sites)


# --------------------------------------------------------------------------------------------------------------- selection
REQUEST = Request(AttentionSpec.parse(PROGRAM), "bfloat16", 128, 128, (9, 0), keys=4096, queries=4096, heads=64)


@pytest.mark.parametrize(
    ("capability", "template"),
    [((8, 9), "sm89-pointer-fp8"), ((9, 0), select.HOPPER_FP8), ((10, 0), "sm100-tma-fp8"), ((12, 0), "sm120-pointer-fp8")],
)
def test_architectures(capability: tuple[int, int], template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    assert select.fp8_supports(replace(REQUEST, capability=capability), "e4m3") == Supported(template)
    assert select.fp8_supports(replace(REQUEST, capability=(9, 0), general=True), "int8-e4m3") == Supported("sm90-tma-fp8")
    for old in ((7, 5), (8, 0), (8, 6)):
        answer = select.fp8_supports(replace(REQUEST, capability=old), "e4m3")
        assert isinstance(answer, Unsupported)
        assert "has no FP8 units" in answer.reason
    blackwell = select.fp8_supports(replace(REQUEST, capability=(10, 0)), "int8-e4m3")
    assert isinstance(blackwell, Unsupported)
    assert "8-bit integers are slow" in blackwell.reason
