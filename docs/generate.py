"""Writes docs/generated/: what is recognised, from the forms of the tests; options, from config.py; a report; measured errors.

    python docs/generate.py          write the files
    python docs/generate.py --check  exit with 1 and name the files that are not as they would be written

The pages include these files. tests/integration/test_docs.py makes the same comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from fa_inductor.__main__ import main as command_line
from fa_inductor.config import ENV_SWITCH, Options
from tests.compiling import fuse, rewriting
from tests.patterns.forms import FORMS, Draw, Form
from tests.patterns.lookalikes import LOOKALIKES

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "generated"

FORM_FILES = {
    "softmax": "Softmax",
    "score": "Scale and terms on the scores",
    "masks": "Masks",
    "layouts": "Heads and layouts",
    "composites": "Calls and modules",
}
LOOKALIKE_FILES = {
    "computation": "Another computation",
    "weights": "Probabilities that are changed or used elsewhere",
    "placement": "The right computation in the wrong place",
}

Row = tuple[str, ...]


def code(text: str) -> str:
    return f"`{text}`"


def prose(text: str) -> str:
    """One line of text from a docstring; brackets outside code are no links."""
    parts = re.split(r"``?(.+?)``?", " ".join(text.split()))
    return "".join(code(part) if i % 2 else part.replace("[", "\\[") for i, part in enumerate(parts))


def table(headers: Row, rows: list[Row]) -> str:
    lines = [headers, ("---",) * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def note_of(fn: Any) -> str:
    own = vars(fn).get("__doc__") if isinstance(fn, type) else fn.__doc__  # a class would inherit the text of nn.Module
    return prose(inspect.cleandoc(own or ""))


def source_of(fn: Any) -> str:
    """Its source without the decorators."""
    lines = textwrap.dedent(inspect.getsource(fn)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(("def ", "class ")))
    return "\n".join(lines[first:])


def recognised_as(name: str, form: Form) -> Row:
    """(form in the report, program in the rewritten graph), once for each different attention in it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in form.draw(Draw())]
    compiled, backend = fuse(form.make(), rewriting())
    with torch.no_grad():
        compiled(*inputs)
    if backend.reasons or backend.fused != form.fused:
        raise RuntimeError(f"{name} is listed as recognised, but: {backend.reasons}")
    found = dict.fromkeys((site.form, code(site.program)) for site in backend.report.fused)
    return tuple("<br>".join(texts) for texts in zip(*found, strict=True))


def function_of(case: Any) -> Any:
    """The function or module that a form or a look-alike is about."""
    if isinstance(case, Form):
        return case.make if isinstance(case.make, type) else case.make()
    return case.fn


def by_file(cases: dict[str, Any], titles: dict[str, str], headers: Row, row: Callable[[str, Any], Row]) -> str:
    """A section for each file of cases, in the order of `titles`: what the file says of itself, a table, the source."""
    files: dict[str, dict[str, Any]] = {name: {} for name in titles}
    for name, case in cases.items():
        files[function_of(case).__module__.rpartition(".")[2]][name] = case  # KeyError: a new file needs a title
    parts = []
    for file, held in files.items():
        functions = [function_of(case) for case in held.values()]
        about = (sys.modules[functions[0].__module__].__doc__ or "").split("\n\n")[0]
        source = "``` py\n" + "\n\n\n".join(map(source_of, functions)) + "\n```"
        parts.append(f"### {titles[file]}\n\n{prose(about)}\n\n")
        parts.append(table(headers, [(code(name), *row(name, case), note_of(function_of(case))) for name, case in held.items()]))
        parts.append('\n??? quote "Source"\n\n' + textwrap.indent(source, "    ") + "\n\n")
    return "".join(parts).rstrip() + "\n"


def forms() -> str:
    return by_file(FORMS, FORM_FILES, ("spelling", "in the report", "program", "note"), recognised_as)


def lookalikes() -> str:
    def reason(name: str, case: Any) -> Row:
        return (prose(case.reason) if case.reason else "(no site in the report)",)

    return by_file(LOOKALIKES, LOOKALIKE_FILES, ("look-alike", "what the report says", "note"), reason)


def options() -> str:
    rows = []
    for name, default, variable, meaning in Options.describe():
        where = f"{code(variable)}, {code(f'{ENV_SWITCH}=0')}" if name == "enabled" else code(variable)
        rows.append((code(name), code(repr(default)), where, prose(meaning)))
    return table(("option", "default", "environment", "meaning"), rows)


