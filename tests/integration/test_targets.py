"""The table of targets on Hopper: what it says of results, and that the one in the notes is what its files give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import _common, _targets

NOTES = _common.ROOT / "benchmarks" / "notes" / "hopper_targets.md"


def write(path: Path, **speeds: float) -> Path:
    rows = [{"case": "d128_s4k", "provider": p, "forward_tflops": s, "backward_tflops": 2 * s} for p, s in speeds.items()]
    path.write_text(json.dumps({"results": [*rows, {"case": "d64_s4k", "provider": "ours", "reason": "none"}]}))
    return path


def row(text: str, name: str) -> list[str]:
    (line,) = (x for x in text.splitlines() if x.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_best_and_last_of_several_runs(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json", ours=660.0, cudnn=600.0), write(tmp_path / "b.json", ours=672.0, cudnn=600.0)]
    text = _targets.table(paths)
    assert row(text, "forward d128_s4k") == ["forward d128_s4k", "1.11", "1.100", "1.120", "1.120", "yes"]
    assert row(text, "backward d128_s4k")[-2:] == ["1.120", "-0.9%"]
    assert row(_targets.table(paths[::-1]), "forward d128_s4k")[-2:] == ["1.120", "-0.9%"]  # the last one counts
    assert row(text, "forward d64_s4k") == ["forward d64_s4k", "1.10", "", "", "", ""]


def test_a_table_is_renewed_in_place(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{n}.json", ours=s, cudnn=600.0) for n, s in (("a", 500.0), ("b", 720.0)))
    text = f"before\n{_targets.section([first])}\nafter\n"
    assert _targets.files(text) == ["a.json"]
    made = _targets.insert(text, [second])
    assert _targets.files(made) == ["b.json"]
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert row(made, "forward d128_s4k")[-1] == "yes"
    with pytest.raises(ValueError, match="0 tables"):
        _targets.insert("before\nafter\n", [second])


def test_the_notes_are_what_their_files_give() -> None:
    text = NOTES.read_text()
    paths = [_common.RESULTS / name for name in _targets.files(text)]
    assert paths
    assert _targets.insert(text, paths) == text
