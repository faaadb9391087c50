"""Runs one function three ways (eager, eager in float64, compiled by fa_inductor) and compares outputs and gradients.

The budget of a compiled value is twice the error that eager itself makes against float64, plus a rounding band of the
dtype. NaN must appear exactly where eager has it. In 16 bits a sum that cancels, as the gradient of one factor of all scores, is
off by chance, and eager code may have had luck: what is a little over the budget there is judged by the root mean square of the
errors over other draws of the arguments, by the same rule. Arguments are passed through :func:`copy_args`, which keeps aliasing:
two arguments that are one tensor, or views of one storage, stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fa_inductor.backend import compile_with
from fa_inductor.config import Options
from fa_inductor.graph_pass import AttentionPass
from fa_inductor.report import SiteReport
from tests.fuzz.tracing import trace

#: Rounding band by dtype, relative to the largest magnitude of the value compared.
BANDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

#: Draws of other arguments where a 16-bit value is at most ``NEAR`` times its budget off.
DRAWS, NEAR = 24, 4.0


class WrongValue(AssertionError):
    """The compiled function returned something else than eager."""


@dataclass
class Outcome:
    """Outputs, gradients of the arguments that require them, and the arguments after the call."""

    outputs: list[Tensor]
    grads: list[Tensor | None]
    after: list[Tensor]


@dataclass
class Compiled:
    """A backend that counts: ``sites`` are the reports of all graphs it saw, ``redrawn`` the calls that other draws had to judge.

    ``full``: through AOTAutograd; ``codegen``: and through Inductor's code generation.
    """

    full: bool = True
    options: Options = field(default_factory=lambda: Options(kernel="reference"))
    codegen: bool = False
    sites: list[SiteReport] = field(default_factory=list)
    redrawn: int = 0

    @property
    def fused(self) -> int:
        return sum(s.status == "fused" for s in self.sites)

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable:
        """The pass, then all of Inductor, AOTAutograd without code generation, or the rewritten graph as it is."""
        if self.full or self.codegen:
            inner = None if self.codegen else run_eagerly
            compiled, result = compile_with(gm, example_inputs, self.options, {}, inner)
        else:
            result = AttentionPass(self.options)(gm)
            compiled = gm.forward
        self.sites += result.sites
        return compiled


def run_eagerly(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable:
    """An inner compile for AOTAutograd that runs its graph node by node."""

    def run(args: list[Any]) -> Any:
        own = list(args)
        args.clear()
        return gm.forward(*own)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _as(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t.to(dtype) if dtype is not None and t.is_floating_point() else t


def copy_args(args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Fresh copies with the same strides, aliasing and requires_grad; floats as ``dtype`` where one is given."""
    bases: dict[int, Tensor] = {}
    same: dict[int, Tensor] = {}
    out: list[Any] = []
    for a in args:
        if not isinstance(a, Tensor):
            out.append(a)
            continue
        if id(a) not in same:
            storage = a.untyped_storage()
            key = storage.data_ptr()
            if key not in bases:
                whole = torch.empty(0, dtype=a.dtype, device=a.device).set_(storage, 0, (storage.nbytes() // a.element_size(),))
                bases[key] = _as(whole.clone(), dtype)
            copy = bases[key].as_strided(a.shape, a.stride(), a.storage_offset()).detach()
            same[id(a)] = copy.requires_grad_(a.requires_grad)
        out.append(same[id(a)])
    return out


def _seed(seed: int) -> None:
    """As ``torch.manual_seed``, which is slow where it puts off to seed a GPU that nobody uses."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def call(fn: Callable, args: Sequence[Any], seed: int = 0) -> Outcome:
    """``fn(*args)`` and the gradients of its float outputs against fixed random cotangents."""
    _seed(seed)
    result = fn(*args)
    outputs = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor)]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    gen = torch.Generator("cpu").manual_seed(1)
    loss: Tensor | None = None
    for t in outputs:
        if not t.is_floating_point():
            continue
        weight = torch.randn(t.shape, generator=gen, dtype=torch.float64, device="cpu").to(t.device)
        if t.requires_grad:
            part = (t.double() * weight).sum()
            loss = part if loss is None else loss + part
    grads: list[Tensor | None] = []
    if leaves and loss is not None:
        grads = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return Outcome([t.detach() for t in outputs], grads, [a.detach() for a in args if isinstance(a, Tensor)])


@dataclass(frozen=True)
class Gap:
    """Largest errors of one value against float64, of ``got`` and of eager code, and the magnitude its band is relative to."""

    what: str
    error: float
    eager: float
    scale: float

    def budget(self, dtype: torch.dtype) -> float:
        return 2.0 * self.eager + BANDS.get(dtype, 2e-5) * self.scale


def _gap(what: str, got: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype) -> Gap:
    """Raises :class:`WrongValue` for any difference but a finite error."""
    if got.shape != eager.shape or got.dtype != eager.dtype:
        raise WrongValue(f"{what}: {got.dtype} {tuple(got.shape)}, eager has {eager.dtype} {tuple(eager.shape)}")
    if not got.is_floating_point():
        if not torch.equal(got, eager):
            raise WrongValue(f"{what}: integer or bool values differ")
        return Gap(what, 0.0, 0.0, 1.0)
    g, e, x = got.double(), eager.double(), exact.double()
    if not torch.equal(e.isfinite(), x.isfinite()):
        # The dtype itself overflows here: eager is no measure, only what both references agree on counts.
        known = e.isfinite() & x.isfinite()
        g, e, x = g[known], e[known], x[known]
        if not bool(g.isfinite().all()):
            raise WrongValue(f"{what}: not finite where eager is, in {dtype} and in float64")
    elif not torch.equal(g.isnan(), e.isnan()):
        raise WrongValue(f"{what}: {int(g.isnan().sum())} NaN, eager has {int(e.isnan().sum())}, of {g.numel()}")
    finite = e.isfinite() & x.isfinite()
    if not torch.equal(g[~finite & ~e.isnan()], e[~finite & ~e.isnan()]):
        raise WrongValue(f"{what}: infinities differ")
    g, e, x = g[finite], e[finite], x[finite]
    if not g.numel():
        return Gap(what, 0.0, 0.0, 1.0)
    scale = max(float(x.abs().max()), 1.0)  # arguments and cotangents are of order 1, sums of them cancel
    error = float((g - x).abs().max())
    return Gap(what, math.inf if math.isnan(error) else error, float((e - x).abs().max()), scale)


def same(got: Outcome, eager: Outcome) -> bool:
    """Whether nothing differs, bit for bit, and nothing is NaN: then nothing is off by more than eager is."""
    pairs = [*zip(got.outputs, eager.outputs, strict=False), *zip(got.after, eager.after, strict=False)]
    pairs += [(g, e) for g, e in zip(got.grads, eager.grads, strict=False)]  # type: ignore[misc]
    lengths = [(len(o.outputs), len(o.after), len(o.grads)) for o in (got, eager)]
    return lengths[0] == lengths[1] and all(
        g is e is None or (g is not None and e is not None and g.dtype == e.dtype and torch.equal(g, e)) for g, e in pairs
    )


def gaps(got: Outcome, eager: Outcome, exact: Outcome, dtype: torch.dtype) -> list[Gap]:
    """The errors of all values; raises :class:`WrongValue` for any difference but a finite error."""
    if len(got.outputs) != len(eager.outputs):
        raise WrongValue(f"{len(got.outputs)} outputs, eager has {len(eager.outputs)}")
    found = []
    for i, (g, e, x) in enumerate(zip(got.outputs, eager.outputs, exact.outputs, strict=True)):
        found.append(_gap(f"output {i}", g, e, x, dtype))
    for i, (a, b, x) in enumerate(zip(got.after, eager.after, exact.after, strict=True)):
        found.append(_gap(f"argument {i} after the call", a, b, x, dtype))
    if len(got.grads) != len(eager.grads):
        raise WrongValue("some gradients are missing or too many")
    # What cancels in one gradient is of the order of the others: with one key that of q is 0, and of v the cotangents' sum. In 16
    # bits other draws tell.
    known = [x for x in exact.grads if x is not None and dtype.itemsize > 2]
    largest = max(map(_largest, known), default=0.0)
    for i, (ga, ea, xa) in enumerate(zip(got.grads, eager.grads, exact.grads, strict=True)):
        if (ga is None) != (ea is None):
            # A gradient of zeros and none at all are the same to an optimiser step.
            other = ga if ga is not None else ea
            if other is not None and bool((other != 0).any()):
                raise WrongValue(f"gradient {i}: {'missing' if ga is None else 'unexpected'}")
            continue
        if ga is not None and ea is not None and xa is not None:
            gap = _gap(f"gradient {i}", ga, ea, xa, dtype)
            found.append(replace(gap, scale=max(gap.scale, largest)))
    return found


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    return float(x.detach().abs().nan_to_num(0.0, 0.0).max()) if x.numel() else 0.0


def compare(found: Sequence[Gap], dtype: torch.dtype, among: str = "") -> None:
    """Raises :class:`WrongValue` for the first that is over its budget."""
    for gap in found:
        budget = gap.budget(dtype)
        if not gap.error <= budget:
            text = f"error {gap.error:.3e} against float64, budget {budget:.3e}, eager {gap.eager:.3e}"
            raise WrongValue(f"{gap.what}: {text}{among}")


def near(found: Sequence[Gap], dtype: torch.dtype) -> bool:
    """Whether other draws are to say how far off values are: in 16 bits, where none is far over its budget."""
    return dtype.itemsize == 2 and all(gap.error <= NEAR * gap.budget(dtype) for gap in found)


def _mean(draws: Sequence[Sequence[Gap]]) -> list[Gap]:
    """The root mean square over draws, value by value."""
    rms = lambda xs: math.sqrt(sum(x * x for x in xs) / len(xs))  # noqa: E731
    by_name: dict[str, list[Gap]] = {}
    for gap in (gap for draw in draws for gap in draw):
        by_name.setdefault(gap.what, []).append(gap)
    return [
        Gap(name, rms([g.error for g in of]), rms([g.eager for g in of]), rms([g.scale for g in of]))
        for name, of in by_name.items()
    ]


def check(
    fn: Callable,
    args: Sequence[Any],
    *,
    exact_fn: Callable | None = None,
    dtype: torch.dtype = torch.float32,
    dynamic: bool | None = False,
    full: bool = True,
    more: Sequence[Sequence[Any]] = (),
    made: Compiled | None = None,
    dynamo: bool = True,
    draw: Callable[[int], Sequence[Any]] | None = None,
) -> Compiled:
    """Compares ``fn`` compiled with ``fn`` eager on ``args``, then on each of ``more`` without compiling anew by hand.

    Args:
        exact_fn: what computes the float64 truth; ``fn`` itself on doubled arguments by default.
        full: through AOTAutograd; otherwise the rewritten graph runs as it is, which is quicker.
        made: the backend, where it is not the usual one.
        dynamo: False takes the graph from :mod:`tests.fuzz.tracing`, which is as Dynamo's and comes quicker.
        draw: other arguments of the same kind by a number; without it every value is held to its budget at once.

    Returns:
        the backend with its site reports.
    """
    made = made or Compiled(full)
    if dynamo:
        torch._dynamo.reset()
        compiled: Callable = torch.compile(fn, backend=made.backend, dynamic=dynamic)
    else:
        compiled = made.backend(trace(fn, copy_args(args)), list(args))

    def measured(given: Sequence[Any]) -> list[Gap]:
        eager, got = call(fn, copy_args(given)), call(compiled, copy_args(given))
        if same(got, eager) and not drawing:
            return []
        return gaps(got, eager, call(exact_fn or fn, copy_args(given, torch.float64)), dtype)

    drawing = False
    for given in (args, *more):
        found = measured(given)
        try:
            compare(found, dtype)
        except WrongValue:
            if draw is None or not near(found, dtype):
                raise
            drawing, made.redrawn = True, made.redrawn + 1
            compare(_mean([measured(draw(i + 1)) for i in range(DRAWS)]), dtype, f" (root mean squares of {DRAWS} draws)")
            drawing = False
    return made
