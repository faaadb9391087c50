"""The backward kernels of a program: row statistics, dK and dV, dQ with the captures' gradients."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from fa_inductor.derivative import d_load
from fa_inductor.expr import Expr, Load, Sym
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.body import descriptors, tile_body
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.forward import checked_dims, sink_lines, used_captures, used_sizes
from fa_inductor.templates.program import LOG2E, ZERO, Program
from fa_inductor.templates.rendering import KernelSource, Problem, common_constants, is_even, render
from fa_inductor.templates.score_codegen import ScorePrinter, hoistable
from fa_inductor.templates.tiles import plan

#: Magnitude of a log-sum-exp from which half an ulp of float32 (3e-5 at 1024, 1e-6 at 16) is too coarse for exp(logit - lse), by
#: the bytes of an operand's element. In float32 also from which scores are large enough to show that dP and DELTA were rounded
#: apart: with 32 the gradient of a trained factor is up to 4 times as far off as eager code's, with 16 no farther, and 8 gains
#: nothing (tests/templates/interpret_factor.py).
LSE_LIMIT = {2: 1024.0, 4: 16.0}

_PROPAGATE = "propagate_nan=tl.PropagateNan.ALL"
_ATOMIC = 'tl.atomic_add({}, {}, mask={}, sem="relaxed")'


def is_wide(spec: AttentionSpec, problem: Problem) -> bool:
    """Whether the backward reads ROW_MAX and ROW_LOG from the rows kernel instead of the forward's LSE."""
    return Program.of(spec, problem).wide


def recomputes_delta(spec: AttentionSpec, problem: Problem) -> bool:
    """Whether the rows kernel also writes ROW_DELTA, which the others then take for DELTA."""
    return Program.of(spec, problem).single


def _row_inputs(program: Program) -> tuple[str, ...]:
    return ("ROW_MAX", "ROW_LOG") if program.wide else ("LSE",)


def _constants(program: Program, problem: Problem, config: TileConfig) -> dict[str, Any]:
    return {
        **common_constants(problem, config),
        "SECTION": config.section,
        "SCALE": program.scale * LOG2E,
        "DROPOUT": program.spec.dropout_p,
        "KEEP_SCALE": 1.0 / (1.0 - program.spec.dropout_p),
    }


def _context(
    program: Program,
    problem: Problem,
    config: TileConfig,
    arguments: tuple[str, ...],
    captures: list[tuple[int, int]],
    printed: list[str],
) -> dict[str, Any]:
    text = "\n".join(printed)
    return {
        "kernel_args": ", ".join(f'"{a}"' for a in arguments),
        "captures": captures,
        "checked_dims": checked_dims(printed, captures),
        "sizes": [i for i in used_sizes(program.spec.expressions) if f"SIZE{i}" in text],
        "tma": config.tma and problem.tma,
        "qk_even": is_even(problem.qk_dim),
        "v_even": is_even(problem.v_dim),
        "seed_slot": program.spec.seed_slot,
        "loop_summaries": (),
        "shares_batches": program.shares_batches,
        "wide": program.wide,
        "dead_zero": program.spec.dead_rows == "zero",
        "even_q": problem.even_q,
        "even_kv": problem.even_kv,
        "dp_place": config.dp_place,
        "pointers_once": config.pointers_once,
    }


def _kernel(
    kind: str,
    functions: AbstractSet[str],
    context: dict[str, Any],
    arguments: tuple[str, ...],
    outputs: tuple[str, ...],
    constants: dict[str, Any],
    config: TileConfig,
    output_rank: int = 4,
) -> KernelSource:
    text, digest = render(f"common/{kind}.py.jinja", functions, context)
    name = f"fa_{kind}_{digest}"
    return KernelSource(name, text, arguments, outputs, output_rank, constants, config.num_warps, config.num_stages)


