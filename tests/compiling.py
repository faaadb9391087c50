"""Compiling in tests without code generation: the final graph runs op by op, a compile takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

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


def _leaves(inputs: tuple[Any, ...]) -> list[Any]:
    """Copies that share memory where the inputs do."""
    storages = {x.untyped_storage().data_ptr(): x for x in inputs if isinstance(x, Tensor)}
    copies = {p: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone()) for p, x in storages.items()}
    return [
        copies[x.untyped_storage().data_ptr()]
        .as_strided(x.shape, x.stride(), x.storage_offset())
        .detach()
        .requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in inputs
    ]


def _run(fn: Callable, inputs: list[Any]) -> list[tuple[str, Tensor | None]]:
    """Outputs, inputs afterwards, and gradients of inputs and parameters under fixed random weights of the outputs."""
    torch.manual_seed(0)
    out = fn(*inputs)
    outputs = list(out) if isinstance(out, (tuple, list)) else [out]
    found: list[tuple[str, Tensor | None]] = [(f"output {i}", o.detach().clone()) for i, o in enumerate(outputs)]
    found += [(f"input {i}", x.detach().clone()) for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    for p in parameters:
        p.grad = None
    trained = [o for o in outputs if o.requires_grad]
    if trained:
        g = torch.Generator().manual_seed(1)
        torch.autograd.backward(trained, [torch.randn(o.shape, generator=g).to(o.dtype) for o in trained])
    found += [(f"gradient of input {i}", x.grad) for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    return found + [(f"gradient of parameter {i}", copied(p.grad)) for i, p in enumerate(parameters)]


def copied(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def agree(fn: Callable, *inputs: Any, fused: int | None = 1, backend: Fusing | None = None, **how: Any) -> Fusing:
    """Compile ``fn`` and compare with eager: outputs, what was written into inputs, gradients. Use float64 inputs.

    A module must not keep state. Gives the backend, for its report.
    """
    compiled, backend = fuse(fn, backend, **how)
    ours, theirs = _leaves(inputs), _leaves(inputs)
    got, expected = _run(compiled, ours), _run(fn, theirs)
    assert fused is None or backend.fused == fused, f"fused {backend.fused} of {fused}: {backend.reasons}"
    for (name, g), (_, e) in zip(got, expected, strict=True):
        assert (g is None) == (e is None), f"{name}: {g} instead of {e}"
        if g is not None and e is not None:
            torch.testing.assert_close(g, e, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    return backend


def normal(*shape: int, grad: bool = True) -> Tensor:
    """A float64 leaf."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)
