"""Attention inside and beside sub-graphs: checkpoints, nested regions, branches, autograd functions, grad and cast modes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import nested_compile_region
from torch.utils.checkpoint import checkpoint

from fa_inductor.report import collecting
from tests.compiling import agree, fuse, normal

B, H, M, N, D = 2, 4, 10, 12, 8
INF = float("inf")


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    s = q @ k.transpose(-2, -1) * 0.3
    return (s if mask is None else s.masked_fill(~mask, -INF)).softmax(-1) @ v


def qkv(grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    return normal(B, H, M, D, grad=grad), normal(B, H, N, D, grad=grad), normal(B, H, N, D, grad=grad)


def causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[-2])[None, :] <= torch.arange(q.shape[-2])[:, None]


# ---------------------------------------------------------------------------------------------------------- checkpoint
def test_checkpoint_with_a_mask_from_outside() -> None:
    def fn(q, k, v):
        return checkpoint(attention, q, k, v, causal(q, k), use_reentrant=False)

    backend = agree(fn, *qkv())
    (site,) = backend.report.fused
    assert site.path
    assert "kv_idx" in site.program, "the mask is proven although the body sees a tensor only"


def test_checkpoint_around_more_than_attention() -> None:
    def body(q, k, v, w):
        return attention((q.transpose(1, 2).reshape(B, M, H * D) @ w).view(B, M, H, D).transpose(1, 2), k, v).tanh()

    def fn(q, k, v, w):
        return checkpoint(body, q, k, v, w, use_reentrant=False) * 2.0

    agree(fn, *qkv(), normal(H * D, H * D))


@pytest.mark.parametrize("inner", [attention, lambda q, k, v: q.tanh() * 0.5])
def test_attention_before_and_after_a_checkpoint(inner: Any) -> None:
    """The top graph has a softmax, and so may the body; what one hands to the other keeps its users."""

    def fn(q, k, v):
        q = attention(q, k, v)
        q = checkpoint(inner, q, k, v, use_reentrant=False)
        return attention(q, k, v)

    agree(fn, *qkv(), fused=3 if inner is attention else 2)


def test_attention_only_before_a_checkpoint() -> None:
    def fn(q, k, v):
        return checkpoint(lambda x: x.tanh().square(), attention(q, k, v), use_reentrant=False)

    agree(fn, *qkv())


def test_nested_checkpoints() -> None:
    def outer(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=False).cos()

    agree(lambda q, k, v: checkpoint(outer, q, k, v, use_reentrant=False), *qkv())


def test_checkpoint_result_written_in_place() -> None:
    def fn(q, k, v):
        out = checkpoint(attention, q, k, v, use_reentrant=False)
        out.add_(1.0)
        return out

    agree(fn, *qkv())


def test_checkpointed_layers_with_dropout_repeat_their_mask() -> None:
    """Recomputation must drop the same weights: with values of one, each row's sum of kept weights is its output."""

    def fn(q, k, v):
        body = lambda q, k, v: torch.dropout(attention_weights(q, k), 0.5, True) @ v  # noqa: E731
        return checkpoint(body, q, k, v, use_reentrant=False)

    q, k = normal(B, H, M, N), normal(B, H, N, N)
    v = torch.eye(N, dtype=torch.float64).expand(B, H, N, N).clone().requires_grad_()
    # Inductor's own code: run op by op, its random numbers do not repeat.
    compiled = torch.compile(fn, backend="fa_inductor", options={"kernel": "reference"})
    with collecting() as report:
        out = compiled(q, k, v)
    out.sum().backward()
    assert len(report.fused) == 1
    # out = P * keep / (1 - p) for v = identity, and d(sum of out)/dv[n, d] = sum over m of out[m, n].
    torch.testing.assert_close(v.grad, out.detach().sum(-2).unsqueeze(-1).expand_as(v))
    kept = out.detach() != 0
    torch.testing.assert_close(out.detach()[kept], (attention_weights(q, k) * 2.0).detach()[kept])
    assert 0.3 < kept.double().mean() < 0.7


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1)


# ----------------------------------------------------------------------------------------------- nested compile regions
def test_a_region_called_by_every_layer_is_rewritten_once() -> None:
    region = nested_compile_region(lambda q, k, v: attention(q, k, v).sin())

    def fn(q, k, v):
        for _ in range(3):
            q = region(q, k, v)
        return q

    backend = agree(fn, *qkv())
    targets = [str(n.target) for body in backend.graphs[0].children() for n in body.graph.nodes]
    assert sum("flash_attention" in t for t in targets) == 1


