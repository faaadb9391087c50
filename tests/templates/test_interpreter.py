"""Values of the kernels in Triton's interpreter, on the CPU, against the reference: the text that a GPU gets, run as
is.

The interpreter's bfloat16 dots are wrong (it multiplies the raw bits), so float32 and float16 stand for all.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.templates.families import FAMILIES, SATURATED

pytest.importorskip("triton")

#: Bound of the relative error: rounding of a few hundred float32 terms; float16 rounds P, dS and the results besides.
BOUND = {"float32": 4e-6, "float16": 2e-3}
_GROUPS = 6


@pytest.mark.parametrize("group", range(_GROUPS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_families(dtype: str, group: int) -> None:
    names = [f.name for f in FAMILIES][group::_GROUPS]
    check(names[::3] if dtype == "float16" else names, dtype, 1)


def test_saturated() -> None:
    """dS is 0 where one weight is 1, whatever the scores multiply it with."""
    check([f.name for f in SATURATED], "float32", 1)


def test_trained_factor() -> None:
    command = [sys.executable, "-m", "tests.templates.interpret_factor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 3
    assert [r for r in reports if not r["ours"] <= 2.0 * r["eager"] + 1e-6] == []


@pytest.mark.parametrize("splits", [2, 5])
def test_keys_are_split(splits: int) -> None:
    """With five parts some have no key at all."""
    names = [f.name for f in FAMILIES]
    check(names[splits % 2 :: 2], "float32", splits)


def check(names: list[str], dtype: str, splits: int) -> None:
    command = [sys.executable, "-m", "tests.templates.interpret", dtype, str(splits), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in reports] == names
    wrong = {(r["name"], k): v for r in reports for k, v in r["errors"].items() if not v <= BOUND[dtype]}
    assert not wrong


def test_pages_and_stored_bits() -> None:
    """Keys and values read through a table, or dequantised."""
    command = [sys.executable, "-m", "tests.templates.interpret_caches"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 14
    assert {r["name"]: r["error"] for r in reports if not r["error"] <= BOUND["float32"]} == {}
