"""The lowerings on a machine without a GPU: they install, and the op's own kernel runs inside a compiled graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config

from fa_inductor import _compat, lowering, lowering_splits, lowerings, ops, reference
from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates import configs, direct, splits
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.tiles import SUMMARY
from tests.templates import families


@pytest.mark.parametrize("kernel", ["triton", "reference"])
@pytest.mark.parametrize("name", ["causal", "alibi", "dropout"])
def test_cpu_runs_the_eager_kernel(name: str, kernel: str) -> None:
    lowerings.register()
    lowerings.register()
    family = families.BY_NAME[name]
    o = families.draw(family, torch.float32, "cpu")
    leaves = [t.requires_grad_(need) for t, need in zip([o.q, o.k, o.v, *o.captures], o.needs_grad, strict=True)]

    @torch.compile
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *captures: torch.Tensor) -> torch.Tensor:
        return ops.flash_attention(q, k, v, list(captures), [], family.program, kernel)[0] * 2.0

    out = run(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(out, wanted, o.grad_out)
    expected = reference.attention(*leaves[:3], leaves[3:], [], family.spec())[0] * 2.0
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, wanted, o.grad_out), strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.library.custom_op("fa_inductor_test::summary", mutates_args=())
def summary(x: torch.Tensor) -> list[torch.Tensor]:
    low, top = (direct.blocks(x).amin(-1), direct.blocks(x).amax(-1))
    return [low, top]


@summary.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    shape = (*x.shape[:-1], (x.shape[-1] + SUMMARY - 1) // SUMMARY)
    dtype = torch.int8 if x.dtype == torch.bool else x.dtype
    return [x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("n", [128, 200])
def test_summary(n: int, dtype: torch.dtype, dynamic: bool) -> None:
    """What Inductor computes of a captured tensor is what the kernels' direct callers compute."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering

    from fa_inductor.lowering_operands import realised, summary_of

    def lower(x: Any) -> list[Any]:
        return [TensorBox(t) for t in summary_of(realised(x))]

    register_lowering(torch.ops.fa_inductor_test.summary.default, type_promotion_kind=None)(lower)
    x = torch.randint(0, 2 if dtype == torch.bool else 2**40, (3, n)).to(dtype)
    got = torch.compile(lambda x: summary(x), dynamic=dynamic)(x)
    torch.testing.assert_close(got, summary(x))


@torch.library.custom_op("fa_inductor_test::row_sums", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def row_sums(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.sum(-1)]


@row_sums.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[:-1])]


