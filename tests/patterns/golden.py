"""Golden texts of rewritten graphs.

Renew them with ``EXPECTTEST_ACCEPT=1 pytest tests/patterns`` and read the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expecttest import TestCase
from torch import Tensor

from tests.compiling import fuse, rewriting
from tests.patterns.forms import FORMS, Draw
from tests.patterns.printing import graph_text


class GoldenCase(TestCase):
    maxDiff = None

    def text(self, fn: Callable, *inputs: Any) -> str:
        compiled, backend = fuse(fn, rewriting())
        compiled(*inputs)
        assert not backend.reasons, backend.reasons
        (graph,) = backend.graphs
        return graph_text(graph)

    def form(self, name: str, expected: str) -> None:
        inputs = [x.float() if x.is_floating_point() else x for x in FORMS[name].draw(Draw())]
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        self.assertExpectedInline(self.text(FORMS[name].make(), *inputs), expected, skip=1)

    def qkv(self) -> list[Tensor]:
        return [x.float() for x in Draw().qkv()]
