"""Which tiles a kernel visits, and with which logit: proven key ranges as Triton text.

The keys that a block of queries sees fall into tiles that no row keeps (skipped where that is right), tiles that
every row keeps (the mask is left out) and edge tiles (the whole program). For the dK/dV kernel the roles are
exchanged: with q_idx and kv_idx swapped in the mask, the same proofs give the queries that see a block of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import (
    BOOL,
    INT,
    KV_IDX,
    KV_LEN,
    Q_IDX,
    Q_LEN,
    SCORE,
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
from fa_inductor.templates.score_codegen import CaptureInfo, ScorePrinter, in_int32

#: Past every index, and a sum of two fits int32: lengths lie below 2^30.
_FAR = 2**30
_FIRST, _END = Sym("block_first"), Sym("block_end")
_SWAP: dict[Expr, Expr] = {Q_IDX: KV_IDX, KV_IDX: Q_IDX, Q_LEN: KV_LEN, KV_LEN: Q_LEN}


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
    keep = masked.keep if keys else substitute(masked.keep, _SWAP)
    wide = frozenset(Sym(f"n{i}") for i, x in enumerate(problem.wide_sizes) if x)
    found = _printable(keep, wide) if masked.fill is not None else KvBounds()
    names: dict[Expr, str] = {_FIRST: first, _END: "block_end"} | ({} if keys else _swapped_names())
    captures = problem.captures if keys else tuple(map(_swapped_info, problem.captures))
    printer = ScorePrinter(captures, "n" if keys else "m", names)
    free = frozenset(x for x in _block_loads(found) if not (packed and x.depends_on(H)))

    def text(e: Expr) -> str:
        value = printer.emit(_saturated(e, wide))
        if not in_int32(e) or not wide.isdisjoint(e.walk()):
            value = f"tl.minimum(tl.maximum({value}, -{_FAR}), {_FAR})"
        return f"tl.cast({value}, tl.int32)"

    scan = _Scan(keep, packed) if skip else None
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
    if summarised:
        printer.lines.append(f"full_lo = tl.maximum(full_lo, whole_lo * {SUMMARY})")
        printer.lines.append(f"full_hi = tl.minimum(full_hi, whole_hi * {SUMMARY})")
    rest = tuple(r if keys else substitute(r, _SWAP) for r in found.rest if r not in summarised)
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


#: Keys (or queries) that one element of a summary stands for. Every tile is a multiple or a part of it.
SUMMARY = 64
#: Up to this many queries a kernel looks at every key of the captured tensors instead: a summary is a kernel more.
_FEW_ROWS = 128


class _Scan:
    """Narrows a block's range by what captured tensors say of each key, before the loop over tiles.

    An atom of the mask that compares something of the query with something of the key (``doc[q_idx] ==
    doc[kv_idx]``), or reads the key alone (``keep[kv_idx]``), excludes keys for the whole block once the query's
    side is replaced by its least and greatest value there. The first and the last key that remains bound the loop:
    packed documents and padding become ranges that way.

    Where the key's side is a captured tensor's own element, the kernel reads a summary of it, LOW<i> and TOP<i>: the
    least and the greatest of every :data:`SUMMARY` elements of its last dimension, made once a call
    (:func:`summarised_slots`). They also show tiles in which every query keeps every key. Otherwise one pass reads every
    key, a vector at a time.
    """

    #: Keys looked at in one step of the pass, and elements of a summary.
    WIDTH = 1024

    def __init__(self, keep: Expr, packed: bool) -> None:
        self.atoms = [a for a in conjuncts(normalise(keep)) if self._usable(a) and not (packed and a.depends_on(H))]

    @staticmethod
    def _usable(atom: Expr) -> bool:
        reads_key = any(isinstance(n, Load) and n.depends_on(KV_IDX) for n in atom.walk())
        if not reads_key or atom.kind != BOOL or atom.depends_on(SCORE):
            return False
        if not atom.depends_on(Q_IDX):
            return True
        if not (isinstance(atom, Call) and atom.fn in _TURNED and atom.args[0].kind == INT):
            return False
        return sorted(x.depends_on(KV_IDX) for x in atom.args) == [False, True] and not any(
            x.depends_on(KV_IDX) and x.depends_on(Q_IDX) for x in atom.args
        )

    @property
    def compares(self) -> bool:
        """Whether an atom compares the two sides."""
        return any(a.depends_on(Q_IDX) for a in self.atoms)

    def summarised(self, problem: Problem, captures: Sequence[CaptureInfo]) -> bool:
        """Whether every atom can be read out of summaries, and there are queries enough for them to pay."""
        if problem.rows is not None and problem.rows <= _FEW_ROWS:
            return False
        return bool(self.atoms) and all(self._element(a, captures) is not None for a in self.atoms)

    @staticmethod
    def _element(atom: Expr, captures: Sequence[CaptureInfo]) -> Load | None:
        """The atom's key side where it is a captured tensor's element, the key being the last index."""
        if not atom.depends_on(Q_IDX):
            e = atom.args[0] if isinstance(atom, Call) and atom.fn == "not_" else atom
        else:
            assert isinstance(atom, Call)
            e = next(x for x in atom.args if x.depends_on(KV_IDX))
        if not isinstance(e, Load) or e.index[-1:] != (KV_IDX,) or e.slot >= len(captures):
            return None
        if any(i.depends_on(Q_IDX, KV_IDX) for i in e.index[:-1]):
            return None
        return e if all(captures[e.slot].proves_inside(d, i) for d, i in enumerate(e.index)) else None

    def slots(self, captures: Sequence[CaptureInfo]) -> set[int]:
        return {e.slot for a in self.atoms if (e := self._element(a, captures)) is not None}

    def summary_lines(
        self, problem: Problem, captures: Sequence[CaptureInfo], keys: bool, length: str, block: str, functions: set[str]
    ) -> list[str]:
        """Statements that narrow ``tile_lo`` and ``tile_hi`` and set ``whole_lo`` and ``whole_hi``.

        Elements [whole_lo, whole_hi) of the summaries stand for keys that every query of the block keeps, as far as the
        atoms say.
        """
        other = {} if keys else _swapped_names()
        outer = ScorePrinter(captures, "a", {Q_IDX: "q_idx" if keys else "kv_idx", **other})
        before: list[str] = []
        inside: list[str] = []
        hits, wholes = [], []
        for i, atom in enumerate(self.atoms):
            e = self._element(atom, captures)
            assert e is not None
            low, top = (f"tl.load({self._summary(e, kind, outer, 'scan_idx')})" for kind in ("LOW", "TOP"))
            if atom.depends_on(Q_IDX):
                low, top = (f"tl.cast({x}, tl.int64)" for x in (low, top))
            inside += [f"low{i} = {low}", f"top{i} = {top}"]
            if not atom.depends_on(Q_IDX):
                turned = atom != e
                hits.append(f"(low{i} == 0)" if turned else f"(top{i} != 0)")
                wholes.append(f"(top{i} == 0)" if turned else f"(low{i} != 0)")
                continue
            fn = self._turned(atom)
            own = self._element(substitute(atom, _SWAP), [_swapped_info(x) for x in captures])
            if own is not None and own.slot in self.slots(captures):
                # The block's own least and greatest are in a summary too.
                for end, kind in (("min", "LOW"), ("max", "TOP")):
                    before.append(f"{end}{i} = tl.{end}(tl.load({self._summary(own, kind, outer, 'own_idx')}), 0)")
            else:
                text = outer.emit(self._query(atom))
                before += [f"{end}{i} = tl.{end}(tl.{end}({text}, 1), 0)" for end in ("min", "max")]
            before += [f"{end}{i} = tl.cast({end}{i}, tl.int64)" for end in ("min", "max")]
            if fn == "eq":
                hits.append(f"(top{i} >= min{i}) & (low{i} <= max{i})")
                wholes.append(f"(low{i} == top{i}) & (low{i} == min{i}) & (min{i} == max{i})")
            elif fn in ("lt", "le"):
                hits.append(f"(min{i} {_SYMBOL[fn]} top{i})")
                wholes.append(f"(max{i} {_SYMBOL[fn]} low{i})")
            else:
                hits.append(f"(max{i} {_SYMBOL[fn]} low{i})")
                wholes.append(f"(min{i} {_SYMBOL[fn]} top{i})")
        functions |= outer.functions
        size = problem.cols if keys else problem.rows
        width = self.WIDTH if size is None else min(self.WIDTH, padded_dim(-(-size // SUMMARY)))
        first, mine, extent = ("q_first", "BLOCK_M", "Q_LEN") if keys else ("kv_first", "BLOCK_N", "KV_LEN")
        count = f"({mine} // {SUMMARY} if {mine} > {SUMMARY} else 1)"
        step = [
            f"scan_vec = scan_start + tl.arange(0, {width})",
            f"scan_idx = tl.minimum(scan_vec, tl.cdiv({length}, {SUMMARY}) - 1)",
            *inside,
            f"scan_in = (scan_vec * {SUMMARY} < tile_hi) & (scan_vec * {SUMMARY} + {SUMMARY} > tile_lo)",
            f"hit = scan_in & {' & '.join(hits)}",
            f"scan_lo = tl.minimum(scan_lo, tl.min(tl.where(hit, scan_vec * {SUMMARY}, tile_hi), 0))",
            f"scan_hi = tl.maximum(scan_hi, tl.max(tl.where(hit, scan_vec * {SUMMARY} + {SUMMARY}, tile_lo), 0))",
            f"whole = scan_in & {' & '.join(wholes)}",
            f"run_end = scan_start + {width}",
            "run_lo = tl.min(tl.where(whole, scan_vec, run_end), 0)",
            "run_hi = tl.min(tl.where(whole | (scan_vec < run_lo), run_end, scan_vec), 0)",
            "longer = run_hi - run_lo > whole_hi - whole_lo",
            "whole_lo = tl.where(longer, run_lo, whole_lo)",
            "whole_hi = tl.where(longer, run_hi, whole_hi)",
        ]
        if size is not None and size <= width * SUMMARY:
            step = ["scan_start = 0", *step]
        else:
            bounds = f"tile_lo // {SUMMARY}, tl.cdiv(tile_hi, {SUMMARY}), {width}"
            step = [f"for scan_start in tl.range({bounds}, num_stages=1):", *("    " + line for line in step)]
        return [
            f"own_idx = {first} // {SUMMARY} + tl.arange(0, {count})",
            f"own_idx = tl.minimum(own_idx, tl.cdiv({extent}, {SUMMARY}) - 1)",
            *outer.lines,
            *before,
            "scan_lo = tile_hi",
            "scan_hi = tile_lo",
            "whole_lo = 0",
            "whole_hi = 0",
            *step,
            f"tile_lo = tl.maximum(tile_lo, scan_lo // {block} * {block})",
            "tile_hi = tl.minimum(tile_hi, scan_hi)",
        ]

    @staticmethod
    def _summary(e: Load, kind: str, printer: ScorePrinter, at: str) -> str:
        """Address of the elements ``at`` of a captured tensor's summary."""
        name, outer = f"{kind}{e.slot}", e.index[:-1]
        offsets = [f"tl.cast({printer.emit(x)}, tl.int64) * {name}_S{d}" for d, x in enumerate(outer) if x != Const(0)]
        return " + ".join([name, *offsets, f"{at} * {name}_S{len(outer)}"])

    @staticmethod
    def _query(atom: Expr) -> Expr:
        """The side that does not depend on the key."""
        assert isinstance(atom, Call)
        return next(x for x in atom.args if not x.depends_on(KV_IDX))

    @staticmethod
    def _turned(atom: Expr) -> str:
        """The comparison with the key's side to its right."""
        assert isinstance(atom, Call)
        return _TURNED[atom.fn] if atom.args[0].depends_on(KV_IDX) else atom.fn

    def lines(
        self, captures: Sequence[CaptureInfo], keys: bool, length: str, block: str, functions: set[str]
    ) -> list[str]:
        """Statements that narrow ``tile_lo`` and ``tile_hi`` in one pass over the keys."""
        other = {} if keys else _swapped_names()
        outer = ScorePrinter(captures, "a", {Q_IDX: "q_idx" if keys else "kv_idx", **other})
        inner = ScorePrinter(captures, "c", {Q_IDX: "q_idx", KV_IDX: "scan_idx", **other})
        before: list[str] = []
        hits = []
        for i, atom in enumerate(self.atoms):
            if not atom.depends_on(Q_IDX):
                hits.append(f"({inner.emit(atom)})")
                continue
            assert isinstance(atom, Call)
            value = f"tl.cast({inner.emit(next(x for x in atom.args if x.depends_on(KV_IDX)))}, tl.int64)"
            text, fn = outer.emit(self._query(atom)), self._turned(atom)
            ends = ((end, f"tl.{end}(tl.{end}({text}, 1), 0)") for end in ("min", "max"))
            before += [f"{end}{i} = tl.cast({value_of}, tl.int64)" for end, value_of in ends]
            if fn == "eq":
                hits.append(f"({value} >= min{i}) & ({value} <= max{i})")
            else:
                hits.append(f"({'min' if fn in ('lt', 'le') else 'max'}{i} {_SYMBOL[fn]} {value})")
        functions |= outer.functions | inner.functions
        return [
            *outer.lines,
            *before,
            "scan_lo = tile_hi",
            "scan_hi = tile_lo",
            f"for scan_start in tl.range(tile_lo, tile_hi, {self.WIDTH}, num_stages=1):",
            f"    scan_vec = scan_start + tl.arange(0, {self.WIDTH})",
            f"    scan_idx = tl.minimum(scan_vec, {length} - 1)",
            *("    " + line for line in inner.lines),
            f"    hit = (scan_vec < tile_hi) & {' & '.join(hits)}",
            "    scan_lo = tl.minimum(scan_lo, tl.min(tl.where(hit, scan_vec, tile_hi), 0))",
            "    scan_hi = tl.maximum(scan_hi, tl.max(tl.where(hit, scan_vec + 1, tile_lo), 0))",
            f"tile_lo = tl.maximum(tile_lo, scan_lo // {block} * {block})",
            "tile_hi = tl.minimum(tile_hi, scan_hi)",
        ]


