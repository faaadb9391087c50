"""What every benchmark shares: where the results go, and a record of what they were measured on."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def arguments() -> list[str]:
    """The command line's arguments as results record them: of a path of this machine its name alone."""

    def shown(text: str) -> str:
        option, equals, value = text.rpartition("=")
        return option + equals + (os.path.basename(value) if os.path.isabs(value) else value)

    return [shown(x) for x in sys.argv[1:]]


def environment() -> dict[str, Any]:
    """Versions, CPU model and thread settings, saved beside every set of numbers."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    libraries = {}
    for name in ("transformers", "timm", "diffusers", "x_transformers", "open_clip_torch"):
        version = installed_version(name)
        if version:
            libraries[name] = version
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fa_inductor": installed_version("fa_inductor") or "checkout",
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "libraries": libraries,
    }


def gpu_head(module: str) -> dict[str, Any]:
    """What a result file of the GPU at hand begins with: the device, the versions and the command."""
    import torch

    command = " ".join([f"python -m {module}", *arguments()])
    return {"device": torch.cuda.get_device_name(), "environment": environment(), "command": command}


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def save(path: str | os.PathLike[str], payload: dict[str, Any]) -> Path:
    """Write ``payload`` as JSON through a temporary file, so that a killed run leaves the old file whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + ".part")
    scratch.write_text(json.dumps(payload, indent=1, sort_keys=False) + "\n")
    scratch.replace(target)
    return target


def shown(options: argparse.Namespace, run: Callable[[argparse.Namespace], dict[str, Any]]) -> dict[str, Any]:
    """The results in the file ``options.show``; without one those of ``run``, saved to ``options.out``."""
    if options.show:
        return dict(json.loads(Path(options.show).read_text()))
    payload = run(options)
    save(options.out, payload)
    return payload


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    """A GitHub-style text table; falls back to tab-separated lines where ``tabulate`` is missing."""
    rows = [[("" if cell is None else cell) for cell in row] for row in rows]
    try:
        from tabulate import tabulate
    except ImportError:
        lines = ["\t".join(headers)]
        lines += ["\t".join(str(cell) for cell in row) for row in rows]
        return "\n".join(lines)
    return tabulate(rows, headers=headers, tablefmt="github", floatfmt=".3g")


def largest(values: Iterable[float]) -> float:
    """The largest value, infinity where one is NaN, so that no comparison passes because of it."""
    return max(math.inf if math.isnan(value) else value for value in values)


def geometric_mean(values: Sequence[float]) -> float | None:
    """Geometric mean of positive numbers, None for an empty list."""
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))


def worker_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs ``python -m module`` in a fresh process."""
    return [sys.executable, "-m", module, *arguments]
