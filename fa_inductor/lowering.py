"""The fused ops inside Inductor: generated Triton on CUDA, the op's own kernel elsewhere.

:mod:`fa_inductor.lowerings` installs one for each op. On CUDA and with ``kernel="triton"`` or "general" it asks
:mod:`fa_inductor.templates.select` for a template, renders it for the operands at hand and hands Inductor a
``TritonTemplate``: what follows the attention is fused into its epilogue, lengths may be symbolic, and under
max-autotune the configurations are timed against each other. Everything else runs the op's eager kernel.

A configuration that does not compile (shared memory, a compiler failure) is dropped with its reason in the log, and the
next one is taken; when none is left the eager kernel runs. Importing this module needs neither triton nor a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from fa_inductor import _compat
from fa_inductor.bounds import Facts
from fa_inductor.cpu_plan import plain_scale
from fa_inductor.lowering_buffers import contiguous, empty_like, layout_like, zeros_like
from fa_inductor.lowering_operands import Cache, Operands, hint, number, problem_of, realised
from fa_inductor.lowering_splits import merged, shared_out
from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates import configs, select
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import KernelSource, Problem, dense_strides
from fa_inductor.templates.sm90.form import form_of
from fa_inductor.templates.splits import unit_of

log = logging.getLogger(__name__)

#: Leading entries of ``call_sizes``: rows or columns to tile, and the number of (batch, head) pairs. Then n0, n1, ...
_GRID_SIZES = 2


_no_python_kernels: ContextVar[bool] = ContextVar("fa_inductor_no_python_kernels", default=False)


class PythonKernelError(RuntimeError):
    """An op has no generated kernel, and the caller cannot run any other."""


@contextmanager
def no_python_kernels() -> Iterator[None]:
    """Inside the block an op without a generated kernel raises :class:`PythonKernelError` instead of running its eager kernel."""
    token = _no_python_kernels.set(True)
    try:
        yield
    finally:
        _no_python_kernels.reset(token)


# ------------------------------------------------------------------------------------------------- Inductor templates
def _grid(length: Any, heads: Any, *rest: Any, cdiv: Callable[[Any, Any], Any]) -> tuple[Any, int, int]:
    """One program for each tile of each (batch, head); ``rest`` ends with the kernel's constants."""
    return (cdiv(length, rest[-1]["GRID_BLOCK"]) * heads, 1, 1)


