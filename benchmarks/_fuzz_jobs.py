"""The fuzzer in several processes: each runs its own examples and reports; one that dies or hangs is a failure of its example."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks._fuzz_tally import Tally


def quiet() -> None:
    """For the whole process: nothing but the fuzzer's own lines is shown, and no thread pool runs beside it."""
    import torch

    warnings.filterwarnings("ignore")
    logging.getLogger("fa_inductor").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def _child(args: argparse.Namespace, job: int, to: Connection) -> None:
    from benchmarks import fuzz

    quiet()
    fuzz.work(args, job, to.send)


def run(args: argparse.Namespace, patience: float) -> Tally:
    """What ``args.jobs`` processes have seen together. ``patience``: seconds that one example may take at most."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, Any] = {}
    for job in range(args.jobs):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(args, job, writer))
        process.start()
        writer.close()
        processes[reader] = process
    total = Tally()
    at: dict[Any, tuple[int, float]] = {reader: (-1, time.monotonic()) for reader in processes}
    while processes:
        for reader in wait(list(processes), timeout=1.0):
            try:
                said = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                said = _lost(total, "crash", at[reader][0], args)
            if isinstance(said, Tally):
                total.merge(said)
                processes.pop(reader).join()
            else:
                at[reader] = said, time.monotonic()
        for reader in [r for r in processes if time.monotonic() - at[r][1] > patience]:
            process = processes.pop(reader)
            process.kill()
            process.join()
            total.merge(_lost(total, "hang", at[reader][0], args))
    return total


def _lost(total: Tally, kind: str, index: int, args: argparse.Namespace) -> Tally:
    """What is known of a process that ended without its tally: only the example that ended it."""
    from benchmarks.fuzz import command

    name = f"{args.seed}/{index}"
    print(f"example {name} fails: {kind}: its process is lost, and what it counted; again: {command(args, name)}", flush=True)
    lost = Tally(last=index)
    lost.kinds[kind] += 1
    return lost
