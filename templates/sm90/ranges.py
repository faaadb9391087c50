"""Which tiles of queries a tile of keys sees, read out of the captured tensors before the backward kernel runs.

The backward kernel takes a band of keys and queries by itself. What else masks is found here, by a kernel in plain Triton
with a program for each tile of keys: packed documents and padding become ranges of the loop over queries, and tiles that the
mask keeps whole need not evaluate it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fa_inductor.expr import INT, KV_IDX, Q_IDX, SCORE, TRUE, Call, Expr, H
from fa_inductor.masks import conjuncts
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import DEVICE_FUNCTIONS, CaptureInfo, ScorePrinter

#: What a kernel's text takes from its launch: captured tensors with their strides and sizes, the program's run-time sizes.
RUN_TIME = re.compile(r"\b(?:CAP\d+(?:_[SN]\d+)?|SIZE\d+)\b")
#: Queries looked at in one step.
_WIDTH = 1024
#: A comparison of a query's side with a key's side -> (whether some key may be kept, whether all keys are) for the least and
#: greatest of the keys' side.
_COMPARE = {
    "eq": ("({q} >= min{i}) & ({q} <= max{i})", "({q} == min{i}) & ({q} == max{i})"),
    "lt": ("({q} < max{i})", "({q} < min{i})"),
    "le": ("({q} <= max{i})", "({q} <= min{i})"),
    "gt": ("({q} > min{i})", "({q} > max{i})"),
    "ge": ("({q} >= min{i})", "({q} >= max{i})"),
}
_TURNED = {"eq": "eq", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def write_constants(text: str, problem: Problem, fixed: Sequence[Sequence[int | None]]) -> str:
    """``text`` with the strides that are known and the widths of indices written out."""
    for slot, strides in enumerate(fixed):
        text = text.replace(f"CAP{slot}_INDEX", "tl.int64" if problem.wide_captures[slot] else "tl.int32")
        for d, s in enumerate(strides):
            if s is not None:
                text = re.sub(rf"\bCAP{slot}_S{d}\b", str(s), text)
    return text


def _compares(atom: Expr) -> bool:
    """Whether an atom compares an integer of the query with an integer of the key."""
    if not isinstance(atom, Call) or atom.fn not in _COMPARE or atom.args[0].kind != INT:
        return False
    sides = [(x.depends_on(Q_IDX), x.depends_on(KV_IDX)) for x in atom.args]
    return sorted(sides) == [(False, True), (True, False)]


def finds(atom: Expr) -> bool:
    """Whether the kernel finds the tiles that one conjunct of a mask leaves: it reads one side alone or compares the two."""
    return not atom.depends_on(H, SCORE) and (not (atom.depends_on(Q_IDX) and atom.depends_on(KV_IDX)) or _compares(atom))


def tile_ranges(
    program: Program, rest: Expr, problem: Problem, fixed: Sequence[Sequence[int | None]]
) -> tuple[str, tuple[str, ...]]:
    """(text, arguments) of the kernel for what masks beside the band, ("", ()) where it would find nothing.

    Its arguments are RANGES, the ones returned, Q_LEN, KV_LEN, and the tiles' sizes. Heads share what is found.
    """
    atoms = [] if rest == TRUE else conjuncts(rest)
    usable = [a for a in atoms if finds(a)]
    if not usable or (len(usable) < len(atoms) and not program.may_skip(True)):
        return "", ()
    captures: Sequence[CaptureInfo] = problem.captures
    outer, inner = ScorePrinter(captures, "a"), ScorePrinter(captures, "c", {Q_IDX: "scan_idx"})
    before: list[str] = []
    hits, wholes = ["(scan_vec < Q_LEN)"], ["(scan_vec < Q_LEN)"]
    for i, atom in enumerate(usable):
        if not atom.depends_on(Q_IDX):
            # Keys past the end repeat the last one.
            text = f"tl.broadcast_to({outer.emit(atom)}, [BLOCK_N, 1]).to(tl.int32)"
            before += [f"{end}{i} = tl.{end}(tl.{end}({text}, 1), 0)" for end in ("min", "max")]
            hits.append(f"(max{i} != 0)")
            wholes.append(f"(min{i} != 0)")
            continue
        if not atom.depends_on(KV_IDX):
            text = inner.emit(atom)
            hits.append(f"({text})")
            wholes.append(f"({text})")
            continue
        assert isinstance(atom, Call)
        turned = atom.args[0].depends_on(KV_IDX)
        query, key = reversed(atom.args) if turned else atom.args
        text = f"tl.cast({outer.emit(key)}, tl.int64)"
        before += [f"{end}{i} = tl.{end}(tl.{end}({text}, 1), 0)" for end in ("min", "max")]
        some, every = _COMPARE[_TURNED[atom.fn] if turned else atom.fn]
        value = f"tl.cast({inner.emit(query)}, tl.int64)"
        hits.append(some.format(q=value, i=i))
        wholes.append(every.format(q=value, i=i))
    if len(usable) < len(atoms):
        wholes = ["(scan_vec < 0)"]
    step = [
        *inner.lines,
        f"hit = {' & '.join(hits)}",
        f"whole = {' & '.join(wholes)}",
    ]
    skips = program.may_skip(True)
    lines = "\n".join(f"    {x}" for x in [*outer.lines, *before])
    inside = "\n".join(f"        {x}" for x in step)
    body = write_constants(f"{lines}\n@{inside}", problem, fixed)
    arguments = tuple(sorted(set(RUN_TIME.findall(body))))
    lines, inside = body.split("\n@")
    text = f"""import triton
