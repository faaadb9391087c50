"""The Gluon backward of a program that reads captured tensors or has a logit of its own: its module's text.

The text is that of :mod:`fa_inductor.templates.sm90.gluon_backward`, followed by definitions of the four functions that it
calls for the score program, printed by the printer of the general templates. The functions see blocks that broadcast to S^T,
whatever their layouts. A second kernel, in plain Triton, reads out of the captured tensors which tiles of queries a tile of
keys sees at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa_inductor.expr import TRUE, Call, Const, Expr, Load
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.program import Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import DEVICE_FUNCTIONS, ScorePrinter, hoistable
from fa_inductor.templates.sm90.form import program_form_of
from fa_inductor.templates.sm90.ranges import RUN_TIME, tile_ranges, write_constants

PARAMETERS = "b_idx, h_idx, q_idx, kv_idx, Q_LEN, KV_LEN, captures"
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


@dataclass(frozen=True)
class ProgramSource:
    """The text of one program's kernels.

    Attributes:
        name: of the Gluon module, with a hash of its text. text: what follows the kernel's own text in it.
        arguments: names of the entries of ``captures``: CAP<slot>, CAP<slot>_S<dim>, CAP<slot>_N<dim>, SIZE<i>.
        scale, factor: of the logits, and of the derivative.
        skip: whether tiles without keys may be left out whatever the lengths; None where the band alone decides.
        plain: whether the logit is the kernel's own. masked: whether more than a band masks.
        heavy: whether the derivative is more than a number, or the logit reads a tensor for every query: more registers.
        select: whether masked entries need a zero gradient written, for the derivative need not be finite there.
        ranges: the text of the kernel that finds the tiles, "" where the band is all that is known of them.
        range_arguments: its arguments after RANGES, and before Q_LEN and KV_LEN.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    scale: float
    factor: float
    skip: bool | None
    plain: bool
    masked: bool
    heavy: bool
    select: bool
    ranges: str = ""
    range_arguments: tuple[str, ...] = ()


def source_of(spec: AttentionSpec, problem: Problem, strides: Sequence[Sequence[int]]) -> ProgramSource:
    """The kernels of a program for operands of which ``problem`` and the captured tensors' strides are known.

    Raises ValueError for a program that :func:`~fa_inductor.templates.sm90.form.program_form_of` does not take.
    """
    return _source(Program.of(spec, problem), problem, fixed_strides(strides))


@lru_cache(maxsize=512)
def _source(program: Program, problem: Problem, fixed: tuple[tuple[int | None, ...], ...]) -> ProgramSource:
    form = program_form_of(program.spec)
    if isinstance(form, str):
        raise ValueError(f"not a program of the Gluon kernel ({form}): {program.spec.program}")
    live = program.masked.live
    body, slope = program.body(live), program.rest(live)
    head = ScorePrinter(problem.captures, "r")
    outside = hoistable([body, slope], frozenset({"q_idx"}))
    for e in outside:
        head.emit(e)
    values = list(dict.fromkeys(head.names[e] for e in outside))
    tile = ScorePrinter(problem.captures, "t", head.names)
    loads = [n for n in dict.fromkeys([*body.walk(), *slope.walk()]) if isinstance(n, Load) and n not in head.names]
    for e in loads:
        tile.emit(e)
    rows = list(dict.fromkeys(tile.names[e] for e in loads))
    # Arithmetic is printed again where it is used: the compiler shares what two functions compute.
    known = {e: head.names[e] for e in outside} | {e: tile.names[e] for e in loads}
    logit, gradient = (ScorePrinter(problem.captures, "x", known) for _ in range(2))
    mask = ScorePrinter(problem.captures, "k")
    logit_text = logit.emit(body)
    mask_text = f'tl.where({mask.emit(form.rest)}, logit, float("-inf"))'
    may_skip = program.masked.fill is None or program.masks_exactly
    slope_text = gradient.times("p", slope, nan=not may_skip)
    unpack = [*unpacked("values", values), *unpacked("rows", rows)]
    functions: list[Function] = [
        ("score_values", "b_idx, h_idx, kv_idx, Q_LEN, KV_LEN, captures", head.lines, as_tuple(values)),
        ("score_rows", f"{PARAMETERS}, values", [*unpacked("values", values), *tile.lines], as_tuple(rows)),
        ("score_logit", f"score, {PARAMETERS}, values, rows", [*unpack, *logit.lines], logit_text),
        ("score_masked", f"logit, {PARAMETERS}", mask.lines, mask_text),
        ("score_slope", f"p, score, {PARAMETERS}, values, rows", [*unpack, *gradient.lines], slope_text),
    ]
    if form.plain:
        functions = [f for f in functions if f[0] == "score_masked"]
    text, arguments, digest = written(functions, (head, tile, logit, gradient, mask), problem, fixed)
    ranges, range_arguments = tile_ranges(program, form.rest, problem, fixed)
    masked = form.rest != TRUE
    skip = True if may_skip else False if masked else None
    heavy = not form.plain and (slope != Const(1.0) or bool(rows))
    select = not form.plain and not _finite(slope)
    return ProgramSource(
        f"fa_gluon_backward_{digest}", text, arguments, program.scale, program.factor, skip, form.plain, masked, heavy,
        select, ranges, range_arguments,
    )  # fmt: skip


