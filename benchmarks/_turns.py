"""Processes that compile side by side and then take turns on the device, so that nothing else runs while one is timed.

The worker prints ``READY`` once everything it will time is compiled (:func:`wait_for_turn`), reads one line from its
standard input, measures, and prints ``RESULT`` with JSON (:func:`give`). A worker that fails or is too slow becomes a
result with an ``error``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

from benchmarks import _common


def wait_for_turn() -> None:
    """In a worker: say that it is compiled, and sleep until the driver lets it measure."""
    print("READY", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the driver is gone")


def give(result: Any) -> None:
    """In a worker: hand the result to the driver."""
    print("RESULT " + json.dumps(result), flush=True)


class _Worker:
    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.command, self.environment = list(command), environment
        self.process: subprocess.Popen[str] | None = None
        self.stderr: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.result: Any = None

    def prepare(self, timeout: float) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=_common.ROOT, env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr,
        )  # fmt: skip
        self._read_until("READY", timeout, "compiling")

    def measure(self, timeout: float) -> Any:
        if self.result is None:
            assert self.process is not None
            assert self.process.stdin is not None
            try:
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass
            self._read_until("RESULT ", timeout, "measuring")
        self.close()
        return self.result

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.stderr.close()

    def _read_until(self, head: str, timeout: float, doing: str) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with _deadline(self.process, timeout) as expired:
            for line in self.process.stdout:
                if line.startswith("RESULT "):
                    self.result = json.loads(line[len("RESULT ") :])
                if line.startswith(head):
                    return
            self.process.wait()
        if expired.is_set():
            self.result = {"error": f"{doing}: more than {timeout:.0f} s"}
            return
        self.stderr.seek(0)
        last = self.stderr.read().strip().splitlines() or [f"exit code {self.process.returncode}"]
        self.result = {"error": f"{doing}: {last[-1]}"[:400]}


@contextmanager
def _deadline(process: subprocess.Popen[str], timeout: float) -> Iterator[threading.Event]:
    """Kill ``process`` after ``timeout`` seconds; the event then is set."""
    expired = threading.Event()

    def end() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(timeout, end)
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def run(
    commands: Sequence[Sequence[str]],
    jobs: int,
    done: Callable[[int, Any], None],
    prepare_timeout: float = 600,
    turn_timeout: float = 120,
) -> None:
    """Start every command, at most ``jobs`` compiling at a time; when all are ready measure one after the other.

    ``done`` is called with the index of the command and its result as soon as that is there.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_common.ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    if jobs > 1:
        environment.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    workers = [_Worker(command, environment) for command in commands]
    started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda w: w.prepare(prepare_timeout), workers):
            pass
    print(f"compiled {len(workers)} in {time.monotonic() - started:.0f} s", flush=True)
    for i, worker in enumerate(workers):
        done(i, worker.measure(turn_timeout))
