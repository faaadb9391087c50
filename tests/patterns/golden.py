"""Golden texts of rewritten graphs.

Renew them with ``EXPECTTEST_ACCEPT=1 pytest tests/patterns`` and read the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expecttest import TestCase
from torch import Tensor

from tests.compiling import fuse, rewriting
from tests.patterns.forms import FORMS, HEADS, Draw
from tests.patterns.printing import graph_text

#: What is left of a form of which the call takes the operands and gives the output as they are.
CALL = """\
k: f32[2, {kv_heads}, 14, 8]
q: f32[2, 4, 10, 8]
v: f32[2, {kv_heads}, 14, 8]
attention = flash_attention(q, k, v)
{program}
item = attention[0]: f32[2, 4, 10, 8]
clone = clone(item): f32[2, 4, 10, 8]
return clone
"""


class GoldenCase(TestCase):
    maxDiff = None

    def text(self, fn: Callable, *inputs: Any) -> str:
        compiled, backend = fuse(fn, rewriting())
        compiled(*inputs)
        assert not backend.reasons, backend.reasons
        (graph,) = backend.graphs
        return graph_text(graph)

    def form(self, name: str, expected: str) -> None:
        self.assertExpectedInline(self.form_text(name), expected, skip=1)

    def call(self, name: str, expected: str, kv_heads: int = HEADS) -> None:
        """The program of a form that becomes one call and nothing beside it."""
        text = self.form_text(name)
        program = next(line for line in text.splitlines() if line.startswith("    "))
        assert text == CALL.format(kv_heads=kv_heads, program=program)
        self.assertExpectedInline(program.strip() + "\n", expected, skip=1)

    def form_text(self, name: str) -> str:
        inputs = [x.float() if x.is_floating_point() else x for x in FORMS[name].draw(Draw())]
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        return self.text(FORMS[name].make(), *inputs)

    def qkv(self) -> list[Tensor]:
        return [x.float() for x in Draw().qkv()]