@lru_cache(maxsize=1)
def _template_class() -> Any:
    import sympy
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel

    class AttentionKernel(TritonTemplateKernel):
        """A template kernel that can also read the program's run-time sizes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._register_extra_template_env_fns(self.program_size)

        def program_size(self, index: int) -> str:
            from torch._inductor.codegen.triton import texpr

            return texpr(self.rename_indexing(sympy.sympify(self.call_sizes[_GRID_SIZES + index])))

    class AttentionTemplate(TritonTemplate):
        kernel_type = AttentionKernel

        @staticmethod
        @cache
        def of(name: str, text: str) -> Any:
            # Inductor keeps templates by name; the name holds a hash of the text, so equal programs share one.
            return AttentionTemplate(name=name, grid=SymbolicGridFn(_grid), source=text)

    return AttentionTemplate


@dataclass
class _Call:
    """One kernel to choose a configuration for."""

    which: str
    render: Callable[[configs.TileConfig], KernelSource]
    tensors: dict[str, Any]
    layout: Any
    grid: Callable[[configs.TileConfig], tuple[Any, Any, str]]
    sizes: list[Any]


def _choices(call: _Call, candidates: Sequence[configs.TileConfig], every: bool) -> tuple[list[Any], list[Any]]:
    """(choices, input nodes). Only configurations that compile; the first one alone unless ``every``."""
    choices: list[Any] = []
    nodes: list[Any] = []
    for config in candidates:
        kernel = call.render(config)
        length, heads, block = call.grid(config)
        nodes = [call.tensors[a] for a in kernel.arguments]
        made: list[Any] = []
        _template_class().of(kernel.name, kernel.text).maybe_append_choice(
            made,
            input_nodes=nodes,
            layout=call.layout,
            mutated_inputs=[call.tensors[a] for a in kernel.outputs],
            call_sizes=[length, heads, *call.sizes],
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
            **kernel.constants,
            GRID_BLOCK=kernel.constants[block],
        )
        if made and _compiles(call.which, made[0], config):
            choices += made
            if not every:
                break
    return choices, nodes


def _compiles(which: str, choice: Any, config: configs.TileConfig) -> bool:
    """Compile a choice now, so that what cannot run is left out instead of failing the whole model."""
    try:
        choice.precompile()
    except Exception as e:
        log.warning("%s kernel: configuration %s dropped: %s: %s", which, config, type(e).__name__, e)
        return False
    return True


def _select(call: _Call, candidates: Sequence[configs.TileConfig]) -> Any | None:
    """The output of the chosen kernel, None when no configuration compiles."""
    from torch._inductor import config as inductor_config

    every = bool(inductor_config.max_autotune)
    choices, nodes = _choices(call, candidates, every)
    if not choices:
        log.warning("%s kernel: no configuration compiles, running the op's eager kernel", call.which)
        return None
    return _fastest(call, choices, nodes)


def _fastest(call: _Call, choices: list[Any], nodes: list[Any]) -> Any:
    """The output of the fastest choice; of the first one where they cannot be timed, as where memory does not hold the
    operands once more. Inductor leaves out single ones that fail when they run."""
    from torch._inductor.select_algorithm import autotune_select_algorithm

    def take(some: list[Any]) -> Any:
        return autotune_select_algorithm(f"fa_inductor_{call.which}", some, nodes, call.layout, return_multi_template=False)

    try:
        chosen = take(choices)
    except Exception as e:
        if len(choices) == 1:
            raise
        log.warning("%s kernel: no timing, the default configuration is taken: %s: %s", call.which, type(e).__name__, e)
        chosen = take(choices[:1])
    # torch 2.13 returns (node, choice), torch 2.11 the node.
    return chosen[0] if isinstance(chosen, tuple) else chosen


# ----------------------------------------------------------------------------------------------------------- lowerings
def _fallback(op: Any, args: Sequence[Any], reason: str) -> Any:
    from torch._inductor.lowering import fallback_handler

    if _no_python_kernels.get():
        raise PythonKernelError(f"{op} would run its eager kernel, which is Python: {reason}")
    log.info("%s is called as an op, no kernel is generated: %s", op, reason)
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def _request(o: Operands, problem: Problem, **more: Any) -> select.Request:
    import torch

    capability = torch.cuda.get_device_capability(o.q.get_device())
    dtype = str(o.q.get_dtype()).removeprefix("torch.")
    return select.Request(
        o.spec, dtype, problem.qk_dim, problem.v_dim, capability, problem.tma, **more
    )  # fmt: skip


def _hopper_runs(o: Operands, problem: Problem, backward: bool = False) -> bool:
    """Launch the Gluon kernel once on few rows of zeros, so that one that does not compile is left out."""
    import torch
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    if V.graph.cpp_wrapper:
        log.info("%s is launched from Python, which a C++ wrapper does not call", select.HOPPER)
        return False
    from fa_inductor.templates.sm90 import backward_launch, launch

    try:
        with _disable_current_modes(), torch.no_grad():
            # As many keys as make it the kernel that will run: whether tiles end with the keys is compiled in.
            rows = 128 if problem.even_kv else 1
            if (hint(o.extents[4]) or 0) > launch.SHORT:
                rows += 4 * 128
            dims = (problem.qk_dim, problem.v_dim)
            k, v = (torch.zeros(1, 1, rows, d, dtype=o.q.get_dtype(), device=o.q.get_device()) for d in dims)
            sizes, program = [1] * len(o.sizes), Program.of(o.spec, problem).spec.program
            captures = [_stand_in(t) for t in o.captures]
            own = isinstance(form_of(AttentionSpec.parse(program)), str)
            if backward:
                lse = v.new_zeros((1, 1, rows), dtype=torch.float32)
                if own:
                    backward_launch.program_backward(v, k, k, v, v, lse, captures, sizes, program)
                else:
                    backward_launch.attention_backward(v, k, k, v, v, lse, sizes, program)
            elif own:
                launch.program_attention(k, k, v, captures, sizes, program)
            else:
                launch.attention(k, k, v, sizes, program)
    except Exception as e:
        log.warning("%s dropped: %s: %s", select.HOPPER, type(e).__name__, e)
        return False
    return True


def _stand_in(t: Any) -> Any:
    """Zeros of a captured tensor's sizes and strides; of run-time sizes those that the graph was traced with."""
    import torch

    sizes, strides = ([hint(x) for x in xs] for xs in (t.get_size(), t.get_stride()))
    if None in sizes or None in strides:
        raise ValueError(f"the sizes of a captured tensor are not known: {t.get_size()}, {t.get_stride()}")
    return torch.empty_strided(sizes, strides, dtype=t.get_dtype(), device=t.get_device()).zero_()


