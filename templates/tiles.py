"""Which tiles a kernel visits, and with which logit: proven key ranges as Triton text.

The keys that a block of queries sees fall into tiles that no row keeps (skipped where that is right), tiles that
every row keeps (the mask is left out) and edge tiles (the whole program). For the dK/dV kernel the roles are
exchanged: with q_idx and kv_idx swapped in the mask, the same proofs give the queries that see a block of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import (
    INT,
    KV_IDX,
    Q_IDX,
    Call,
    Const,
    Expr,
    H,
    Load,
    Sym,
    call,
    substitute,
)  # fmt: skip
from fa_inductor.intervals import linear
from fa_inductor.masks import MaskedScore, conjuncts, normalise
from fa_inductor.templates.configs import TileConfig, Use, candidates
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem, padded_dim
from fa_inductor.templates.scan import SUMMARY, SWAP, Scan, swapped_info, swapped_names
from fa_inductor.templates.score_codegen import ScorePrinter, in_int32

#: Past every index, and a sum of two fits int32: lengths lie below 2^30.
_FAR = 2**30
_FIRST, _END = Sym("block_first"), Sym("block_end")


@dataclass(frozen=True)
class Plan:
    """The one loop over tiles of a kernel.

    One loop visits tiles of every kind, and an edge tile takes a branch inside it. Loops of their own for the kinds
    would fill and drain the pipeline once each, and where an accumulator passes from one to the next, ptxas 13
    serialises every wgmma of the kernel (its message C7515), which costs a fifth of a causal dK/dV kernel on sm_90.

    Attributes:
        lines: statements that compute the loop's bounds.
        start, stop: its bounds, as Triton text.
        edge: condition under which a tile needs the whole program and a tail mask; "" where every tile does.
        full: the logit of a tile that is no edge.
        functions: device functions that the statements call.
        summaries: (slot, rank) of the captured tensors whose summaries the statements read.
    """

    lines: tuple[str, ...]
    start: str
    stop: str
    edge: str
    full: Expr
    functions: frozenset[str]
    summaries: tuple[tuple[int, int], ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the summaries among a kernel's arguments."""
        return tuple(f"{kind}{slot}" for slot, _ in self.summaries for kind in ("LOW", "TOP"))


