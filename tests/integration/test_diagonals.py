"""Position biases that are the same along every diagonal are captured as one vector; everything else stays what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from fa_inductor import capture_layout, rewrite
from fa_inductor.config import Options
from fa_inductor.graph_pass import AttentionPass

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


# ------------------------------------------------------------------------------------ sharing, sub-graphs, what cannot be built
def check(
    f: Callable[..., Any], x: list[Tensor], parameters: list[Tensor], dynamic: bool | None = None, error: float = 1e-3
) -> None:
    """Outputs and gradients of ``f``, rewritten and run by ATen's kernels, against eager."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        AttentionPass(Options(kernel="reference"))(gm)
        return aot_eager(gm, inputs)

    def step(g: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in x]
        out = g(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), [*leaves, *parameters])]

    for a, b in zip(step(torch.compile(f, backend=backend, dynamic=dynamic)), step(f), strict=True):
        torch.testing.assert_close(a, b, rtol=error, atol=error * float(b.abs().max()))


def qkv(queries: int = 520, keys: int = 560) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 4, n, 8) for n in (queries, keys, keys)]


@torch.compiler.nested_compile_region
def region(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + F.embedding(at, table).permute(2, 0, 1), -1) @ v


def test_calls_of_one_region_with_other_positions(seen: list[Any]) -> None:
    """Only the first call's positions are differences."""
    model = Biased(t5)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = positions(q, k) % 32
        other = (at * 3 + 7 * torch.arange(q.shape[2])[:, None]) % 32
        return region(q, k, v, model.table.weight, at) + region(q, k, v, model.table.weight, other)

    check(f, qkv(), [model.table.weight])


def test_results_in_another_order_than_their_softmaxes(seen: list[Any]) -> None:
    model = Biased(t5)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = t5(model, q, k)
        first, second = torch.softmax(q @ k.mT + bias, -1), torch.softmax(2 * q @ k.mT + bias, -1)
        later = second @ v
        return first @ v + 2 * later

    check(f, qkv(), [model.table.weight])
    assert ["q_idx % 128" in program for program, _ in seen] == [True, True]


FLAT: dict[str, Callable[[Biased, Tensor, Tensor], Tensor]] = {
    "rows": lambda m, q, k: m.table.weight[buckets(positions(q, k)).view(-1)].view(q.shape[2], k.shape[2], 4).permute(2, 0, 1),
    "columns": lambda m, q, k: m.table.weight.T[:, buckets(positions(q, k)).view(-1)].view(4, q.shape[2], k.shape[2]),
}


@pytest.mark.parametrize("name", FLAT)
def test_pairs_in_one_dimension(name: str, seen: list[Any]) -> None:
    model = Biased(FLAT[name])
    check(model, qkv(), [model.table.weight])
    assert ["q_idx % 128" in program for program, _ in seen] == [name == "rows"]


def spread(number: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return number.expand(q.shape[2], k.shape[2])


PROMOTED: dict[str, Callable[[Biased, Tensor, Tensor], Tensor]] = {
    # 300 is no int8: with dimensions the number decides what dtype is compared in.
    "integers": lambda m, q, k: t5(m, q, k).where((positions(q, k) % 90).to(torch.int8) == spread(m.number, q, k), -1.0),
    "one row for all": lambda m, q, k: t5(m, q, k) * m.table(spread(m.number - 290, q, k)).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_dtypes_of_numbers_with_dimensions(name: str, seen: list[Any]) -> None:
    model = Biased(PROMOTED[name])
    model.register_buffer("number", torch.tensor(300))
    check(model, qkv(), [model.table.weight])
    assert ["q_idx % 128" in program for program, _ in seen] == [True]


def test_what_cannot_be_built_is_captured_whole(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Any, node: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(capture_layout._Builder, "_same_dtype", staticmethod(fail))
    model = Biased(FORMS["scaled"])
    check(model, qkv(), [model.table.weight, model.heads])
    assert len(seen) == 1
    assert "q_idx % 128" not in seen[0][0]


@pytest.mark.parametrize(("queries", "dynamic"), [(1, True), (3, True)])
def test_few_queries_need_no_rows(queries: int, dynamic: bool | None, seen: list[Any]) -> None:
    """A tensor of diagonals has 128 rows, which would be many times what one or three queries need."""
    model = Biased(t5)
    check(model, qkv(queries, 900), [model.table.weight], dynamic)
    assert seen
    assert not any("q_idx % 128" in program for program, _ in seen)