@lru_cache(maxsize=512)
def rows_kernel(spec: AttentionSpec, problem: Problem, config: TileConfig) -> KernelSource:
    """Render the kernel that computes ROW_MAX (main output), ROW_LOG and where :func:`recomputes_delta` ROW_DELTA.

    Needed where :func:`is_wide`.
    """
    program = Program.of(spec, problem)
    spec = program.spec
    body = program.body(spec.score)
    rows = ScorePrinter(problem.captures, "r")
    sink_lines(rows, spec, 1.0 / program.scale)
    for e in hoistable([body], frozenset({"kv_idx"})):
        rows.emit(e)
    tile = ScorePrinter(problem.captures, "e", rows.names)
    tile.assign("logit", body)
    exact = program.single
    captures = used_captures(spec.expressions, spec.seed_slot if exact else -1)
    outputs = ("ROW_LOG", "ROW_DELTA") if exact else ("ROW_LOG",)
    inputs = ("Q", "K", "V", "DO", "DELTA", "LSE") if exact else ("Q", "K", "V", "LSE")
    arguments = (*inputs, *outputs, *(f"CAP{s}" for s, _ in captures))
    context = _context(program, problem, config, arguments, captures, rows.lines + tile.lines)
    context.update(row_lines=rows.lines, edge_lines=tile.lines, sinks=len(spec.sinks), exact_delta=exact)
    constants = {**_constants(program, problem, config), "UNIT": 1.0 / program.scale, "LSE_LIMIT": LSE_LIMIT[problem.element]}
    functions = rows.functions | tile.functions
    return _kernel("rows", functions, context, arguments, outputs, constants, config, output_rank=3)


@lru_cache(maxsize=512)
def dkdv_kernel(spec: AttentionSpec, problem: Problem, config: TileConfig) -> KernelSource:
    """Render the kernel that computes dK (main output) and DV."""
    program = Program.of(spec, problem)
    spec = program.spec
    schedule = plan(program, problem, keys=False, backward=True)
    needed = [e for logit in (spec.score, schedule.full) for e in (program.body(logit), program.rest(logit))]
    head = ScorePrinter(problem.captures, "r")
    for e in hoistable(needed, frozenset({"q_idx"})):
        head.emit(e)

    def after(printer: ScorePrinter, logit: Expr, tail: bool) -> list[str]:
        return _derivative_lines(printer, program.rest(logit), "rows[None, :] < Q_LEN" if tail else "")

    inside = "" if problem.even_q else "rows[None, :] < Q_LEN"
    through = descriptors(program, problem, config, head, keys=False)
    body = tile_body(program, problem, schedule, head.names, inside, after, through)
    functions = head.functions | schedule.functions | body.functions
    captures = used_captures((spec.score, *needed), spec.seed_slot)
    arguments = ("Q", "K", "V", "DO", *_row_inputs(program), "DELTA", "DV", *(f"CAP{s}" for s, _ in captures))
    arguments += schedule.arguments
    printed = [*head.lines, *through.lines, *body.lines, *schedule.lines]
    context = _context(program, problem, config, arguments, captures, printed)
    context.update(row_lines=[*head.lines, *through.lines], loop=schedule, loop_summaries=schedule.summaries, body=body)
    constants = {**_constants(program, problem, config), "FACTOR": program.factor}
    return _kernel("dkdv", functions, context, arguments, ("DV",), constants, config)


def _derivative_lines(printer: ScorePrinter, rest: Expr, inside: str) -> list[str]:
    """Statements that turn ``ds`` = dL/dlogit into dL/dscore over the factor; 0 where ``inside`` does not hold."""
    start = len(printer.lines)
    text = printer.times("ds", rest)
    lines = printer.lines[start:]
    if text != "ds":
        lines.append("ds = tl.zeros_like(ds)" if rest == ZERO else f"ds = {text}")
        if inside:
            lines.append(f"ds = tl.where({inside}, ds, 0.0)")
    return lines


def depends(load: Load, name: str) -> bool:
    """Whether the element that ``load`` reads changes with the index symbol ``name``."""
    return any(isinstance(n, Sym) and n.name == name for i in load.index for n in i.walk())


