"""The warp-specialised Gluon backward on a Hopper GPU: values, who chooses it, and what happens where it does not run."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import lowering, ops, reference
from fa_inductor.backend import fa_inductor
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import select
from fa_inductor.templates.sm90 import backward_launch, form, launch
from tests.gpu.captured import CAPTURED
from tests.gpu.test_gluon import PROGRAMS, SHAPES, attend, causal, random_band
from tests.templates import families

pytestmark = pytest.mark.gpu

TAKEN = f"{select.HOPPER} was chosen"
@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "FEWEST", 1)  # short sequences test the same code
    monkeypatch.setattr(form, "LEAST_WORK", 0.0)
    monkeypatch.setattr(form, "LEAST_BACKWARD_WORK", 0.0)
    monkeypatch.setattr(form, "LEAST_PROGRAM_WORK", 0.0)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for compute capability 9.0")


def tensors(shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    b, hq, hkv, m, n = shape
    parts = ((m, hq, dims[0]), (n, hkv, dims[0]), (n, hkv, dims[1]), (m, hq, dims[1]))
    return [torch.randn(b, length, h, d, device="cuda", dtype=dtype).transpose(1, 2) for length, h, d in parts]


def check(program: str, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, sizes: list[int]) -> None:
    """Gradients against float64, with out and lse as a forward in ``dtype`` leaves them."""
    q, k, v, grad = tensors(shape, dims, dtype)
    spec = AttentionSpec.parse(program)
    exact = [t.double() for t in (q, k, v)]
    out, lse = reference.attention(*exact, [], sizes, spec)
    want = reference.attention_grads(grad.double(), *exact, [], sizes, spec, [True, True, True])
    found = backward_launch.attention_backward(grad, q, k, v, out.to(dtype), lse.float(), sizes, program)
    # Of gradients that are zero, such as those of a row of one key, only rounding is left.
    floor = 1e-2 * math.sqrt(dims[0])
    for name, ours, true in zip(("dq", "dk", "dv"), found, want, strict=True):
        assert true is not None
        nan = torch.isnan(true)
        assert torch.equal(torch.isnan(ours), nan), name
        error = torch.where(nan, 0.0, ours.double() - true)
        limit = 1.2e-2 * torch.where(nan, 0.0, true).norm() + floor * math.sqrt(true.numel()) * 1e-1
        assert error.norm() <= limit, (name, shape, error.norm().item(), limit.item())


@pytest.mark.parametrize("dims", [(64, 64), (80, 72), (96, 96), (128, 128), (128, 64), (192, 136), (256, 256)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str, dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for i, shape in enumerate(SHAPES):
        layout = ", layout='bmhd'" if i % 2 else ""
        check(f"attention({PROGRAMS[name]}{layout})", shape, dims, (torch.bfloat16, torch.float16)[i % 2], [100])


def check_captured(name: str, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, sinks: bool = False) -> None:
    """Gradients at most twice as far from float64 as eager code of the operands' precision; with ``sinks`` theirs too."""
    text, draw = CAPTURED[name]
    q, k, v, grad = tensors(shape, dims, dtype)
    b, h, _, m, n = shape
    captures = [c.cuda() for c in draw(b, h, m, n)] if draw else []
    spec = AttentionSpec.parse(f"attention({text})")
    doubles = [c.double() if c.is_floating_point() else c for c in captures]
    exact = [t.double() for t in (q, k, v)]
    out, lse = reference.attention(*exact, doubles, [], spec)
    wanted = [sinks and c.is_floating_point() for c in captures]
    want = reference.attention_grads(grad.double(), *exact, doubles, [], spec, [True] * 3 + wanted)
    operands = families.Operands(q, k, v, grad, captures)
    _, other = families.eager(operands, spec, [])
    program = f"attention({text})"
    found = backward_launch.program_backward(grad, q, k, v, out.to(dtype), lse.float(), captures, [], program, wanted)
    floor = 1e-3 * math.sqrt(dims[0])
    for i, (ours, true) in enumerate(zip(found, want, strict=True)):
        if true is None:
            assert ours is None
            continue
        nan = torch.isnan(true)
        assert ours is not None
        assert torch.equal(torch.isnan(ours), nan), (name, i)
        theirs = other[i]
        assert theirs is not None
        error, yardstick = (torch.where(nan, 0.0, x.double() - true).norm() for x in (ours, theirs))
        limit = 2.0 * yardstick + 2.0 * torch.finfo(dtype).eps * torch.where(nan, 0.0, true).norm() + floor
        assert error <= limit, (name, i, shape, error.item(), yardstick.item(), true.norm().item())


