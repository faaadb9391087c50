"""Targets on Hopper as ratios to cuDNN of the same run, and the table that says how far measured results are from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: By case of :mod:`benchmarks.attention`: least ratio to cuDNN of the forward and of the backward; no row may be under 1.
TARGETS = {
    "d64_s4k": (1.10, 1.15),
    "d64_s4k_causal": (1.08, 1.22),
    "d128_s512": (1.0, 1.0),
    "d128_s512_causal": (1.0, 1.0),
    "d128_s2k_causal": (1.14, 1.0),
    "d128_s4k": (1.11, 1.13),
    "d128_s4k_causal": (1.17, 1.17),
    "d128_s16k": (1.12, 1.14),
    "d128_s16k_causal": (1.20, 1.18),
    "gqa_s8k_causal": (1.22, 1.14),
    "d256_s4k_causal": (1.15, 1.15),
}
PASSES = ("forward", "backward")
_BEGIN, _END = "<!-- ratios of {files} -->", "<!-- end of ratios -->"


def ratios(results: Iterable[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """TFLOP/s of ``ours`` over those of ``cudnn`` by case and pass, where one run has both."""
    found = {(r["case"], r["provider"]): r for r in results}
    made = {}
    for case in TARGETS:
        for which in PASSES:
            ours, cudnn = (found.get((case, p), {}).get(f"{which}_tflops") for p in ("ours", "cudnn"))
            if ours and cudnn:
                made[case, which] = ours / cudnn
    return made


def table(paths: Sequence[Path]) -> str:
    """The targets beside the ratios of each results file and whether the last of them reaches the target, as Markdown.

    The last file that has a row is the one that counts, so ``paths`` go from the oldest to the newest.
    """
    runs = [ratios(json.loads(path.read_text())["results"]) for path in paths]
    lines = [
        f"| | target | {' | '.join(p.stem for p in paths)} | best | the last reaches it |",
        "|---" * (len(paths) + 4) + "|",
    ]
    for which in PASSES:
        for case, targets in TARGETS.items():
            target = targets[PASSES.index(which)]
            values = [run.get((case, which)) for run in runs]
            known = [v for v in values if v is not None]
            best = max(known, default=None)
            reached = "" if not known else "yes" if known[-1] >= target else f"{known[-1] / target - 1:.1%}"
            cells = [f"{which} {case}", f"{target:.2f}", *("" if v is None else f"{v:.3f}" for v in (*values, best)), reached]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(paths: Sequence[Path]) -> str:
    """:func:`table` between the marks that :func:`insert` and :func:`files` look for."""
    return "\n".join([_BEGIN.format(files=" ".join(p.name for p in paths)), table(paths), _END])


def insert(text: str, paths: Sequence[Path]) -> str:
    """``text`` with the section between its marks renewed. Raises ValueError where there are no marks."""
    made, count = _pattern().subn(lambda _: section(paths), text)
    if count != 1:
        raise ValueError(f"{count} tables of ratios, expected one between {_BEGIN!r} and {_END!r}")
    return made


def files(text: str) -> list[str]:
    """Names of the results files that the table in ``text`` was made of."""
    found = _pattern().search(text)
    return found.group(1).split() if found else []


def _pattern() -> re.Pattern[str]:
    begin = re.escape(_BEGIN).replace(re.escape("{files}"), "(.*?)")
    return re.compile(begin + ".*?" + re.escape(_END), re.DOTALL)