def report() -> str:
    """What `python -m fa_inductor explain three_attentions:model` prints in examples/.

    The pass over the graph runs as it is. Inductor, which the report does not depend on, is left out: it would take
    most of the time. So is the time of the pass, which is never the same twice.
    """
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    torch._dynamo.reset()
    torch.manual_seed(0)
    printed, folder = io.StringIO(), os.getcwd()
    os.chdir(ROOT / "examples")
    sys.path.insert(0, os.getcwd())
    try:
        run_it_as_it_is = mock.patch.object(compile_fx, "compile_fx", lambda gm, inputs, **settings: gm.forward)
        with contextlib.redirect_stdout(printed), run_it_as_it_is:
            if command_line(["explain", "three_attentions:model"]) != 0:
                raise RuntimeError("explain failed")
    finally:
        sys.path.remove(os.getcwd())
        os.chdir(folder)
    text = re.sub(r"pass: \d+ ms", "pass: ... ms", printed.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


#: Files of benchmarks/results/ that `benchmarks.accuracy` has written, and the machine of each.
ACCURACY = {"accuracy_h200.json": "On an NVIDIA H200", "accuracy_cpu.json": "On a CPU"}


def accuracy() -> str:
    """For every machine and program the errors against float64 of ours, SDPA and eager code: outputs, then gradients."""
    parts = []
    for name, machine in ACCURACY.items():
        path = ROOT / "benchmarks" / "results" / name
        if not path.exists():
            continue
        found = json.loads(path.read_text("utf-8"))
        rows: dict[str, dict[str, Any]] = {}
        for row in found["rows"]:
            rows.setdefault(row["program"], {})[row["dtype"]] = row
        dtypes = sorted({row["dtype"] for row in found["rows"]}, key=["float32", "bfloat16", "float16"].index)
        lines = [f"### {machine}", "", f"torch {found['environment']['torch']}; `{found['command']}`", ""]
        lines += ["| program | " + " | ".join(dtypes) + " |", "|---" * (len(dtypes) + 1) + "|"]
        for program, by_dtype in rows.items():
            lines.append(f"| {program} | " + " | ".join(_errors(by_dtype[d]) for d in dtypes) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _errors(row: dict[str, Any]) -> str:
    """The error of the output and the largest one of a gradient: ours / SDPA / eager. A dash where SDPA has not the form."""

    def side(name: str, gradients: bool) -> str:
        errors = [e for what, e in (row.get(name) or {}).items() if (what != "out") == gradients and isinstance(e, float)]
        return f"{max(errors):.1e}" if errors else "-"

    return "<br>".join(" / ".join(side(name, g) for name in ("ours", "sdpa", "eager")) for g in (False, True))


def fuzz() -> str:
    """The sums of the ledger by device, and its last runs."""
    ledger = json.loads((ROOT / "benchmarks" / "results" / "fuzz_totals.json").read_text("utf-8"))
    lines = ["| device | runs | graphs | fused | with gradients | through Dynamo | generated code | failures | hours of runs |"]
    lines.append("|---" * 9 + "|")
    for device, t in ledger["totals"].items():
        counts = ["runs", "graphs", "fused", "with_gradients", "through_dynamo", "through_code_generation", "failures"]
        lines.append(f"| {device} | " + " | ".join(f"{t[c]:,}" for c in counts) + f" | {t['seconds'] / 3600:.1f} |")
    lines += ["", "| last runs | revision | torch | seed | examples | graphs | failures | seconds |", "|---" * 8 + "|"]
    for r in ledger["runs"][-10:]:
        first, last = r["examples"]
        place = f"{r['device']}, {r['jobs']} {'process' if r['jobs'] == 1 else 'processes'}"
        lines.append(
            f"| {place} | {r['revision']} | {r['torch']} | {r['seed']} | {first} to {last} | {r['graphs']:,} | {r['failures']} "
            f"| {r['seconds']:,} |"
        )
    return "\n".join(lines) + "\n"


FILES: dict[str, Callable[[], str]] = {
    "accuracy.md": accuracy,
    "forms.md": forms,
    "fuzz.md": fuzz,
    "lookalikes.md": lookalikes,
    "options.md": options,
    "report.txt": report,
}


def stale() -> list[str]:
    """The generated files that differ from what would be written now."""
    return [name for name, make in FILES.items() if not (OUT / name).exists() or (OUT / name).read_text("utf-8") != make()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is out of date")
    if parser.parse_args().check:
        for name in (names := stale()):
            print(f"docs/generated/{name} is out of date: run python docs/generate.py", file=sys.stderr)
        return 1 if names else 0
    OUT.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (OUT / name).write_text(make(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
