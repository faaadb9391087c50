"""The fuzzer as a program: a kernel broken on purpose is found, shrunk and saved; what it saves runs alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _fuzz_jobs, _fuzz_ledger, fuzz
from fa_inductor import cpu_flash

ROOT = Path(__file__).parents[2]


def run_program(path: Path) -> int:
    """Exit code of a saved program, run in this process, with whatever is broken in it."""
    scope: dict[str, Any] = {"__name__": "saved"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    torch._dynamo.reset()
    return int(scope["main"]())


def test_a_broken_kernel_is_found_shrunk_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = cpu_flash.FLASH

    def broken(*args: Any, attn_mask: Any = None, **more: Any) -> Any:
        out, lse = original(*args, attn_mask=attn_mask, **more)
        return (out if attn_mask is None else out * 1.01), lse

    monkeypatch.setattr(cpu_flash, "FLASH", broken)
    before = cpu_flash.BLOCK_M, cpu_flash.DENSE_M
    path = tmp_path / "found.py"
    arguments = ["--kernels", "aten", "--failures", "1", "--examples", "60", "--shrink-seconds", "20", "--out", str(path)]
    assert fuzz.main(arguments) == 1
    text = capsys.readouterr().out
    assert "1 failures (1 wrong)" in text.splitlines()[-1]
    assert "WrongValue: output 0: error" in path.read_text()
    (example,) = [line for line in text.splitlines() if line.startswith("example ")]
    source = path.read_text().split("def f(")[1].split("return f\n")[0]
    assert source.count("\n") <= 10, source  # the plainest attention there is with a mask
    assert run_program(path) == 1, "the saved program shows the fault"
    cpu_flash.BLOCK_M, cpu_flash.DENSE_M = before
    # The same example again, by the name that was printed.
    seed, number = example.split()[1].split("/")
    again = ["--kernels", "aten", "--seed", seed, "--start", number, "--examples", "1", "--shrink-seconds", "0"]
    assert fuzz.main([*again, "--out", str(path)]) == 1
    assert path.with_name("found-2.py").exists(), "nothing is overwritten"

    monkeypatch.undo()
    done = subprocess.run([sys.executable, str(path)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all is well"), done.stderr[-2000:]
    assert fuzz.main([*again, "--out", str(path)]) == 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_crash_is_a_failure_and_an_example_depends_on_its_name_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = [fuzz.case_of(fuzz.Choices(source=random.Random("3/5")), "cpu", ["aten"], fuzz.Through()) for _ in range(2)]
    assert cases[0].example.source == cases[1].example.source
    assert fuzz.case_of(fuzz.Choices(cases[0].trace), "cpu", ["aten"], fuzz.Through()).example.source == cases[0].example.source

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(fuzz, "run", fail)
    verdict = fuzz.judge(cases[0], "cpu")
    assert (verdict.kind, verdict.error) == ("crash", "ZeroDivisionError: made to fail")
    again = lambda trace: fuzz.judge(fuzz.case_of(fuzz.Choices(trace), "cpu", ["aten"], fuzz.Through()), "cpu")  # noqa: E731
    small, tried = fuzz.shrink(verdict, again, 10)
    assert tried > 0
    assert set(small.case.trace) == {0}, "everything is the simplest there is"


def test_what_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "run", lambda *_: time.sleep(30))
    monkeypatch.setitem(fuzz.HANG, "cpu", 1)
    start = time.monotonic()
    verdict = fuzz.judge(fuzz.case_of(fuzz.Choices(), "cpu", ["aten"], fuzz.Through()), "cpu")
    assert (verdict.kind, verdict.failed) == ("hang", True)
    assert time.monotonic() - start < 20


def test_processes_share_the_examples_and_the_ledger_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "totals.json"
    arguments = ["--jobs", "2", "--examples", "6", "--family", "2", "--whole-every", "5", "--ledger", str(ledger)]
    arguments += ["--revision", "abc"]
    args = fuzz.parse(arguments)
    assert [list(fuzz.indices(args, job)) for job in range(2)] == [[0, 1, 4, 5], [2, 3]]
    assert fuzz.main(arguments) == 0
    assert fuzz.main([*arguments, "--jobs", "1", "--start", "6"]) == 0
    found = json.loads(ledger.read_text())
    first, second = found["runs"]
    assert (first["examples"], second["examples"], first["revision"]) == ([0, 5], [6, 11], "abc")
    assert found["totals"]["cpu"]["graphs"] == first["graphs"] + second["graphs"] > 0
    assert _fuzz_ledger.add(ledger, first)["totals"] == found["totals"], "a run counts once"


def test_a_run_that_is_asked_to_end_keeps_what_it_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []

    def judge(case: Any, *_: Any) -> fuzz.Verdict:
        judged.append(case)
        if len(judged) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return fuzz.Verdict("ok", case)

    monkeypatch.setattr(fuzz, "judge", judge)
    ledger = tmp_path / "totals.json"
    assert fuzz.main(["--examples", "50", "--ledger", str(ledger), "--revision", "abc"]) == 0
    (run,) = json.loads(ledger.read_text())["runs"]
    assert (run["examples"], run["graphs"]) == ([0, 2], 3)


def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_fuzz_jobs, "_child", dies)
    assert fuzz.main(["--jobs", "2", "--examples", "2", "--seed", "7"]) == 1
    assert "--seed 7 --start 1 --examples 1" in capsys.readouterr().out


def dies(work: Any, args: Any, job: int, to: Any) -> None:
    to.send((False, fuzz.Tally(last=job)))
    os._exit(1)


def test_many_spellings_of_one_attention() -> None:
    cases = [
        fuzz.case_of(
            fuzz.Choices(source=random.Random(f"5/{i}"), meaning=random.Random("5/family/0")), "cpu", ["aten"], fuzz.Through()
        )
        for i in range(12)
    ]
    assert len({c.example.dtype for c in cases}) == 1
    assert len({c.example.source for c in cases}) == 12


def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """A process of its own: TRITON_INTERPRET counts when triton is imported."""
    pytest.importorskip("triton")
    ledger = tmp_path / "totals.json"
    arguments = ["--interpret", "--examples", "12", "--seed", "1", "--ledger", str(ledger), "--shrink-seconds", "0"]
    command = [sys.executable, "-m", "benchmarks.fuzz", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (run,) = json.loads(ledger.read_text())["runs"]
    assert run["device"] == "interpreter"
    assert run["fused"] > 3