def is_unique(load: Load, loads: tuple[Load, ...]) -> bool:
    """Whether each element of the captured tensor belongs to at most one score, through this load alone."""
    names = [i.name for i in load.index if isinstance(i, Sym)]
    return {"b", "h", "q_idx", "kv_idx"} <= set(names) and [x.slot for x in loads].count(load.slot) == 1


class _CaptureGradients:
    """Prints the reductions of the captures' gradients: inside the tile loop, after it, and for sinks."""

    def __init__(self, program: Program, slots: tuple[int, ...], rows: ScorePrinter) -> None:
        self.program, self.rows = program, rows
        self.all_loads = tuple(n for n in program.spec.loads() if n.slot in slots)
        self.loads = tuple(n for n in self.all_loads if program.spec.score.depends_on(n))
        by_row = [i for i, load in enumerate(self.loads) if not depends(load, "kv_idx")]
        self.row_sums = [f"{kind}{i}" for i in by_row for kind in ("g", "w")]
        self.sums_rows = bool(by_row) or any(s.depends_on(*self.all_loads) for s in program.spec.sinks)

    def derivatives(self, logit: Expr) -> list[Expr]:
        return [d_load(logit, load) for load in self.loads]

    @staticmethod
    def _inside(value: str, tail: bool) -> str:
        return f"tl.where(kv_vec[None, :] < KV_LEN, {value}, 0.0)" if tail else value

    def tile_lines(self, printer: ScorePrinter, logit: Expr, tail: bool) -> list[str]:
        """Statements for a tile whose p, dp and ``ds`` (dL/dlogit) are known, float32 [BLOCK_M, BLOCK_N].

        ``tail``: the tile may hold keys past the end.
        """
        start = len(printer.lines)
        for i, (load, derivative) in enumerate(zip(self.loads, self.derivatives(logit), strict=True)):
            if derivative == ZERO:
                continue
            if not depends(load, "kv_idx"):
                for total, factor in ((f"g{i}", "ds"), (f"w{i}", "p")):
                    value = self._inside(printer.times(factor, derivative), tail)
                    printer.lines.append(f"{total} += tl.sum({value}, 1)")
                continue
            value = self._inside(printer.times("ds", derivative), tail)
            address, mask = printer.element(load, "GRAD")
            conditions = [f"({mask})"] if mask else []
            if tail:
                conditions.append("(kv_vec < KV_LEN)[None, :]")
            store = _ATOMIC
            if depends(load, "q_idx"):
                conditions.append("rows_in[:, None]")
                if is_unique(load, self.all_loads):
                    store = "tl.store({}, {}, mask={})"
            else:
                value = f"tl.sum({value}, 0, keep_dims=True)"
            printer.lines.append(store.format(address, value, " & ".join(conditions) or "None"))
        return printer.lines[start:]

    def end_lines(self) -> list[str]:
        """Statements after the tile loop: rows reduced to their own element, and the sinks."""
        printer = self.rows
        start = len(printer.lines)
        if self.sums_rows:
            exponent = "(sink{0} - row_max) * SCALE - row_log" if self.program.wide else "sink{0} - lse"
            for i in range(len(self.program.spec.sinks)):
                # A sink is part of its row's sum; where rounding hides that, it must not make up a weight above 1.
                printer.lines.append(f"s{i} = tl.exp2(tl.minimum({exponent.format(i)}, 0.0, {_PROPAGATE}))")
                printer.lines.append(f"delta_error = delta_error - delta * s{i}")
        for i, load in enumerate(self.loads):
            if not depends(load, "kv_idx"):
                # A row without keys is NaN throughout, but where its mask keeps any gradient from the element, 0 it is.
                printer.lines.append(f"g{i} = g{i} - tl.where(w{i} == 0.0, 0.0, delta_error * w{i})")
                self._add_rows(load, f"g{i}")
        for i, sink in enumerate(self.program.spec.sinks):
            loads = [n for n in self.all_loads if sink.depends_on(n)]
            if loads:
                # A sink has no value, so only the normalisation passes a gradient: its weight times -delta.
                printer.lines.append(f"s{i} = -(delta + delta_error) * s{i}")
            for load in loads:
                derivative = printer.emit(d_load(sink, load))
                block = f"tl.reshape(({derivative}) + tl.zeros([BLOCK_M, 1], tl.float32), [BLOCK_M])"
                name = f"s{i}_{self.all_loads.index(load)}"
                printer.lines.append(f"{name} = tl.where(rows_in, s{i} * {block}, 0.0)")
                self._add_rows(load, name)
        return printer.lines[start:]

    def _add_rows(self, load: Load, name: str) -> None:
        """Add the [BLOCK_M] block ``name`` to the elements that ``load`` reads."""
        address, mask = self.rows.element(load, "GRAD")
        if depends(load, "q_idx"):
            conditions = [f"({mask})"] if mask else []
            text = _ATOMIC.format(address, f"{name}[:, None]", " & ".join([*conditions, "rows_in[:, None]"]))
        else:
            text = _ATOMIC.format(address, f"tl.sum({name}, 0)", mask or "None")
        self.rows.lines.append(text)