def test_what_kernels_address_without_strides_is_contiguous() -> None:
    """Inductor pads the strides of what it computes, here of 2800 elements, where it may choose them."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import lowerings as inductors
    from torch._inductor.lowering import register_lowering

    from fa_inductor.lowering_buffers import contiguous
    from fa_inductor.lowering_operands import realised

    for keep in (realised, contiguous):
        strides = []

        def lower(x: Any, keep: Any = keep, strides: list[Any] = strides) -> list[Any]:
            made = keep(inductors[torch.ops.aten.sum](x, axis=[-1]))
            strides.append([int(s) for s in made.get_stride()])
            return [TensorBox(made)]

        register_lowering(torch.ops.fa_inductor_test.row_sums.default, type_promotion_kind=None)(lower)
        torch._dynamo.reset()
        x = torch.randn(2, 4, 700, 8)
        with torch._inductor.config.patch(force_disable_caches=True, disable_padding_cpu=False):
            got = torch.compile(lambda x: row_sums(x * 2.0)[0] * 2.0)(x)
        torch.testing.assert_close(got, x.sum(-1) * 4.0)
        assert (strides == [[2800, 700, 1]]) == (keep is contiguous), (keep, strides)


@torch.library.custom_op("fa_inductor_test::merge", mutates_args=())
def merged(parts: torch.Tensor, stats: torch.Tensor, dead_zero: bool, layout: str) -> list[torch.Tensor]:
    out, lse = splits.merge(parts, stats, parts.shape, splits.LN2, dead_zero, torch.ops.aten)
    return [reference.with_layout(out, layout), lse]


@merged.register_fake
def _(parts: torch.Tensor, stats: torch.Tensor, dead_zero: bool, layout: str) -> list[torch.Tensor]:
    return [reference.with_layout(parts.new_empty(parts.shape[1:]), layout), stats.new_empty(stats.shape[2:])]


@pytest.mark.parametrize("dead_zero", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_are_merged(dynamic: bool, dead_zero: bool) -> None:
    """By Inductor's lowerings as by ATen: parts without a key, rows without any, and NaN that stays."""
    from torch._inductor.lowering import register_lowering

    def lower(parts: Any, stats: Any, dead_zero: bool, layout: str) -> list[Any]:
        shape = parts.get_size()
        return list(splits.merge(parts, stats, shape, splits.LN2, dead_zero, lowering_splits.Lowerings()))

    register_lowering(torch.ops.fa_inductor_test.merge.default, type_promotion_kind=None)(lower)
    torch.manual_seed(0)
    logits, values = torch.randn(3, 2, 4, 5, 20) * 30, torch.randn(3, 2, 4, 20, 8)
    logits[1], logits[:, 1, 2, 3], logits[2, 0, 0, 0, 0] = -torch.inf, -torch.inf, torch.nan
    top = logits.amax(-1)
    p = torch.exp2(logits - top.clamp_min(-1e30)[..., None])
    sums = p.sum(-1)
    parts = (p @ values) / torch.where(sums == 0, 1.0, sums)[..., None]
    got = torch.compile(lambda *x: merged(*x, dead_zero, "bhmd"), dynamic=dynamic)(parts, torch.stack([top, sums]))
    whole = logits.permute(1, 2, 3, 0, 4).flatten(3) * splits.LN2
    want = whole.softmax(-1) @ values.permute(1, 2, 0, 3, 4).flatten(2, 3)
    if dead_zero:
        want[1, 2, 3] = 0.0
    torch.testing.assert_close(got[0], want, equal_nan=True)
    torch.testing.assert_close(got[1], whole.logsumexp(-1), equal_nan=True)


