"""Which tiles of keys a tile of queries sees, or the other way round, read out of the captured tensors.

The Gluon kernels take a band of keys and queries by themselves. What else masks is found here, before they run, by a kernel in
plain Triton with a program for each tile of keys of the backward, of queries of the forward: packed documents and padding become
ranges of the loop over the other side, and tiles that the mask keeps whole need not evaluate it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import indent

from fa_inductor.expr import INT, KV_IDX, Q_IDX, SCORE, TRUE, Call, Expr, H
from fa_inductor.masks import conjuncts
from fa_inductor.templates.program import VANISHING_FILL, Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import DEVICE_FUNCTIONS, CaptureInfo, ScorePrinter

#: What a kernel's text takes from its launch: captured tensors with their strides and sizes, the program's run-time sizes.
RUN_TIME = re.compile(r"\b(?:CAP\d+(?:_[SN]\d+)?|SIZE\d+)\b")
#: Queries, or keys, looked at in one step.
_WIDTH = 1024
#: A comparison of the side that is looked at with the side of the tile -> (whether some of the tile may be kept, whether all of
#: it is) for the least and greatest of the tile's side.
_COMPARE = {
    "eq": ("({x} >= min{i}) & ({x} <= max{i})", "({x} == min{i}) & ({x} == max{i})"),
    "lt": ("({x} < max{i})", "({x} < min{i})"),
    "le": ("({x} <= max{i})", "({x} <= min{i})"),
    "gt": ("({x} > min{i})", "({x} > max{i})"),
    "ge": ("({x} >= min{i})", "({x} >= max{i})"),
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
    program: Program, rest: Expr, problem: Problem, fixed: Sequence[Sequence[int | None]], keys: bool = False,
    term: Expr | None = None, rows_keep: bool = False,
) -> tuple[str, tuple[str, ...]]:  # fmt: skip
    """(text, arguments) of the kernel for what masks beside the band, ("", ()) where it would find nothing.

    Its arguments are RANGES, the ones returned, Q_LEN, KV_LEN, with ``keys`` LOW and HIGH, the ends of the band (less and more
    than any difference where it has none), and the tiles' sizes. Heads share what is found.

    Args:
        keys: whether keys of a tile of queries are looked for, and not queries of a tile of keys.
        term: of a key, added to its logits, instead of a mask: keys of which it is 0 are whole, and where there is one, such as
            have next to no weight may be left out.
        rows_keep: whether the mask's fill is finite, so that tiles may be left out only where each row keeps a key; the mask then
            reads keys alone.
    """
    own, look = (Q_IDX, KV_IDX) if keys else (KV_IDX, Q_IDX)
    atoms = [] if rest == TRUE else conjuncts(rest)
    usable = [a for a in atoms if finds(a)]
    skips = program.may_skip(not keys)
    if term is None and not rows_keep and (not usable or (len(usable) < len(atoms) and not skips)):
        return "", ()
    captures: Sequence[CaptureInfo] = problem.captures
    outer, inner = ScorePrinter(captures, "a"), ScorePrinter(captures, "c", {look: "scan_idx"})
    before: list[str] = []
    hits, wholes = ["(scan_vec < LOOK_LEN)"], ["(scan_vec < LOOK_LEN)"]
    for i, atom in enumerate(usable):
        if not atom.depends_on(look):
            # What is past the end repeats the last one.
            text = f"tl.broadcast_to({outer.emit(atom)}, [MINE, 1]).to(tl.int32)"
            before += [f"{end}{i} = tl.{end}(tl.{end}({text}, 1), 0)" for end in ("min", "max")]
            hits.append(f"(max{i} != 0)")
            wholes.append(f"(min{i} != 0)")
            continue
        if not atom.depends_on(own):
            text = inner.emit(atom)
            hits.append(f"({text})")
            wholes.append(f"({text})")
            continue
        assert isinstance(atom, Call)
        turned = atom.args[0].depends_on(own)
        there, here = reversed(atom.args) if turned else atom.args
        text = f"tl.cast({outer.emit(here)}, tl.int64)"
        before += [f"{end}{i} = tl.{end}(tl.{end}({text}, 1), 0)" for end in ("min", "max")]
        some, every = _COMPARE[_TURNED[atom.fn] if turned else atom.fn]
        value = f"tl.cast({inner.emit(there)}, tl.int64)"
        hits.append(some.format(x=value, i=i))
        wholes.append(every.format(x=value, i=i))
    if term is not None:
        assert keys
        text = inner.emit(term)
        hits.append(f"(({text} <= {VANISHING_FILL}) == 0)")
        wholes.append(f"({text} == 0.0)")
    if len(usable) < len(atoms):
        wholes = ["(scan_vec < 0)"]
    step = [
        *inner.lines,
        f"hit = {' & '.join(hits)}",
        f"whole = {' & '.join(wholes)}",
    ]
    if term is not None:
        # Only without another mask is a key that is whole one of every row.
        skips = rows_keep = rest == TRUE and program.masked.fill is None
    skips = skips or rows_keep
    lines = "\n".join(f"    {x}" for x in [*outer.lines, *before])
    inside = "\n".join(f"        {x}" for x in step)
    body = write_constants(f"{lines}\n@{inside}", problem, fixed)
    arguments = tuple(sorted(set(RUN_TIME.findall(body))))
    own_len, look_len = ("Q_LEN", "KV_LEN") if keys else ("KV_LEN", "Q_LEN")
    name = "q_idx" if keys else "kv_idx"
    mine, theirs = ("BLOCK_M", "BLOCK_N") if keys else ("BLOCK_N", "BLOCK_M")
    body = body.replace("LOOK_LEN", look_len).replace("[MINE, 1]", f"[{mine}, 1]")
    lines, inside = body.split("\n@")
    band = "" if not keys else f"""
    # What the band excludes is not looked at.
    look_first = tl.minimum(tl.maximum(own_first + LOW, 0), KV_LEN) // {_WIDTH} * {_WIDTH}
    look_end = tl.minimum(tl.maximum(own_first + {mine} + HIGH, 0), KV_LEN)"""
    alive = "" if not rows_keep else f"""
    # Without a key that every row keeps, rows are averages of all keys.
    alive = whole_hi > whole_lo
    lo = tl.where(alive, lo, 0)
    hi = tl.where(alive, hi, {look_len})"""
    step_of = f"""        scan_vec = start + tl.arange(0, {_WIDTH})
        scan_idx = tl.minimum(scan_vec, {look_len} - 1)
{inside}
"""
    runs = f"""        # The first run of this step; it may go on with the one before.
        run_end = start + {_WIDTH}
        run_lo = tl.min(tl.where(whole, scan_vec, run_end), 0)
        run_hi = tl.min(tl.where(whole | (scan_vec < run_lo), run_end, scan_vec), 0)
        run_lo = tl.where((run_lo == start) & (whole_hi == start), whole_lo, run_lo)
        longer = run_hi - run_lo > whole_hi - whole_lo
        whole_lo = tl.where(longer, run_lo, whole_lo)
        whole_hi = tl.where(longer, run_hi, whole_hi)"""
    loops = f"""    lo = {look_len}
    hi = 0
    whole_lo = 0
    whole_hi = 0
    for start in tl.range(0, {look_len}, {_WIDTH}, num_stages=1):
{step_of}        lo = tl.minimum(lo, tl.min(tl.where(hit, scan_vec, {look_len}), 0))
        hi = tl.maximum(hi, tl.max(tl.where(hit, scan_vec + 1, 0), 0))
{runs}"""
    if keys:
        # Most often there is one run: what a thread sees is put together once, after the loop.
        loops = f"""    lo_vec = tl.full([{_WIDTH}], {look_len}, tl.int32)
    hi_vec = tl.zeros([{_WIDTH}], tl.int32)
    whole_lo_vec = lo_vec
    whole_hi_vec = hi_vec
    count_vec = hi_vec
    for start in tl.range(look_first, look_end, {_WIDTH}):
{step_of}        lo_vec = tl.minimum(lo_vec, tl.where(hit, scan_vec, {look_len}))
        hi_vec = tl.where(hit, scan_vec + 1, hi_vec)
        whole_lo_vec = tl.minimum(whole_lo_vec, tl.where(whole, scan_vec, {look_len}))
        whole_hi_vec = tl.where(whole, scan_vec + 1, whole_hi_vec)
        count_vec += whole.to(tl.int32)
    lo = tl.min(lo_vec, 0)
    hi = tl.max(hi_vec, 0)
    whole_hi = tl.max(whole_hi_vec, 0)
    whole_lo = tl.minimum(tl.min(whole_lo_vec, 0), whole_hi)
    if tl.sum(count_vec, 0) != whole_hi - whole_lo:
        whole_lo = 0
        whole_hi = 0
        for start in tl.range(look_first, look_end, {_WIDTH}, num_stages=1):
{indent(step_of + runs, "    ")}"""
    unit = "keys" if keys else f"tiles of {theirs} queries"
    least, most = ("lo", "hi") if skips else ("0", look_len)
    # The forward knows from keys whether they are all that its mask leaves out.
    ends = [least, most, "whole_lo", "whole_hi"]
    if not keys:
        middle = [f"tl.cdiv({x}, {theirs})" for x in ends[1:3]]
        ends = [f"{ends[0]} // {theirs}", *middle, f"{ends[3]} // {theirs}"]
    stores = "\n".join(f"    tl.store(at + {i}, {x})" if i else f"    tl.store(at, {x})" for i, x in enumerate(ends))
    text = f"""import triton
import triton.language as tl


@triton.jit
def tile_ranges(
    RANGES, {"".join(f"{a}, " for a in arguments)}Q_LEN, KV_LEN, {"LOW, HIGH, " if keys else ""}
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # RANGES [B, tiles of {mine}, 4] int32, in {unit}: the first that any of {mine} sees and the end of them, the first of
    # a run that all of {mine} see and the run's end.
    tiles = tl.cdiv({own_len}, {mine})
    b_idx = tl.program_id(0) // tiles
    own_first = tl.program_id(0) % tiles * {mine}
    {name} = tl.minimum(own_first + tl.arange(0, {mine}), {own_len} - 1)[:, None]{band}
{lines}
{loops}{alive}
    at = RANGES + tl.program_id(0) * 4
{stores}
"""
    functions = outer.functions | inner.functions
    return text + "".join(DEVICE_FUNCTIONS[f] for f in sorted(functions)), arguments
