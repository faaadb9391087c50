"""Time and peak memory of whole small models: compiled with us, compiled without, eager. CPU, float32.

    python benchmarks/models.py                                    # forward and a training step, all models and lengths
    python benchmarks/models.py --models llama,bert --lengths 1024 --modes infer
    python benchmarks/models.py --show benchmarks/results/models_cpu.json

Times: one process a row; after compilation and one warm-up the three sides take turns, and the median is kept.
Memory: a fresh process a side, the kernel's own high-water mark of resident memory during one call, above what was
resident before it. README.md in this folder says more.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks")]

from benchmarks import _common  # noqa: E402
from benchmarks._memory import peak_of, release_free_memory  # noqa: E402

Row = dict[str, Any]
SIDES = ("fa_inductor", "inductor", "eager")


# ---- one process ---------------------------------------------------------------------------------------------------


def prepare(job: Row, side: str) -> tuple[Callable[[], Any], Any]:
    """A zero-argument callable that runs the model once, compiled by ``side``, and the report of our sites."""
    import torch

    from benchmarks._small_models import MODELS

    torch.manual_seed(0)
    module, inputs = MODELS[job["model"]].make(job["layers"], job["length"])
    train = job["mode"] == "train"
    # Dropout stays off in both modes: the three sides must do the same work on the same numbers.
    module.eval()
    function: Any = module
    if side == "inductor":
        function = torch.compile(module, backend="inductor", dynamic=False)
    elif side == "fa_inductor":
        from fa_inductor.backend import fa_inductor

        function = torch.compile(module, backend=fa_inductor, dynamic=False)

    def infer() -> Any:
        with torch.no_grad():
            return function(**inputs)

    def step() -> Any:
        module.zero_grad(set_to_none=True)
        output = function(**inputs)
        output.float().square().mean().backward()
        return output.detach()

    return (step if train else infer), module


def timed(job: Row) -> Row:
    """Median seconds of each side, sides taking turns, and how far the compiled outputs are from eager's."""
    import torch

    torch.set_num_threads(job["threads"])
    runs, outputs, row = {}, {}, dict(job)
    for side in SIDES:
        started = time.perf_counter()
        try:
            runs[side], _ = prepare(job, side)
            if side == "fa_inductor":
                from fa_inductor.report import collecting

                with collecting() as report:
                    outputs[side] = runs[side]()
                row["fused"] = len(report.fused)
                row["sites"] = len(report.sites)
                row["reasons"] = sorted({site.reason for site in report.unfused})
                row["kernels"] = sorted({site.template for site in report.fused if site.template})
            else:
                outputs[side] = runs[side]()
        except Exception as error:
            row[f"{side}_failed"] = f"{type(error).__name__}: {str(error)[:400]}"
            runs.pop(side, None)
        row[f"{side}_first_call"] = time.perf_counter() - started
    samples: dict[str, list[float]] = {side: [] for side in runs}
    for run in runs.values():
        run()
    deadline = time.monotonic() + job["budget"]
    gc.disable()
    # Eager code leaves the caches cold for what follows it: every order of the sides comes up.
    orders = itertools.cycle(itertools.permutations(runs.items()))
    for order in itertools.islice(orders, job["repeats"]):
        for side, run in order:
            started = time.perf_counter()
            run()
            samples[side].append(time.perf_counter() - started)
        if time.monotonic() > deadline and len(samples["eager"]) >= 5:
            break
    for side, values in samples.items():
        row[f"{side}_seconds"] = statistics.median(values)
        row[f"{side}_fastest"] = min(values)
        row["repeats"] = len(values)
    reference = outputs["eager"].float()
    for side in ("fa_inductor", "inductor"):
        if side in outputs:
            row[f"{side}_error"] = ((outputs[side].float() - reference).abs().max() / reference.abs().max()).item()
    return row


def measured_memory(job: Row) -> Row:
    """Bytes of resident memory that one call needs beyond what was resident before it."""
    import torch

    torch.set_num_threads(job["threads"])
    run, _ = prepare(job, job["side"])
    for _ in range(2):
        run()
    gc.collect()
    release_free_memory()
    peak, method = peak_of(run)
    return {"bytes": peak, "method": method}


# ---- the driver ----------------------------------------------------------------------------------------------------


def worker(task: str, job: Row, timeout: float) -> Row:
    """Run ``task`` on ``job`` in a fresh process; a failure becomes a row with an ``error``."""
    command = _common.worker_command("benchmarks.models", "--worker", json.dumps({"task": task, "job": job}))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": str(job["threads"]),
        "HF_HUB_OFFLINE": "1",
    }
    if task == "memory":
        # Without these, glibc keeps freed blocks below a growing threshold, and the high-water mark depends on history.
        environment.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {timeout:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT ") :])
    return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:400]}


def measure(job: Row, options: argparse.Namespace) -> Row:
    row = {**job, **worker("time", job, options.timeout)}
    if "error" not in row and options.memory:
        for side in SIDES:
            found = worker("memory", {**job, "side": side}, options.timeout)
            row[f"{side}_bytes"] = found.get("bytes")
            row["memory_method"] = found.get("method", row.get("memory_method"))
            if "error" in found:
                row[f"{side}_memory_failed"] = found["error"]
    return row


def ratio(row: Row, field: str, over: str = "inductor") -> float | None:
    ours, theirs = row.get(f"fa_inductor_{field}"), row.get(f"{over}_{field}")
    return theirs / ours if ours and theirs else None


def megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f}"


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.1f}"


