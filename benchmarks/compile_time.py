"""What our pass costs: its share of the whole compile of a decoder, against the number of layers.

    python benchmarks/compile_time.py                          # 4, 8, 16, 24 layers; static and dynamic shapes
    python benchmarks/compile_time.py --layers 4,8 --modes train

Every point is a fresh process with an empty cache folder. The whole compile is the first call less a later call; the
pass reports its own wall time. The lines ``seconds = a + b * layers`` are least-squares fits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks")]

from benchmarks import _common  # noqa: E402

Row = dict[str, Any]


def compile_once(job: Row) -> Row:
    """Compile one decoder and return the wall times of the first call, of a later call and of our pass."""
    import torch
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    from benchmarks._small_models import MODELS

    torch.set_num_threads(job["threads"])
    module, inputs = MODELS[job["model"]].make(job["layers"], job["length"])
    module.eval()
    train = job["mode"] == "train"

    def once(function: Any) -> float:
        started = time.perf_counter()
        if train:
            function(**inputs).float().square().mean().backward()
        else:
            with torch.no_grad():
                function(**inputs)
        return time.perf_counter() - started

    once(module)  # kernels and libraries that load on first use are nobody's compile time
    caches_off = (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    )
    row = dict(job)
    with caches_off[0], caches_off[1]:
        if job["side"] == "fa_inductor":
            from fa_inductor.backend import fa_inductor
            from fa_inductor.report import collecting

            with collecting() as report:
                compiled = torch.compile(module, backend=fa_inductor, dynamic=job["dynamic"])
                row["first"] = once(compiled)
            row.update(report.counts(), seconds=report.seconds, graphs=report.graphs)
        else:
            compiled = torch.compile(module, backend="inductor", dynamic=job["dynamic"])
            row["first"] = once(compiled)
        row["later"] = min(once(compiled) for _ in range(3))
    row["compile"] = row["first"] - row["later"]
    return row


def worker(job: Row, timeout: float) -> Row:
    """`compile_once` in a fresh process with an empty cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "OMP_NUM_THREADS": str(job["threads"]),
            "HF_HUB_OFFLINE": "1",
        }
        command = _common.worker_command("benchmarks.compile_time", "--worker", json.dumps(job))
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {**job, "error": f"more than {timeout:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT ") :])
    return {**job, "error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:400]}


def line_fit(points: list[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Intercept, slope and R squared of the least-squares line; None below three points."""
    if len(points) < 3:
        return None
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    intercept = mean_y - slope * mean_x
    total = sum((y - mean_y) ** 2 for _, y in points)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in points)
    return intercept, slope, 1.0 - rest / total if total else 1.0


def summary(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        shapes = "dynamic" if row["dynamic"] else "static"
        if "error" in row:
            lines.append([row["model"], row["mode"], shapes, row["side"], row["layers"], row["error"][:60]])
            continue
        share = f"{100 * row['seconds'] / row['compile']:.1f} %" if "seconds" in row else ""
        sites = f"{row['fused']}/{row['fused'] + row['declined'] + row['rejected']}" if "fused" in row else ""
        lines.append(
            [
                row["model"],
                row["mode"],
                shapes,
                row["side"],
                row["layers"],
                sites,
                row["compile"],
                row.get("seconds", ""),
                share,
            ]
        )
    headers = ["model", "mode", "shapes", "side", "layers", "fused", "compile s", "pass s", "share"]
    text = [_common.table(lines, headers), ""]
    fits = []
    groups = {(row["model"], row["mode"], row["dynamic"]) for row in rows if "seconds" in row}
    for model, mode, dynamic in sorted(groups):
        mine = [
            row
            for row in rows
            if (row["model"], row["mode"], row["dynamic"]) == (model, mode, dynamic) and "seconds" in row
        ]
        for what in ("seconds", "compile"):
            fit = line_fit([(row["layers"], row[what]) for row in mine])
            if fit:
                label = "pass" if what == "seconds" else "whole compile"
                fits.append([model, mode, "dynamic" if dynamic else "static", label, *fit])
    text.append(_common.table(fits, ["model", "mode", "shapes", "what", "a (s)", "b (s a layer)", "R squared"]))
    return "\n".join(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama")
    parser.add_argument("--layers", default="4,8,16,24")
    parser.add_argument("--shapes", default="static,dynamic")
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument(
        "--sides", default="fa_inductor", help="fa_inductor, inductor or both; inductor shows the bare compile"
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", default=str(_common.RESULTS / "compile_time.json"))
    parser.add_argument("--show", metavar="JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        print("RESULT " + json.dumps(compile_once(json.loads(options.worker))), flush=True)
        return 0
    if options.show:
        print(summary(json.loads(Path(options.show).read_text())["rows"]))
        return 0
    rows: list[Row] = []
    for model in options.models.split(","):
        for mode in options.modes.split(","):
            for shapes in options.shapes.split(","):
                for layers in (int(part) for part in options.layers.split(",")):
                    for side in options.sides.split(","):
                        job = {
                            "model": model,
                            "mode": mode,
                            "dynamic": shapes == "dynamic",
                            "layers": layers,
                            "side": side,
                            "length": options.length,
                            "threads": options.threads,
                        }
                        rows.append(worker(job, options.timeout))
                        _common.save(
                            options.json, {"environment": _common.environment(), "command": _common.arguments(), "rows": rows}
                        )
                        row = rows[-1]
                        print(
                            row.get("error")
                            or f"{model} {mode} {shapes} {layers} layers, {side}: compile "
                            f"{row['compile']:.1f} s, pass {row.get('seconds', 0):.2f} s",
                            flush=True,
                        )
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
