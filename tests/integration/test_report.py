"""The report: its table, its json, who collects what, the log lines and the structured trace."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from fa_inductor import report as report_module
from fa_inductor.errors import InternalError, StrictModeError, VerificationError
from fa_inductor.report import FusionReport, SiteReport, collecting, record, record_graph

FUSED = SiteReport(
    status="fused",
    node="softmax",
    source="model.py:31: probs = scores.softmax(-1)",
    form="causal, GQA 4:2",
    program="where(kv_idx <= q_idx, s*0.125, -inf)",
    template="aten flash attention",
    shapes="q[1,4,64,16] k[1,2,64,16]",
    dtype="float32",
    backward=True,
    evidence="selector chose it",
)
DECLINED = SiteReport(status="declined", node="softmax_1", form="softcap", reason="ATen's flash attention has no softcap")
REJECTED = SiteReport(
    status="rejected",
    path="wrap_body_0",
    node="softmax_2",
    reason="the probabilities are returned",
    near_misses=("dropout after the softmax",),
)


def test_sites_are_checked() -> None:
    with pytest.raises(InternalError, match="site status 'ok'"):
        SiteReport(status="ok")
    with pytest.raises(InternalError, match="needs a reason"):
        SiteReport(status="rejected", node="softmax")
    with pytest.raises(InternalError, match="site evidence"):
        SiteReport(status="fused", evidence="seen it")


def test_site_on_one_line() -> None:
    assert str(FUSED) == (
        "fused [causal, GQA 4:2] graph 0 softmax at model.py:31: probs = scores.softmax(-1) "
        "(q[1,4,64,16] k[1,2,64,16] float32): aten flash attention"
    )
    assert str(REJECTED) == "rejected graph 0 wrap_body_0/softmax_2: the probabilities are returned"


def test_json_round_trip() -> None:
    report = FusionReport([FUSED, DECLINED, REJECTED], graphs=2, seconds=0.25, notes=["a note"])
    data = json.loads(report.to_json())
    assert data["counts"] == {"fused": 1, "declined": 1, "rejected": 1}
    assert data["sites"][2]["near_misses"] == ["dropout after the softmax"]
    assert set(data["sites"][0]) == {f.name for f in dataclasses.fields(SiteReport)}
    assert FusionReport.from_dict(data) == report


def test_merge_numbers_graphs_on() -> None:
    first = FusionReport([FUSED], graphs=2, seconds=1.0, notes=["x"])
    second = FusionReport([dataclasses.replace(DECLINED, graph_index=1)], graphs=3, seconds=0.5, notes=["x", "y"])
    merged = first.merge(second, FusionReport([REJECTED], graphs=1))
    assert [site.graph_index for site in merged.sites] == [0, 3, 5]
    assert (merged.graphs, merged.seconds, merged.notes) == (6, 1.5, ["x", "y"])
    assert first.sites == [FUSED], "merging changes none of its parts"


def test_table_groups_layers_and_names_reasons() -> None:
    layers = [dataclasses.replace(FUSED, node=f"softmax_{i}") for i in range(12)]
    text = str(FusionReport([*layers, DECLINED, REJECTED], graphs=1, seconds=0.0123))
    lines = text.split("\n")
    assert lines[0] == "fa_inductor: 12 fused, 1 declined, 1 rejected in 1 graph (pass: 12 ms)"
    (row,) = [line for line in lines if line.startswith("12 ")]
    assert "fused" in row
    assert "model.py:31" in row
    assert "causal, GQA 4:2" in row
    squeezed = " ".join(text.split())
    assert "aten flash attention" in row
    assert "forward and backward" in squeezed
    assert "ATen's flash attention has no softcap" in squeezed
    assert "near miss: dropout after the softmax" in squeezed
    assert "wrap_body_0/softmax_2" in squeezed


def test_table_without_tabulate_shows_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    report = FusionReport([FUSED, DECLINED, REJECTED], graphs=1)
    words = sorted(report.table().split())
    monkeypatch.setitem(sys.modules, "tabulate", None)
    plain = report.table()
    rules = [w for w in plain.split() if set(w) == {"-"}]
    assert len(rules) == 5
    assert sorted(w for w in plain.split() if set(w) != {"-"}) == sorted(w for w in words if set(w) != {"-"})


def test_long_cells_wrap() -> None:
    long = dataclasses.replace(DECLINED, reason="because " * 60)
    assert max(len(line) for line in FusionReport([long]).table(width=120).split("\n")) <= 140


def test_table_shortens_paths_and_splits_the_code_off() -> None:
    sources = [
        "/env/lib/python3/site-packages/models/llama.py:199: y = torch.matmul(weights, value)",
        f"{os.getcwd()}/my/model.py:7: y = w @ v",
        "/elsewhere/x.py:1: y = w @ v",
    ]
    lines = FusionReport([dataclasses.replace(DECLINED, source=s) for s in sources]).table().split("\n")
    cells = [part for line in lines for part in line.split("  ") if part]
    for cell in (
        "models/llama.py:199",
        "y = torch.matmul(weights, value)",
        "my/model.py:7",
        "y = w @ v",
        "/elsewhere/x.py:1",
    ):
        assert cell in [c.strip() for c in cells]


def test_empty_report_says_so() -> None:
    assert "No attention was found." in str(FusionReport(graphs=1))


def test_collecting_nests_and_numbers_graphs_for_each() -> None:
    with collecting() as outer:
        record_graph([FUSED], 0.5)
        with collecting() as inner:
            record_graph([DECLINED, REJECTED], 0.25)
        record(FUSED)
    record_graph([FUSED], 9.0)
    assert [(site.status, site.graph_index) for site in outer.sites] == [
        ("fused", 0),
        ("declined", 1),
        ("rejected", 1),
        ("fused", 0),
    ]
    assert (outer.graphs, outer.seconds) == (2, 0.75)
    assert [(site.status, site.graph_index) for site in inner.sites] == [("declined", 0), ("rejected", 0)]
    assert (inner.graphs, inner.seconds) == (1, 0.25)


def test_collecting_ends_on_an_error() -> None:
    with pytest.raises(KeyError), collecting() as report:
        raise KeyError
    record(FUSED)
    assert report.sites == []


def test_threads_collect_their_own() -> None:
    barrier = threading.Barrier(4)
    seen: dict[int, list[str]] = {}

    def work(number: int) -> None:
        with collecting() as report:
            barrier.wait(timeout=30)
            for _ in range(50):
                record_graph([dataclasses.replace(FUSED, node=f"thread_{number}")], 0.0)
            barrier.wait(timeout=30)
            seen[number] = [site.node for site in report.sites]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == {n: [f"thread_{n}"] * 50 for n in range(4)}


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fa_inductor"):
        record_graph([FUSED, REJECTED], 0.0)
    lines = [(entry.levelname, entry.getMessage()) for entry in caplog.records if entry.name == "fa_inductor"]
    assert lines == [
        ("INFO", str(FUSED)),
        ("DEBUG", "  program: where(kv_idx <= q_idx, s*0.125, -inf)"),
        ("INFO", str(REJECTED)),
        ("DEBUG", "  near miss: dropout after the softmax"),
    ]


def test_strict_error_lists_every_site() -> None:
    error = StrictModeError([DECLINED, REJECTED])
    assert error.sites == (DECLINED, REJECTED)
    assert "2 attention sites stayed unfused" in str(error)
    assert str(DECLINED) in str(error)
    assert str(REJECTED) in str(error)


def test_verification_error_has_the_figures() -> None:
    error = VerificationError(FUSED, 0.5, 1e-5)
    assert (error.site, error.max_error, error.tolerance) == (FUSED, 0.5, 1e-5)
    assert "5.000e-01" in str(error)
    assert "1.000e-05" in str(error)


RECORD = """
import torch
from fa_inductor.report import SiteReport, record_graph
record_graph([SiteReport("rejected", node="softmax", reason="no proof", near_misses=("almost",))], 0.0)
"""


def _run(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240, cwd=_root(), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.parametrize(("setting", "info", "debug"), [("fa_inductor", True, False), ("+fa_inductor", True, True)])
def test_torch_logs(setting: str, info: bool, debug: bool) -> None:
    text = _run(RECORD, TORCH_LOGS=setting)
    assert ("rejected graph 0 softmax: no proof" in text) is info
    assert ("near miss: almost" in text) is debug


def test_silent_by_default() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", RECORD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=_root(),
        check=True,
    )
    assert "no proof" not in done.stdout + done.stderr


def test_structured_trace(tmp_path: object) -> None:
    _run(RECORD, TORCH_TRACE=str(tmp_path))
    text = "".join(path.read_text() for path in tmp_path.iterdir())  # type: ignore[attr-defined]
    assert '"artifact": {"name": "fa_inductor_report", "encoding": "json"}' in text
    assert '"reason": "no proof"' in text


def test_report_module_exports_what_it_names() -> None:
    assert all(hasattr(report_module, name) for name in report_module.__all__)
