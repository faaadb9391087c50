"""Time and peak memory of whole models on one GPU, bfloat16: eager, compiled, compiled with us, compiled with SDPA calls.

    python -m benchmarks.models_gpu --jobs 14 --out benchmarks/results/models_h200.json --plot benchmarks/results/models_h200.png
    python -m benchmarks.models_gpu --models decoder,t5 --lengths 4096 --modes infer
    python -m benchmarks.models_gpu --show benchmarks/results/models_h200.json

``eager``, ``compile`` and ``fa_inductor`` run the model whose attention is spelled out; ``compile_sdpa`` the one that
calls SDPA, over the same weights, where SDPA has the form. One process a row: all compile first, ``--jobs`` at a time,
then one after the other is timed alone. README.md in this folder says more.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _common, _turns

Row = dict[str, Any]
SIDES = ("eager", "compile", "fa_inductor", "compile_sdpa")
#: Seconds of repetitions a side, and the fewest and most of them.
BUDGET, FEWEST, MOST = 0.3, 5, 40
#: Kernels that a profile lists.
KERNELS = 14


# ---- one process -----------------------------------------------------------------------------------------------------


class _Said(logging.Handler):
    """Keeps what the lowering of our ops logs: configurations that do not compile, kernels that are not used."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


class Bench:
    """One model at one length in one mode: its four sides and what is measured of them."""

    def __init__(self, job: Row) -> None:
        import torch

        from benchmarks import _gpu_models as models

        self.job, self.train, self.device = job, job["mode"] == "train", job["device"]
        entry = models.MODELS[job["model"]]
        self.name, self.config = entry.name, entry.tiny if job["tiny"] else entry.config
        self.dtype = torch.bfloat16
        self.sides = [s for s in SIDES if entry.sdpa or s != "compile_sdpa"]
        self.weights = models.build(self.name, self.config, "eager", self.device, self.dtype)
        self.inputs = models.draw(self.name, self.config, job["length"], job["batch"], self.device, self.dtype)
        torch.manual_seed(2)
        self.grad_out: Any = None
        self.calls = {side: self._side(side) for side in self.sides}
        if self.train:
            shape = (job["batch"], job["length"], self.config.hidden)  # every model returns hidden states [B, S, C]
            self.grad_out = torch.randn(shape, device=self.device, dtype=self.dtype)

    def _side(self, side: str) -> Callable[..., Any]:
        import torch

        from benchmarks import _gpu_models as models

        if side == "eager":
            return self.weights
        module = models.share(self.name, self.weights, self.config, "sdpa" if side == "compile_sdpa" else "eager")
        backend: Any = "inductor"
        if side == "fa_inductor":
            from fa_inductor.backend import fa_inductor as backend
        options = self.job["options"] if side == "fa_inductor" else None
        return torch.compile(module, backend=backend, dynamic=False, options=options or None)

    def call(self, side: str) -> Any:
        """One forward under no_grad, or one training step."""
        import torch

        if not self.train:
            with torch.no_grad():
                return self.calls[side](*self.inputs)
        self.weights.zero_grad(set_to_none=True)
        out = self.calls[side](*self.inputs)
        out.backward(self.grad_out)
        return out.detach()

    # -- phases
    def compile(self, row: Row) -> None:
        """First calls. What does not fit beside the other processes runs out of memory here, compiled all the same."""
        import torch

        from fa_inductor.report import collecting

        self._limit(self.job["share"])
        said = _Said()
        logging.getLogger("fa_inductor.lowering").addHandler(said)
        logging.getLogger("fa_inductor.lowering").setLevel(logging.INFO)
        for side in self.sides[1:]:
            started = time.perf_counter()
            try:
                with collecting() as report:
                    self.call(side)
                    self._synchronize()
            except torch.OutOfMemoryError:
                row[f"{side}_first_call_out_of_memory"] = True
            except Exception as error:
                row[f"{side}_failed"] = f"{type(error).__name__}: {error}"[:400]
            row[f"{side}_first_call"] = time.perf_counter() - started
            if side == "fa_inductor":
                row["fused"], row["sites"] = len(report.fused), len(report.sites)
                row["reasons"] = sorted({site.reason for site in report.unfused})
                row["kernels"] = sorted({site.template for site in report.fused if site.template})
            self._clean()
        if said.lines:
            row["lowering"] = said.lines
        if self.job["profile"] and self.device == "cuda":
            self._profile(lambda: self.grad_out)  # the profiler's own start takes seconds
        self._clean()
        gc.freeze()  # the compiler leaves millions of objects, which every later collection would visit
        self._limit(1.0)

    def measure(self, row: Row) -> None:
        started = time.perf_counter()
        self._errors(row)
        row["seconds"] = {"errors": time.perf_counter() - started}
        for side in self.sides:
            if f"{side}_failed" in row:
                continue
            started = time.perf_counter()
            try:
                row[f"{side}_bytes"] = self._peak(side)
                row[f"{side}_ms"], row[f"{side}_ms_fastest"], row[f"{side}_repeats"] = self._time(side)
                if self.job["profile"] and side != "eager" and self.device == "cuda":
                    row[f"{side}_profile"] = self._profile(partial(self.call, side))
            except Exception as error:
                row[f"{side}_failed"] = f"{type(error).__name__}: {error}"[:400]
            self._clean()
            row["seconds"][side] = time.perf_counter() - started

    # -- measurements
    def _errors(self, row: Row) -> None:
        """Of each side against eager float32 code over the same weights: output, and in training the worst gradient."""
        import torch

        from benchmarks import _gpu_models as models

        exact = models.build(self.name, self.config, "eager", self.device, torch.float32)
        exact.load_state_dict(self.weights.state_dict())
        exact.recompute = self.train
        inputs = [t.float() if t.is_floating_point() else t for t in self.inputs]
        with torch.set_grad_enabled(self.train):
            true = exact(*inputs)
            if self.train:
                true.backward(self.grad_out.float())
        true = true.detach()
        gradients = {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}
        # The bias of k has no influence, and a gradient of rounding errors alone: errors count relative to at least a
        # thousandth of the usual size of a gradient's entries.
        usual = [float(g.square().mean().sqrt()) for g in gradients.values()]
        least = {n: 1e-3 * statistics.median(usual) * g.numel() ** 0.5 for n, g in gradients.items()} if usual else {}
        self._clean(keep_grads=True)
        for side in self.sides:
            if f"{side}_failed" in row:
                continue
            try:
                out = self.call(side)
                row[f"{side}_error"] = _largest(out, true)
                row[f"{side}_error_norm"] = _norm(out, true)
                if self.train:
                    named = dict(self.weights.named_parameters())
                    found = {n: _norm(named[n].grad, g, least[n]) for n, g in gradients.items()}
                    worst = max(found, key=lambda n: found[n] if found[n] == found[n] else float("inf"))
                    row[f"{side}_gradient_error"], row[f"{side}_worst_gradient"] = found[worst], worst
                del out
            except Exception as error:
                row[f"{side}_failed"] = f"{type(error).__name__}: {error}"[:400]
            self._clean()

    def _peak(self, side: str) -> int | None:
        """Bytes at the highest point of one call above weights and inputs, parameter gradients included."""
        import torch

        self._clean()
        if self.device != "cuda":
            self.call(side)
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.call(side)
        self._synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def _time(self, side: str) -> tuple[float, float, int]:
        """(median, least, count) of milliseconds a call."""
        import torch

        def once() -> float:
            if self.device != "cuda":
                started = time.perf_counter()
                self.call(side)
                return 1e3 * (time.perf_counter() - started)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.call(side)
            end.record()
            end.synchronize()
            return start.elapsed_time(end)

        count = int(min(MOST, max(FEWEST, 1e3 * BUDGET / max(once(), 1e-3))))  # errors and peak were the warm-up
        gc.disable()
        samples = [once() for _ in range(count)]
        gc.enable()
        return statistics.median(samples), min(samples), count

    def _profile(self, call: Callable[[], Any]) -> Row:
        """Milliseconds on the device of one call: all kernels together, and the longest by name with their count."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            call()
            self._synchronize()
        events = [(e.key[:120], e.self_device_time_total / 1e3, e.count) for e in trace.key_averages()]
        events.sort(key=lambda e: -e[1])
        return {"busy_ms": sum(ms for _, ms, _ in events), "kernels": [list(e) for e in events[:KERNELS]]}

    def _limit(self, share: float) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(share)

    def _synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def _clean(self, keep_grads: bool = False) -> None:
        import torch

        if not keep_grads:
            self.weights.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _largest(x: Any, true: Any) -> float:
    return ((x.float() - true).abs().max() / true.abs().max()).item()


def _norm(x: Any, true: Any, least: float = 1e-30) -> float:
    return ((x.float() - true).norm() / true.norm().clamp_min(least)).item()


def worker(job: Row) -> None:
    import torch
    import torch._functorch.config

    # The backward is compiled with the forward, before anything runs; torch versions without the setting compile it later.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True
    row = dict(job)
    bench = Bench(job)
    bench.compile(row)
    _turns.wait_for_turn()
    bench.measure(row)
    _turns.give(row)
    os._exit(0)  # tearing everything down would take as long as measuring it


# ---- the driver ------------------------------------------------------------------------------------------------------


def jobs_of(options: argparse.Namespace) -> list[Row]:
    from benchmarks import _gpu_models as models

    jobs = []
    wanted = [int(n) for n in options.lengths.split(",")] if options.lengths else None
    for name in options.models.split(",") if options.models else models.MODELS:
        entry = models.MODELS[name]
        config = entry.tiny if options.tiny else entry.config
        for length, batch in config.batch.items():
            if wanted and length not in wanted:
                continue
            jobs += [
                {
                    "model": name, "mode": mode, "length": length, "batch": batch, "layers": config.layers,
                    "device": options.device, "tiny": options.tiny, "profile": options.profile,
                    "share": options.share, "options": json.loads(options.options),
                }
                for mode in options.modes.split(",")
            ]  # fmt: skip
    if options.rows:
        named = {":".join((j["model"], j["mode"], str(j["length"]))): j for j in jobs}
        return [named[row] for row in options.rows.split(",")]
    # The longest compiles first.
    return sorted(jobs, key=lambda j: j["mode"] != "train") if options.jobs > 1 else jobs


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def order(row: Row) -> tuple[str, int, int]:
    """Inference before training, models in their order, short before long."""
    from benchmarks import _gpu_models as models

    return row["mode"], list(models.MODELS).index(row["model"]), row["length"]


def summary(rows: list[Row]) -> str:
    """One line a row: milliseconds, ratios, peak GiB, errors (norm of the output's, in training the worst gradient's)."""
    headers = ["model", "mode", "S", "B", "fused"]
    headers += [f"{s} ms" for s in SIDES] + ["vs compile", "vs sdpa"]
    headers += [f"{s} GiB" for s in SIDES] + [f"{s} err" for s in SIDES] + ["note"]
    lines = []
    for row in sorted(rows, key=order):
        head = [row["model"], row["mode"], row["length"], row["batch"]]
        if "error" in row:
            lines.append([*head, *[""] * 15, row["error"][:90]])
            continue
        field = "gradient_error" if row["mode"] == "train" else "error_norm"
        failed = "; ".join(f"{s}: {row[f'{s}_failed'][:60]}" for s in SIDES if f"{s}_failed" in row)
        lines.append(
            [
                *head,
                f"{row.get('fused', '')}/{row.get('sites', '')}",
                *(shown(row.get(f"{s}_ms"), "{:.2f}") for s in SIDES),
                shown(ratio(row, "compile"), "{:.2f}x"),
                shown(ratio(row, "compile_sdpa"), "{:.2f}x"),
                *(shown(row.get(f"{s}_bytes"), "{:.2f}", 2**30) for s in SIDES),
                *(shown(row.get(f"{s}_{field}"), "{:.1e}") for s in SIDES),
                failed or "; ".join(row.get("reasons", []))[:90],
            ]
        )
    return _common.table(lines, headers)


def shown(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else form.format(value / unit)


def ratio(row: Row, over: str, field: str = "ms") -> float | None:
    """How many times less than ``over`` we take."""
    ours, theirs = row.get(f"fa_inductor_{field}"), row.get(f"{over}_{field}")
    return theirs / ours if ours and theirs else None


def plot(rows: list[Row], path: Path, device: str) -> None:
    """Times relative to eager code, and peaks, one group of bars a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted((r for r in rows if "error" not in r), key=order)
    labels = [f"{r['model']} {r['mode']} {r['length']}" for r in rows]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(max(9, 0.55 * len(rows)), 8.5), sharex=True)
    for i, side in enumerate(SIDES):
        at = [j + 0.2 * (i - 1.5) for j in range(len(rows))]
        speed = [(r.get("eager_ms") or 0) / r[f"{side}_ms"] if r.get(f"{side}_ms") else 0 for r in rows]
        above.bar(at, speed, 0.2, label=side)
        below.bar(at, [(r.get(f"{side}_bytes") or 0) / 2**30 for r in rows], 0.2, label=side)
    above.set(ylabel="times faster than eager", title=f"whole models, {device}, bfloat16")
    below.set(ylabel="peak above weights and inputs, GiB", yscale="log")
    below.set_xticks(range(len(rows)), labels, rotation=40, ha="right")
    above.legend(ncols=4)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="comma-separated, default all")
    parser.add_argument("--lengths", help="comma-separated, of those that a model has; default all")
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--rows", help="of these, only MODEL:MODE:LENGTH, comma-separated, in this order")
    parser.add_argument("--reuse", metavar="JSON", help="keep the rows of an earlier run that this one does not measure")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--share", type=float, default=0.05, help="of the GPU's memory for a process while it compiles")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one process may compile")
    parser.add_argument("--turn-timeout", type=float, default=60, help="seconds that one process may measure")
    parser.add_argument("--profile", action="store_true", help="keep the longest kernels of every side")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="very small models, to try the script")
    parser.add_argument("--options", default="{}", help="JSON options of our backend")
    parser.add_argument("--out", default=str(_common.RESULTS / "models_gpu.json"))
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--show", metavar="JSON", help="print (and plot) an earlier run, measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    if options.show:
        payload = json.loads(Path(options.show).read_text())
        rows, device = payload["rows"], payload["device"]
    else:
        jobs, rows = jobs_of(options), []
        device = device_name(options.device)
        commands_run = [" ".join(["python -m benchmarks.models_gpu", *_common.arguments()])]
        if options.reuse:
            earlier = json.loads(Path(options.reuse).read_text())
            commands_run = [*earlier["commands"], *commands_run]
            again = {(j["model"], j["mode"], j["length"]) for j in jobs}
            rows = [r for r in earlier["rows"] if (r["model"], r["mode"], r["length"]) not in again]

        def done(i: int, result: Row) -> None:
            rows.append({**jobs[i], **result})
            print(one_line(rows[-1]), flush=True)
            head = {"device": device, "environment": _common.environment(), "commands": commands_run}
            _common.save(options.out, {**head, "rows": rows})

        commands = [_common.worker_command("benchmarks.models_gpu", "--worker", json.dumps(job)) for job in jobs]
        _turns.run(commands, options.jobs, done, options.timeout, options.turn_timeout)
    print(summary(rows))
    if options.plot:
        plot(rows, Path(options.plot), device)
    return 0


def one_line(row: Row) -> str:
    head = f"{row['model']} {row['mode']} S={row['length']}"
    if "error" in row:
        return f"{head}: {row['error']}"
    times = ", ".join(f"{s} {shown(row.get(f'{s}_ms'), '{:.2f}')}" for s in SIDES)
    return f"{head}: fused {row.get('fused')}/{row.get('sites')}, ms {times}"


if __name__ == "__main__":
    sys.exit(main())
