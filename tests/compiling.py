"""Compiling in tests without code generation: the final graph runs op by op, a compile takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fa_inductor.backend import compile_with
from fa_inductor.config import Options
from fa_inductor.graph_pass import AttentionPass
from fa_inductor.report import FusionReport, collecting, record_graph

TESTING = Options(kernel="reference")
"""Every recognised site is rewritten, whatever its size."""

Backend = Callable[[fx.GraphModule, list[Any]], Callable]


def run_eagerly(gm: fx.GraphModule, example_inputs: Any, **_: Any) -> Callable:
    """In place of Inductor's code generation: what joint-graph passes and the partitioner left, run op by op."""

    def run(args: list[Any]) -> Any:
        operands = list(args)
        args.clear()
        return gm.forward(*operands)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class Fusing:
    """A torch.compile backend: our pass, AOTAutograd, Inductor's graph passes, then :func:`run_eagerly`.

    ``graphs`` keeps the Dynamo graphs in the order of compilation, as the pass left them; ``report`` their sites.
    """

    def __init__(self, options: Options = TESTING, inductor: Mapping[str, Any] | None = None, autograd: bool = True):
        self.options, self.inductor, self.autograd = options, dict(inductor or {}), autograd
        self.graphs: list[fx.GraphModule] = []
        self.report = FusionReport()

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable:
        self.graphs.append(gm)
        with collecting() as report:
            compiled = self._compile(gm, example_inputs)
        self.report = self.report.merge(report)
        return compiled

    def _compile(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable:
        if self.autograd:
            return compile_with(gm, example_inputs, self.options, self.inductor, run_eagerly)[0]
        result = AttentionPass(self.options)(gm)
        record_graph(result.sites, result.seconds)
        return gm.forward

    @property
    def fused(self) -> int:
        return len(self.report.fused)

    @property
    def reasons(self) -> list[str]:
        """Why sites stayed unfused, in graph order."""
        return [site.reason for site in self.report.unfused]


def rewriting() -> Fusing:
    """A backend that rewrites the Dynamo graph and runs it as it is."""
    return Fusing(autograd=False)


def fuse(fn: Callable, backend: Fusing | None = None, **how: Any) -> tuple[Callable, Fusing]:
    """(``fn`` compiled with a :class:`Fusing` backend, that backend)."""
    backend = backend or Fusing()
    return torch.compile(fn, backend=backend, **how), backend
