"""Which tiles a kernel visits, and with which logit: proven key ranges as Triton text.

The keys that a block of queries sees fall into tiles that no row keeps (skipped where that is right), tiles that
every row keeps (the mask is left out) and edge tiles (the whole program). For the dK/dV kernel the roles are
exchanged: with q_idx and kv_idx swapped in the mask, the same proofs give the queries that see a block of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from fa_inductor.bounds import KvBounds
from fa_inductor.expr import BOOL, INT, KV_IDX, KV_LEN, Q_IDX, Q_LEN, Call, Const, Expr, H, Load, Sym, call, substitute
from fa_inductor.masks import MaskedScore, conjuncts, normalise
from fa_inductor.templates.configs import TileConfig, Use, candidates
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem, padded_dim
from fa_inductor.templates.score_codegen import ScorePrinter

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
    """

    lines: tuple[str, ...]
    start: str
    stop: str
    edge: str
    full: Expr
    functions: frozenset[str]


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
    found = KvBounds.of(keep) if masked.fill is not None else KvBounds()
    names: dict[Expr, str] = {_FIRST: first, _END: "block_end"} | ({} if keys else _swapped_names())
    printer = ScorePrinter(problem.captures, "n" if keys else "m", names)
    wide = {f"n{i}" for i, x in enumerate(problem.wide_sizes) if x}
    free = frozenset(x for x in _block_loads(found) if not (packed and x.depends_on(H)))

    def text(e: Expr) -> str:
        value = printer.emit(e)
        if any(isinstance(n, Load) or (isinstance(n, Sym) and n.name in wide) for n in e.walk()):
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
    if scan is not None and scan.atoms:
        printer.lines += scan.lines(problem, keys, length, block, printer.functions)
    partial = KvBounds(found.lower, found.upper).block_full(_FIRST, _END, free)
    if partial is None:
        return Plan(tuple(printer.lines), "tile_lo", "tile_hi", "", score, frozenset(printer.functions))
    full_low, full_high = partial
    assert full_low is not None
    assert full_high is not None
    edges = []
    if full_low != Const(0):
        printer.lines.append(f"full_lo = {text(full_low)}")
        edges.append(f"({tile} < full_lo)")
    printer.lines.append(f"full_hi = tl.minimum({text(full_high)}, {length})")
    edges.append(f"({tile} + {block} > full_hi)")
    rest = found.rest if keys else tuple(substitute(r, _SWAP) for r in found.rest)
    return Plan(
        tuple(printer.lines),
        "tile_lo",
        "tile_hi",
        " | ".join(edges),
        _full_logit(masked, rest),
        frozenset(printer.functions),
    )


class _Scan:
    """Narrows a block's range by what captured tensors say of each key, before the loop over tiles.

    An atom of the mask that compares something of the query with something of the key (``doc[q_idx] ==
    doc[kv_idx]``), or reads the key alone (``keep[kv_idx]``), excludes keys for the whole block once the query's
    side is replaced by its least and greatest value there. One pass over the keys, a vector at a time, finds the
    first and the last key that remains. Packed documents and padding become ranges that way, at the cost of reading
    the captured row once a block.
    """

    #: Keys looked at in one step of the pass.
    WIDTH = 1024

    def __init__(self, keep: Expr, packed: bool) -> None:
        self.atoms = [a for a in conjuncts(normalise(keep)) if self._usable(a) and not (packed and a.depends_on(H))]

    @staticmethod
    def _usable(atom: Expr) -> bool:
        reads_key = any(isinstance(n, Load) and n.depends_on(KV_IDX) for n in atom.walk())
        if not reads_key or atom.kind != BOOL:
            return False
        if not atom.depends_on(Q_IDX):
            return True
        if not (isinstance(atom, Call) and atom.fn in _TURNED and atom.args[0].kind == INT):
            return False
        return sorted(x.depends_on(KV_IDX) for x in atom.args) == [False, True] and not any(
            x.depends_on(KV_IDX) and x.depends_on(Q_IDX) for x in atom.args
        )

    def lines(self, problem: Problem, keys: bool, length: str, block: str, functions: set[str]) -> list[str]:
        other = {} if keys else _swapped_names()
        outer = ScorePrinter(problem.captures, "a", {Q_IDX: "q_idx" if keys else "kv_idx", **other})
        inner = ScorePrinter(problem.captures, "c", {Q_IDX: "q_idx", KV_IDX: "scan_idx", **other})
        hits = [self._hit(a, outer, inner) for a in self.atoms]
        functions |= outer.functions | inner.functions
        return [
            *outer.lines,
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

    @staticmethod
    def _hit(atom: Expr, outer: ScorePrinter, inner: ScorePrinter) -> str:
        """Text that is true for each key that the atom does not exclude for the whole block."""
        if not atom.depends_on(Q_IDX):
            return f"({inner.emit(atom)})"
        assert isinstance(atom, Call)
        query, key, fn = *atom.args, atom.fn
        if query.depends_on(KV_IDX):
            query, key, fn = key, query, _TURNED[fn]
        text, value = outer.emit(query), inner.emit(key)
        least, greatest = (f"tl.{end}(tl.{end}({text}, 1), 0)" for end in ("min", "max"))
        if fn == "eq":
            return f"(({value} >= {least}) & ({value} <= {greatest}))"
        symbol = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}[fn]
        return f"({least if fn in ('lt', 'le') else greatest} {symbol} {value})"


#: Comparison -> the same with its sides exchanged.
_TURNED = {"eq": "eq", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def leaves_tiles_out(program: Program, backward: bool) -> bool:
    """Whether the ranges of the program's mask let a kernel skip tiles."""
    if not program.may_skip(backward):
        return False
    found = KvBounds.of(program.masked.keep)
    return bool(found.lower or found.upper or _Scan(program.masked.keep, False).atoms)


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
