"""The quick tracer writes the graphs that Dynamo writes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from benchmarks.fuzz import Choices
from tests.fuzz.generate import Example, generate
from tests.fuzz.running import arguments, valid
from tests.fuzz.tracing import trace


def told(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [told(x) for x in value]
    if not isinstance(value, Tensor):
        return None
    strides = [t if n > 1 else 0 for n, t in zip(value.shape, value.stride(), strict=True)]  # one element has no next one
    return tuple(value.shape), strides, value.dtype, value.requires_grad


def lines(gm: fx.GraphModule) -> list[tuple]:
    """What each node calls on which nodes and numbers, and what it gives; inputs and outputs are left out."""
    # Dynamo has the inputs in the order of their use, and under other names.
    calls = [n for n in gm.graph.nodes if n.op != "placeholder"]
    nodes = {n: told(n.meta["example_value"]) if n.op == "placeholder" else calls.index(n) for n in gm.graph.nodes}
    found = []
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "output"):
            continue
        given = [*n.args, *(x for _, x in sorted(n.kwargs.items()))]
        found.append((n.op, n.target, fx.map_arg(given, lambda a: f"node {nodes[a]}"), told(n.meta.get("example_value"))))
    return [(op, target, str(given), value) for op, target, given, value in found]


@pytest.mark.parametrize("start", [0, 20])
def test_graphs_are_those_of_dynamo(start: int) -> None:
    compared = 0
    for i in range(start, start + 20):
        example = generate(Choices(source=random.Random(f"tracing/{i}")))
        if not valid(example):
            continue
        given, graphs = arguments(example), []
        torch._dynamo.reset()
        torch.compile(example.function(), backend=lambda gm, _, g=graphs: g.append(gm) or gm.forward, dynamic=False)(*given)
        assert len(graphs) == 1
        assert lines(trace(example.function(), given)) == lines(graphs[0]), example.source
        compared += 1
    assert compared > 10


def test_a_branch_on_values_is_refused() -> None:
    with pytest.raises(TypeError, match="a branch on values"):
        trace(lambda x: x if x.sum() > 0 else -x, [torch.ones(2)])


def test_made_tensors_can_be_placed() -> None:
    line = "s = torch.where(torch.arange(3) > 1, torch.full((), -math.inf, dtype=s.dtype), s) + torch.zeros(2, 3).tril()"
    (placed,) = Example(lines=[line]).placed("meta").lines
    assert placed == (
        "s = torch.where(torch.arange(3, device='meta') > 1, torch.full((), -math.inf, dtype=s.dtype, device='meta'), s)"
        " + torch.zeros(2, 3, device='meta').tril()"
    )