@pytest.mark.parametrize(("dims", "shapes"), [((64, 64), (1, 5)), ((128, 128), (0, 1, 2, 3, 4)), ((96, 64), (2, 4))])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str, dims: tuple[int, int], shapes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for i in shapes:
        shape = SHAPES[i]
        check_captured(name, shape, dims, (torch.bfloat16, torch.float16)[i % 2])


@pytest.mark.parametrize("name", ["sinks", "sinks_window"])
def test_gradients_of_sinks(name: str) -> None:
    torch.manual_seed(0)
    for i, shape in enumerate(SHAPES):
        check_captured(name, shape, (128, 128), (torch.bfloat16, torch.float16)[i % 2], sinks=True)


@pytest.mark.parametrize("name", ["alibi", "sinks", "temperature"])
def test_deterministic_captured(name: str, deterministic: None) -> None:
    torch.manual_seed(0)
    for i, shape in enumerate(SHAPES):
        check_captured(name, shape, (128, 128), (torch.bfloat16, torch.float16)[i % 2])
    text, draw = CAPTURED[name]
    assert draw is not None
    q, k, v, grad = tensors((2, 16, 8, 1500, 1900), (128, 128), torch.bfloat16)
    captures = [c.cuda() for c in draw(2, 16, 1500, 1900)]
    out, lse = (torch.rand_like(q), torch.rand(q.shape[:3], device="cuda") + 5.0)
    again = [
        backward_launch.program_backward(grad, q, k, v, out, lse, captures, [], f"attention({text})")[0] for _ in range(4)
    ]
    for one in again[1:]:
        assert torch.equal(one.view(torch.int16), again[0].view(torch.int16))


def test_random_bands() -> None:
    """Shapes, groups, offsets and windows at random: no wrong value, no NaN, no hang."""
    random.seed(1)
    torch.manual_seed(1)
    for _ in range(150):
        program, shape = random_band()
        dim = random.choice([64, 128, 256])
        check(program, shape, (dim, dim), torch.bfloat16, [])


def test_keys_and_values_repeat_bit_for_bit() -> None:
    """dK and dV are sums in a fixed order; dQ's is fixed in deterministic mode alone, and stays within rounding."""
    torch.manual_seed(0)
    q, k, v, grad = tensors((2, 8, 2, 1024, 1024), (128, 128), torch.bfloat16)
    program = f"attention({PROGRAMS['causal']})"
    out, lse = reference.attention(q.double(), k.double(), v.double(), [], [], AttentionSpec.parse(program))
    out, lse = out.to(q.dtype), lse.float()
    first, second = (ops.hopper_attention_backward(grad, q, k, v, out, lse, [], program) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    torch.testing.assert_close(first[0], second[0], atol=2e-2, rtol=2e-2)


@pytest.fixture
def deterministic() -> Iterator[None]:
    # With warnings only: the eager sides use kernels that add in no fixed order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_deterministic_values(name: str, dims: tuple[int, int], deterministic: None) -> None:
    torch.manual_seed(2)
    for i, shape in enumerate(SHAPES):
        check(f"attention({PROGRAMS[name]})", shape, dims, (torch.bfloat16, torch.float16)[i % 2], [100])


def test_deterministic_random_bands(deterministic: None) -> None:
    random.seed(3)
    torch.manual_seed(3)
    for _ in range(150):
        program, shape = random_band()
        dim = random.choice([64, 128, 256])
        check(program, shape, (dim, dim), torch.bfloat16, [])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["plain", "causal", "bottom_right", "window", "band_zero", "strict_nan"])
def test_deterministic_gradients_repeat_bit_for_bit(name: str, dim: int, deterministic: None) -> None:
    """Of more programs than fit the device at once, and while other work makes their times uneven."""
    torch.manual_seed(0)
    q, k, v, grad = tensors((3, 16, 8, 1500, 1900), (dim, dim), torch.bfloat16)
    program = f"attention({PROGRAMS[name]})"
    out, lse = launch.attention(q, k, v, [100], program)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    results = []
    for i in range(6):
        if i % 2:
            with torch.cuda.stream(other):
                noise @ noise
        results.append(ops.hopper_attention_backward(grad, q, k, v, out, lse, [100], program))
    for again in results[1:]:
        for a, b in zip(results[0], again, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def grads(function: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def close(function: Callable[..., Tensor], eager: Callable[..., Tensor], length: int, dim: int, dynamic: bool = False) -> None:
    """Out and gradients at most twice as far from float64 as eager code is."""
    q, k, v, grad = tensors((2, 4, 2, length, length), (dim, dim), torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    if dynamic:
        for t in leaves:
            torch._dynamo.mark_dynamic(t, 2)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    sides = (grads(function, leaves, grad), grads(eager, leaves, grad), grads(eager, exact, grad))
    for ours, other, want in zip(*sides, strict=True):
        limit = 2.0 * (other.double() - want).norm() + 2.0 * torch.finfo(torch.bfloat16).eps * want.norm()
        assert (ours.double() - want).norm() <= limit


@pytest.fixture
def chosen(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], bool]]:
    """Whether the compiled backward is the Gluon kernel."""
    torch._dynamo.reset()
    caplog.set_level(logging.INFO, logger=lowering.__name__)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield lambda: any(TAKEN in m and "hopper_attention_backward" in m for m in caplog.messages)


@pytest.fixture
def program_chosen(caplog: pytest.LogCaptureFixture, chosen: Callable[[], bool]) -> Callable[[], bool]:
    """Whether the compiled backward is the Gluon kernel with a program of its own."""
    return lambda: any(TAKEN in m and "hopper_program_backward" in m for m in caplog.messages)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, causal])
