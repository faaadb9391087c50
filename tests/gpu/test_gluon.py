"""The warp-specialised Gluon forward on a Hopper GPU: values, gradients through the general backward, and who chooses it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import reference
from fa_inductor.report import collecting
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import select
from fa_inductor.templates.sm90 import form, launch
from tests.gpu.captured import CAPTURED, FORWARD

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "FEWEST", 1)  # short sequences and little work test the same code
    monkeypatch.setattr(form, "LEAST_WORK", 0.0)
    monkeypatch.setattr(form, "LEAST_BACKWARD_WORK", 0.0)
    monkeypatch.setattr(form, "LEAST_PROGRAM_WORK", 0.0)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for compute capability 9.0")


CAUSAL = "kv_idx <= q_idx"
BOTTOM_RIGHT = "kv_idx <= q_idx + (kv_len - q_len)"
PROGRAMS = {
    "plain": "score=score * 0.1",
    "causal": f"score=where({CAUSAL}, score * 0.1, -inf)",
    "bottom_right": f"score=where({BOTTOM_RIGHT}, score * 0.1, -inf)",
    "window": f"score=where(({BOTTOM_RIGHT}) & (kv_idx > q_idx - n0), score * 0.1, -inf)",
    "band_zero": "score=where((kv_idx <= q_idx + 30) & (kv_idx >= q_idx - 40), score * 0.1, -inf), dead_rows='zero'",
    "strict_nan": "score=where(kv_idx < q_idx, score * 0.1, -inf)",
    "softcap": f"score=where({CAUSAL}, tanh(score * 0.02) * 50.0, -inf)",
}
#: (batch, query heads, key heads, queries, keys)
SHAPES = [
    (1, 2, 1, 1, 1), (2, 4, 2, 63, 129), (1, 3, 3, 300, 300), (2, 2, 1, 129, 1000), (1, 2, 2, 1000, 257), (4, 32, 8, 700, 700)
]  # fmt: skip


def tensors(shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    b, hq, hkv, m, n = shape
    parts = ((m, hq, dims[0]), (n, hkv, dims[0]), (n, hkv, dims[1]))
    return [torch.randn(b, length, h, d, device="cuda", dtype=dtype).transpose(1, 2) for length, h, d in parts]


def check(program: str, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, sizes: list[int]) -> None:
    """Two calls: the second goes past the jit to the compiled kernel."""
    spec = AttentionSpec.parse(program)
    for _ in range(2):
        q, k, v = tensors(shape, dims, dtype)
        out, lse = launch.attention(q, k, v, sizes, program)
        want, want_lse = reference.attention(q.double(), k.double(), v.double(), [], sizes, spec)
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(out), nan)
        eps = 2e-2 if dtype == torch.bfloat16 else 4e-3
        error = torch.where(nan, 0.0, out.double() - want).abs().max().item()
        assert error <= eps, error
        finite = torch.isfinite(want_lse)
        assert torch.where(finite, lse.double() - want_lse, 0.0).abs().max().item() <= 1e-2


@pytest.mark.parametrize("dims", [(64, 64), (80, 72), (128, 128), (128, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str, dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for i, shape in enumerate(SHAPES):
        layout = ", layout='bmhd'" if i % 2 else ""
        check(f"attention({PROGRAMS[name]}{layout})", shape, dims, (torch.bfloat16, torch.float16)[i % 2], [100])


def check_captured(name: str, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Two calls: the second goes past the jit to the compiled kernels."""
    text, draw = {**CAPTURED, **FORWARD}[name]
    spec = AttentionSpec.parse(f"attention({text})")
    b, h, _, m, n = shape
    for _ in range(2):
        q, k, v = tensors(shape, dims, dtype)
        captures = [c.cuda() for c in draw(b, h, m, n)] if draw else []
        out, lse = launch.program_attention(q, k, v, captures, [], spec.program)
        doubles = [c.double() if c.is_floating_point() else c for c in captures]
        want, want_lse = reference.attention(q.double(), k.double(), v.double(), doubles, [], spec)
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(out), nan)
        eps = 2e-2 if dtype == torch.bfloat16 else 4e-3
        error = torch.where(nan, 0.0, out.double() - want).abs().max().item()
        assert error <= eps, (name, shape, error)
        finite = torch.isfinite(want_lse)
        assert torch.equal(torch.isfinite(lse), finite)
        assert torch.where(finite, (lse.double() - want_lse) / (1.0 + want_lse.abs()), 0.0).abs().max().item() <= 1e-2


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [((64, 64), (1, 3, 5)), ((128, 128), (0, 1, 2, 3, 4)), ((96, 64), (2, 4)), ((256, 256), (3, 4)), ((192, 128), (2,))],
)
@pytest.mark.parametrize("name", [*CAPTURED, *FORWARD])
def test_captured(name: str, dims: tuple[int, int], shapes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for i in shapes:
        check_captured(name, SHAPES[i], dims, (torch.bfloat16, torch.float16)[i % 2])


BIASES = ("bias", "bias_nan")


def test_lengths_of_tiles() -> None:
    """Where every tile ends with the keys and the queries, and documents and padding begin with a tile."""
    torch.manual_seed(0)
    for dim in (64, 128):
        for name in (*("documents", "padding_zero", "lengths_alone", "padding_added", "padding_finite"), "alibi", "sinks", *BIASES):
            check_captured(name, (3, 4, 2, 768, 1152), (dim, dim), torch.bfloat16)


def test_one_loop() -> None:
    """Few keys under a mask, and documents: tiles of queries that follow each other in one loop, of more tiles than processors."""
    torch.manual_seed(0)
    dims = (128, 128)
    for name in ("causal", "bottom_right", "strict_nan"):
        for i, shape in enumerate([(4, 32, 8, 512, 512), (2, 4, 2, 300, 384), (3, 40, 40, 450, 320), (1, 1, 1, 1, 64)]):
            check(f"attention({PROGRAMS[name]})", shape, dims, (torch.bfloat16, torch.float16)[i % 2], [])
    for shape in ((2, 40, 8, 1024, 1024), (3, 4, 2, 700, 1152), (1, 2, 2, 65, 320)):
        check_captured("documents", shape, dims, torch.bfloat16)


def random_band() -> tuple[str, tuple[int, ...]]:
    """A program with a random band, and a shape to run it on."""
    group, hkv = random.choice([1, 2, 3, 8]), random.choice([1, 2, 5])
    shape = (random.choice([1, 3]), group * hkv, hkv, random.randint(1, 700), random.randint(1, 900))
    low, high = random.randint(-900, 300), random.randint(-300, 900)
    parts = {f"(kv_idx >= q_idx + {low})": random.random() < 0.6, f"(kv_idx <= q_idx + {high})": random.random() < 0.6}
    keep = " & ".join(p for p, used in parts.items() if used)
    score = f"where({keep}, score * 0.1, -inf)" if keep else "score * 0.1"
    return f"attention(score={score}, dead_rows={random.choice(['nan', 'zero'])!r})", shape


def test_random_bands() -> None:
    """Shapes, groups, offsets and windows at random: no wrong value, no NaN, no hang."""
    random.seed(0)
    torch.manual_seed(0)
    for _ in range(200):
        program, shape = random_band()
        check(program, shape, (128, 128), torch.bfloat16, [])


def attend(mask: Callable[[int, int], Tensor] | None, fill: float = -math.inf) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * 0.1
        if mask is not None:
            s = s.masked_fill(~mask(q.shape[2], k.shape[2]), fill)
        return s.softmax(-1) @ v

    return run


def causal(m: int, n: int) -> Tensor:
    return torch.arange(m, device="cuda")[:, None] >= torch.arange(n, device="cuda")[None, :]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("mask", "fill"), [(None, 0.0), (causal, -math.inf), (causal, torch.finfo(torch.bfloat16).min)])