@torch._inductor.config.patch(force_disable_caches=True)
@pytest.mark.parametrize("dynamic", [False, True])
def test_merged_parts_have_the_layout_asked_for(dynamic: bool) -> None:
    """Folding the heads of an output that is laid out for it moves nothing."""
    from torch._inductor.lowering import register_lowering
    from torch._inductor.utils import run_and_get_code

    from fa_inductor.templates.rendering import dense_strides

    def lower(parts: Any, stats: Any, dead_zero: bool, layout: str) -> list[Any]:
        strides = dense_strides(parts.get_size()[1:], layout)
        return list(lowering_splits.merged(parts, stats, torch.float32, strides, splits.LN2, dead_zero))

    def run(parts: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
        return merged(parts, stats, True, "bmhd")[0].transpose(1, 2).flatten(2) @ torch.ones(32, 3)

    register_lowering(torch.ops.fa_inductor_test.merge.default, type_promotion_kind=None)(lower)
    parts, stats = torch.randn(9, 2, 4, 5, 8), torch.randn(2, 9, 2, 4, 5).abs()
    got, (code,) = run_and_get_code(torch.compile(run, dynamic=dynamic), parts, stats)
    torch.testing.assert_close(got, run(parts, stats))
    assert "mm(reinterpret_tensor(" in code


@torch._inductor.config.patch(force_disable_caches=True)
@pytest.mark.parametrize("dynamic", [False, True])
def test_run_time_sizes_have_the_traced_value(dynamic: bool) -> None:
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering

    from fa_inductor.lowering_operands import hint, realised, summary_of

    seen: list[int | None] = []

    def lower(x: Any) -> list[Any]:
        seen.append(hint(x.get_size()[-1]))
        return [TensorBox(t) for t in summary_of(realised(x))]

    register_lowering(torch.ops.fa_inductor_test.summary.default, type_promotion_kind=None)(lower)
    torch.compile(lambda x: summary(x), dynamic=dynamic)(torch.zeros(3, 200, dtype=torch.int64))
    assert seen == [200]


def test_parts_do_not_outgrow_what_a_graph_was_traced_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may be a run-time size, the batch size where queries are few, and the number of queries never."""
    import sympy

    traced = {sympy.Symbol("s0"): 2, sympy.Symbol("s1"): 8192, sympy.Symbol("s2"): 4}
    batch, keys, rows = traced
    monkeypatch.setattr(lowering_splits, "hint", lambda x: traced.get(x, x))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    deep: configs.TileConfig | None = None

    def count(*extents: Any) -> int:
        operands: Any = SimpleNamespace(extents=extents, q=SimpleNamespace(get_device=lambda: torch.device("cuda", 0)))
        known = None if extents[3] == rows else extents[3]
        narrow = configs.TileConfig(64, 32, 4, 3)
        found, splits = lowering_splits.shared_out(operands, Problem(128, 128, 4, rows=known), [narrow], deep)
        assert found == ([deep, narrow] if deep else [narrow])
        return splits

    assert count(2, 8, 2, 4, 8192) == count(2, 8, 2, 4, keys) == count(batch, 8, 2, 4, keys) == 32
    assert count(2, 8, 2, rows, 8192) == 1
    assert count(2, 8, 2, 300, keys) == 3
    assert count(batch, 8, 2, 300, keys) == 1
    # A wave of one program on each multiprocessor: 4 tiles of 33 parts.
    deep = configs.TileConfig(16, 128, 4, 3)
    assert count(2, 8, 2, 4, 16384) == count(batch, 8, 2, 4, 16384) == 33


def test_split_count() -> None:
    assert splits.split_count(128, 8192, 132) == 2
    assert splits.split_count(8, 65536, 132) == 64
    assert splits.split_count(8, 1024, 132) == 4
    assert splits.split_count(1000, 65536, 132) == 1
    assert splits.split_count(8, 100, 132) == 1
    assert splits.split_count(0, 100, 132) == 1
    assert splits.split_count(128, 8192, 132, CacheForm(16)) == 2
    assert splits.split_count(128, 8192, 132, CacheForm(16, k="bfloat16")) == 4


def test_one_program_on_each_multiprocessor() -> None:
    assert splits.one_each(128, 8192, 132) == 1
    assert splits.one_each(8, 65536, 132) == 16
    assert splits.one_each(32, 2048, 132) == 4
    assert splits.one_each(48, 65536, 132) == 0, "36 of 132 would have nothing to do"
    assert splits.one_each(8, 2048, 132) == 0, "parts of 256 keys are 64"
    assert splits.one_each(140, 65536, 132) == 0, "a second wave"
    assert splits.one_each(0, 100, 132) == 0
    assert splits.one_each(128, 8192, 132, uneven=True) == 4
    assert splits.one_each(48, 65536, 132, uneven=True) == 0


@pytest.mark.parametrize(("shared", "stages"), [(163 * 1024, 3), (99 * 1024, 2), (None, 3)])
def test_tiles_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch, shared: int | None, stages: int) -> None:
    """Of two devices that run the sm_80 forms, the one with less shared memory gets tiles that fit."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared) if shared else SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0)
    assert _compat.shared_memory(device) == shared
    spec = AttentionSpec.parse("attention(score=score * 0.1)")
    operands: Any = SimpleNamespace(spec=spec, q=SimpleNamespace(get_device=lambda: device))
    first = lowering._candidates(80, operands, Problem(128, 128, 1), "forward")[0]
    assert (first.block_m, first.num_stages) == (128, stages)
