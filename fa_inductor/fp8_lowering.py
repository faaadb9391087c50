"""``fp8_attention`` and ``fp8_projected_attention`` inside Inductor: the cast, then the best FP8 kernel for the device.

Where no FP8 kernel compiles the attention runs in the dtype of the model, with a warning.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fa_inductor import fp8
from fa_inductor.bounds import Facts
from fa_inductor.lowering import (
    _Call,
    _candidates,
    _fallback,
    _refusal,
    _request,
    _select,
    lower_forward,
)
from fa_inductor.lowering_buffers import empty_like, layout_like
from fa_inductor.lowering_operands import Operands, hint, problem_of, realised
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import configs, select
from fa_inductor.templates.program import Program
from fa_inductor.templates.quantise import fp8_problem
from fa_inductor.templates.rendering import Problem, dense_strides

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Planned:
    """An operand that is never there as such: the projection writes it in FP8."""

    size: list[Any]
    dtype: Any
    device: Any

    def get_size(self) -> list[Any]:
        return self.size

    def get_stride(self) -> list[Any]:
        return dense_strides(self.size, "bhmd")

    def get_dtype(self) -> Any:
        return self.dtype

    def get_device(self) -> Any:
        return self.device

    def get_name(self) -> str:
        return ""

    def get_layout(self) -> Any:
        return types.SimpleNamespace(offset=0)


@dataclass(frozen=True)
class _Source:
    """Where FP8 operands come from: the ops that make them and that also attend, the arguments of both."""

    operands: Any
    hopper: Any
    arguments: tuple[Any, ...]


def lower(
    q: Any, k: Any, v: Any, captures: Sequence[Any], sizes: Sequence[Any], program: str, kernel: str, format: str
) -> Any:
    """(out, lse) of ``fp8_attention`` as IR nodes."""
    reason = _refusal(kernel, (q, k, v), captures)
    if reason:
        return _fallback(fp8.fp8_attention, (q, k, v, captures, sizes, program, kernel, format), reason)
    q, k, v, captures = realised(q), realised(k), realised(v), [realised(c) for c in captures]
    o = Operands(q, k, v, captures, list(sizes), AttentionSpec.parse(program), [])
    source = _Source(fp8.fp8_operands, fp8.hopper_fp8_attention, (q, k, v))
    return _attend(o, source, kernel, format, lambda: lower_forward(q, k, v, captures, sizes, program, kernel))


def lower_projected(
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any],
    heads: int,
    kv_heads: int,
    captures: Sequence[Any],
    sizes: Sequence[Any],
    program: str,
    kernel: str,
    format: str,
) -> Any:
    """(out, lse) of ``fp8_projected_attention`` as IR nodes."""
    args = (x, weights, biases, heads, kv_heads, captures, sizes, program, kernel, format)
    reason = _refusal(kernel, (x, *weights, *biases), captures)
    if reason:
        return _fallback(fp8.fp8_projected_attention, args, reason)
    batch, length, _ = x.get_size()

    def planned(i: int, n: int) -> _Planned:
        return _Planned([batch, n, length, weights[i].get_size()[0] // n], x.get_dtype(), x.get_device())

    q, k, v = planned(0, heads), planned(1, kv_heads), planned(2, kv_heads)
    spec = AttentionSpec.parse(program)

    def separate() -> Any:
        layers = zip(weights, biases or [None] * 3, (heads, kv_heads, kv_heads), strict=True)
        apart = [_linear(x, w, b, n) for w, b, n in layers]
        return lower(apart[0], apart[1], apart[2], captures, sizes, program, kernel, format)

    if not _projects(x, (q, k, v), bool(biases), format):
        return separate()
    x, weights, biases = realised(x), [realised(w) for w in weights], [realised(b) for b in biases]
    o = Operands(q, k, v, [realised(c) for c in captures], list(sizes), spec, [])
    layers = (x, weights, biases, heads, kv_heads)
    source = _Source(fp8.fp8_projected_operands, fp8.hopper_fp8_projected_attention, layers)
    return _attend(o, source, kernel, format, separate)


def _linear(x: Any, weight: Any, bias: Any | None, heads: int) -> Any:
    """A linear layer [B, L, features] split into heads, [B, heads, L, head_dim]."""
    import torch
    from torch._inductor.lowering import lowerings

    aten = torch.ops.aten
    batch, length, features = x.get_size()
    rows = lowerings[aten.view](x, [batch * length, features])
    y = lowerings[aten.mm](rows, lowerings[aten.permute](weight, [1, 0]))
    y = y if bias is None else lowerings[aten.add](y, bias)
    y = lowerings[aten.view](y, [batch, length, heads, weight.get_size()[0] // heads])
    return lowerings[aten.permute](y, [0, 2, 1, 3])


def _attend(o: Operands, source: _Source, kernel: str, format: str, otherwise: Callable[[], Any]) -> Any:
    """(out, lse); ``otherwise`` computes them where no FP8 kernel does."""
    from torch._inductor.virtualized import V

    problem = problem_of(o)
    batch, heads, _, rows, cols = o.extents
    facts = Facts(problem.rows, problem.cols, problem.sizes)
    known = {"keys": hint(cols), "queries": hint(rows), "heads": hint(batch * heads)}
    request = _request(o, problem, **known, facts=facts, general=kernel == "general")
    answer = select.fp8_supports(request, format)
    if V.graph.cpp_wrapper:
        answer = select.Unsupported("the operands are cast from Python, which a C++ wrapper does not call")
    if isinstance(answer, select.Unsupported):
        return _without(answer.reason, otherwise)
    if answer.template == select.HOPPER_FP8 and _hopper_runs(o, problem, format):
        text = Program.of(o.spec, problem).spec.program
        return _fallback(source.hopper, (*source.arguments, o.sizes, text, format), f"{answer.template} was chosen")
    made = _general(o, source, fp8_problem(problem), request.capability, format)
    return _without("no configuration compiles", otherwise) if made is None else made


def _without(reason: str, otherwise: Callable[[], Any]) -> Any:
    log.warning("an attention that the report names FP8 runs otherwise: %s", reason)
    return otherwise()


def _general(o: Operands, source: _Source, problem: Problem, capability: tuple[int, int], format: str) -> Any | None:
    """The Triton template on cast operands."""
    import torch

    from fa_inductor.templates.forward import forward_kernel, packs_heads

    arch = select.architecture(capability)
    assert arch is not None
    batch, heads, kv_heads, rows, _ = o.extents
    cast = _fallback(source.operands, (*source.arguments, format), "FP8 operands are cast by a kernel of ours")
    names = ("Q", "K", "V", "QS", "KS", "VS")
    small = dict(zip(names, map(realised, cast), strict=True))
    out_size = [batch, heads, rows, o.v.get_size()[3]]
    lse = empty_like(o.q, [batch, heads, rows], None, torch.float32)

    def grid(config: configs.TileConfig) -> tuple[Any, Any, str]:
        if packs_heads(problem, config):
            return rows * problem.group, batch * kv_heads, "BLOCK_M"
        return rows, batch * heads, "BLOCK_M"

    call = _Call(
        "fp8 forward",
        lambda config: forward_kernel(o.spec, problem, config, fp8=True),
        {**o.named(), **small, "LSE": lse},
        layout_like(o.q, out_size, dense_strides(out_size, o.spec.layout)),
        grid,
        o.sizes,
    )
    out = _select(call, _candidates(arch, o, problem, "forward"))
    return None if out is None else (out, lse)


def _hopper_runs(o: Operands, problem: Problem, format: str) -> bool:
    """Launch the Gluon kernel once on few rows of zeros, so that one that does not compile is left out."""
    import torch

    from fa_inductor.templates.sm90 import fp8_launch

    def run() -> None:
        # As many keys as make it the kernel that will run: whether tiles end with the keys is compiled in.
        rows = 128 if problem.even_kv else 1
        dims = (problem.qk_dim, problem.v_dim)
        k, v = (torch.zeros(1, 1, rows, d, dtype=o.q.get_dtype(), device=o.q.get_device()) for d in dims)
        fp8_launch.attention(k, k, v, [1] * len(o.sizes), Program.of(o.spec, problem).spec.program, format)

    return _runs(run, select.HOPPER_FP8)


def _projects(x: Any, planned: Sequence[_Planned], bias: bool, format: str) -> bool:
    """The same for the projection's kernel."""
    import torch

    from fa_inductor.templates.projection import STEP, project

    def run() -> None:
        h = torch.zeros(1, 1, STEP, dtype=x.get_dtype(), device=x.get_device())
        weights = [h.new_zeros(int(p.size[3]), STEP) for p in planned]
        project(h, weights, [w[:, 0].contiguous() for w in weights] if bias else [], 1, 1, format)

    return _runs(run, "the projection that casts its results")


def _runs(run: Callable[[], None], name: str) -> bool:
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        with _disable_current_modes(), torch.no_grad():
            run()
    except Exception as e:
        log.warning("%s dropped: %s: %s", name, type(e).__name__, e)
        return False
    return True