@lru_cache(maxsize=512)
def dq_kernel(
    spec: AttentionSpec, problem: Problem, config: TileConfig, grad_slots: tuple[int, ...] = ()
) -> KernelSource:
    """Render the kernel that computes dQ (main output) and adds the gradients of ``grad_slots`` into GRAD<slot>."""
    program = Program.of(spec, problem)
    spec = program.spec
    schedule = plan(program, problem, keys=True, backward=True)
    rows = ScorePrinter(problem.captures, "r")
    gradients = _CaptureGradients(program, grad_slots, rows)
    if gradients.sums_rows:
        sink_lines(rows, spec, 1.0 / program.scale if program.wide else LOG2E)
    needed = [
        e
        for logit in (spec.score, schedule.full)
        for e in (program.body(logit), program.rest(logit), *gradients.derivatives(logit))
    ]
    for e in hoistable(needed, frozenset({"kv_idx"})):
        rows.emit(e)
    through = descriptors(program, problem, config, rows, keys=True)
    row_lines = [*rows.lines, *through.lines]

    def after(printer: ScorePrinter, logit: Expr, tail: bool) -> list[str]:
        lines = gradients.tile_lines(printer, logit, tail)
        return lines + _derivative_lines(printer, program.rest(logit), "kv_vec[None, :] < KV_LEN" if tail else "")

    inside = "" if problem.even_kv else "kv_vec[None, :] < KV_LEN"
    body = tile_body(program, problem, schedule, rows.names, inside, after, through)
    end_lines = gradients.end_lines()
    functions = schedule.functions | body.functions | rows.functions
    exprs = (*spec.expressions, *needed) if grad_slots else (spec.score, *needed)
    captures = used_captures(exprs, spec.seed_slot)
    grads = [(slot, rank) for slot, rank in captures if slot in grad_slots]
    arguments = (
        *("Q", "K", "V", "DO", *_row_inputs(program), "DELTA"),
        *(f"GRAD{s}" for s, _ in grads),
        *(f"CAP{s}" for s, _ in captures),
        *schedule.arguments,
    )
    printed = [*row_lines, *body.lines, *end_lines, *schedule.lines]
    context = _context(program, problem, config, arguments, captures, printed)
    context.update(
        grads=grads,
        row_lines=row_lines,
        row_sums=gradients.row_sums,
        sums_rows=gradients.sums_rows,
        loop=schedule,
        loop_summaries=schedule.summaries,
        body=body,
        end_lines=end_lines,
    )
    constants = {**_constants(program, problem, config), "FACTOR": program.factor}
    return _kernel("dq", functions, context, arguments, tuple(f"GRAD{s}" for s, _ in grads), constants, config)
