"""What the loop over tiles computes of the score program: the statements of an ordinary tile and of an edge tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa_inductor.expr import Expr, Load
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import ScorePrinter
from fa_inductor.templates.tiles import Plan

#: (printer, logit, whether the tile may reach past the end) -> statements that follow p, dp and ds.
After = Callable[[ScorePrinter, Expr, bool], list[str]]


@dataclass(frozen=True)
class TileBody:
    """Statements of one trip.

    Attributes:
        early: run for every tile before the scores are there: the loads.
        logit: run for every tile; they end with ``logit``, of a tile that is no edge.
        edge_logit: run for an edge tile after those.
        after: run for a tile that is no edge once p and ds are known; for every tile where ``edge_after`` is None.
        edge_after: the same for an edge tile.
        functions: device functions that the statements call.
    """

    early: tuple[str, ...]
    logit: tuple[str, ...]
    edge_logit: tuple[str, ...]
    after: tuple[str, ...]
    edge_after: tuple[str, ...] | None
    functions: frozenset[str]

    @property
    def lines(self) -> list[str]:
        return [*self.early, *self.logit, *self.edge_logit, *self.after, *(self.edge_after or ())]


def tile_body(
    program: Program, problem: Problem, schedule: Plan, bound: dict[Expr, str], inside: str, after: After | None = None
) -> TileBody:
    """The statements of a kernel's loop.

    Args:
        bound: what is computed before the loop.
        inside: condition that a score lies within the operands, "" where every score of every tile does.
        after: the statements that follow p, dp and ds.
    """
    whole, full = program.spec.score, schedule.full
    mask = [f'logit = tl.where({inside}, logit, float("-inf"))'] if inside else []
    every = ScorePrinter(problem.captures, "t", bound)
    functions: set[str] = set()
    common = program.body(full if schedule.edge else whole)
    for node in common.walk():
        if isinstance(node, Load):
            every.emit(node)
    early, every.lines = tuple(every.lines), []

    def follow(outer: ScorePrinter, prefix: str, logit: Expr, tail: bool) -> list[str]:
        if after is None:
            return []
        inner = ScorePrinter(problem.captures, prefix, outer.names)
        lines = after(inner, logit, tail)
        functions.update(inner.functions)
        return lines

    if not schedule.edge:
        every.assign("logit", common)
        lines = follow(every, "d", whole, bool(inside))
        functions |= every.functions
        return TileBody(early, (*every.lines, *mask), (), tuple(lines), None, frozenset(functions))

    # What an edge tile shares with the others is computed outside its branch.
    every.assign("logit", common)
    edge = ScorePrinter(problem.captures, "e", every.names)
    if full != whole:
        edge.assign("logit", program.body(whole))
    ordinary, last = follow(every, "d", full, False), follow(every, "d", whole, bool(inside))
    functions |= every.functions | edge.functions
    edge_after = None
    if ordinary != last:
        # Triton wants a name that both branches bind to have one type: each has names of its own.
        edge_after = tuple(follow(every, "f", whole, bool(inside)))
    return TileBody(early, tuple(every.lines), (*edge.lines, *mask), tuple(ordinary), edge_after, frozenset(functions))
