"""Which tiles a kernel visits, and with which logit: proven key ranges as Triton text.

The keys that a block of queries sees fall into tiles that no row keeps (skipped where that is right), tiles that
every row keeps (the mask is left out) and edge tiles (the whole program). For the dK/dV kernel the roles are
exchanged: with q_idx and kv_idx swapped in the mask, the same proofs give the queries that see a block of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import KV_IDX, KV_LEN, Q_IDX, Q_LEN, Const, Expr, H, Load, Sym, call, substitute
from fa_inductor.masks import MaskedScore
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import ScorePrinter

_FIRST, _END = Sym("block_first"), Sym("block_end")
_SWAP: dict[Expr, Expr] = {Q_IDX: KV_IDX, KV_IDX: Q_IDX, Q_LEN: KV_LEN, KV_LEN: Q_LEN}


@dataclass(frozen=True)
class Loop:
    """One loop over tiles: bounds as Triton text, and whether its tiles need the whole program and a tail mask."""

    start: str
    stop: str
    edge: bool


@dataclass(frozen=True)
class Plan:
    """The loops of one kernel.

    Attributes:
        lines: statements that compute the loops' bounds.
        loops: in order; together they visit every tile that matters once.
        full: the logit inside loops that are no edge.
        functions: device functions that the statements call.
    """

    lines: tuple[str, ...]
    loops: tuple[Loop, ...]
    full: Expr
    functions: frozenset[str]


def plan(
    program: Program, problem: Problem, *, keys: bool, backward: bool, packed: bool = False, single: bool = False
) -> Plan:
    """The loops over key tiles of one query block (``keys``), or over query tiles of one key block.

    The kernel defines ``q_first`` and ``q_last`` (``kv_first`` and ``kv_last``), both inclusive, as scalars.
    ``packed``: the block holds several heads. ``single``: one loop, every tile an edge (warp specialisation takes
    one loop a kernel).
    """
    masked, score = program.masked, program.spec.score
    skip = program.may_skip(backward)
    length, block = ("KV_LEN", "BLOCK_N") if keys else ("Q_LEN", "BLOCK_M")
    first, last = ("q_first", "q_last") if keys else ("kv_first", "kv_last")
    even = problem.even_kv if keys else problem.even_q
    keep = masked.keep if keys else substitute(masked.keep, _SWAP)
    found = KvBounds.of(keep) if masked.fill is not None else KvBounds()
    names: dict[Expr, str] = {_FIRST: first, _END: "block_end"} | ({} if keys else _swapped_names())
    printer = ScorePrinter(problem.captures, "n" if keys else "m", names)
    free = frozenset(x for x in _block_loads(found) if not (packed and x.depends_on(H)))

    def text(e: Expr) -> str:
        return f"tl.cast({printer.emit(e)}, tl.int32)"

    tail = Loop("full_hi", "tile_hi", True)
    if not (found.lower or found.upper):
        # Nothing is known of where the mask holds: every tile evaluates the whole program.
        if single:
            return Plan((), (Loop("0", length, True),), score, frozenset())
        lines = [f"full_hi = {length} // {block} * {block}", f"tile_hi = {length}"]
        return Plan(tuple(lines), (Loop("0", "full_hi", False), *(() if even else (tail,))), score, frozenset())

    printer.lines.append(f"block_end = {last} + 1")
    low, high = found.block(_FIRST, _END, free)
    assert low is not None
    assert high is not None
    printer.lines.append(f"tile_lo = tl.maximum({text(low)}, 0) // {block} * {block}" if skip else "tile_lo = 0")
    printer.lines.append(f"tile_hi = tl.minimum({text(high)}, {length})" if skip else f"tile_hi = {length}")
    partial = KvBounds(found.lower, found.upper).block_full(_FIRST, _END, free)
    starts_at_zero = not skip or low == Const(0)
    if single or partial is None:
        loops = (Loop("tile_lo", "tile_hi", True),)
        return Plan(tuple(printer.lines), loops, score, frozenset(printer.functions))
    full_low, full_high = partial
    if full_low == Const(0) and starts_at_zero:
        printer.lines.append("full_lo = 0")
        head: tuple[Loop, ...] = ()
    else:
        printer.lines.append(f"full_lo = tl.cdiv(tl.maximum({text(full_low)}, tile_lo), {block}) * {block}")
        printer.lines.append("full_lo = tl.minimum(full_lo, tl.maximum(tile_hi, tile_lo))")
        # The first loop must end on the grid of tiles; past tile_hi it would only visit masked tiles.
        head = (Loop("tile_lo", "full_lo", True),)
    printer.lines.append(f"full_hi = tl.maximum(tl.minimum({text(full_high)}, tile_hi) // {block} * {block}, full_lo)")
    loops = (*head, Loop("full_lo", "full_hi", False), tail)
    rest = found.rest if keys else tuple(substitute(r, _SWAP) for r in found.rest)
    return Plan(tuple(printer.lines), loops, _full_logit(masked, rest), frozenset(printer.functions))


def leaves_tiles_out(program: Program, backward: bool) -> bool:
    """Whether the ranges of the program's mask let a kernel skip tiles."""
    if not program.may_skip(backward):
        return False
    found = KvBounds.of(program.masked.keep)
    return bool(found.lower or found.upper)


def _full_logit(masked: MaskedScore, rest: tuple[Expr, ...]) -> Expr:
    """The logit where the ranges of the mask are known to hold and only ``rest`` is left of it."""
    if not rest:
        return masked.live
    assert masked.fill is not None
    keep = reduce(lambda x, y: call("and_", x, y), rest)
    excluded = call("add", masked.live, masked.fill) if masked.additive else masked.fill
    return call("where", keep, masked.live, excluded)


def _block_loads(found: KvBounds) -> list[Expr]:
    """Loads in the ranges that are one number for the whole block: their index uses neither q_idx nor kv_idx."""
    exprs = (*found.lower, *found.upper)
    return [n for e in exprs for n in e.walk() if isinstance(n, Load) and not n.depends_on(Q_IDX, KV_IDX)]


def _swapped_names() -> dict[Expr, str]:
    """Names under which a swapped mask's symbols are printed: its q_len is the kernel's KV_LEN, and vice versa."""
    return {Q_LEN: "KV_LEN", KV_LEN: "Q_LEN"}
