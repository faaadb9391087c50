"""Peak resident memory of one call, above what was resident before it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def release_free_memory() -> None:
    """Give freed heap pages back to the system, so that the baseline holds live tensors only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_of(run: Callable[[], Any]) -> tuple[int, str]:
    """Peak resident bytes during ``run`` above those before it, and how they were found."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present resident size
        before = status_bytes("VmRSS")
        result = run()
        peak = status_bytes("VmHWM") - before
        del result
        return max(peak, 0), "VmHWM"
    except OSError:
        return sampled_peak(run), "sampled every millisecond"


def sampled_peak(run: Callable[[], Any]) -> int:
    import psutil

    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    highest = before

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    return highest - before


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")
