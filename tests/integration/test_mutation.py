"""In-place writes around attention: into operands, scores, the result, caches, and memory that inputs share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fa_inductor.view.aliasing import is_inplace
from tests.compiling import agree, fuse, normal
from tests.patterns.forms import INF

B, H, M, N, D = 2, 4, 10, 12, 8
OVERWRITTEN = "overwritten in place before the product with V"


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * 0.3


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def qkv(grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    return normal(B, H, M, D, grad=grad), normal(B, H, N, D, grad=grad), normal(B, H, N, D, grad=grad)


def test_operands_written_before_use() -> None:
    def fn(q, k, v):
        q, k, v = q * 2.0, k + 1.0, v * 1.5
        q.mul_(0.5)
        k[:, :, 2:5] = 0.0
        v += 1.0
        return attention(q, k, v)

    agree(fn, *qkv())


@pytest.mark.parametrize("which", ["q", "k"])
def test_operand_written_between_the_products(which: str) -> None:
    def fn(q, k, v):
        s = scores(q, k)
        (q if which == "q" else k).mul_(2.0)
        return s.softmax(-1) @ v

    backend = agree(fn, *qkv(grad=False), fused=0)
    assert OVERWRITTEN in backend.reasons[0]


def test_values_written_between_the_products() -> None:
    def fn(q, k, v):
        p = scores(q, k).softmax(-1)
        v.mul_(2.0)
        return p @ v

    agree(fn, *qkv(grad=False))


def test_mask_written_after_use() -> None:
    def fn(q, k, v, keep):
        s = scores(q, k).masked_fill(~keep, -INF)
        keep.fill_(True)
        return s.softmax(-1) @ v

    keep = torch.ones(M, N, dtype=torch.bool).tril(2)
    backend = agree(fn, *qkv(grad=False), keep, fused=None)
    assert backend.fused == 1 or backend.reasons


def test_mask_written_before_use() -> None:
    """A causal mask drawn by slice assignment is still proven."""

    def fn(q, k, v):
        keep = torch.zeros(M, N, dtype=torch.bool)
        keep[:, :3] = True
        return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v

    backend = agree(fn, *qkv())
    assert backend.report.fused[0].program == "attention(score=where(kv_idx >= 3, -inf, score * 0.3))"


def test_operand_written_after_the_attention() -> None:
    """Autograd needs the old values, which the compiled graph keeps; the program's operands must not be the new ones."""

    def fn(q, k, v):
        q, v = q * 1.0, v.tanh()
        out = attention(q, k, v)
        q.zero_()
        v.zero_()
        return out, q, v

    agree(fn, *qkv(grad=False))


def test_scores_scaled_and_masked_in_place() -> None:
    def fn(q, k, v):
        s = q @ k.transpose(-2, -1)
        s *= 0.3
        s.masked_fill_(torch.ones(M, N, dtype=torch.bool).triu(1), -INF)
        s += 0.5
        s.div_(2.0)
        return s.softmax(-1) @ v

    backend = agree(fn, *qkv())
    assert "kv_idx" in backend.report.fused[0].program


@pytest.mark.parametrize(
    "write", [lambda o: o.add_(1.0), lambda o: o[:, 0].mul_(2.0), lambda o: o.transpose(1, 2).relu_()]
)
def test_result_written_in_place(write) -> None:
    """The op saves its result for the backward, eager code does not: the write must not reach what is saved."""

    def fn(q, k, v):
        out = attention(q, k, v)
        write(out)
        return out

    agree(fn, *qkv())


def test_input_written_before_use() -> None:
    def fn(q, k, v):
        q.mul_(0.5)
        v.add_(k)
        return attention(q, k, v)

    agree(fn, *qkv(grad=False))


@pytest.mark.parametrize("between", [False, True])
def test_inputs_share_memory_and_one_is_written(between: bool) -> None:
    def fn(a, b, k, v):
        if not between:
            b.mul_(2.0)
        s = scores(a, k)
        if between:
            b.mul_(2.0)
        return s.softmax(-1) @ v

    q, k, v = qkv(grad=False)
    backend = agree(fn, q, q[:, :, :5], k, v, fused=0)
    assert "memory that two inputs of the graph share" in backend.reasons[0]


def test_inputs_share_memory_and_none_is_written() -> None:
    packed = normal(3, B, H, M, D, grad=False)
    agree(attention, *packed.unbind(0))
    torch._dynamo.reset()
    agree(lambda a, b: attention(a, b, a), packed[0], packed[0])