import triton.language as tl


@triton.jit
def tile_ranges(RANGES, {"".join(f"{a}, " for a in arguments)}Q_LEN, KV_LEN, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # RANGES [B, key tiles, 4] int32, in tiles of BLOCK_M queries: the first that any of BLOCK_N keys sees and the end of
    # them, the first of a run that all of the keys see and the run's end.
    tiles = tl.cdiv(KV_LEN, BLOCK_N)
    b_idx = tl.program_id(0) // tiles
    kv_first = tl.program_id(0) % tiles * BLOCK_N
    kv_idx = tl.minimum(kv_first + tl.arange(0, BLOCK_N), KV_LEN - 1)[:, None]
{lines}
    lo = Q_LEN
    hi = 0
    whole_lo = 0
    whole_hi = 0
    for start in tl.range(0, Q_LEN, {_WIDTH}, num_stages=1):
        scan_vec = start + tl.arange(0, {_WIDTH})
        scan_idx = tl.minimum(scan_vec, Q_LEN - 1)
{inside}
        lo = tl.minimum(lo, tl.min(tl.where(hit, scan_vec, Q_LEN), 0))
        hi = tl.maximum(hi, tl.max(tl.where(hit, scan_vec + 1, 0), 0))
        # The first run of this step; it may go on with the one before.
        run_end = start + {_WIDTH}
        run_lo = tl.min(tl.where(whole, scan_vec, run_end), 0)
        run_hi = tl.min(tl.where(whole | (scan_vec < run_lo), run_end, scan_vec), 0)
        run_lo = tl.where((run_lo == start) & (whole_hi == start), whole_lo, run_lo)
        longer = run_hi - run_lo > whole_hi - whole_lo
        whole_lo = tl.where(longer, run_lo, whole_lo)
        whole_hi = tl.where(longer, run_hi, whole_hi)
    at = RANGES + tl.program_id(0) * 4
    tl.store(at, {"lo // BLOCK_M" if skips else "0"})
    tl.store(at + 1, tl.cdiv({"hi" if skips else "Q_LEN"}, BLOCK_M))
    tl.store(at + 2, tl.cdiv(whole_lo, BLOCK_M))
    tl.store(at + 3, whole_hi // BLOCK_M)
"""
    functions = outer.functions | inner.functions
    return text + "".join(DEVICE_FUNCTIONS[f] for f in sorted(functions)), arguments