def _hopper_backward(o: Operands, problem: Problem, request: select.Request) -> bool:
    """Whether the Gluon kernel computes the gradients."""
    batch, heads, _, rows, cols = o.extents
    facts = Facts(problem.rows, problem.cols, problem.sizes)
    asked = replace(request, keys=hint(cols), queries=hint(rows), heads=hint(batch * heads), facts=facts)
    return not select.not_hopper(asked) and _hopper_runs(o, problem, backward=True)


def _refusal(kernel: str, operands: Sequence[Any], captures: Sequence[Any]) -> str:
    """Why an op is not lowered at all, "" where it may be."""
    device = operands[0].get_device()
    if kernel not in ("triton", "general"):
        return f"kernel {kernel!r} was chosen"
    if device.type != "cuda":
        return f"operands are on {device.type}"
    if any(t.get_device() != device for t in operands):
        return f"operands are on {', '.join(sorted({str(t.get_device()) for t in operands}))}"
    for i, t in enumerate(captures):
        # Eager code may mix a CPU scalar in; a kernel would get a pointer that it cannot read.
        if t.get_device() != device:
            return f"captured tensor {i} is on {t.get_device()}, the operands are on {device}"
    if any(number(s) == 0 for t in operands for s in t.get_size()):
        return "an operand is empty"
    return ""


def _candidates(arch: int, o: Operands, problem: Problem, which: str) -> list[configs.TileConfig]:
    from fa_inductor.templates import tiles

    return tiles.choose(Program.of(o.spec, problem), problem, arch, which, _compat.shared_memory(o.q.get_device()))


def _deep_rows(arch: int, o: Operands, problem: Problem) -> configs.TileConfig | None:
    from fa_inductor.templates import tiles

    shared = _compat.shared_memory(o.q.get_device())
    return configs.deep_rows(tiles.use_of(Program.of(o.spec, problem), problem, arch, "forward", shared))


def lower_forward(q: Any, k: Any, v: Any, captures: Sequence[Any], sizes: Sequence[Any], program: str, kernel: str) -> Any:
    """``fa_inductor::flash_attention``: (out, lse)."""
    from fa_inductor import ops

    args = (q, k, v, captures, sizes, program, kernel)
    reason = _refusal(kernel, (q, k, v), captures)
    if reason:
        if kernel == "aten" and not captures and plain_scale(AttentionSpec.parse(program)) is not None:
            return _fallback(ops.plain_attention, (q, k, v, program), reason)
        return _fallback(ops.flash_attention, args, reason)
    spec = AttentionSpec.parse(program)
    o = Operands(realised(q), realised(k), realised(v), [realised(c) for c in captures], list(sizes), spec, [])
    return _forward(o, kernel, lambda reason: _fallback(ops.flash_attention, args, reason))


def lower_cached(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    k_scale: Any,
    v_scale: Any,
    captures: Sequence[Any],
    sizes: Sequence[Any],
    keys: Any,
    program: str,
    cache: str,
    kernel: str,
) -> Any:
    """``fa_inductor::cached_attention``: (out, lse)."""
    import sympy

    from fa_inductor import caches

    args = (q, k, v, table, k_scale, v_scale, captures, sizes, keys, program, cache, kernel)
    beside = [x for x in (table, k_scale, v_scale) if x is not None]
    reason = _refusal(kernel, (q, k, v, *beside), captures)
    if reason:
        return _fallback(caches.cached_attention, args, reason)
    table, k_scale, v_scale = (x if x is None else realised(x) for x in (table, k_scale, v_scale))
    stored = Cache(CacheForm.parse(cache), table, k_scale, v_scale, sympy.sympify(keys))
    spec = AttentionSpec.parse(program)
    o = Operands(realised(q), realised(k), realised(v), [realised(c) for c in captures], list(sizes), spec, [], stored)
    return _forward(o, kernel, lambda reason: _fallback(caches.cached_attention, args, reason))


