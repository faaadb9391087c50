"""A ledger of fuzzing: every run with its revision, seed and counts, and the sums.

    python -m benchmarks._fuzz_ledger benchmarks/results/fuzz_totals.json other.json    # adds the runs of other ledgers
    python -m benchmarks._fuzz_ledger benchmarks/results/fuzz_totals.json               # shows the sums
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import _common
from benchmarks._fuzz_tally import Tally

_SUMS = ("graphs", "fused", "with_gradients", "through_dynamo", "through_code_generation", "failures", "seconds")


def revision() -> str:
    """The commit of the sources, with a + where they differ from it; empty outside of a repository."""
    git = ["git", "-C", str(_common.ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if changed.strip() else "")


def entry(tally: Tally, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One run."""
    import torch

    name = torch.cuda.get_device_name() if args.device == "cuda" else _common.environment()["cpu"]
    return {
        "device": "interpreter" if args.interpret else args.device,
        "name": name,
        "torch": torch.__version__,
        "triton": _common.installed_version("triton"),
        "revision": args.revision or revision(),
        "date": date.today().isoformat(),
        "seed": args.seed,
        "examples": [args.start, tally.last],
        "jobs": args.jobs,
        "family": args.family,
        "whole_every": args.whole_every,
        "codegen_every": args.codegen_every,
        "dynamic_every": args.dynamic_every,
        "graphs": tally.graphs,
        "fused": tally.fused,
        "with_gradients": tally.gradients,
        "through_dynamo": tally.whole,
        "with_run_time_sizes": tally.dynamic,
        "through_code_generation": tally.generated,
        "failures": tally.failures,
        "redrawn": tally.redrawn,
        "kinds": dict(tally.kinds),
        "dtypes": dict(tally.dtypes),
        "kernels": dict(tally.kernels),
        "seconds": round(seconds),
    }


def add(path: Path, *runs: dict[str, Any]) -> dict[str, Any]:
    """Adds runs to the ledger in ``path``, which may not exist yet; a run that is in it already is left out."""
    known = json.loads(path.read_text())["runs"] if path.exists() else []
    known += [r for r in runs if r not in known]
    totals = {
        device: {"runs": len(of), **{k: sum(r[k] for r in of) for k in _SUMS}}
        for device in ("cpu", "cuda", "interpreter")
        if (of := [r for r in known if r["device"] == device])
    }
    ledger = {"totals": totals, "runs": known}
    _common.save(path, ledger)
    return ledger


def main(paths: list[str]) -> None:
    runs = [r for path in paths[1:] for r in json.loads(Path(path).read_text())["runs"]]
    totals = add(Path(paths[0]), *runs)["totals"]
    print(_common.table([[d, *(t[k] for k in ("runs", *_SUMS))] for d, t in totals.items()], ["device", "runs", *_SUMS]))


if __name__ == "__main__":
    main(sys.argv[1:])