_SYMBOL = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
#: Comparison -> the same with its sides exchanged.
_TURNED = {"eq": "eq", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def leaves_tiles_out(program: Program, backward: bool) -> bool:
    """Whether the ranges of the program's mask let a kernel skip tiles."""
    if not program.may_skip(backward):
        return False
    found = KvBounds.of(program.masked.keep)
    return bool(found.lower or found.upper or _Scan(program.masked.keep, False).atoms)


def summarised_slots(program: Program, problem: Problem) -> tuple[int, ...]:
    """The captured tensors whose summaries some kernel of the program reads (LOW<i> and TOP<i>)."""
    found: set[int] = set()
    for keep, captures in (
        (program.masked.keep, problem.captures),
        (substitute(program.masked.keep, _SWAP), tuple(map(_swapped_info, problem.captures))),
    ):
        scan = _Scan(keep, False)
        if program.may_skip(backward=False) and scan.summarised(problem, captures):
            found |= scan.slots(captures)
    return tuple(sorted(found))


def _swapped_info(info: CaptureInfo) -> CaptureInfo:
    """What is known of a captured tensor, in the names of a swapped mask."""
    turned = {"q_idx": "kv_idx", "kv_idx": "q_idx"}
    return replace(info, covers=tuple(frozenset(turned.get(n, n) for n in names) for names in info.covers))


def choose(program: Program, problem: Problem, arch: int, which: str) -> list[TileConfig]:
    """The configurations to try for one kernel of a program, best first."""
    use = Use(
        arch=arch,
        element=problem.element,
        qk_pad=padded_dim(problem.qk_dim),
        v_pad=padded_dim(problem.v_dim),
        rows=None if problem.rows is None else problem.rows * problem.group,
        keys=problem.cols,
        masked=leaves_tiles_out(program, backward=which != "forward"),
        loads_tiles=program.loads_tiles,
        documents=program.may_skip(which != "forward") and _Scan(program.masked.keep, False).compares,
    )
    return candidates(use, which)


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
