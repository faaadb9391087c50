"""The ops as torch sees them: schema, fakes, autograd, modes, partitioner, caches, randomness."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_inductor import ops, reference
from fa_inductor.errors import ProgramError
from fa_inductor.spec import AttentionSpec

B, HQ, HKV, M, N, D, DV = 2, 4, 2, 5, 7, 8, 8
CAUSAL = "attention(score=where(kv_idx <= q_idx, score * 0.3, -inf))"


def operands(grad: bool = True, dtype: torch.dtype = torch.float32, dv: int = DV) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, M, HQ, D), (B, N, HKV, D), (B, N, HKV, dv)]
    return [torch.randn(s).to(dtype).transpose(1, 2).detach().requires_grad_(grad) for s in shapes]


def capture(name: str) -> Tensor:
    torch.manual_seed(1)
    made = {
        "bias": lambda: torch.randn(HQ, M, N, requires_grad=True),
        "expanded_bias": lambda: torch.randn(1, M, N).expand(HQ, M, N).detach().requires_grad_(),
        "frozen_bias": lambda: torch.randn(HQ, M, N),
        "half_bias": lambda: torch.randn(HQ, M, N, dtype=torch.bfloat16).requires_grad_(),
        "mask": lambda: torch.rand(B, N) > 0.3,
        "bucket": lambda: torch.randint(0, 3, (M, N)),
        "table": lambda: torch.randn(3, HQ, requires_grad=True),
        "sinks": lambda: torch.randn(HQ, requires_grad=True),
        "scale": lambda: torch.tensor(0.4, requires_grad=True),
        "seed": lambda: torch.tensor([3, 5]),
    }
    return made[name]()


#: program -> (captures, sizes)
PROGRAMS: dict[str, tuple[list[str], list[int]]] = {
    "attention(score=score * 0.3)": ([], []),
    CAUSAL: ([], []),
    "attention(score=(score * 0.3) + f0[h, q_idx, kv_idx], layout='bmhd')": (["bias"], []),
    "attention(score=score + f0[h, q_idx, kv_idx])": (["expanded_bias"], []),
    "attention(score=score - f0[h, q_idx, kv_idx])": (["half_bias"], []),
    "attention(score=where(m0[b, kv_idx], score + f2[i1[q_idx, kv_idx], h], -10000.0), dead_rows='zero')": (
        ["mask", "bucket", "table"], []),
    "attention(score=score * f0[()], sinks=[f1[h], -1.0])": (["scale", "sinks"], []),
    "attention(score=where(kv_idx < n0, score, where(kv_idx < n1, -5.0, -inf)))": ([], [4, 6]),
    "attention(score=tanh(score * f0[()]) * 3.0, dropout=(0.2, 1), layout='bmhd')": (["scale", "seed"], []),
}  # fmt: skip
ATEN = [CAUSAL, "attention(score=score * 0.3)", "attention(score=score * f0[()], sinks=[f1[h], -1.0])"]


@pytest.mark.parametrize("kernel", ["reference", "triton", "aten"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_opcheck_forward(program: str, kernel: str) -> None:
    if kernel == "aten" and program not in ATEN:
        pytest.skip("not a program of ATen's kernel")
    names, sizes = PROGRAMS[program]
    torch.library.opcheck(ops.flash_attention, (*operands(), [capture(n) for n in names], sizes, program, kernel))


@pytest.mark.parametrize("fill", [0.0, math.nan, -math.inf])
@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
def test_plain_attention_is_flash_attention(layout: str, fill: float) -> None:
    program = f"attention(score=score * 0.3, layout={layout!r})"
    q, k, v = operands(grad=False)
    k[0, 0, 1], v[1, 0, 2] = fill, fill
    if fill == 0.0:  # opcheck compares NaN as unequal
        torch.library.opcheck(ops.plain_attention, (q, k, v, program))
    got, want = ops.plain_attention(q, k, v, program), ops.flash_attention(q, k, v, [], [], program, "aten")
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert [t.stride() for t in got] == [t.stride() for t in want]


@pytest.mark.parametrize("kernel", ["reference", "aten"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_opcheck_backward(program: str, kernel: str) -> None:
    if kernel == "aten" and program not in ATEN:
        pytest.skip("not a program of ATen's kernel")
    names, sizes = PROGRAMS[program]
    qkv, captures = operands(grad=False), [capture(n).detach() for n in names]
    out, lse = ops.flash_attention(*qkv, captures, sizes, program, kernel)
    floats = [c.is_floating_point() for c in captures]
    for needs in ([True, True, True, *floats], [False, True, False, *([False] * len(floats))]):
        args = (torch.randn_like(out), *qkv, out, lse, captures, sizes, program, kernel, needs)
        torch.library.opcheck(ops.flash_attention_backward, args)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_gradients(program: str, dynamic: bool) -> None:
    names, sizes = PROGRAMS[program]
    qkv, captures = operands(), [capture(n) for n in names]
    inputs = [*qkv, *(c for c in captures if c.requires_grad)]

    def f(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> Tensor:
        out, _ = ops.flash_attention(q * 1.0, k, v, captures, sizes, program, "reference")
        return out.relu() + out

    want = f(*qkv, captures)
    got = torch.compile(f, dynamic=dynamic, fullgraph=True)(*qkv, captures)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (3,)])
def test_partial_gradients(which: tuple[int, ...]) -> None:
    """Only what needs a gradient gets one, and nothing else is computed."""
    program = "attention(score=(score * 0.3) + f0[h, q_idx, kv_idx], layout='bmhd')"
    inputs = [*operands(grad=False), capture("frozen_bias")]
    for i in which:
        inputs[i].requires_grad_()
    out, lse = ops.flash_attention(*inputs[:3], inputs[3:], [], program, "reference")
    assert not lse.requires_grad
    grad = torch.randn_like(out)
    out.backward(grad)
    needs = [i in which for i in range(4)]
    want = reference.attention_grads(
        grad, *(t.detach() for t in inputs[:3]), [inputs[3].detach()], [], AttentionSpec.parse(program), needs
    )
    for i, t in enumerate(inputs):
        assert (t.grad is not None) == (i in which)
        if t.grad is not None:
            torch.testing.assert_close(t.grad, want[i])
    raw = ops.flash_attention_backward(
        grad,
        *(t.detach() for t in inputs[:3]),
        out.detach(),
        lse,
        [inputs[3].detach()],
        [],
        program,
        "reference",
        needs,
    )
    assert [g.numel() > 0 for g in raw] == needs


def test_no_gradient_modes() -> None:
    qkv = operands()
    want, _ = reference.attention(*(t.detach() for t in qkv), [], [], AttentionSpec.parse(CAUSAL))
    with torch.no_grad():
        assert not ops.flash_attention(*qkv, [], [], CAUSAL, "reference")[0].requires_grad
    with torch.inference_mode():
        for kernel in ops.KERNELS:
            out, _ = ops.flash_attention(*qkv, [], [], CAUSAL, kernel)
            assert out.is_inference()
            torch.testing.assert_close(out, want)
        inner = [t.clone() for t in qkv]
        torch.testing.assert_close(ops.flash_attention(*inner, [], [], CAUSAL, "reference")[0], want)
    assert ops.flash_attention(*qkv, [], [], CAUSAL, "reference")[0].requires_grad


def test_functional_autograd() -> None:
    q, k, v = operands(grad=False)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, [], [], CAUSAL, "reference")[0].square().sum()

    want = torch.autograd.functional.vjp(f, (q, k, v))[1]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    for g, w in zip(torch.autograd.grad(f(*leaves), leaves), want, strict=True):
        torch.testing.assert_close(g, w)
    # torch.library's autograd formulas do not take part in functorch transforms; they say so instead of being wrong.
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(f)(q, k, v)


def test_second_derivative_is_refused() -> None:
    q, k, v = operands()
    out, _ = ops.flash_attention(q, k, v, [], [], CAUSAL, "reference")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("compiled", [False, True])
def test_ambient_autocast_changes_nothing(compiled: bool) -> None:
    qkv = operands()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, [], [], CAUSAL, "reference")[0]

    g = torch.compile(f) if compiled else f
    want = f(*qkv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = g(*qkv)
        grads = torch.autograd.grad(got.sum(), qkv)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # bfloat16 products would be off by 1e-2
    for a, b in zip(grads, torch.autograd.grad(want.sum(), qkv), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoint(compiled: bool) -> None:
    qkv = operands()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q.sin(), k, v, [], [], CAUSAL, "reference")[0].cos()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = checkpoint(block, q, k, v, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    got = (torch.compile(f, fullgraph=True) if compiled else f)(*qkv)
    want = block(*qkv)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), qkv), torch.autograd.grad(want.sum(), qkv), strict=True):
        torch.testing.assert_close(a, b)


def _forward_count(graph: torch.fx.GraphModule) -> int:
    return sum(n.target is ops.flash_attention for n in graph.graph.nodes)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_the_partitioner_recomputes_only_under_checkpoint(use_checkpoint: bool) -> None:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q.sin(), k, v, [], [], CAUSAL, "reference")[0].cos()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = checkpoint(block, q, k, v, use_reentrant=False) if use_checkpoint else block(q, k, v)
        assert isinstance(out, Tensor)
        return out

    torch.compile(f, backend=backend, fullgraph=True)(*operands()).sum().backward()
    assert [_forward_count(g) for g in graphs] == [1, int(use_checkpoint)]


def test_dynamic_lengths_compile_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        program = "attention(score=where(kv_idx < n0, score, -inf))"
        return ops.flash_attention(q, k, v, [], [k.shape[2] // 2], program, "reference")[0]

    compiled = torch.compile(f, backend=counter, dynamic=True)
    for n in (11, 12, 31):
        q = torch.randn(2, 2, n, 8, requires_grad=True)
        torch.testing.assert_close(compiled(q, q, q), f(q, q, q))
    assert counter.frame_count == 1


def test_caches_take_the_op() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention(q, k, v, [], [], CAUSAL, "reference")[0] * 2

    qkv = operands()
    with fresh_cache():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(f)(*qkv).sum().backward()
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


# --------------------------------------------------------------------------------------------------------- randomness
DROPPED = "attention(score=score * 0.3, dropout=(0.5, 0))"


def two_dropouts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s1, s2 = ops.dropout_seed(q), ops.dropout_seed(q)
    out, _ = ops.flash_attention(q, k, v, [s1], [], DROPPED, "reference")
    out, _ = ops.flash_attention(out.sin(), k, v, [s2], [], DROPPED, "reference")
    return out.cos(), s1, s2


def with_seeds(q: Tensor, k: Tensor, v: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    out, _ = ops.flash_attention(q, k, v, [s1], [], DROPPED, "reference")
    return ops.flash_attention(out.sin(), k, v, [s2], [], DROPPED, "reference")[0].cos()


@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("mode", ["eager", "static", "dynamic"])
def test_backward_sees_the_forwards_seed(mode: str, use_checkpoint: bool) -> None:
    qkv = operands()

    def f(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return checkpoint(two_dropouts, *args, use_reentrant=False) if use_checkpoint else two_dropouts(*args)

    g = f if mode == "eager" else torch.compile(f, fullgraph=True, dynamic=mode == "dynamic")
    torch.manual_seed(7)
    out, s1, s2 = g(*qkv)
    assert not torch.equal(s1, s2)  # equal calls are not merged
    grads = torch.autograd.grad(out.sum(), qkv)
    want = with_seeds(*qkv, s1, s2)
    torch.testing.assert_close(out, want)
    for a, b in zip(grads, torch.autograd.grad(want.sum(), qkv), strict=True):
        torch.testing.assert_close(a, b)
    again, t1, _ = g(*qkv)
    assert not torch.equal(t1, s1)
    assert not torch.equal(again, out)
    torch.manual_seed(7)
    torch.testing.assert_close(g(*qkv)[0], out)


def test_seed() -> None:
    for like in (torch.randn(3), torch.randn(2, device="meta")):
        seed = ops.dropout_seed(like)
        assert seed.shape == (2,)
        assert seed.dtype == torch.int64
        assert seed.device == like.device


# -------------------------------------------------------------------------------------------------- errors and counts
def test_errors() -> None:
    q, k, v = operands(grad=False)
    bias = capture("frozen_bias")

    def call(*args: object) -> None:
        with warnings.catch_warnings():
            ops.flash_attention(*args)

    bad: list[tuple[str, tuple[object, ...]]] = [
        ("unknown kernel", (q, k, v, [], [], CAUSAL, "fast")),
        ("cannot parse", (q, k, v, [], [], "attention(", "reference")),
        ("4 dimensions", (q[0], k, v, [], [], CAUSAL, "reference")),
        ("must agree", (q, k.double(), v, [], [], CAUSAL, "reference")),
        ("slot 0", (q, k, v, [], [], "attention(score=score + f0[h])", "reference")),
        ("does not fit", (q, k, v, [bias], [], "attention(score=score + f0[h])", "reference")),
        ("does not fit", (q, k, v, [bias.int()], [], "attention(score=score + f0[h, q_idx, kv_idx])", "reference")),
        ("sizes", (q, k, v, [], [], "attention(score=where(kv_idx < n0, score, -inf))", "reference")),
        ("int64", (q, k, v, [bias], [], "attention(score=score, dropout=(0.1, 0))", "reference")),
        (r"not score \* scale", (q, k, v, [], [], "attention(score=tanh(score))", "aten")),
    ]
    for message, args in bad:
        with pytest.raises(ProgramError, match=message):
            call(*args)
    shapes = [(q[:1], k, v), (q, k[:, :1], v), (q, k[:, :, :3], v), (q, k[..., :4], v), (q[:, :3], k, v)]
    for part in shapes:
        with pytest.raises(RuntimeError, match=r"differ|multiple"):
            call(*part, [], [], CAUSAL, "reference")
    out, lse = ops.flash_attention(q, k, v, [], [], CAUSAL, "reference")
    with pytest.raises(ProgramError, match="needs_grad"):
        ops.flash_attention_backward(out, q, k, v, out, lse, [], [], CAUSAL, "reference", [True] * 4)
    with pytest.raises(ProgramError, match="no gradient"):
        ops.flash_attention_backward(out, q, k, v, out, lse, [capture("mask")], [], CAUSAL, "reference", [True] * 4)


def test_flop_count() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    qkv = operands(dv=6)
    with FlopCounterMode(display=False) as counter:
        out, _ = ops.flash_attention(*qkv, [], [], CAUSAL, "reference")
    assert counter.get_total_flops() == 2 * B * HQ * M * N * (D + 6)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * B * HQ * M * N * (3 * D + 2 * 6)
