"""What was fused, what was not, and why: the report, the log lines and the structured trace.

The graph pass calls `record_graph` once a graph. Whoever wants a report opens ``with collecting() as report:`` around
the compile. Logger ``fa_inductor``: one INFO line a site, DEBUG lines for near misses (``TORCH_LOGS="fa_inductor"``
and ``TORCH_LOGS="+fa_inductor"``). ``TORCH_TRACE`` gets one artifact ``fa_inductor_report`` a graph.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import _compat
from .errors import InternalError

__all__ = ["EVIDENCE", "STATUSES", "FusionReport", "SiteReport", "collecting", "record", "record_graph"]

log = logging.getLogger("fa_inductor")

STATUSES = ("fused", "declined", "rejected")
"""fused: rewritten to one op. declined: recognised, but no kernel applies or pays here. rejected: looks like attention,
but could not be proven to be."""

EVIDENCE = ("", "template exists", "selector chose it", "trace shows it ran", "profiler shows its time")
"""What is known about the kernel of a fused site, weakest first."""


@dataclass(frozen=True)
class SiteReport:
    """One attention site of one graph.

    `graph_index` counts graphs in the order of compilation, `path` names the sub-graph ("" is the top graph), `node`
    the graph node of the softmax (or of the site's last node), `source` the user's line as ``file:line: code``.
    `form` is for people ("causal, GQA 4:2, softcap"), `program` is the exact text the op carries. `template` is the
    kernel chosen, `reason` why the site stayed unfused, `near_misses` what other readings of the site stopped at.
    `fused_already`: a declined site whose own code calls a fused kernel, which `strict` lets pass. `evidence` is one of
    `EVIDENCE`; `milliseconds` is the kernel's time in a forward pass where a profiler measured it (``explain(profile=True)``).
    `fp8`: with that option, the FP8 format that a fused site runs in, or "not FP8: " and why.
    """

    status: str
    graph_index: int = 0
    path: str = ""
    node: str = ""
    source: str = ""
    form: str = ""
    program: str = ""
    template: str = ""
    reason: str = ""
    near_misses: tuple[str, ...] = ()
    shapes: str = ""
    dtype: str = ""
    backward: bool = False
    evidence: str = ""
    fused_already: bool = False
    milliseconds: float | None = None
    fp8: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InternalError(f"site status {self.status!r}, expected one of {', '.join(STATUSES)}")
        if self.evidence not in EVIDENCE:
            raise InternalError(f"site evidence {self.evidence!r}, expected one of {EVIDENCE}")
        if self.status != "fused" and not self.reason:
            raise InternalError(f"a site that is {self.status} needs a reason (node {self.node!r})")
        object.__setattr__(self, "near_misses", tuple(self.near_misses))

    def __str__(self) -> str:
        """One line: status, form, where, and the kernel or the reason."""
        what = f" [{self.form}]" if self.form else ""
        where = " at ".join(part for part in (self.where(), self.source) if part)
        why = "; ".join(part for part in (self.template, self.fp8_text()) if part) if self.status == "fused" else self.reason
        shapes = " ".join(part for part in (self.shapes, self.dtype) if part)
        return f"{self.status}{what} {where}" + (f" ({shapes})" if shapes else "") + (f": {why}" if why else "")

    def fp8_text(self) -> str:
        """``FP8 e4m3``, ``not FP8: ...`` or nothing."""
        return f"FP8 {self.fp8}" if self.fp8 and not self.fp8.startswith("not ") else self.fp8

    def where(self) -> str:
        """The node, with its graph and sub-graph, e.g. ``graph 0 wrap_body_0/softmax_1``."""
        return f"graph {self.graph_index} {'/'.join(part for part in (self.path, self.node) if part)}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return {**asdict(self), "near_misses": list(self.near_misses)}


@dataclass
class FusionReport:
    """The sites of any number of graphs. `seconds` is wall time spent in the graph pass, `notes` what else to know."""

    sites: list[SiteReport] = field(default_factory=list)
    graphs: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def fused(self) -> list[SiteReport]:
        return [site for site in self.sites if site.status == "fused"]

    @property
    def unfused(self) -> list[SiteReport]:
        return [site for site in self.sites if site.status != "fused"]

    def counts(self) -> dict[str, int]:
        """Number of sites of each status, in the order of `STATUSES`."""
        found = Counter(site.status for site in self.sites)
        return {status: found[status] for status in STATUSES}

    def merge(self, *others: FusionReport) -> FusionReport:
        """A new report with the sites of all; graphs of the later ones are numbered on."""
        merged = FusionReport(list(self.sites), self.graphs, self.seconds, list(self.notes))
        for other in others:
            merged.sites += [replace(site, graph_index=site.graph_index + merged.graphs) for site in other.sites]
            merged.graphs += other.graphs
            merged.seconds += other.seconds
            merged.notes += [note for note in other.notes if note not in merged.notes]
        return merged

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`to_json` writes, as a dictionary."""
        return {
            "graphs": self.graphs,
            "seconds": self.seconds,
            "counts": self.counts(),
            "sites": [site.to_dict() for site in self.sites],
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text; :meth:`from_dict` reads it again, parsed."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FusionReport:
        """The inverse of `to_dict`."""
        return cls([SiteReport(**site) for site in data["sites"]], data["graphs"], data["seconds"], list(data["notes"]))

    def table(self, width: int = 144) -> str:
        """The sites as a table of about `width` columns. Sites that only differ by layer share a row."""
        groups: dict[tuple[Any, ...], list[SiteReport]] = {}
        for site in self.sites:
            alike = (site.status, site.source, site.form, site.shapes, site.dtype, site.template, site.reason, site.fp8)
            groups.setdefault((*alike, site.backward), []).append(site)
        each = max(20, (width - 32) // 3)  # a file's path takes 8 more
        rows = []
        for members in groups.values():
            site = members[0]
            misses = [f"near miss: {miss}" for miss in site.near_misses]
            form = [site.form, " ".join(part for part in (site.shapes, site.dtype) if part)]
            times = [s.milliseconds for s in members if s.milliseconds is not None]
            spent = f"{sum(times):.3g} ms" + (f" in {len(times)} sites" if len(times) > 1 else "") if times else ""
            kernel = [site.template, site.fp8_text(), "forward and backward" if site.backward else "", spent]
            rows.append(
                [
                    str(len(members)),
                    site.status,
                    _wrap(_short(site.source) or [site.where()], each + 8),
                    _wrap(form, each),
                    _wrap([*kernel, site.reason, _nodes(members), *misses], each),
                ]
            )
        return tabulate(rows, ["sites", "status", "source", "form", "kernel or reason"])

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts().items())
        graphs = f"{self.graphs} graph{'s' if self.graphs != 1 else ''}"
        head = f"fa_inductor: {counts} in {graphs} (pass: {self.seconds * 1e3:.0f} ms)"
        lines = [head, *(f"note: {note}" for note in self.notes)]
        # A note without a graph says why nothing was searched.
        if self.sites or self.graphs or not self.notes:
            lines.append(self.table() if self.sites else "No attention was found.")
        return "\n".join(lines)


def _nodes(members: Sequence[SiteReport]) -> str:
    """Where unfused sites that share a row are in their graphs."""
    if members[0].status == "fused":
        return ""
    names = list(dict.fromkeys(site.node for site in members if site.node))
    return f"at {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""


def _short(source: str) -> list[str]:
    """[``file:line``, code] of a source line, the file from its package or the current folder on."""
    location, _, code = source.partition(": ")
    location = re.sub(r"^.*/(site|dist)-packages/", "", location).removeprefix(os.getcwd() + os.sep)
    return [part for part in (location, code) if part]


def _wrap(paragraphs: Sequence[str], width: int) -> str:
    return "\n".join("\n".join(textwrap.wrap(text, width, break_on_hyphens=False)) for text in paragraphs if text)


def tabulate(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """The rows in columns, cells may hold several lines: by the package tabulate where there is one."""
    try:
        package = importlib.import_module("tabulate")
    except ImportError:
        return _plain_columns(rows, headers)
    return str(package.tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))


def _plain_columns(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    cells = [[cell.split("\n") for cell in row] for row in [headers, *rows]]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(headers))]
    lines = []
    for index, row in enumerate(cells):
        for depth in range(max(len(cell) for cell in row)):
            parts = (cell[depth] if depth < len(cell) else "" for cell in row)
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
        if index == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


# A context variable, so that each thread (and each asyncio task) collects the compiles that it started and no others.
_active: ContextVar[tuple[FusionReport, ...]] = ContextVar("fa_inductor_reports", default=())
_lock = threading.Lock()


@contextmanager
def collecting() -> Iterator[FusionReport]:
    """Collect every graph compiled in the block by this thread. Blocks nest; each gets all that happens inside it."""
    report = FusionReport()
    token = _active.set((*_active.get(), report))
    try:
        yield report
    finally:
        _active.reset(token)


def record_graph(sites: Sequence[SiteReport], seconds: float) -> None:
    """Add one graph, its sites and the seconds its pass took to every active report, the log and the structured trace.

    In each report the graph gets the next number; the `graph_index` of the sites passed in is replaced by it there.
    """
    with _lock:
        for report in _active.get():
            report.sites += [replace(site, graph_index=report.graphs) for site in sites]
            report.graphs += 1
            report.seconds += seconds
    for site in sites:
        _log_site(site)
    _compat.emit_artifact("fa_inductor_report", FusionReport(list(sites), 1, seconds).to_json())


def record(site: SiteReport) -> None:
    """Add one site known outside the pass over a graph, as it is, to every active report, the log and the trace."""
    with _lock:
        for report in _active.get():
            report.sites.append(site)
    _log_site(site)
    _compat.emit_artifact("fa_inductor_site", json.dumps(site.to_dict()))


def _log_site(site: SiteReport) -> None:
    log.info("%s", site)
    if site.program:
        log.debug("  program: %s", site.program)
    for miss in site.near_misses:
        log.debug("  near miss: %s", miss)
