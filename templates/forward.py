"""The forward kernel of a program: :func:`forward_kernel` renders templates/common/forward.py.jinja."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fa_inductor.expr import Expr, Load, Sym
from fa_inductor.spec import AttentionSpec, CacheForm
from fa_inductor.templates.body import Descriptors, descriptors, tile_body
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.program import LOG2E, Program
from fa_inductor.templates.quantise import E4M3_MAX, SCALE_KEYS, TINY
from fa_inductor.templates.rendering import KernelSource, Problem, common_constants, is_even, render
from fa_inductor.templates.score_codegen import ScorePrinter, float_literal, hoistable
from fa_inductor.templates.tiles import plan


def used_captures(exprs: tuple[Expr, ...], seed_slot: int) -> list[tuple[int, int]]:
    """(slot, rank) of every captured tensor that a kernel evaluating ``exprs`` and dropout reads, by slot."""
    ranks = {n.slot: len(n.index) for e in exprs for n in e.walk() if isinstance(n, Load)}
    if seed_slot >= 0:
        ranks[seed_slot] = 1
    return sorted(ranks.items())


def used_sizes(exprs: tuple[Expr, ...]) -> list[int]:
    """Numbers of the run-time sizes n0, n1, ... that ``exprs`` name."""
    names = {n.name for e in exprs for n in e.walk() if isinstance(n, Sym)}
    return sorted(int(n[1:]) for n in names if n[:1] == "n" and n[1:].isdigit())


def checked_dims(lines: list[str], captures: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which captures' sizes the printed text reads."""
    text = "\n".join(lines)
    return {(s, d) for s, rank in captures for d in range(rank) if f"CAP{s}_N{d}" in text}


_LARGEST = float_literal(3.0e38)


def sink_lines(
    printer: ScorePrinter,
    spec: AttentionSpec,
    unit: float,
    block: str = "tl.reshape(({}) + tl.zeros([BLOCK_M, 1], tl.float32), [BLOCK_M])",
) -> None:
    """Print each sink as a block [BLOCK_M] ``sink0``, ... in the units of the running maximum; ``block``: text around a sink."""
    for i, sink in enumerate(spec.sinks):
        printer.lines.append(f"raw{i} = {block.format(printer.emit(sink))}")
        printer.lines.append(f"sink{i} = raw{i} * {float_literal(unit)}")
        if unit > 1.0:
            # A finite sink stays finite: only an infinite one makes its row NaN.
            printer.lines.append(f'sink{i} = tl.where(sink{i} - raw{i} == float("inf"), {_LARGEST}, sink{i})')


#: Rows of the tallest tile that holds the queries of a whole group.
PACKED_ROWS = 64


def packs_heads(problem: Problem, config: TileConfig) -> bool:
    """Whether one tile holds the queries of every head of a group: few queries then read K and V once a group."""
    if problem.rows is None or problem.group == 1:
        return False
    return problem.rows * problem.group <= min(PACKED_ROWS, config.block_m)


def cache_arguments(cache: CacheForm | None) -> tuple[str, ...]:
    """Names of what comes with k and v that are read as they are stored."""
    given = {"TABLE": cache.page, "KS": cache.k_scaled, "VS": cache.v_scaled} if cache else {}
    return tuple(name for name, is_there in given.items() if is_there)


@lru_cache(maxsize=512)
def forward_kernel(
    spec: AttentionSpec, problem: Problem, config: TileConfig, fp8: bool = False, rounds: bool = False
) -> KernelSource:
    """Render the forward kernel.

    ``fp8``: for operands of :mod:`fa_inductor.templates.quantise`, a program without dropout. ``rounds``: FP8 weights are
    rounded in float32, for Triton's interpreter.

    Raises:
        Unprintable: a term of the program has no Triton form.
    """
    program = Program.of(spec, problem)
    spec = program.spec
    pack = packs_heads(problem, config)
    schedule = plan(program, problem, keys=True, backward=False, packed=pack)

    rows = ScorePrinter(problem.captures, "r")
    sink_lines(rows, spec, 1.0 / program.scale if program.wide else LOG2E)
    for e in hoistable([program.body(spec.score), program.body(schedule.full)], frozenset({"kv_idx"})):
        rows.emit(e)
    inside = "" if problem.even_kv else "(kv_vec < KV_LEN)[None, :]"
    through = Descriptors() if pack else descriptors(program, problem, config, rows, keys=True)
    body = tile_body(program, problem, schedule, rows.names, inside, through=through)
    functions = rows.functions | schedule.functions | body.functions
    poly = f"_exp2_poly{config.poly_degree}" if config.poly_degree else ""
    if poly:
        functions = functions | {poly}
    captures = used_captures(spec.expressions, spec.seed_slot)
    scales = ("QS", "KS", "VS") if fp8 else cache_arguments(problem.cache)
    arguments = ("Q", "K", "V", "LSE", *scales, *(f"CAP{s}" for s, _ in captures), *schedule.arguments)
    context: dict[str, Any] = {
        "kernel_args": ", ".join(f'"{a}"' for a in arguments),
        "captures": captures,
        "checked_dims": checked_dims([*rows.lines, *through.lines, *body.lines, *schedule.lines], captures),
        "sizes": used_sizes(spec.expressions),
        "pack": pack,
        "split": config.splits > 1,
        "shares_batches": program.shares_batches,
        "tma": config.tma and problem.tma,
        "qk_even": is_even(problem.qk_dim),
        "v_even": is_even(problem.v_dim),
        "row_lines": [*rows.lines, *through.lines],
        "loop": schedule,
        "loop_summaries": schedule.summaries,
        "body": body,
        "seed_slot": spec.seed_slot,
        "sinks": len(spec.sinks),
        "wide": program.wide,
        "dead_zero": spec.dead_rows == "zero",
        "even_kv": problem.even_kv,
        "poly": poly,
        "poly_quarters": config.poly_quarters,
        "threshold": config.rescale_threshold,
        "fp8": fp8,
        "rounds": rounds,
        "cache": problem.cache,
        "keys_size": len(problem.sizes),
        "whole_pages": problem.cache is not None and problem.cache.page > 0 and problem.cache.page % config.block_n == 0,
    }
    text, digest = render("common/forward.py.jinja", functions, context)
    constants = {
        **common_constants(problem, config),
        "SECTION": config.section,
        "SCALE": program.scale * LOG2E,
        "TO_LOG2": program.scale * LOG2E if program.wide else 1.0,
        "LN_UNIT": program.scale,
        "DROPOUT": spec.dropout_p,
        "KEEP_SCALE": 1.0 / (1.0 - spec.dropout_p),
        "PACK": pack,
        "SPLITS": config.splits,
        **({"PAGE": problem.cache.page} if problem.cache else {}),
        **({"SCALE_KEYS": SCALE_KEYS, "P_TOP": E4M3_MAX, "TINY": TINY} if fp8 else {}),
    }
    return KernelSource(
        name=f"fa_forward_{digest}",
        text=text,
        arguments=arguments,
        outputs=("LSE",),
        output_rank=5 if config.splits > 1 else 4,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
