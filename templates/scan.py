"""What captured tensors say of the tiles that a block sees: packed documents and padding become ranges of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fa_inductor.expr import BOOL, INT, KV_IDX, KV_LEN, Q_IDX, Q_LEN, SCORE, Call, Const, Expr, H, Load, substitute
from fa_inductor.masks import conjuncts, normalise
from fa_inductor.templates.rendering import Problem, padded_dim
from fa_inductor.templates.score_codegen import CaptureInfo, ScorePrinter

#: A mask with the roles of queries and keys exchanged.
SWAP: dict[Expr, Expr] = {Q_IDX: KV_IDX, KV_IDX: Q_IDX, Q_LEN: KV_LEN, KV_LEN: Q_LEN}


def swapped_info(info: CaptureInfo) -> CaptureInfo:
    """What is known of a captured tensor, in the names of a swapped mask."""
    turned = {"q_idx": "kv_idx", "kv_idx": "q_idx"}
    return replace(info, covers=tuple(frozenset(turned.get(n, n) for n in names) for names in info.covers))


def swapped_names() -> dict[Expr, str]:
    """Names under which a swapped mask's symbols are printed: its q_len is the kernel's KV_LEN, and vice versa."""
    return {Q_LEN: "KV_LEN", KV_LEN: "Q_LEN"}


#: Keys (or queries) that one element of a summary stands for. Every tile is a multiple or a part of it.
SUMMARY = 64
#: Up to this many queries a kernel looks at every key of the captured tensors instead: a summary is a kernel more.
_FEW_ROWS = 128


class Scan:
    """Narrows a block's range by what captured tensors say of each key, before the loop over tiles.

    An atom of the mask that compares something of the query with something of the key (``doc[q_idx] ==
    doc[kv_idx]``), or reads the key alone (``keep[kv_idx]``), excludes keys for the whole block once the query's
    side is replaced by its least and greatest value there. The first and the last key that remains bound the loop:
    packed documents and padding become ranges that way.

    Where the key's side is a captured tensor's own element, the kernel reads a summary of it, LOW<i> and TOP<i>: the
    least and the greatest of every :data:`SUMMARY` elements of its last dimension, made once a call
    (``tiles.summarised_slots``). They also show tiles in which every query keeps every key. Otherwise one pass reads every
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
        other = {} if keys else swapped_names()
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
            own = self._element(substitute(atom, SWAP), [swapped_info(x) for x in captures])
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
        other = {} if keys else swapped_names()
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