def plan(program: Program, problem: Problem, *, keys: bool, backward: bool, packed: bool = False) -> Plan:
    """The loop over key tiles of one query block (``keys``), or over query tiles of one key block.

    The kernel defines ``q_first`` and ``q_last`` (``kv_first`` and ``kv_last``), both inclusive, as scalars.
    ``packed``: the block holds several heads.
    """
    masked, score = program.masked, program.spec.score
    skip = program.may_skip(backward)
    length, block, tile = ("KV_LEN", "BLOCK_N", "start_n") if keys else ("Q_LEN", "BLOCK_M", "start_m")
    first, last = ("q_first", "q_last") if keys else ("kv_first", "kv_last")
    even = problem.even_kv if keys else problem.even_q
    keep = masked.keep if keys else substitute(masked.keep, SWAP)
    wide = frozenset(Sym(f"n{i}") for i, x in enumerate(problem.wide_sizes) if x)
    found = _printable(keep, wide) if masked.fill is not None else KvBounds()
    names: dict[Expr, str] = {_FIRST: first, _END: "block_end"} | ({} if keys else swapped_names())
    captures = problem.captures if keys else tuple(map(swapped_info, problem.captures))
    printer = ScorePrinter(captures, "n" if keys else "m", names)
    free = frozenset(x for x in _block_loads(found) if not (packed and x.depends_on(H)))

    def text(e: Expr) -> str:
        value = printer.emit(_saturated(e, wide))
        if not in_int32(e) or not wide.isdisjoint(e.walk()):
            value = f"tl.minimum(tl.maximum({value}, -{_FAR}), {_FAR})"
        return f"tl.cast({value}, tl.int32)"

    scan = Scan(keep, packed) if skip else None
    if not (found.lower or found.upper or (scan and scan.atoms)):
        # Nothing is known of where the mask holds: every tile evaluates the whole program.
        edge = "" if even else f"{tile} + {block} > {length}"
        return Plan((), "0", length, edge, score, frozenset())

    printer.lines.append(f"block_end = {last} + 1")
    low, high = found.block(_FIRST, _END, free)
    assert low is not None
    assert high is not None
    printer.lines.append(f"tile_lo = tl.maximum({text(low)}, 0) // {block} * {block}" if skip else "tile_lo = 0")
    printer.lines.append(f"tile_hi = tl.minimum({text(high)}, {length})" if skip else f"tile_hi = {length}")
    summarised: list[Expr] = []
    summaries: tuple[tuple[int, int], ...] = ()
    if scan is not None and scan.atoms:
        if scan.summarised(problem, captures):
            summarised = scan.atoms
            summaries = tuple((slot, captures[slot].rank) for slot in sorted(scan.slots(captures)))
            printer.lines += scan.summary_lines(problem, captures, keys, length, block, printer.functions)
        else:
            printer.lines += scan.lines(captures, keys, length, block, printer.functions)
    partial = KvBounds(found.lower, found.upper).block_full(_FIRST, _END, free)
    if partial is None:
        return Plan(tuple(printer.lines), "tile_lo", "tile_hi", "", score, frozenset(printer.functions), summaries)
    full_low, full_high = partial
    assert full_low is not None
    assert full_high is not None
    edges = []
    if full_low != Const(0) or summarised:
        printer.lines.append(f"full_lo = {text(full_low)}")
        edges.append(f"({tile} < full_lo)")
    printer.lines.append(f"full_hi = tl.minimum({text(full_high)}, {length})")
    edges.append(f"({tile} + {block} > full_hi)")
    if keys and not backward and not skip and not found.rest and program.fill_vanishes:
        # Whether every row keeps a key is seen now: the block then has keys that all of its rows keep.
        printer.lines.append(f"seen = {'full_lo' if full_low != Const(0) else '0'} < full_hi")
        printer.lines.append(f"tile_lo = tl.where(seen, tl.maximum({text(low)}, 0) // {block} * {block}, 0)")
        printer.lines.append(f"tile_hi = tl.where(seen, tl.minimum({text(high)}, {length}), {length})")
    if summarised:
        printer.lines.append(f"full_lo = tl.maximum(full_lo, whole_lo * {SUMMARY})")
        printer.lines.append(f"full_hi = tl.minimum(full_hi, whole_hi * {SUMMARY})")
    rest = tuple(r if keys else substitute(r, SWAP) for r in found.rest if r not in summarised)
    return Plan(
        tuple(printer.lines),
        "tile_lo",
        "tile_hi",
        " | ".join(edges),
        _full_logit(masked, rest),
        frozenset(printer.functions),
        summaries,
    )


#: Where a captured number, a wide size or a constant of a range is cut off: past every index with room below for the sums
#: and divisions that :func:`_reach` allows, and above for them within int64.
_CUT = 2**50


def _printable(keep: Expr, wide: frozenset[Expr]) -> KvBounds:
    """The ranges of a mask that int64 computes, however large what it captures is; the others stay with ``rest``.

    Solving ``kv_idx <= x`` for the range makes ``x + 1`` of an x that may be the largest integer there is.
    """
    lower: list[Expr] = []
    upper: list[Expr] = []
    rest: list[Expr] = []
    for atom in conjuncts(normalise(keep)):
        found = KvBounds.of(atom)
        if all(_reach(e, wide) is not None for e in (*found.lower, *found.upper)):
            lower += [e for e in found.lower if e not in lower]
            upper += [e for e in found.upper if e not in upper]
            rest += found.rest
        else:
            rest.append(atom)
    return KvBounds(tuple(lower), tuple(upper), tuple(rest))


def _is_cut(e: Expr, wide: frozenset[Expr]) -> bool:
    if isinstance(e, Const):
        return e.kind == INT and abs(int(e.value)) > _FAR
    return isinstance(e, Load) or e in wide


