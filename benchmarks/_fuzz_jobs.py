"""The fuzzer in several processes: each runs its own examples and reports; one that dies or hangs is a failure of its example."""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks._fuzz_tally import Tally


def quiet() -> None:
    """For the whole process: nothing but the fuzzer's own lines is shown, and no thread pool runs beside it."""
    import torch

    warnings.filterwarnings("ignore")
    logging.getLogger("fa_inductor").setLevel(logging.ERROR)
    torch.set_num_threads(1)


#: Runs one process's examples, see :func:`benchmarks.fuzz.work`; the command line of an example by its name.
Work = Callable[[argparse.Namespace, int, Callable[[Tally], None]], Tally]
Command = Callable[[argparse.Namespace, str], str]


def _child(work: Work, args: argparse.Namespace, job: int, to: Connection) -> None:
    quiet()
    to.send((True, work(args, job, lambda tally: to.send((False, tally)))))


class Stopped(Exception):
    """Somebody asks this process to end, as ``timeout`` does."""


def _stop(*_: Any) -> None:
    raise Stopped


@contextlib.contextmanager
def on_termination(do: Callable[..., None]) -> Iterator[None]:
    """Calls ``do`` where this process is asked to end meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, do)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(work: Work, command: Command, args: argparse.Namespace, patience: float) -> Tally:
    """What ``args.jobs`` processes have seen together. ``patience``: seconds that one example may take at most.

    Where this process is asked to end (SIGTERM), what was seen until then.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, Any] = {}
    seen: dict[Any, tuple[Tally, float]] = {}
    try:
        with on_termination(_stop):
            for job in range(args.jobs):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(work, args, job, writer))
                process.start()
                writer.close()
                processes[reader], seen[reader] = process, (Tally(), time.monotonic())
            _listen(lambda name: command(args, name), args.seed, patience, processes, seen)
    except Stopped:
        print("stopped: each process's last example is not counted", flush=True)
    finally:
        for process in processes.values():
            process.kill()
    total = Tally()
    for tally, _ in seen.values():
        total.merge(tally)
    return total


def _listen(
    again: Callable[[str], str], seed: int, patience: float, processes: dict[Any, Any], seen: dict[Any, tuple[Tally, float]]
) -> None:
    """Until all processes have ended: ``seen`` is what each has counted, and when it said so."""
    while processes:
        for reader in wait(list(processes), timeout=1.0):
            try:
                ends, tally = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                ends, tally = True, _lost(seen[reader][0], "crash", again, seed)
            seen[reader] = tally, time.monotonic()
            if ends:
                processes.pop(reader).join()
        for reader in [r for r in processes if time.monotonic() - seen[r][1] > patience]:
            seen[reader] = _lost(seen[reader][0], "hang", again, seed), time.monotonic()
            process = processes.pop(reader)
            process.kill()
            process.join()


def _lost(tally: Tally, kind: str, again: Callable[[str], str], seed: int) -> Tally:
    """What a process had counted when an example ended it, and that example."""
    name = f"{seed}/{tally.last}"
    print(f"example {name} fails: {kind}: its process is lost; again: {again(name)}", flush=True)
    tally.kinds[kind] += 1
    return tally
