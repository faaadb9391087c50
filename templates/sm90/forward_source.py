"""The Gluon forward of a program that reads captured tensors or has a logit of its own: its module's text.

The text is that of :mod:`fa_inductor.templates.sm90.gluon_program_forward`, followed by definitions of the functions that it
calls for the score program, printed as :mod:`fa_inductor.templates.sm90.program_source` does for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fa_inductor.expr import TRUE
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.forward import sink_lines
from fa_inductor.templates.program import LOG2E, Program
from fa_inductor.templates.rendering import Problem
from fa_inductor.templates.score_codegen import ScorePrinter, float_literal, hoistable
from fa_inductor.templates.sm90.form import forward_form_of
from fa_inductor.templates.sm90.program_source import (
    PARAMETERS,
    Function,
    as_tuple,
    fixed_strides,
    module_with,
    unpacked,
    written,
)
from fa_inductor.templates.sm90.ranges import tile_ranges


@dataclass(frozen=True)
class ForwardSource:
    """The text of one program's kernels.

    Attributes:
        name: of the Gluon module, with a hash of its text. text: what follows the kernel's own text in it.
        arguments: names of the entries of ``captures``: CAP<slot>, CAP<slot>_S<dim>, CAP<slot>_N<dim>, SIZE<i>.
        plain: whether the logit is the kernel's own. masked: whether more than a band masks. wide: whether masked logits are
            finite and may be huge. sinks: how many. across: whether what is read for every score is the same of all sequences.
        ranges: the text of the kernel that finds the tiles, "" where the band is all that is known of them.
        range_arguments: its arguments after RANGES, and before Q_LEN and KV_LEN.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    plain: bool
    masked: bool
    wide: bool
    sinks: int
    across: bool = False
    ranges: str = ""
    range_arguments: tuple[str, ...] = ()

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments that the text decides."""
        return {"PROGRAM": not self.plain, "MASKED": self.masked, "WIDE": self.wide, "SINKS": self.sinks, "ACROSS": self.across}


def forward_source_of(spec: AttentionSpec, problem: Problem, strides: Sequence[Sequence[int]]) -> ForwardSource:
    """The kernels of a program for operands of which ``problem`` and the captured tensors' strides are known.

    Raises ValueError for a program that :func:`~fa_inductor.templates.sm90.form.forward_form_of` does not take.
    """
    return _source(Program.of(spec, problem), problem, fixed_strides(strides))


@lru_cache(maxsize=512)
def _source(program: Program, problem: Problem, fixed: tuple[tuple[int | None, ...], ...]) -> ForwardSource:
    spec = program.spec
    form = forward_form_of(spec)
    if isinstance(form, str):
        raise ValueError(f"not a program of the Gluon kernel ({form}): {spec.program}")
    head = ScorePrinter(problem.captures, "r")
    outside = hoistable([form.body], frozenset({"kv_idx"}))
    for e in outside:
        head.emit(e)
    values = list(dict.fromkeys(head.names[e] for e in outside))
    logit = ScorePrinter(problem.captures, "x", {e: head.names[e] for e in outside})
    logit_text = logit.emit(form.body)
    ahead = ScorePrinter(problem.captures, "a")
    taken = {load: ahead.raw(load) for load in form.taken_ahead}
    mask = ScorePrinter(problem.captures, "k", {load: value for load, (_name, value) in taken.items()})
    sinks = ScorePrinter(problem.captures, "s")
    masked = f"logit + {mask.emit(form.term)}" if form.term is not None else "logit"
    if form.rest != TRUE:
        fill = 'float("-inf")' if form.fill is None else float_literal(form.fill)
        mask_text = f"tl.where({mask.emit(form.rest)}, {masked}, {fill})"
    else:
        mask_text = masked
    sink_lines(sinks, spec, LOG2E, "tl.cast({}, tl.float32)")
    names = [f"sink{i}" for i in range(len(spec.sinks))]
    functions: list[Function] = []
    if not form.plain:
        functions += [
            ("score_values", "b_idx, h_idx, q_idx, Q_LEN, KV_LEN, captures", head.lines, as_tuple(values)),
            ("score_logit", f"score, {PARAMETERS}, values", [*unpacked("values", values), *logit.lines], logit_text),
        ]
    if mask_text != "logit":
        names_ahead = [name for name, _value in taken.values()]
        if taken:
            functions.append(("score_ahead", PARAMETERS, ahead.lines, as_tuple(names_ahead)))
        lines = [*unpacked("ahead", names_ahead), *mask.lines]
        functions.append(("score_masked", f"logit, {PARAMETERS}, ahead", lines, mask_text))
    if names:
        functions.append(("score_sinks", "b_idx, h_idx, q_idx, Q_LEN, KV_LEN, captures", sinks.lines, as_tuple(names)))
    text, arguments, digest = written(functions, (head, logit, ahead, mask, sinks), problem, fixed)
    ranges: str = ""
    range_arguments: tuple[str, ...] = ()
    if not form.of_scores:
        ranges, range_arguments = tile_ranges(
            program, form.rest, problem, fixed, keys=True, term=form.term, rows_keep=form.fill is not None
        )
    return ForwardSource(
        f"fa_gluon_forward_{digest}", text, arguments, form.plain, mask_text != "logit", form.wide, len(names),
        program.shares_batches, ranges, range_arguments,
    )  # fmt: skip


@lru_cache(maxsize=512)
def forward_kernel(source: ForwardSource, stream: bool = False) -> Any:
    """The jitted Gluon kernel; needs triton. ``stream``: the one of :mod:`~fa_inductor.templates.sm90.gluon_stream`."""
    if stream:
        return module_with("gluon_stream", f"{source.name}_stream", source.text).flash_forward
    return module_with("gluon_program_forward", source.name, source.text).flash_forward
