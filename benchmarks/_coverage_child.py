"""One row of the coverage table: a model, compiled by one side, in one mode and dtype, against float64.

Runs inside Inductor's own pipeline (Dynamo, pre-grad passes, AOTAutograd, decompositions, joint-graph passes,
partitioner). Only code generation is left out: the graphs that would be lowered are run op by op, which takes a
hundredth of the time and leaves every decision about fusion as it is.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks import zoo
from benchmarks.sitefinder import attention_sites, fused_calls

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIDES = ("builtin", "fa_inductor")
OUR_OP, TORCH_OP = "fa_inductor", "scaled_dot_product"
ROUNDING = {torch.float32: 64.0, torch.bfloat16: 4.0}
"""Units in the last place allowed beside four times eager's own error."""


@dataclass
class Seen:
    """What the graph hooks saw in one compilation: entry and exit of the joint-graph passes."""

    sites: int = 0
    sites_left: int = 0
    torch_ops_in: int = 0
    torch_ops_out: int = 0
    our_ops: int = 0
    graphs: int = 0
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watch(seen: Seen) -> Iterator[None]:
    """Count attentions at both ends of Inductor's joint-graph passes while the block runs."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    def entry(graph: torch.fx.Graph) -> None:
        seen.graphs += 1
        seen.sites += len(attention_sites(graph))
        seen.torch_ops_in += fused_calls(graph, TORCH_OP)
        seen.our_ops += fused_calls(graph, OUR_OP)

    def leave(graph: torch.fx.Graph) -> None:
        seen.sites_left += len(attention_sites(graph))
        seen.torch_ops_out += fused_calls(graph, TORCH_OP)

    with (
        inductor_config.patch(fx_graph_cache=False, joint_custom_pre_pass=entry, joint_custom_post_pass=leave),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def run_eagerly(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
    """Stands in for Inductor's code generation."""

    def boxed(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return gm.forward(*values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def backend_of(side: str) -> tuple[Callable[..., Any], Callable[[], int | None]]:
    """A torch.compile backend, and a function that returns the number of attentions that it has fused so far."""
    if side == "builtin":
        from torch._inductor.compile_fx import compile_fx

        return (lambda gm, inputs: compile_fx(gm, inputs, inner_compile=run_eagerly)), lambda: None
    from fa_inductor import testing

    return testing.make(inner_compile=run_eagerly)


@dataclass
class Outcome:
    """Floating-point outputs of one call, and in training the gradients of parameters and inputs by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def call(function: Any, built: tuple[Any, Any, Any], model: zoo.ZooModel, train: bool) -> Outcome:
    """One forward, and in training one backward with fixed random cotangents."""
    module, args, kwargs = built
    torch.manual_seed(3)
    if not train:
        with torch.no_grad():
            outputs = floats(function(*args, **kwargs))
        return Outcome({str(index): tensor for index, tensor in enumerate(outputs)}, {})
    args = tuple(
        value.detach().clone().requires_grad_() if position in model.grad_inputs else value
        for position, value in enumerate(args)
    )
    outputs = floats(function(*args, **kwargs))
    live = [tensor for tensor in outputs if tensor.requires_grad]
    cotangents = [
        # drawn once in bfloat16, so that every dtype pulls back the same numbers
        torch.randn(tensor.shape, generator=torch.Generator().manual_seed(40 + index)).bfloat16().to(tensor.dtype)
        for index, tensor in enumerate(live)
    ]
    torch.autograd.backward(live, cotangents)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    gradients.update({f"argument {position}": args[position].grad for position in model.grad_inputs})
    return Outcome({str(index): tensor.detach() for index, tensor in enumerate(outputs)}, gradients)


def floats(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def build(model: zoo.ZooModel, dtype: torch.dtype, train: bool, exact: bool = False) -> tuple[Any, Any, Any]:
    """Fresh module and inputs; ``exact`` widens the already rounded numbers to float64."""
    module, args, kwargs = model.build(dtype)
    if exact:
        module, args, kwargs = (zoo.base.cast(value, torch.float64) for value in (module, args, kwargs))
    module.train(train)
    return module, args, kwargs


def measure(name: str, mode: str, dtype_name: str, sides: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row a side. Never raises: a failure is the row's status."""
    model, dtype, train = zoo.get(name), DTYPES[dtype_name], mode == "train"
    head = {
        "model": name,
        "family": model.family,
        "kind": model.kind,
        "stated_sites": model.sites,
        "mode": mode,
        "dtype": dtype_name,
    }
    try:
        built = build(model, dtype, train)
        eager = call(built[0], built, model, train)
    except Exception as error:
        return [{**head, "side": side, "status": "unavailable", "message": describe(error)} for side in sides]
    try:
        built = build(model, dtype, train, exact=True)
        exact, reference = call(built[0], built, model, train), "float64"
    except Exception:
        exact, reference = eager, "eager"
    return [{**head, "reference": reference, **one_side(side, model, dtype, train, eager, exact)} for side in sides]


def one_side(
    side: str, model: zoo.ZooModel, dtype: torch.dtype, train: bool, eager: Outcome, exact: Outcome
) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    seen, row, started = Seen(), {"side": side}, time.perf_counter()
    try:
        backend, count = backend_of(side)
        before = count()
        built = build(model, dtype, train)
        with watch(seen), reporting(side) as report:
            compiled = torch.compile(built[0], backend=backend, dynamic=model.dynamic)
            got = call(compiled, built, model, train)
        after = count()
        row["status"] = "ok"
        row["fused"] = after - (before or 0) if after is not None else seen.torch_ops_out - seen.torch_ops_in
        row["declined"] = [entry for entry in report if entry["status"] != "fused"]
        if model.random:
            row["status"] = "ok" if all(tensor.isfinite().all() for tensor in got.outputs.values()) else "wrong"
            row["compared"] = "finite only: live dropout"
        else:
            values = compare(eager.outputs, exact.outputs, got.outputs, dtype)
            gradients = compare(eager.gradients, exact.gradients, got.gradients, dtype)
            row["value"], row["gradient"] = values, gradients if train else None
            if values["ratio"] > 1 or gradients["ratio"] > 1:
                row["status"] = "wrong"
    except Exception as error:
        row["status"] = "error"
        row["message"] = describe(error)
        row["trace"] = traceback.format_exc()[-1500:]
    row.update(
        sites=seen.sites,
        sites_left=seen.sites_left,
        torch_ops=seen.torch_ops_in,
        our_ops=seen.our_ops,
        graphs=seen.graphs,
        breaks=sum(counters["graph_break"].values()),
        seconds=round(time.perf_counter() - started, 2),
    )
    return row


@contextlib.contextmanager
def reporting(side: str) -> Iterator[list[dict[str, str]]]:
    """Our own report of the sites compiled inside the block; stays empty for the other side."""
    rows: list[dict[str, str]] = []
    if side != "fa_inductor":
        yield rows
        return
    from fa_inductor.report import collecting

    with collecting() as report:
        yield rows
    for site in report.sites:
        fields = ("status", "path", "node", "source", "form", "program", "template", "reason")
        rows.append({key: str(getattr(site, key, "") or "")[:300] for key in fields})


def compare(
    eager: dict[str, Tensor | None], exact: dict[str, Tensor | None], got: dict[str, Tensor | None], dtype: torch.dtype
) -> dict[str, Any]:
    """Largest error against ``exact``, and the largest ratio of an error to its budget.

    The budget of a tensor is four times the error of eager in the same dtype, plus a few units in the last place of
    the tensor's largest value (and of 5 % of the largest value of all tensors: gradients that are zero in exact
    arithmetic, such as that of a key bias, hold nothing but rounding). A ratio of at most 1 is right.
    """
    if set(got) != set(eager):
        return {"error": None, "ratio": float("inf"), "worst": f"{len(got)} tensors in place of {len(eager)}"}
    overall = max((magnitude(tensor) for tensor in exact.values() if tensor is not None), default=0.0)
    unit = ROUNDING[dtype] * torch.finfo(dtype).eps * (1.0 if exact is not eager else 8.0)
    worst: dict[str, Any] = {"error": 0.0, "ratio": 0.0, "worst": ""}
    for name, reference in eager.items():
        truth, value = exact[name], got[name]
        if reference is None and value is None:
            continue
        problem = None
        if reference is None or value is None or truth is None:
            problem = "missing" if value is None else "not missing in eager"
        elif value.shape != reference.shape or value.dtype != reference.dtype:
            problem = f"{value.dtype}{list(value.shape)} in place of {reference.dtype}{list(reference.shape)}"
        elif not torch.equal(value.isnan(), reference.isnan()):
            problem = "NaN in other places than in eager"
        if problem:
            return {"error": None, "ratio": float("inf"), "worst": f"{name}: {problem}"}
        budget = 4 * distance(reference, truth) + unit * (magnitude(truth) + 0.05 * overall) + 1e-30
        error = min(distance(value, truth), distance(value, reference))
        if error / budget > worst["ratio"]:
            worst = {"error": error, "ratio": error / budget, "worst": name}
    return worst


def magnitude(tensor: Tensor) -> float:
    return tensor.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if tensor.numel() else 0.0


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference; equal infinities are equal, NaN is compared by place elsewhere."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    gap = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
    return gap.nan_to_num(0.0, float("inf")).max().item()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:400]}"
