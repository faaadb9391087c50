"""Values and gradients of every form against float64 eager.

The bound of each tensor is twice the error that eager code of the same precision makes, plus a rounding band: one
rounding of the largest value in bfloat16; in float32 sixteen, since a sum of a few hundred terms may be taken in
another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiling import Fusing, fuse
from tests.patterns.forms import FORMS, Draw, Form

DTYPES = [torch.float32, torch.bfloat16]
BAND = {torch.float32: 16, torch.bfloat16: 1}


def run(form: Form, fn: Callable, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Outputs, and gradients of inputs and parameters under fixed random weights of the outputs."""
    leaves = [
        x.detach().clone().requires_grad_(i not in form.frozen) if is_float(x) else x for i, x in enumerate(inputs)
    ]
    outputs = fn(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = dict(fn.named_parameters()) if isinstance(fn, nn.Module) else {}
    named = {name.removeprefix("_orig_mod."): p for name, p in named.items()}
    for p in named.values():
        p.grad = None
    weights = [Draw(i).normal(*o.shape).to(o.dtype) for i, o in enumerate(outputs)]
    torch.autograd.backward(outputs, weights)
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"grad of input {i}": x.grad for i, x in enumerate(leaves) if is_float(x) and x.requires_grad}
    return found | {f"grad of {name}": p.grad.clone() for name, p in named.items()}


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def error(x: Tensor, truth: Tensor) -> float:
    """Largest absolute difference; infinite where only one of the two is finite."""
    same = (x.double() == truth) | (x.isnan() & truth.isnan())
    return torch.where(same, 0.0, (x.double() - truth).abs()).nan_to_num(nan=float("inf")).max().item()


def check(form: Form, dtype: torch.dtype, backend: Fusing, **how: Any) -> None:
    fn = form.make()
    module = isinstance(fn, nn.Module)
    inputs = tuple(x.to(dtype) if is_float(x) else x for x in form.draw(Draw()))
    exact_inputs = tuple(x.double() if is_float(x) else x for x in inputs)
    low = fn.to(dtype) if module else fn  # type: ignore[attr-defined]
    exact_fn = copy.deepcopy(low).double() if module else fn
    truth = run(form, exact_fn, exact_inputs)
    eager = run(form, low, inputs)
    compiled, _ = fuse(low, backend, **how)
    got = run(form, compiled, inputs)
    assert backend.fused == form.fused, f"fused {backend.fused} of {form.fused}: {backend.reasons}"
    assert got.keys() == truth.keys()
    for name, value in got.items():
        assert value.dtype == eager[name].dtype
        assert value.shape == eager[name].shape
        band = BAND[dtype] * torch.finfo(dtype).eps * truth[name].nan_to_num().abs().max().item()
        allowed = 2 * error(eager[name], truth[name]) + band
        assert error(value, truth[name]) <= allowed, f"{name}: {error(value, truth[name]):.3g} > {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, dtype: torch.dtype) -> None:
    check(FORMS[name], dtype, Fusing())
