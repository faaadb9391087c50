"""A failing example of the fuzzer as a program of its own: torch and fa_inductor are all it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PROGRAM = '''"""{title}

{error}

Found by: {command}
With: {versions}
This program says so again, with exit code 1, or that all is well. PYTHONPATH must lead to fa_inductor and its checkout.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import tensor

from fa_inductor import cpu_flash
from fa_inductor.backend import compile_with
from fa_inductor.config import Options
from fa_inductor.graph_pass import AttentionPass

inf, nan = math.inf, math.nan
DTYPE, BAND, DEVICE = {dtype}, {band!r}, {device!r}
OPTIONS = Options({options})
FULL, CODEGEN, DYNAMIC = {full!r}, {codegen!r}, {dynamic!r}
cpu_flash.BLOCK_M, cpu_flash.DENSE_M = {blocks!r}


def function(DT, WIDE):
    FMIN = torch.finfo(DTYPE).min
{source}
    return f


def arguments(dtype=None):
    made = [
{inputs}
    ]
    grads = {grads!r}
    kept = [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in made]
    return [x.to(DEVICE).requires_grad_(g) for x, g in zip(kept, grads)]


def run_eagerly(gm, example_inputs, **_):
    def run(args):
        own = list(args)
        args.clear()
        return gm.forward(*own)

    run._boxed_call = True
    return run


def backend(gm, example_inputs):
    if FULL or CODEGEN:
        compiled, result = compile_with(gm, example_inputs, OPTIONS, {{}}, None if CODEGEN else run_eagerly)
    else:
        result = AttentionPass(OPTIONS)(gm)
        compiled = gm.forward
    print(*result.sites, sep="\\n")
    return compiled


def call(fn, args):
    """Named results: outputs, arguments afterwards, gradients."""
    torch.manual_seed(0)
    result = fn(*args)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    leaves = [a for a in args if a.requires_grad]
    gen = torch.Generator("cpu").manual_seed(1)
    weights = [torch.randn(t.shape, generator=gen, dtype=torch.float64, device="cpu").to(t.device) for t in outputs]
    parts = [(t.double() * w).sum() for t, w in zip(outputs, weights) if t.requires_grad]
    grads = torch.autograd.grad(sum(parts), leaves, allow_unused=True) if parts and leaves else []
    found = {{f"output {{i}}": t for i, t in enumerate(outputs)}}
    found.update({{f"argument {{i}} after the call": a for i, a in enumerate(args)}})
    found.update({{f"gradient {{i}}": g for i, g in enumerate(grads)}})
    return {{name: None if t is None else t.detach().double() for name, t in found.items()}}


def fault(got, eager, exact):
    """What is wrong with one value, "" if nothing."""
    zero = torch.zeros(())
    got, eager, exact = (zero.to(DEVICE) if t is None else t for t in (got, eager, exact))
    if torch.equal(eager.isfinite(), exact.isfinite()) and not torch.equal(got.isnan(), eager.isnan()):
        return f"{{int(got.isnan().sum())}} NaN, eager has {{int(eager.isnan().sum())}}"
    finite = (eager.isfinite() & exact.isfinite()).broadcast_to(torch.broadcast_shapes(eager.shape, got.shape))
    got, eager, exact = (t.broadcast_to(finite.shape)[finite] for t in (got, eager, exact))
    if not got.numel():
        return ""
    budget = 2.0 * float((eager - exact).abs().max()) + BAND * max(float(exact.abs().max()), 1.0)
    error = float((got - exact).abs().max())
    return "" if error <= budget else f"error {{error:.3e}} against float64, budget {{budget:.3e}}"


def main():
    wide = torch.float32 if DTYPE.itemsize < 8 else torch.float64
    fn = function(DTYPE, wide)
    exact = call(function(torch.float64, torch.float64), arguments(torch.float64))
    eager = call(fn, arguments())
    torch._dynamo.reset()
    got = call(torch.compile(fn, backend=backend, dynamic=DYNAMIC), arguments())
    faults = {{name: fault(got[name], eager[name], exact[name]) for name in eager}}
    faults = {{name: text for name, text in faults.items() if text}}
    for name, text in faults.items():
        print(f"{{name}}: {{text}}")
    print("WRONG" if faults else "all is well")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
'''


def _literal(t: Tensor) -> str:
    return f"        tensor({t.detach().cpu().tolist()!r}, dtype={t.dtype}, device='cpu'),"


def program(
    case: Any, arguments: list[Tensor], error: str, command: str, versions: str, band: float, device: str
) -> str:
    """The text of the program for ``case``, a :class:`benchmarks.fuzz.Case`."""
    example = case.example
    options = ", ".join(f"{name}={value!r}" for name, value in case.options.items())
    return _PROGRAM.format(
        title="A graph that fa_inductor computes wrongly, or fails to compile, as the fuzzer left it.",
        error=error.replace("\\", "\\\\").replace('"""', "'''"),
        command=command,
        versions=versions,
        dtype=example.dtype,
        band=band,
        device=device,
        options=options,
        full=case.through.whole,
        # The program launches no kernel itself: on a GPU only generated code does.
        codegen=case.through.codegen or device == "cuda",
        dynamic=example.dynamic,
        blocks=case.blocks,
        source="\n".join("    " + line for line in example.placed(device).source.rstrip().splitlines()),
        inputs="\n".join(_literal(t) for t in arguments),
        grads=[t.requires_grad for t in arguments],
    )


def versions() -> str:
    """What the failure was seen on."""
    import platform

    import fa_inductor

    return f"fa_inductor {fa_inductor.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
