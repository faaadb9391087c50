"""A view that is recorded on the tape is the one that ``make_fx`` records, node for node."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.fuzz import Choices
from fa_inductor.view import builder
from fa_inductor.view.aten_view import AtenView
from tests.fuzz.generate import generate
from tests.fuzz.running import arguments, valid
from tests.fuzz.tracing import trace


def recorded(gm: fx.GraphModule, how: Callable) -> AtenView:
    inputs = [builder._example(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return builder._build(gm, inputs, builder._tensor_attributes(gm), builder._fake_mode(gm), how)


def told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # One element has no next one: there eager code and torch's Python rules differ in their strides, to no effect.
        strides = [s if n > 1 else 0 for n, s in zip(value.shape, value.stride(), strict=True)]
        return tuple(value.shape), strides, value.storage_offset(), value.dtype, value.device
    return [told(x) for x in value] if isinstance(value, (tuple, list)) else value


def lines(view: AtenView) -> list[tuple]:
    names = {n: f"%{i}" for i, n in enumerate(view.graph.nodes)}
    inside = lambda args: str(fx.map_arg(args, lambda a: names[a]))  # noqa: E731
    origin = lambda n: (o.path, o.node.name, o.clock, o.grad_enabled) if (o := view.origin.get(n)) else None  # noqa: E731
    return [
        (n.name, n.op, n.target, inside(n.args), inside(n.kwargs), told(n.meta.get("val")), origin(n))
        for n in view.graph.nodes
        if n.op != "output"
    ]


def held(view: AtenView) -> list[tuple]:
    """Which ATen node every Dynamo value holds, and since when."""
    name = lambda n: None if n is None else n.name  # noqa: E731
    return [
        (path, node.name, [(clock, {i: name(n) for i, n in leaves.items()}) for clock, leaves in past])
        for (path, node), past in view._history.items()
    ]


def compare(gm: fx.GraphModule) -> None:
    assert builder._known_sizes(gm)
    tape, other = recorded(gm, builder._on_tape), recorded(gm, builder._by_make_fx)
    assert lines(tape) == lines(other)
    assert held(tape) == held(other)
    assert str(tape.graph.output_node().args) == str(other.graph.output_node().args)
    for n in tape.graph.find_nodes(op="get_attr"):
        assert torch.equal(getattr(tape.graph.owning_module, n.target), getattr(other.graph.owning_module, n.target))


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_random_graphs(start: int) -> None:
    compared = 0
    for i in range(start, start + 30):
        example = generate(Choices(source=random.Random(f"view/{i}")))
        if valid(example):
            compare(trace(example.function(), arguments(example)))
            compared += 1
    assert compared > 20


def captured(fn: Callable, *args: Any, **options: Any) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm) or gm.forward, **options)(*args)
    return graphs[0]


def scores(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1)


def in_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return scores(x) @ x


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: scores(y) @ y, x, use_reentrant=False)


def by_name(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def packed(x: torch.Tensor) -> torch.Tensor:
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    weights = [p.detach() for p in (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)]
    y = x[0].transpose(0, 1)
    return torch.nn.functional.multi_head_attention_forward(y, y, y, 8, 2, *weights[:2], None, None, False, 0.0, *weights[2:])[0]


def written(x: torch.Tensor) -> torch.Tensor:
    s = x @ x.mT
    s[..., 0] += 1
    s.mul_(0.5)
    return s.softmax(-1) @ x.detach()


def looked_up(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0.5, 1.5])
    rows, columns = torch.arange(6)[:, None], torch.arange(6)
    return (x @ x.mT + table[(rows - columns).clamp(0, 1)]).softmax(-1) @ x


@pytest.mark.parametrize("fn", [in_autocast, checkpointed, by_name, written, looked_up], ids=lambda f: f.__name__)
def test_graphs_of_dynamo(fn: Callable) -> None:
    compare(captured(fn, torch.randn(2, 3, 6, 8, requires_grad=True), dynamic=False))


def test_multi_head_attention() -> None:
    compare(captured(packed, torch.randn(2, 3, 6, 8), dynamic=False))


def test_sizes_of_run_time_are_not_for_the_tape() -> None:
    gm = captured(lambda x: scores(x) @ x, torch.randn(2, 3, 6, 8), dynamic=True)
    assert not builder._known_sizes(gm)
    assert any("softmax" in str(n.target) for n in builder.build(gm).graph.nodes)


def test_what_the_tape_cannot_record_is_recorded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = captured(written, torch.randn(2, 3, 6, 8), dynamic=False)
    wanted = lines(builder.build(gm))
    monkeypatch.setattr(builder, "is_inplace", lambda _: False)  # so that no functional mode is there when the writes come
    inputs = [builder._example(n) for n in gm.graph.nodes if n.op == "placeholder"]
    with pytest.raises(builder.ViewError, match="Unfit"):
        builder._build(gm, inputs, [], builder._fake_mode(gm), builder._on_tape)
    assert lines(builder.build(gm)) == wanted