def summary(rows: list[Row]) -> str:
    """The table, and geometric means by mode."""
    headers = [
        "model",
        "mode",
        "S",
        "fused",
        "ms with",
        "ms without",
        "ms eager",
        "speed-up",
        "MB with",
        "MB without",
        "MB eager",
        "error",
        "why not",
    ]
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["model"], row["mode"], row["length"], *[""] * 9, row["error"][:60]])
            continue
        faster = ratio(row, "seconds")
        lines.append(
            [
                row["model"],
                row["mode"],
                row["length"],
                f"{row.get('fused', '')}/{row.get('sites', '')}",
                *(milliseconds(row.get(f"{side}_seconds")) for side in SIDES),
                "" if faster is None else f"{faster:.2f}x",
                *(megabytes(row.get(f"{side}_bytes")) for side in SIDES),
                f"{row['fa_inductor_error']:.0e}" if "fa_inductor_error" in row else "",
                row.get("fa_inductor_failed") or "; ".join(row.get("reasons", []))[:100],
            ]
        )
    text = [_common.table(lines, headers), ""]
    means = []
    for mode in ("infer", "train"):
        for label, chosen in (
            ("every row", lambda row: True),
            ("S >= 1024", lambda row: row["length"] >= 1024),
            ("S >= 1024, something fused", lambda row: row["length"] >= 1024 and row.get("fused")),
            ("S >= 1024, causal decoders", lambda row: row["length"] >= 1024 and row["model"] in CAUSAL),
        ):
            picked = [row for row in rows if row["mode"] == mode and "error" not in row and chosen(row)]
            speed = [value for row in picked if (value := ratio(row, "seconds"))]
            eager = [value for row in picked if (value := ratio(row, "seconds", "eager"))]
            space = [value for row in picked if (value := ratio(row, "bytes"))]
            if speed:
                slow = min(speed)
                means.append(
                    [mode, label, len(speed), *(_common.geometric_mean(part) for part in (speed, eager, space)), slow]
                )
    text.append(
        _common.table(
            means,
            [
                "mode",
                "rows",
                "n",
                "speed-up over compiled without",
                "over eager",
                "memory without / with",
                "slowest row",
            ],
        )
    )
    return "\n".join(text)


CAUSAL = ("llama", "llama_padded", "gpt2", "plain_gpt", "mistral", "gemma2")


def plot(rows: list[Row], path: Path) -> None:
    """Speed-up over plain torch.compile and peak memory against length, one line a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    names = list(dict.fromkeys(row["model"] for row in rows))
    for color, name in zip(pyplot.cm.tab10.colors, names, strict=False):
        mine = [row for row in rows if row["model"] == name and row["mode"] == "infer" and "error" not in row]
        lengths = [row["length"] for row in mine]
        left.plot(lengths, [ratio(row, "seconds") for row in mine], "o-", color=color, label=name)
        for side, style in (("fa_inductor", "o-"), ("inductor", "x:")):
            right.plot(lengths, [(row.get(f"{side}_bytes") or 0) / 2**20 for row in mine], style, color=color)
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(
        xlabel="sequence length",
        ylabel="times faster than torch.compile alone",
        xscale="log",
        title="forward, float32, CPU",
    )
    right.set(
        xlabel="sequence length",
        ylabel="peak memory above baseline, MB",
        xscale="log",
        yscale="log",
        title="solid: with fa_inductor, dotted: without",
    )
    for axes in (left, right):
        axes.set_xticks(
            sorted({row["length"] for row in rows}), [str(n) for n in sorted({row["length"] for row in rows})]
        )
        axes.minorticks_off()
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="comma-separated, default all")
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--train-lengths", default="1024,2048", help="lengths of the training step")
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=36, help="turns of the three sides; 6 orders")
    parser.add_argument("--budget", type=float, default=60, help="seconds of turns a row, at least five turns")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a process")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--json", default=str(_common.RESULTS / "models_cpu.json"))
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--show", metavar="JSON", help="print (and plot) an earlier run, measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        request = json.loads(options.worker)
        result = {"time": timed, "memory": measured_memory}[request["task"]](request["job"])
        print("RESULT " + json.dumps(result), flush=True)
        return 0
    if options.show:
        rows = json.loads(Path(options.show).read_text())["rows"]
    else:
        from benchmarks._small_models import MODELS

        rows = []
        lengths = {"infer": options.lengths, "train": options.train_lengths}
        for name in options.models.split(",") if options.models else MODELS:
            for mode in options.modes.split(","):
                for length in (int(part) for part in lengths[mode].split(",")):
                    job = {
                        "model": name,
                        "mode": mode,
                        "length": length,
                        "layers": options.layers,
                        "threads": options.threads,
                        "repeats": options.repeats,
                        "budget": options.budget,
                    }
                    rows.append(measure(job, options))
                    print(one_line(rows[-1]), flush=True)
                    payload = {"environment": _common.environment(), "command": _common.arguments(), "rows": rows}
                    _common.save(options.json, payload)
    print(summary(rows))
    if options.plot:
        plot(rows, Path(options.plot))
    return 0


def one_line(row: Row) -> str:
    head = f"{row['model']} {row['mode']} S={row['length']}"
    if "error" in row:
        return f"{head}: {row['error']}"
    faster = ratio(row, "seconds")
    return f"{head}: fused {row.get('fused')}/{row.get('sites')}, " + (f"{faster:.2f}x" if faster else "no time")


if __name__ == "__main__":
    sys.exit(main())
