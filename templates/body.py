"""What the loop over tiles computes of the score program: the statements of an ordinary tile and of an edge tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa_inductor.diagonal import ROWS, is_diagonal
from fa_inductor.expr import FLOAT, KV_IDX, Q_IDX, Const, Expr, Load
from fa_inductor.templates.configs import TileConfig
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import ScorePrinter, varies
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


@dataclass(frozen=True)
class Descriptors:
    """Captured tensors whose tiles a kernel loads through tensor descriptors.

    Attributes:
        lines: statements before the loop.
        tiles: load -> text of its tile, float32, inside the loop.
    """

    lines: tuple[str, ...] = ()
    tiles: tuple[tuple[Load, str], ...] = ()


def descriptors(program: Program, problem: Problem, config: TileConfig, printer: ScorePrinter, keys: bool) -> Descriptors:
    """Descriptors for every bias that is read at (..., q_idx, kv_idx) or along diagonals, where its strides and the
    configuration allow.

    Args:
        printer: prints the indices before the loop.
        keys: whether the loop is over keys, with scores [BLOCK_M, BLOCK_N]; else over queries, transposed.
    """
    lines: list[str] = []
    tiles: list[tuple[Load, str]] = []
    usable = config.tma and problem.tma
    for load in dict.fromkeys(n for n in program.spec.score.walk() if isinstance(n, Load) and usable):
        info = problem.captures[load.slot]
        outer = load.index[:-2]
        diagonal = is_diagonal(load) and ROWS % config.block_m == 0
        if not info.tma or load.kind != FLOAT or not (diagonal or load.index[-2:] == (Q_IDX, KV_IDX)):
            continue
        if any(varies(i) for i in outer) or not all(info.proves_inside(d, i) for d, i in enumerate(load.index)):
            continue
        name = f"bias{len(tiles)}"
        start = len(printer.lines)
        cap = f"CAP{load.slot}"
        offsets = [f"tl.cast({printer.emit(i)}, tl.int64) * {cap}_S{d}" for d, i in enumerate(outer) if i != Const(0)]
        lines += printer.lines[start:]
        base = " + ".join([cap, *offsets])
        stride = f"{cap}_S{len(outer)}"
        row, column = ("q_first", "start_n") if keys else ("start_m", "kv_first")
        size = "[Q_LEN, KV_LEN]"
        if diagonal:
            # Tiles of queries start at multiples of their size, so all rows of one have the same base.
            size = f"[{ROWS}, {cap}_N{len(outer) + 1}]"
            row, column = f"{row} % {ROWS}", f"{column} - ({row} - {row} % {ROWS}) + (Q_LEN - 1) // {ROWS} * {ROWS}"
        lines.append(f"{name}_desc = tl.make_tensor_descriptor({base}, {size}, [{stride}, 1], [BLOCK_M, BLOCK_N])")
        turned = "" if keys else ".T"
        tiles.append((load, f"{name}_desc.load([{row}, {column}]){turned}.to(tl.float32)"))
    return Descriptors(tuple(lines), tuple(tiles))


def tile_body(
    program: Program,
    problem: Problem,
    schedule: Plan,
    bound: dict[Expr, str],
    inside: str,
    after: After | None = None,
    through: Descriptors = Descriptors(),
) -> TileBody:
    """The statements of a kernel's loop.

    Args:
        bound: what is computed before the loop.
        inside: condition that a score lies within the operands, "" where every score of every tile does.
        after: the statements that follow p, dp and ds.
        through: captured tensors with descriptors.
    """
    whole, full = program.spec.score, schedule.full
    mask = [f'logit = tl.where({inside}, logit, float("-inf"))'] if inside else []
    every = ScorePrinter(problem.captures, "t", bound)
    functions: set[str] = set()
    common = program.body(full if schedule.edge else whole)
    for load, text in through.tiles:
        every.bind(load, text)
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
