"""The forward kernel of a program: :func:`forward_kernel` renders templates/common/forward.py.jinja."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fa_inductor.expr import Expr
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.program import LOG2E, may_be_huge, pull_scale
from fa_inductor.templates.rendering import KernelSource, Problem, common_constants, render
from fa_inductor.templates.score_codegen import ScorePrinter, float_literal, hoistable


@dataclass(frozen=True)
class Loop:
    """One loop over tiles: bounds as Triton text, and whether its tiles need masking."""

    start: str
    stop: str
    edge: bool


def used_captures(exprs: tuple[Expr, ...], spec: AttentionSpec) -> list[tuple[int, int]]:
    """(slot, rank) of every captured tensor that a kernel evaluating ``exprs`` reads, by slot."""
    from fa_inductor.expr import Load

    ranks = {n.slot: len(n.index) for e in exprs for n in e.walk() if isinstance(n, Load)}
    if spec.seed_slot >= 0:
        ranks[spec.seed_slot] = 1
    return sorted(ranks.items())


def used_sizes(exprs: tuple[Expr, ...]) -> list[int]:
    """Numbers of the run-time sizes n0, n1, ... that ``exprs`` name."""
    from fa_inductor.expr import Sym

    names = {n.name for e in exprs for n in e.walk() if isinstance(n, Sym)}
    return sorted(int(n[1:]) for n in names if n[:1] == "n" and n[1:].isdigit())


def checked_dims(lines: list[str], captures: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which captures' sizes the printed text reads."""
    text = "\n".join(lines)
    return {(s, d) for s, rank in captures for d in range(rank) if f"CAP{s}_N{d}" in text}


@lru_cache(maxsize=512)
def forward_kernel(spec: AttentionSpec, problem: Problem, config: TileConfig) -> KernelSource:
    """Render the forward kernel.

    Raises:
        Unprintable: a term of the program has no Triton form.
    """
    body, factor = pull_scale(spec.score)
    wide = any(may_be_huge(e) for e in spec.expressions)
    pack = problem.rows is not None and problem.group > 1 and problem.rows * 2 <= config.block_m
    tma = config.tma and problem.tma
    unit = 1.0 / factor if wide else LOG2E

    rows = ScorePrinter(problem.captures, "r")
    for i, sink in enumerate(spec.sinks):
        value = rows.emit(sink)
        rows.lines.append(
            f"sink{i} = tl.reshape(({value}) + tl.zeros([BLOCK_M, 1], tl.float32), [BLOCK_M]) * {float_literal(unit)}"
        )
    for e in hoistable([body], frozenset({"kv_idx"})):
        rows.emit(e)
    functions = set(rows.functions)

    def tile_lines(e: Expr, prefix: str) -> list[str]:
        printer = ScorePrinter(problem.captures, prefix, rows.names)
        printer.assign("logit", e)
        functions.update(printer.functions)
        return printer.lines

    full_lines, edge_lines = tile_lines(body, "t"), tile_lines(body, "e")
    range_lines = ["full_hi = KV_LEN // BLOCK_N * BLOCK_N"]
    if config.warp_specialize:
        loops = [Loop("0", "KV_LEN", not problem.even_kv)]
    else:
        loops = [Loop("0", "full_hi", False)]
        if not problem.even_kv:
            loops.append(Loop("full_hi", "KV_LEN", True))

    exprs = spec.expressions
    captures = used_captures(exprs, spec)
    arguments = ("Q", "K", "V", "LSE", *(f"CAP{s}" for s, _ in captures))
    context: dict[str, Any] = {
        "kernel_args": ", ".join(f'"{a}"' for a in arguments),
        "captures": captures,
        "checked_dims": checked_dims(rows.lines + full_lines + edge_lines, captures),
        "sizes": used_sizes(exprs),
        "pack": pack,
        "tma": tma,
        "qk_even": problem.qk_dim & (problem.qk_dim - 1) == 0 and problem.qk_dim >= 16,
        "v_even": problem.v_dim & (problem.v_dim - 1) == 0 and problem.v_dim >= 16,
        "row_lines": rows.lines,
        "full_lines": full_lines,
        "edge_lines": edge_lines,
        "range_lines": range_lines,
        "loops": loops,
        "seed_slot": spec.seed_slot,
        "sinks": len(spec.sinks),
        "wide": wide,
        "dead_zero": spec.dead_rows == "zero",
        "warp_specialize": config.warp_specialize,
    }
    text, digest = render("common/forward.py.jinja", functions, context)
    constants = {
        **common_constants(problem, config),
        "SECTION": config.section,
        "SCALE": factor * LOG2E,
        "TO_LOG2": factor * LOG2E if wide else 1.0,
        "LN_UNIT": factor,
        "DROPOUT": spec.dropout_p,
        "KEEP_SCALE": 1.0 / (1.0 - spec.dropout_p),
        "PACK": pack,
    }
    return KernelSource(
        name=f"fa_forward_{digest}",
        text=text,
        arguments=arguments,
        outputs=("LSE",),
        output_rank=4,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
