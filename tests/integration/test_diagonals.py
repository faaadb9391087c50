"""Position biases that are the same along every diagonal are captured as one vector; everything else stays what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_inductor import capture_layout, rewrite

LENGTH = 600


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """(program, shapes of the captures) of each site, rewritten as for the generated kernels and run by the reference."""
    found: list[tuple[str, list[tuple[Any, ...]]]] = []
    plain, arrange = rewrite._captures, capture_layout.arrange

    def watched(em: Any, match: Any, spec: Any, captures: Any) -> Any:
        spec = arrange(em, match, spec, captures)
        found.append((str(spec.score), [tuple(c.meta["example_value"].shape) for c in captures]))
        return spec

    monkeypatch.setattr(rewrite, "_captures", lambda em, match, kernel: plain(em, match, "triton"))
    monkeypatch.setattr(capture_layout, "arrange", watched)
    torch._dynamo.reset()
    return found


def buckets(relative: Tensor, both: bool = True, num: int = 32, far: int = 128) -> Tensor:
    """As T5 has it."""
    found = torch.zeros_like(relative)
    if both:
        num //= 2
        found = found + (relative > 0).to(torch.long) * num
        relative = relative.abs()
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = num // 2
    large = exact + (torch.log(relative.float() / exact) / math.log(far / exact) * (num - exact)).to(torch.long)
    return found + torch.where(relative < exact, relative, torch.min(large, torch.full_like(large, num - 1)))


class Biased(nn.Module):
    """softmax(q k^T + bias) v with a bias of ``form(self, q, k)``."""

    def __init__(self, form: Callable[[Biased, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.table = nn.Embedding(32, 4)
        self.heads = nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("ids", torch.randint(0, 32, (LENGTH, LENGTH)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT + self.form(self, q, k), -1) @ v


def positions(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]


def t5(m: Biased, q: Tensor, k: Tensor) -> Tensor:
    return m.table(buckets(positions(q, k))).permute(2, 0, 1).unsqueeze(0)


FORMS: dict[str, Callable[[Biased, Tensor, Tensor], Tensor]] = {
    "t5": t5,
    "one way": lambda m, q, k: m.table(buckets(positions(q, k), both=False)).permute(2, 0, 1),
    "clipped": lambda m, q, k: m.table.weight[positions(q, k).clamp(-15, 16) + 15].permute(2, 0, 1)[None],
    "last queries": lambda m, q, k: m.table(buckets(positions(k, k)[-q.shape[2] :])).permute(2, 0, 1),
    "scaled": lambda m, q, k: t5(m, q, k) * m.heads + 1.0,
    "times a factor of the query": lambda m, q, k: t5(m, q, k) * torch.arange(q.shape[2])[:, None].sin(),
    "of the sine": lambda m, q, k: torch.sin(positions(q, k).float() * 0.1)[None] * torch.exp(m.heads),
}


@pytest.mark.parametrize(("name", "queries"), [*((name, LENGTH) for name in FORMS), ("t5", 513), ("last queries", 520)])
def test_values_and_gradients(name: str, queries: int, seen: list[Any]) -> None:
    torch.manual_seed(0)
    model = Biased(FORMS[name])
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 4, LENGTH, 8), torch.randn(2, 4, LENGTH, 8)
    weight = torch.randn(2, 4, queries, 8)

    def step(f: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        out = f(q, k, v)
        (out * weight).sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    want = step(model)
    got = step(torch.compile(model, backend="fa_inductor", options={"kernel": "reference"}))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * float(b.abs().max()))
    assert len(seen) == 1
    program, captures = seen[0]
    dense = [c for c in captures if len(c) > 1 and c[-2:] == (queries, LENGTH)]
    if name == "of the sine":
        # A few calls of the positions: the kernel computes them.
        assert not dense
    else:
        assert "q_idx % 128" in program
        assert not dense


def test_layers_share_the_vector(seen: list[Any]) -> None:
    model = Biased(t5)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = t5(model, q, k)
        x = torch.softmax(q @ k.mT + bias, -1) @ v
        return torch.softmax(x @ k.mT + bias, -1) @ v

    graphs = []
    plain = capture_layout._Builder.tensor

    def counted(self: Any, found: Any) -> Any:
        graphs.append(found)
        return plain(self, found)

    capture_layout._Builder.tensor = counted  # type: ignore[method-assign]
    try:
        x = [torch.randn(1, 4, LENGTH, 8) for _ in range(3)]
        torch.testing.assert_close(
            torch.compile(f, backend="fa_inductor", options={"kernel": "reference"})(*x), f(*x), rtol=1e-4, atol=1e-4
        )
    finally:
        capture_layout._Builder.tensor = plain  # type: ignore[method-assign]
    assert len(seen) == 2
    assert len(graphs) == 1


def test_run_time_lengths(seen: list[Any]) -> None:
    model = Biased(t5)
    f = torch.compile(model, backend="fa_inductor", options={"kernel": "reference"}, dynamic=True)
    for queries, keys in ((600, 600), (700, 650), (257, 1030)):
        q, k, v = torch.randn(1, 4, queries, 8), torch.randn(1, 4, keys, 8), torch.randn(1, 4, keys, 8)
        torch.testing.assert_close(f(q, k, v), model(q, k, v), rtol=1e-4, atol=1e-4)
    assert "q_idx % 128" in seen[-1][0]


OTHERS: dict[str, Callable[[Biased, Tensor, Tensor], Tensor]] = {
    "positions from data": lambda m, q, k: m.table(m.ids).permute(2, 0, 1),
    "sum of positions": lambda m, q, k: m.table((positions(q, k).abs() * 0 + torch.arange(k.shape[2]) + 1) % 32).permute(2, 0, 1),
    "twice the queries": lambda m, q, k: m.table(
        buckets(torch.arange(k.shape[2])[None] - 2 * torch.arange(q.shape[2])[:, None])
    ).permute(2, 0, 1),
    "rows shuffled": lambda m, q, k: t5(m, q, k)[:, :, torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(0))],
    "without gradient": lambda m, q, k: t5(m, q, k).detach() + m.heads,
    "dropout": lambda m, q, k: F.dropout(t5(m, q, k), 1e-7),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str, seen: list[Any]) -> None:
    torch.manual_seed(0)
    model = Biased(OTHERS[name])
    x = [torch.randn(1, 4, LENGTH, 8) for _ in range(3)]
    want = model(*x)
    want.sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = torch.compile(model, backend="fa_inductor", options={"kernel": "reference"})(*x)
    got.sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    for p, g in zip(model.parameters(), grads, strict=True):
        if g is not None and p.grad is not None:
            torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-3)
    assert not any("q_idx % 128" in program for program, _ in seen)
