"""The models of benchmarks/generate.py, small and on the CPU: one graph for every step, each attention fused, eager's tokens."""

from __future__ import annotations

import pytest
import torch

from benchmarks import _packed, generate
from tests.compiling import Fusing


@pytest.mark.parametrize("library", ["torch", "transformers"])
@pytest.mark.parametrize("spelling", ["eager", "sdpa"])
def test_one_graph_for_every_step(spelling: str, library: str) -> None:
    if library == "transformers":
        pytest.importorskip("transformers")
    torch._dynamo.reset()
    model, backend = generate.build(64, 2, spelling, "cpu", True, library), Fusing()
    ids = torch.arange(2)[:, None]
    with torch.no_grad():
        ours = generate.generate(model, torch.compile(model, backend=backend), ids, 50, 6)
        theirs = generate.generate(model, model, ids, 50, 6)
    assert torch.equal(ours, theirs)
    assert len(backend.graphs) == 1
    assert backend.fused == 2, backend.reasons


def test_documents_fill_the_sequence() -> None:
    lengths = _packed.lengths(32768)
    assert sum(lengths) == len(_packed.ids(32768)) == 32768
    assert _packed.kept(32768) == sum(n * (n + 1) // 2 for n in lengths)
    assert lengths[:3] == [912, 1133, 2206]  # the same wherever and whenever they are asked for