def test_compiled(mask: Any, fill: float, dynamic: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = attend(mask, fill)
    function = torch.compile(eager, backend=_backend())
    for length in (384, 640) if dynamic else (384,):
        leaves = [t.detach().requires_grad_() for t in tensors((2, 4, 2, length, length), (128, 128), torch.bfloat16)]
        if dynamic:
            for t in leaves:
                torch._dynamo.mark_dynamic(t, 2)
        with collecting() as report:
            out = function(*leaves)
        if report.sites:
            assert [s.template for s in report.fused] == [select.HOPPER]
        grad = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, grad)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        true = eager(*exact)
        true_grads = torch.autograd.grad(true, exact, grad.double())
        same = eager(*leaves)
        same_grads = torch.autograd.grad(same, leaves, grad)
        for ours, other, want in zip([out, *grads], [same, *same_grads], [true, *true_grads], strict=True):
            limit = 2.0 * (other.double() - want).norm() + 2.0 * torch.finfo(torch.bfloat16).eps * want.norm()
            assert (ours.double() - want).norm() <= limit


def _backend() -> Any:
    from fa_inductor.backend import fa_inductor

    return fa_inductor


@pytest.mark.parametrize(("kind", "dim"), [("padding", 64), ("padding", 128), ("documents", 128)])
def test_compiled_captured(kind: str, dim: int) -> None:
    """A mask of a captured tensor, forward and backward, at most twice as far from float64 as eager code."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    ids = (torch.arange(384, device="cuda") // 100).expand(2, -1).contiguous()
    real = ids[:, None, None, :] < 3

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = real if kind == "padding" else ids[:, None, :, None] == ids[:, None, None, :]
        return (q @ k.transpose(-1, -2) * 0.1).masked_fill(~keep, -math.inf).softmax(-1) @ v

    function = torch.compile(eager, backend=_backend())
    leaves = [t.detach().requires_grad_() for t in tensors((2, 4, 4, 384, 384), (dim, dim), torch.bfloat16)]
    with collecting() as report:
        out = function(*leaves)
    assert [s.template.split(",")[0] for s in report.fused] == [select.HOPPER], [s.reason for s in report.sites]
    grad = torch.randn_like(out)
    sides = [(out, leaves)]
    for kept in (leaves, [t.detach().double().requires_grad_() for t in leaves]):
        sides.append((eager(*kept), kept))
    results = [[o, *torch.autograd.grad(o, x, grad.to(o.dtype))] for o, x in sides]
    for ours, other, want in zip(*results, strict=True):
        limit = 2.0 * (other.double() - want).norm() + 2.0 * torch.finfo(torch.bfloat16).eps * want.norm()
        assert (ours.double() - want).norm() <= limit


def test_dropped_when_it_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails is left out with its reason in the log, and the general template gives the values."""

    def fails(*args: Any, **kw: Any) -> Any:
        raise RuntimeError("forced: out of shared memory")

    monkeypatch.setattr(launch, "attention", fails)
    torch._dynamo.reset()
    q, k, v = tensors((1, 2, 2, 384, 384), (128, 128), torch.bfloat16)
    eager = attend(causal)
    with torch._inductor.config.patch(force_disable_caches=True):
        out = torch.compile(eager, backend=_backend())(q, k, v)
    torch.testing.assert_close(out, eager(q, k, v), atol=5e-2, rtol=2e-2)


