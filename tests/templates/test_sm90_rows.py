"""The kernels before and after the Gluon backward, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_rows_and_sums() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.templates.interpret_rows"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_ranges_of_queries() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.templates.interpret_ranges"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