def _forward(o: Operands, kernel: str, fallback: Callable[[str], Any]) -> Any:
    """(out, lse) by the best template; ``fallback`` runs the op's eager kernel."""
    import torch

    from fa_inductor import ops
    from fa_inductor.templates.forward import forward_kernel, packs_heads

    spec, problem = o.spec, problem_of(o)
    batch, heads, kv_heads, rows, cols = o.extents
    facts = Facts(problem.rows, problem.cols, problem.sizes)
    request = _request(o, problem, keys=hint(cols), queries=hint(rows), heads=hint(batch * heads), facts=facts)
    answer = select.supports(request)
    if isinstance(answer, select.Unsupported):
        return fallback(answer.reason)
    if kernel == "triton" and answer.template == select.HOPPER and _hopper_runs(o, problem):
        asked, why = Program.of(spec, problem).spec, f"{select.HOPPER} was chosen"
        if isinstance(form_of(asked), str):
            more = (o.captures, o.sizes, asked.program)
            return _fallback(ops.hopper_program_attention, (o.q, o.k, o.v, *more), why)
        return _fallback(ops.hopper_attention, (o.q, o.k, o.v, o.sizes, asked.program), why)
    arch = select.architecture(request.capability)
    assert arch is not None
    candidates = _candidates(arch, o, problem, "forward")
    candidates, splits = shared_out(o, problem, candidates, _deep_rows(arch, o, problem), Program.of(spec, problem).uneven)
    out_size = [batch, heads, rows, o.v.get_size()[3]]
    strides = dense_strides(out_size, spec.layout)
    layout = layout_like(o.q, out_size, strides)
    lse_size = out_size[:-1]
    if splits > 1:
        size = [splits, *out_size]
        layout, lse_size = layout_like(o.q, size, None, torch.float32), [2, splits, *lse_size]
    lse = empty_like(o.q, lse_size, None, torch.float32)

    def grid(config: configs.TileConfig) -> tuple[Any, Any, str]:
        if packs_heads(problem, config):
            return rows * problem.group, batch * kv_heads * splits, "BLOCK_M"
        return rows, batch * heads * splits, "BLOCK_M"

    run_time = [*o.sizes, o.cache.keys] if o.cache else o.sizes
    call = _Call(
        "forward", lambda config: forward_kernel(spec, problem, config), {**o.named(), "LSE": lse}, layout, grid, run_time
    )
    out = _select(call, [replace(c, splits=splits) for c in candidates])
    if out is None:
        return fallback("no configuration compiles")
    if splits == 1:
        return out, lse
    unit = unit_of(Program.of(spec, problem))
    return merged(out, lse, o.q.get_dtype(), strides, unit, spec.dead_rows == "zero")