def test_cuda_graphs() -> None:
    torch._dynamo.reset()
    eager = attend(causal)
    function = torch.compile(eager, backend=_backend(), mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = tensors((2, 4, 4, 512, 512), (128, 128), torch.bfloat16)
        torch.testing.assert_close(function(q, k, v).clone(), eager(q, k, v), atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("heads", [1, 16])
def test_launches_side_by_side(name: str, heads: int) -> None:
    """Of one prepared kernel: on several streams at once, and graphs replayed at once; more and fewer tiles than processors."""
    torch.manual_seed(0)
    program = f"attention({PROGRAMS[name]})"
    inputs = [tensors((4, heads, heads, 512, 512), (128, 128), torch.bfloat16) for _ in range(4)]
    want = [launch.attention(*x, [], program) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in inputs]
    for _ in range(20):
        for x, stream, results in zip(inputs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(launch.attention(*x, [], program))
    torch.cuda.synchronize()
    graphs, graphed = [torch.cuda.CUDAGraph() for _ in inputs], []
    for x, graph in zip(inputs, graphs, strict=True):
        with torch.cuda.graph(graph):
            graphed.append(launch.attention(*x, [], program))
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (out, lse), results, last in zip(want, found, graphed, strict=True):
        for other, other_lse in [*results, last]:
            assert torch.equal(out, other)
            assert torch.equal(lse, other_lse)


def test_unaligned_addresses() -> None:
    q, k, v = tensors((1, 2, 2, 200, 200), (128, 128), torch.bfloat16)
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view(k.transpose(1, 2).shape).transpose(1, 2)
    shifted.copy_(k)
    program = f"attention({PROGRAMS['causal']})"
    assert torch.equal(launch.attention(q, shifted, v, [], program)[0], launch.attention(q, k, v, [], program)[0])


@pytest.mark.parametrize("value", [0, 7, -1, -(2**31), 2**31 - 1])
def test_a_counter_that_nobody_has_set(value: int) -> None:
    """With a program for each tile the counter is fresh memory: torch fills it with the largest number when deterministic."""
    q, k, v = tensors((1, 2, 2, 300, 300), (128, 128), torch.bfloat16)
    program = f"attention({PROGRAMS['causal']})"
    want = launch.attention(q, k, v, [], program)
    prepared = launch.prepare(q, k, v, [], program)
    assert prepared.make_counter is torch.empty
    prepared.make_counter = lambda *size, **kw: torch.full(size, value, **kw)
    for ours, other in zip(prepared(q, k, v), want, strict=True):
        assert torch.equal(ours, other)


def test_keys_of_one_batch_for_all() -> None:
    """Expanded operands, of stride 0, are no tensors that a descriptor reads."""
    q, k, v = tensors((3, 2, 2, 200, 200), (128, 128), torch.bfloat16)
    shared = [t[:1].expand_as(t) for t in (k, v)]
    program = f"attention({PROGRAMS['causal']})"
    want = launch.attention(q, *[t.contiguous() for t in shared], [], program)
    for ours, other in zip(launch.attention(q, *shared, [], program), want, strict=True):
        assert torch.equal(ours, other)