def fixed_strides(strides: Sequence[Sequence[int]]) -> tuple[tuple[int | None, ...], ...]:
    """The strides of 0 and 1, which become part of the text: they say which elements lie side by side."""
    return tuple(tuple(s if s in (0, 1) else None for s in one) for one in strides)


#: Name, parameters, lines and result of a function.
Function = tuple[str, str, Sequence[str], str]


def written(
    functions: Sequence[Function], printers: Iterable[ScorePrinter], problem: Problem, fixed: Sequence[Sequence[int | None]]
) -> tuple[str, tuple[str, ...], str]:
    """(text, entries of ``captures`` that it names, digest) of functions printed by ``printers``."""
    texts = [write_constants(_function(*f), problem, fixed) for f in functions]
    arguments = tuple(sorted({a for t in texts for a in RUN_TIME.findall(t)}))
    text = "\n\n".join(_with_arguments(t, arguments) for t in texts)
    used = {f for printer in printers for f in printer.functions if f"{f}(" in text}
    text = "".join(_device_function(f) for f in sorted(used - {"_tanh"})) + "\n\n" + text
    # The kernel has a tanh of its own, as exact as logits need it.
    text = text.replace("_tanh(", "tanh(").replace("tl.PropagateNan", "triton_language.PropagateNan")
    return text, arguments, hashlib.sha256(text.encode()).hexdigest()[:12]


def as_tuple(names: Sequence[str]) -> str:
    """The text of a tuple of ``names``; never an empty one, which the language cannot return."""
    return f"({', '.join(names)},)" if names else "(b_idx,)"


def unpacked(name: str, items: Iterable[str]) -> list[str]:
    """Lines that give the entries of the tuple ``name`` the names ``items``."""
    return [f"{x} = {name}[{i}]" for i, x in enumerate(items)]


def _function(name: str, parameters: str, lines: Sequence[str], result: str) -> str:
    """The text of a function; of ``lines``, each ``name = expression``, those that the result needs."""
    needed, kept = set(_NAME.findall(result)), []
    for line in reversed(lines):
        target, value = line.split(" = ", 1)
        if target in needed:
            needed.update(_NAME.findall(value))
            kept.append(f"    {line}")
    return "\n".join(["@gluon.jit", f"def {name}({parameters}):", *reversed(kept), f"    return {result}", ""])


def _with_arguments(text: str, arguments: tuple[str, ...]) -> str:
    """A function's text that takes what it names out of ``captures``."""
    decorator, head, *rest = text.split("\n")
    used = set(RUN_TIME.findall(text))
    taken = [f"    {a} = captures[{i}]" for i, a in enumerate(arguments) if a in used]
    return "\n".join([decorator, head, *taken, *rest])


def _device_function(name: str) -> str:
    return "\n" + DEVICE_FUNCTIONS[name].replace("@triton.jit", "@gluon.jit")


#: Functions whose slope is a number for every score.
_TAME = frozenset({"tanh", "sigmoid", "sin", "cos", "erf"})
_SUMS = frozenset({"add", "sub", "mul", "neg"})


def _finite(slope: Expr) -> bool:
    """Whether a derivative is a finite number for every finite score, whatever the captured tensors hold."""
    if isinstance(slope, Const):
        return True
    if not isinstance(slope, Call) or any(isinstance(n, Load) for n in slope.walk()):
        return False
    if slope.fn in _TAME:
        return True
    return slope.fn in _SUMS and all(_finite(a) for a in slope.args)


@lru_cache(maxsize=2)
def _kernel_text(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text()


def module_with(kernel: str, name: str, text: str) -> Any:
    """The module ``name`` of a kernel's own text (``kernel``: its file's name), and after it ``text``."""
    from fa_inductor.templates.standalone import module_of

    aliases = "\nimport triton.language as triton_language\n\ntl = gl\n"
    return module_of(name, _kernel_text(kernel) + aliases + text)


@lru_cache(maxsize=512)
def gluon_kernel(source: ProgramSource) -> Any:
    """The jitted Gluon kernel; needs triton."""
    return module_with("gluon_backward", source.name, source.text).flash_backward


@lru_cache(maxsize=512)
def range_kernel(text: str) -> Any:
    """The jitted kernel of :attr:`ProgramSource.ranges`."""
    from fa_inductor.templates.standalone import module_of

    return module_of(f"fa_tile_ranges_{hashlib.sha256(text.encode()).hexdigest()[:12]}", text).tile_ranges