def lower_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    captures: Sequence[Any],
    sizes: Sequence[Any],
    program: str,
    kernel: str,
    needs_grad: Sequence[bool],
) -> Any:
    """``fa_inductor::flash_attention_backward``: [dq, dk, dv, *gradients of captured tensors]."""
    import torch

    from fa_inductor import ops

    args = (grad_out, q, k, v, out, lse, captures, sizes, program, kernel, needs_grad)
    reason = _refusal(kernel, (q, k, v), captures)
    if reason:
        return _fallback(ops.flash_attention_backward, args, reason)
    spec = AttentionSpec.parse(program)
    do = realised(grad_out)
    o = Operands(realised(q), realised(k), realised(v), [realised(c) for c in captures], list(sizes), spec, [do])
    slots = tuple(i for i, need in enumerate(needs_grad[3:]) if need)
    problem = problem_of(o)
    deterministic = torch.are_deterministic_algorithms_enabled()
    request = _request(o, problem, grad_slots=slots, deterministic=deterministic, backward=True)
    answer = select.supports(request)
    if isinstance(answer, select.Unsupported):
        return _fallback(ops.flash_attention_backward, args, answer.reason)
    if kernel == "triton" and _hopper_backward(o, problem, request):
        asked = Program.of(spec, problem).spec
        operands = (do, o.q, o.k, o.v, realised(out), contiguous(lse))
        why = f"{select.HOPPER} was chosen"
        if isinstance(form_of(asked), str):
            more = (o.captures, o.sizes, asked.program, list(needs_grad))
            return list(_fallback(ops.hopper_program_backward, (*operands, *more), why))
        return list(_fallback(ops.hopper_attention_backward, (*operands, o.sizes, asked.program), why))
    arch = select.architecture(request.capability)
    assert arch is not None
    grads = _backward_kernels(o, do, out, contiguous(lse), problem, arch, slots, needs_grad)
    if grads is None:
        return _fallback(ops.flash_attention_backward, args, "no configuration compiles")
    return grads


def _backward_kernels(
    o: Operands,
    do: Any,
    out: Any,
    lse: Any,
    problem: Problem,
    arch: int,
    slots: tuple[int, ...],
    needs_grad: Sequence[bool],
) -> list[Any] | None:
    """The gradients, None when one of the kernels cannot be compiled."""
    import torch
    from torch._inductor.lowering import lowerings, to_dtype

    from fa_inductor.templates.backward import dkdv_kernel, dq_kernel, is_wide, recomputes_delta, rows_kernel

    aten, spec = torch.ops.aten, o.spec
    batch, heads, kv_heads, rows, cols = o.extents
    by_query, by_key = (rows, batch * heads, "BLOCK_M"), (cols, batch * kv_heads, "BLOCK_N")
    tensors = {**o.named(), "DO": do, "LSE": lse}

    def run(which: str, render: Callable[[configs.TileConfig], KernelSource], layout: Any, grid: Any) -> Any | None:
        call = _Call(which, render, tensors, layout, lambda _: grid, o.sizes)
        return _select(call, _candidates(arch, o, problem, which))

    # Inductor fuses this reduction with whatever produced grad_out.
    product = lowerings[aten.mul](to_dtype(out, torch.float32), to_dtype(do, torch.float32))
    tensors["DELTA"] = contiguous(lowerings[aten.sum](product, axis=[-1]))
    if is_wide(spec, problem):
        written = ("ROW_LOG", "ROW_DELTA") if recomputes_delta(spec, problem) else ("ROW_LOG",)
        tensors.update({name: empty_like(o.q, [batch, heads, rows], None, torch.float32) for name in written})
        layout = layout_like(o.q, [batch, heads, rows], None, torch.float32)
        row_max = run("rows", lambda c: rows_kernel(spec, problem, c), layout, by_query)
        if row_max is None:
            return None
        tensors["ROW_MAX"], tensors["DELTA"] = row_max, tensors.get("ROW_DELTA", tensors["DELTA"])

    def dense(like: Any) -> tuple[list[Any], list[Any]]:
        size = list(like.get_size())
        return size, dense_strides(size, spec.layout)

    empty = empty_like(o.q, [0], None)
    result: list[Any] = [empty] * len(needs_grad)
    if needs_grad[1] or needs_grad[2]:
        tensors["DV"] = empty_like(o.v, *dense(o.v))
        dk = run("dkdv", lambda c: dkdv_kernel(spec, problem, c), layout_like(o.k, *dense(o.k)), by_key)
        if dk is None:
            return None
        result[1], result[2] = (dk if needs_grad[1] else empty), (tensors["DV"] if needs_grad[2] else empty)
    if needs_grad[0] or slots:
        for s in slots:
            tensors[f"GRAD{s}"] = zeros_like(o.captures[s])
        dq = run("dq", lambda c: dq_kernel(spec, problem, c, slots), layout_like(o.q, *dense(o.q)), by_query)
        if dq is None:
            return None
        if needs_grad[0]:
            result[0] = dq
        for s in slots:
            result[3 + s] = to_dtype(tensors[f"GRAD{s}"], o.captures[s].get_dtype())
    return result