class Cached(nn.Module):
    """A static key-value cache, written at given positions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("k", torch.zeros(B, H, 16, D))
        self.register_buffer("v", torch.zeros(B, H, 16, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        if self.how == "index_copy_":
            self.k.index_copy_(2, position, k)
            self.v.index_copy_(2, position, v)
        else:
            self.k[:, :, position] = k
            self.v[:, :, position] = v
        keep = torch.arange(16)[None, :] <= position[:, None]
        return scores(q, self.k).masked_fill(~keep, -INF).softmax(-1) @ self.v


@pytest.mark.parametrize("how", ["index_copy_", "setitem"])
def test_cache_written_in_place(how: str) -> None:
    ours = Cached(how)
    theirs = copy.deepcopy(ours)
    compiled, backend = fuse(ours)
    with torch.no_grad():
        for position in ([0, 1, 2], [3], [4], [5]):
            at = torch.tensor(position)
            q, k, v = (torch.randn(B, H, len(position), D) for _ in range(3))
            torch.testing.assert_close(compiled(q, k, v, at), theirs(q, k, v, at))
            torch.testing.assert_close(ours.k, theirs.k, rtol=0, atol=0)
            torch.testing.assert_close(ours.v, theirs.v, rtol=0, atol=0)
    assert backend.fused == backend.report.graphs
    assert not backend.reasons


class Counted(nn.Module):
    """A cache that counts its keys in place, as that of transformers: the mask's positions were computed of the old count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(B, H, 16, D))
        self.register_buffer("v", torch.zeros(B, H, 16, D))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[2]) + self.count
        low = torch.finfo(q.dtype).min
        mask = torch.where(torch.arange(16)[None, :] <= position[:, None], 0.0, low)
        self.k.index_copy_(2, torch.arange(q.shape[2]) + self.count, k)
        self.v.index_copy_(2, torch.arange(q.shape[2]) + self.count, v)
        self.count.add_(q.shape[2])
        return (scores(q, self.k) + mask).softmax(-1) @ self.v


def test_positions_outlive_the_count() -> None:
    """What is captured are the positions, not the mask of them."""
    ours = Counted()
    theirs = copy.deepcopy(ours)
    compiled, backend = fuse(ours)
    with torch.no_grad():
        for n in (3, 1, 1, 1):
            q, k, v = (torch.randn(B, H, n, D) for _ in range(3))
            torch.testing.assert_close(compiled(q, k, v), theirs(q, k, v))
    assert backend.fused == backend.report.graphs
    programs = {site.program for site in backend.report.fused}
    assert any("kv_idx <= i0[0]" in p for p in programs), programs
    assert not any("[q_idx, kv_idx]" in p or "m0" in p for p in programs)


class Grown(nn.Module):
    """A cache of which what was written so far is read, for groups of four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(B, H // 4, 16, D))
        self.register_buffer("v", torch.zeros(B, H // 4, 16, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        end = start + q.shape[2]
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        k, v = (x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for x in (self.k[:, :, :end], self.v[:, :, :end]))
        return attention(q, k, v)


def test_heads_share_what_is_read_of_a_cache_after_a_write() -> None:
    """The graph holds the cache and the expanded keys, and nothing between them that is not older than the write."""
    ours = Grown()
    theirs = copy.deepcopy(ours)
    compiled, backend = fuse(ours)
    with torch.no_grad():
        for start, rows in ((0, 5), (5, 1), (6, 1)):
            q, k, v = (torch.randn(B, h, rows, D) for h in (H, H // 4, H // 4))
            torch.testing.assert_close(compiled(q, k, v, start), theirs(q, k, v, start))
    assert backend.fused == backend.report.graphs
    assert [site.form for site in backend.report.fused] == ["MQA 4:1"] * backend.fused


def test_logic_operators_write_nothing() -> None:
    """``operator.and_`` and ``or_`` end in an underscore for Python's sake; masks made of masks are not overwritten."""

    def fn(q, k, v, keep):
        out = attention(q, k, v)
        keep = (keep & (torch.arange(N) < 9)) | (torch.arange(N) < 2)
        return scores(out, k).masked_fill(~keep, -INF).softmax(-1) @ v

    agree(fn, *qkv(), torch.ones(M, N, dtype=torch.bool).tril(2), fused=2)
    graph = fx.symbolic_trace(lambda a, b: (a & b) | a).graph
    assert not any(is_inplace(n) for n in graph.nodes)


def test_positional_arguments_that_are_not_inplace() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    plain = [(F.dropout, (x, 0.1, True, False)), (F.dropout, (x, 0.1, True)), (F.elu, (x, 1.0)), (F.relu, (x, False))]
    writes = [(F.dropout, (x, 0.1, True, True)), (F.relu, (x, True)), (F.hardtanh, (x, -1.0, 1.0, True))]
    assert not any(is_inplace(graph.call_function(fn, args)) for fn, args in plain)
    assert all(is_inplace(graph.call_function(fn, args)) for fn, args in writes)
    assert is_inplace(graph.call_function(F.silu, (x,), {"inplace": True}))


def test_methods_that_only_begin_like_a_write() -> None:
    """Under a default device ``~mask`` is captured as a call of ``__invert__``."""

    def fn(q, k, v, keep):
        return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v

    before = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        agree(fn, *qkv(), torch.ones(M, N, dtype=torch.bool).tril(2))
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not any(is_inplace(graph.call_method(name, (x,))) for name in ("__invert__", "__index__", "__int__"))
    assert all(is_inplace(graph.call_method(name, (x, x))) for name in ("__iadd__", "__ior__", "__setitem__", "add_"))
