"""The testing mode: every recognised site is rewritten whatever the device, and runs the dense reference kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fa_inductor.backend import compile_with
from fa_inductor.config import Options

__all__ = ["make"]


def make(inner_compile: Callable | None = None) -> tuple[Callable[[fx.GraphModule, list[Any]], Callable], Callable[[], int]]:
    """(torch.compile backend in testing mode, function giving the number of attentions it has fused so far).

    Args:
        inner_compile: replaces Inductor's code generation, for instance by an eager runner of the final graph.
    """
    fused = 0

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable:
        nonlocal fused
        compiled, result = compile_with(gm, example_inputs, Options(kernel="reference"), {}, inner_compile)
        fused += result.fused
        return compiled

    return backend, lambda: fused