def _reach(e: Expr, wide: frozenset[Expr]) -> tuple[int, int] | None:
    """(most, far) of a range's end once its leaves are cut off at :data:`_CUT`, None where that may change the tiles.

    ``most`` bounds the magnitude of what has no leaf to cut off. ``far`` is the least magnitude where one is cut off, with
    the sign of the true value; 0 without such a leaf.
    """
    if _is_cut(e, wide):
        return 0, _CUT
    if isinstance(e, Const):
        return abs(int(e.value)), 0
    if isinstance(e, Sym):
        return 2 * _FAR, 0
    form = linear(e)
    if form.terms != {e: 1}:
        parts = [(c, _reach(t, wide)) for t, c in form.terms.items()]
        parts.append((1, _reach(Const(form.const), wide)))
        reaches = [(abs(c), r) for c, r in parts if r is not None]
        cut = [(c, r[1]) for c, r in reaches if r[1]]
        most = sum(c * r[0] for c, r in reaches)
        if len(reaches) < len(parts) or len(cut) > 1 or most > 2**40 or any(c > 2**10 for c, _ in cut):
            return None
        far = cut[0][0] * cut[0][1] - most if cut else 0
        return (most, far) if not cut or far > 2 * _FAR else None
    if isinstance(e, Call) and e.fn in ("minimum", "maximum", "where", "floordiv"):
        inner = [_reach(x, wide) for x in (e.args[1:] if e.fn == "where" else e.args[: 1 if e.fn == "floordiv" else 2])]
        known = [r for r in inner if r is not None]
        if len(known) < len(inner):
            return None
        most, far = max(r[0] for r in known), min((r[1] for r in known if r[1]), default=0)
        if e.fn == "floordiv" and far:
            divisor = e.args[1]
            far = far // int(divisor.value) - 1 if isinstance(divisor, Const) and int(divisor.value) > 0 else -1
        return (most, far) if not far or far > 2 * _FAR else None
    # Other terms have no bounds, or constant ones.
    return 2 * _FAR, 0


def _saturated(e: Expr, wide: frozenset[Expr]) -> Expr:
    """``e`` with its leaves cut off at :data:`_CUT`."""

    def cut(x: Expr) -> Expr:
        return call("minimum", call("maximum", x, Const(-_CUT)), Const(_CUT))

    return substitute(e, {n: cut(n) for n in e.walk() if _is_cut(n, wide)})


def leaves_tiles_out(program: Program, backward: bool) -> bool:
    """Whether the ranges of the program's mask let a kernel skip tiles."""
    if not program.may_skip(backward):
        return False
    found = KvBounds.of(program.masked.keep)
    return bool(found.lower or found.upper or Scan(program.masked.keep, False).atoms)


def summarised_slots(program: Program, problem: Problem) -> tuple[int, ...]:
    """The captured tensors whose summaries some kernel of the program reads (LOW<i> and TOP<i>)."""
    found: set[int] = set()
    for keep, captures in (
        (program.masked.keep, problem.captures),
        (substitute(program.masked.keep, SWAP), tuple(map(swapped_info, problem.captures))),
    ):
        scan = Scan(keep, False)
        if program.may_skip(backward=False) and scan.summarised(problem, captures):
            found |= scan.slots(captures)
    return tuple(sorted(found))


def choose(program: Program, problem: Problem, arch: int, which: str, shared: int | None = None) -> list[TileConfig]:
    """The configurations to try for one kernel of a program, best first. ``shared``: as :attr:`Use.shared`."""
    return candidates(use_of(program, problem, arch, which, shared), which)


def use_of(program: Program, problem: Problem, arch: int, which: str, shared: int | None = None) -> Use:
    """What a configuration for one kernel of a program is for. ``shared``: as :attr:`Use.shared`."""
    return Use(
        arch=arch,
        element=problem.element,
        qk_pad=padded_dim(problem.qk_dim),
        v_pad=padded_dim(problem.v_dim),
        rows=None if problem.rows is None else problem.rows * problem.group,
        keys=problem.cols,
        masked=leaves_tiles_out(program, backward=which != "forward"),
        loads_tiles=program.loads_tiles,
        documents=program.may_skip(which != "forward") and Scan(program.masked.keep, False).compares,
        lean=program.lean and (which != "dkdv" or problem.group == 1),
        shared=shared,
        pages=problem.cache is not None and problem.cache.page > 0,
        bits=problem.cache is not None and bool(problem.cache.k or problem.cache.v),
    )


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
