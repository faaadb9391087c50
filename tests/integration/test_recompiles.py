"""Run-time sizes: few graphs, and each right at every length."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.compiling import fuse, rewriting
from tests.patterns.forms import FORMS, INF, KEYS, ROWS, Draw

LENGTHS = range(3, 23)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    s = q @ k.transpose(-2, -1) * 0.3
    return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -INF).softmax(-1) @ v


class Decoder(nn.Module):
    """Two layers with grouped heads; the scale is an attribute, as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = 8**-0.5
        self.layers = nn.ModuleList(nn.Linear(32, 32 + 2 * 16) for _ in range(2))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        b, n, _ = x.shape
        mask = keep[:, None, None, :] & (torch.arange(n)[None, :] <= torch.arange(n)[:, None])
        for layer in self.layers:
            q, k, v = layer(x).split([32, 16, 16], dim=-1)
            q, k, v = (t.view(b, n, -1, 8).transpose(1, 2) for t in (q, k, v))
            k, v = (t[:, :, None].expand(b, 2, 2, n, 8).reshape(b, 4, n, 8) for t in (k, v))
            s = (q @ k.transpose(2, 3)) * self.scaling
            s = s + torch.where(mask, 0.0, torch.finfo(s.dtype).min)
            x = x + (s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2).reshape(b, n, 32)
        return x


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [True, None])
def test_twenty_lengths(dynamic: bool | None, grad: bool) -> None:
    compiled, backend = fuse(causal, dynamic=dynamic)
    for n in LENGTHS:
        q, k, v = (torch.randn(2, 4, n, 8, requires_grad=grad) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), causal(q, k, v))
    assert backend.report.graphs <= 2
    assert backend.fused == backend.report.graphs
    assert "(q_idx + 1) <= kv_idx" in backend.report.fused[-1].program


def test_twenty_lengths_of_a_model() -> None:
    torch.manual_seed(0)
    model = Decoder()
    compiled, backend = fuse(model, dynamic=True)
    with torch.no_grad():
        for n in LENGTHS:
            x, keep = torch.randn(1 + n % 3, n, 32), torch.arange(n)[None, :].repeat(1 + n % 3, 1) < max(1, n - 1)
            torch.testing.assert_close(compiled(x, keep), model(x, keep), rtol=1e-4, atol=1e-5)
    assert backend.report.graphs <= 2
    assert backend.fused == 2 * backend.report.graphs
    (program,) = {site.program for site in backend.report.fused[-2:]}
    assert "kv_idx <= q_idx" in program, "causality is proven for every length"


def test_a_scale_of_the_queries_by_their_run_time_size() -> None:
    """The root is a number of the run that only the operand's view asks for."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q * (1.0 / math.sqrt(q.shape[-1]))) @ k.mT).softmax(-1) @ v

    compiled, backend = fuse(fn, dynamic=True)
    for n, d in ((12, 8), (20, 16)):
        q, k, v = (torch.randn(2, 4, n + i, d) for i in (0, 1, 1))
        torch.testing.assert_close(compiled(q, k, v), fn(q, k, v))
    assert backend.fused == backend.report.graphs == 1, backend.reasons


def test_a_growing_cache() -> None:
    """Decoding step by step: keys grow by one, the mask is bottom-right causal."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.arange(k.shape[2])[None, :] <= torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    compiled, backend = fuse(step)
    k, v = torch.randn(2, 1, 4, 5, 8).unbind(0)
    for _ in range(12):
        q = torch.randn(1, 4, 1, 8)
        k, v = torch.cat([k, torch.randn(1, 4, 1, 8)], 2), torch.cat([v, torch.randn(1, 4, 1, 8)], 2)
        torch.testing.assert_close(compiled(q, k, v), step(q, k, v))
    assert backend.report.graphs <= 2
    assert backend.fused == backend.report.graphs


def test_a_sliding_cache() -> None:
    """The first position that a window's cache holds is a maximum of run-time sizes, as transformers writes it."""

    def step(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        first = max(seen.shape[0] - 8 + 1, 0)
        keep = torch.arange(k.shape[2])[None, :] + first <= min(seen.shape[0] - 1, 100)
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    compiled, backend = fuse(step)
    k, v = torch.randn(2, 1, 4, 8, 8).unbind(0)
    for n in range(2, 14):
        q, seen = torch.randn(1, 4, 1, 8), torch.zeros(n)
        torch.testing.assert_close(compiled(q, k, v, seen), step(q, k, v, seen))
    assert backend.report.graphs <= 3
    assert backend.fused == backend.report.graphs, backend.reasons


# What each form must be right at with run-time sizes; test_values holds it to static ones.
DYNAMIC = [
    "plain", "deferred_division", "causal_bottom_right", "window", "prefix", "documents", "chunked", "padding",
    "additive_bias", "alibi", "t5", "sinks", "gqa_repeat_kv", "gqa_grouped_einsum", "gqa_broadcast", "mqa_einsum", "mla",
    "packed_qkv", "kv_cache", "sdpa", "sdpa_grouped", "MultiheadAttention", "checkpointed",
]  # fmt: skip


def marked(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lengths are run-time sizes; heads and features come from a model's weights and are not."""
    for x in inputs:
        for d, size in enumerate(x.shape):
            if size in (ROWS, KEYS):
                torch._dynamo.maybe_mark_dynamic(x, d)
    return inputs


def guards_of(gm: fx.GraphModule) -> tuple[int, list[str]]:
    """How many guards the shape environment of a graph has, and which symbols it has replaced."""
    env = next(
        e.fake_mode.shape_env
        for n in gm.graph.nodes
        if isinstance(e := n.meta.get("example_value"), Tensor) and isinstance(e, FakeTensor)
    )
    return len(env.guards), sorted(map(str, env.replacements))


@pytest.mark.parametrize("name", DYNAMIC)
def test_forms_with_run_time_sizes(name: str) -> None:
    """Right values, and no guards of ours: analysis must not fix run-time sizes."""
    form = FORMS[name]
    fn = form.make()
    fn = fn.double() if isinstance(fn, nn.Module) else fn
    inputs = marked(form.draw(Draw()))
    rewrite, seen = rewriting(), []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        before = guards_of(gm)
        compiled = rewrite(gm, example_inputs)
        seen.append((before, guards_of(gm)))
        return compiled

    got, expected = torch.compile(fn, backend=backend)(*inputs), fn(*inputs)
    assert rewrite.fused == form.fused, rewrite.reasons
    for g, e in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
        torch.testing.assert_close(g, e)
    if "sdpa" not in name:  # an SDPA call does guard that its keys are as many as its values
        assert all(before == after for before, after in seen), seen
