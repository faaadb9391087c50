"""``fp8_attention`` inside Inductor: the cast, then the best FP8 kernel for the device; bf16 where none compiles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fa_inductor import fp8
from fa_inductor.bounds import Facts
from fa_inductor.lowering import (
    _Call,
    _candidates,
    _empty,
    _fallback,
    _layout,
    _lower_forward,
    _refusal,
    _request,
    _select,
)
from fa_inductor.lowering_operands import Operands, hint, problem_of, realised
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates import configs, select
from fa_inductor.templates.program import Program
from fa_inductor.templates.quantise import fp8_problem
from fa_inductor.templates.rendering import Problem, dense_strides

log = logging.getLogger(__name__)


def lower(
    q: Any, k: Any, v: Any, captures: Sequence[Any], sizes: Sequence[Any], program: str, kernel: str, format: str
) -> Any:
    """(out, lse) as IR nodes."""
    args = (q, k, v, captures, sizes, program, kernel, format)
    reason = _refusal(kernel, (q, k, v), captures)
    if reason:
        return _fallback(fp8.fp8_attention, args, reason)
    spec = AttentionSpec.parse(program)
    o = Operands(realised(q), realised(k), realised(v), [realised(c) for c in captures], list(sizes), spec, [])
    problem = problem_of(o)
    batch, heads, _, rows, cols = o.extents
    facts = Facts(problem.rows, problem.cols, problem.sizes)
    sizes_known = {"keys": hint(cols), "queries": hint(rows), "heads": hint(batch * heads)}
    request = _request(o, problem, **sizes_known, facts=facts, general=kernel == "general")
    rotate = fp8.rotates(format)
    answer = select.fp8_supports(request)
    if isinstance(answer, select.Unsupported):
        return _bf16(args, answer.reason)
    if answer.template == select.HOPPER_FP8 and _hopper_runs(o, problem, rotate):
        text = Program.of(spec, problem).spec.program
        return _fallback(fp8.hopper_fp8_attention, (o.q, o.k, o.v, o.sizes, text, rotate), f"{answer.template} was chosen")
    made = _general(o, fp8_problem(problem), request.capability, rotate)
    return _bf16(args, "no configuration compiles") if made is None else made


def _bf16(args: Sequence[Any], reason: str) -> Any:
    log.warning("an attention that the report names FP8 runs in the dtype of the model: %s", reason)
    return _lower_forward(*args[:-1])


def _general(o: Operands, problem: Problem, capability: tuple[int, int], rotate: bool) -> Any | None:
    """The Triton template on cast operands."""
    import torch

    from fa_inductor.templates.forward import forward_kernel, packs_heads

    arch = select.architecture(capability)
    assert arch is not None
    batch, heads, kv_heads, rows, _ = o.extents
    cast = _fallback(fp8.fp8_operands, (o.q, o.k, o.v, rotate), "FP8 operands are cast by a kernel of ours")
    names = ("Q", "K", "V", "QS", "KS", "VS")
    small = dict(zip(names, map(realised, cast), strict=True))
    out_size = [batch, heads, rows, o.v.get_size()[3]]
    lse = _empty(o.q, [batch, heads, rows], None, torch.float32)

    def grid(config: configs.TileConfig) -> tuple[Any, Any, str]:
        if packs_heads(problem, config):
            return rows * problem.group, batch * kv_heads, "BLOCK_M"
        return rows, batch * heads, "BLOCK_M"

    call = _Call(
        "fp8 forward",
        lambda config: forward_kernel(o.spec, problem, config, fp8=True),
        {**o.named(), **small, "LSE": lse},
        _layout(o.q, out_size, dense_strides(out_size, o.spec.layout)),
        grid,
        o.sizes,
    )
    out = _select(call, _candidates(arch, o, problem, "forward"))
    return None if out is None else (out, lse)


def _hopper_runs(o: Operands, problem: Problem, rotate: bool) -> bool:
    """Launch the Gluon kernel once on few rows of zeros, so that one that does not compile is left out."""
    import torch
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    if V.graph.cpp_wrapper:
        log.info("%s is launched from Python, which a C++ wrapper does not call", select.HOPPER_FP8)
        return False
    from fa_inductor.templates.sm90 import fp8_launch

    try:
        with _disable_current_modes(), torch.no_grad():
            # As many keys as make it the kernel that will run: whether tiles end with the keys is compiled in.
            rows = 128 if problem.even_kv else 1
            dims = (problem.qk_dim, problem.v_dim)
            k, v = (torch.zeros(1, 1, rows, d, dtype=o.q.get_dtype(), device=o.q.get_device()) for d in dims)
            text = Program.of(o.spec, problem).spec.program
            fp8_launch.attention(k, k, v, [1] * len(o.sizes), text, rotate)
    except Exception as e:
        log.warning("%s dropped: %s: %s", select.HOPPER_FP8, type(e).__name__, e)
        return False
    return True