def test_compiled(mask: Any, dim: int, dynamic: bool, chosen: Callable[[], bool]) -> None:
    torch.manual_seed(0)
    eager = attend(mask)
    function = torch.compile(eager, backend=fa_inductor)
    for length in (384, 640) if dynamic else (384,):
        close(function, eager, length, dim, dynamic)
    assert chosen()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_compiled_deterministic(dim: int, chosen: Callable[[], bool], deterministic: None) -> None:
    torch.manual_seed(0)
    eager = attend(causal)
    function = torch.compile(eager, backend=fa_inductor)
    close(function, eager, 384, dim)
    q, k, v, grad = tensors((2, 4, 2, 384, 384), (dim, dim), torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for a, b in zip(grads(function, leaves, grad), grads(function, leaves, grad), strict=True):
        assert torch.equal(a, b)
    assert chosen()


def _attend_causally(slopes: Tensor | None = None, ids: Tensor | None = None) -> Callable[..., Tensor]:
    """Causal attention with ALiBi's slopes, or within documents."""

    def run(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
        key, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, v))
        s = query @ key.transpose(-1, -2) * 0.1
        q, k = (torch.arange(n, device=s.device) for n in s.shape[-2:])
        keep = q[:, None] >= k[None, :]
        if slopes is not None:
            s = s + slopes[:, None, None] * (k[None, :] - q[:, None])
        if ids is not None:
            keep = keep & (ids[:, None, :, None] == ids[:, None, None, :])
        return s.masked_fill(~keep, -math.inf).softmax(-1).to(v.dtype) @ v

    return run


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["alibi", "documents"])
def test_compiled_captured(kind: str, dim: int, program_chosen: Callable[[], bool]) -> None:
    torch.manual_seed(0)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    ids = (torch.arange(384, device="cuda") // 100).expand(2, -1).contiguous()
    eager = _attend_causally(slopes) if kind == "alibi" else _attend_causally(ids=ids)
    close(torch.compile(eager, backend=fa_inductor), eager, 384, dim)
    assert program_chosen()


def test_gradients_of_captured_tensors_are_the_general_kernels(program_chosen: Callable[[], bool]) -> None:
    torch.manual_seed(0)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda", requires_grad=True)
    eager = _attend_causally(slopes)
    close(torch.compile(eager, backend=fa_inductor), eager, 384, 128)
    assert not program_chosen()


def test_dropped_when_it_does_not_launch(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[], bool]) -> None:
    """A kernel that fails is left out with its reason in the log, and the general template gives the values."""

    def fails(*args: Any, **kw: Any) -> Any:
        raise RuntimeError("forced: out of shared memory")

    monkeypatch.setattr(backward_launch, "attention_backward", fails)
    eager = attend(causal)
    close(torch.compile(eager, backend=fa_inductor), eager, 384, 128)
    assert not chosen()


def test_gradients_of_any_strides(chosen: Callable[[], bool]) -> None:
    """A gradient that is one number repeated, and one that is transposed."""
    torch.manual_seed(0)
    eager = attend(causal)
    function = torch.compile(eager, backend=fa_inductor)
    for reduce in (lambda x: x.sum() * 0.5, lambda x: (x.transpose(2, 3).contiguous() ** 2).sum()):
        results = []
        for f in (function, eager):
            torch.manual_seed(0)
            leaves = [t.requires_grad_() for t in tensors((2, 4, 2, 384, 384), (128, 128), torch.bfloat16)[:3]]
            results.append(torch.autograd.grad(reduce(f(*leaves)), leaves))
        for ours, other in zip(*results, strict=True):
            assert (ours - other).norm() <= 3e-2 * other.norm()


def test_cuda_graphs(chosen: Callable[[], bool]) -> None:
    eager = attend(causal)
    function = torch.compile(eager, backend=fa_inductor, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        close(function, eager, 512, 128)
    assert chosen()