def test_a_region_whose_calls_prove_different_masks_is_left_alone() -> None:
    region = nested_compile_region(attention)

    def fn(q, k, v):
        later = torch.arange(N)[None, :] <= torch.arange(M)[:, None] + 2
        return region(q, k, v, causal(q, k)) + region(q, k, v, later)

    backend = agree(fn, *qkv(), fused=0)
    assert "called several times and not every call is the same attention" in backend.reasons[0]


# -------------------------------------------------------------------------------------------------- branches and loops
@pytest.mark.parametrize("grad", [False, True])
def test_both_branches_of_cond(grad: bool) -> None:
    def fn(flag, q, k, v):
        return torch.cond(flag.sum() > 0, attention, lambda q, k, v: attention(q, k, v) * 2.0, (q, k, v))

    agree(fn, torch.ones(2), *qkv(grad), fused=2)
    torch._dynamo.reset()
    agree(fn, -torch.ones(2), *qkv(grad), fused=2)


def test_branches_of_cond_with_a_mask_from_outside() -> None:
    """The branch knows the mask as an input only, so it is captured."""

    def fn(flag, q, k, v):
        mask = causal(q, k)
        return torch.cond(flag.sum() > 0, lambda: attention(q, k, v, mask), lambda: attention(q, k, v))

    backend = agree(fn, torch.ones(2), *qkv(False), fused=2)
    assert any("m0[" in site.program for site in backend.report.fused)


# --------------------------------------------------------------------------------------------------- autograd functions
class TimesThree(torch.autograd.Function):
    """Identity whose gradient is three times too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3.0


class OwnAttention(torch.autograd.Function):
    """Attention with a made-up gradient."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q)
        return attention(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        return torch.ones_like(q) * grad.sum(), None, None


def test_autograd_function_keeps_its_gradient() -> None:
    agree(lambda q, k, v: OwnAttention.apply(q, k, v) * 1.0, *qkv(), fused=0)


def test_autograd_function_on_operands_and_on_the_result() -> None:
    agree(lambda q, k, v: TimesThree.apply(attention(TimesThree.apply(q), k, v)), *qkv())


@pytest.mark.parametrize("where", ["scores", "weights"])
def test_autograd_function_inside(where: str) -> None:
    def fn(q, k, v):
        s = q @ k.transpose(-2, -1)
        return TimesThree.apply(s).softmax(-1) @ v if where == "scores" else TimesThree.apply(s.softmax(-1)) @ v

    backend = agree(fn, *qkv(), fused=0)
    assert backend.reasons, "an attention with something unknown inside is reported"


# ----------------------------------------------------------------------------------------------------- modes and blocks
def test_no_grad_block_and_inference() -> None:
    def block(q, k, v):
        with torch.no_grad():
            out = attention(q, k, v)
        return out + q

    agree(block, *qkv())
    for mode in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with mode():
            agree(attention, *qkv(False))


def test_bias_made_in_a_no_grad_block_gets_no_gradient() -> None:
    def fn(q, k, v):
        with torch.no_grad():
            bias = (q @ k.transpose(-2, -1)).tanh()
        return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v

    agree(fn, *qkv())


@pytest.mark.parametrize("trained", ["q", "k", "v", "kv", "bias"])
def test_only_some_inputs_are_trained(trained: str) -> None:
    q, k, v = (x.requires_grad_(n in trained and trained != "bias") for n, x in zip("qkv", qkv(False), strict=True))
    bias = normal(H, 1, N, grad=trained == "bias")
    agree(lambda q, k, v, b: (q @ k.mT + b).softmax(-1) @ v, q, k, v, bias)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(outside: bool) -> None:
    """Autocast's own casts become part of the program: bfloat16 operands, bfloat16 result."""
    q, k, v = (x.detach().float().requires_grad_() for x in qkv())

    def fn(q, k, v):
        with contextlib.nullcontext() if outside else torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v)

    compiled, backend = fuse(fn)
    with torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext():
        out = compiled(q, k, v)
        expected = fn(q, k, v)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert [site.dtype for site in backend.report.fused] == ["bfloat16"]
    exact = attention(q.bfloat16().double(), k.bfloat16().double(), v.bfloat16().double())
    worst = (expected.double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * worst + torch.finfo(torch.bfloat16).eps * exact.abs().max()
    out.sum().backward()
    assert {x.grad.dtype for x in (q, k, v)} == {torch.float32}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, dtype=torch.float64), nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(attention(q, k, v, causal(q, k)).transpose(1, 2).reshape(x.shape))


class Stack(nn.Module):
    """Layers under activation checkpointing, as training scripts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_checkpointed_layers_train() -> None:
    torch.manual_seed(0)
    backend = agree(Stack(), normal(2, 10, 16), fused=3)
    assert {site.backward for site in backend.report.fused} == {True}
