"""A small GPT trained on text of a seeded grammar, with plain torch.compile and with us: does it learn the same?

    python -m benchmarks.training --out benchmarks/results/training_h200.json --plot benchmarks/results/training_h200.png
    python -m benchmarks.training --dropout 0.1 --checkpoint --accumulate 2
    python -m benchmarks.training --device cpu --tiny --steps 5 --seeds 2 --options '{"kernel": "reference"}'
    python -m benchmarks.training --show benchmarks/results/training_h200.json --plot curves.png

One process a side: both compile at a time, then one after the other trains a model for every seed (weights and order of the
text) on the compiled module. float32 weights under bfloat16 autocast, AdamW, fused. Checked are the gradients of the first step
against eager float32 code, and the loss curves: smoothed, the sides may differ less than the seeds do. The exit code is 1 where
they differ more, an attention is not fused, or a gradient is more than twice as far off as the other side's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import _common, _grammar, _turns

Row = dict[str, Any]
SIDES = ("compile", "fa_inductor")
#: Steps over which the learning rate rises, over which curves are averaged, and which are not timed.
WARM_UP, WINDOW, UNTIMED = 50, 25, 10
LEARNING_RATE = 1e-3


# ---- one process -----------------------------------------------------------------------------------------------------


class Trainer:
    """One side: its compiled model and the text."""

    def __init__(self, job: Row) -> None:
        import torch

        import fa_inductor  # noqa: F401 -- a checkout that is not installed has its backend registered by this
        from benchmarks._gpt import GPT, Variant
        from benchmarks._gpu_layers import Config

        self.job, self.device = job, job["device"]
        config = Config(**job["config"], batch={})
        self.model = GPT(config, len(_grammar.WORDS), Variant(job["dropout"], job["checkpoint"])).to(self.device)
        self.model.draw(0)
        ours = {"backend": "fa_inductor", "options": job["options"]}
        self.compiled = torch.compile(self.model, dynamic=False, **(ours if job["side"] == "fa_inductor" else {}))
        self.text = torch.tensor(_grammar.Grammar(1).tokens(job["tokens"]), device=self.device)
        self.held_out = torch.tensor(_grammar.Grammar(2).tokens(job["batch"] * (job["length"] + 1)), device=self.device)

    def compile(self) -> Row:
        """What the first step compiles, forward and backward, and what the pass reports of it."""
        from fa_inductor import report

        started = time.perf_counter()
        with report.collecting() as sites:
            self.backward(self.compiled, next(self.batches(0)))
        return {
            "compile_seconds": time.perf_counter() - started,
            "fused": len(sites.fused),
            "sites": len(sites.sites),
            "reasons": sorted({site.reason for site in sites.unfused}),
            "kernels": sorted({site.template for site in sites.fused}),
        }

    def measure(self) -> Row:
        """Gradients and training runs. With dropout the sides draw other random numbers, so no gradients are compared."""
        return {
            "gradient_errors": {} if self.job["dropout"] else self.gradient_errors(),
            "runs": [self.train(seed, self.job["steps"]) for seed in range(self.job["seeds"])],
        }

    def batches(self, seed: int) -> Iterator[Any]:
        """Random windows [B, S + 1] of the text."""
        import torch

        g = torch.Generator().manual_seed(1000 + seed)
        span = torch.arange(self.job["length"] + 1, device=self.device)
        while True:
            start = torch.randint(len(self.text) - len(span), (self.job["batch"], 1), generator=g)
            yield self.text[start.to(self.device) + span]

    def backward(self, call: Callable[..., Any], tokens: Any, exact: bool = False) -> Any:
        """The mean loss of a batch; its gradient is added to the parameters'."""
        import torch

        parts = tokens.chunk(self.job["accumulate"])
        total = torch.zeros((), device=self.device)
        for part in parts:
            with torch.autocast(self.device, torch.bfloat16, enabled=not exact):
                loss = call(part) / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def gradient_errors(self) -> dict[str, float]:
        """Of each parameter: distance of the compiled model's first gradient to eager float32 code's, relative to its norm."""
        tokens = next(self.batches(0))
        grads = []
        for call, exact in ((self.model, True), (self.compiled, False)):
            self.model.zero_grad()
            self.backward(call, tokens, exact)
            grads.append({n: p.grad.clone() for n, p in self.model.named_parameters()})
        true, found = grads
        return {n: float((found[n] - g).norm() / g.norm()) for n, g in true.items()}

    def train(self, seed: int, steps: int) -> Row:
        """Losses of all steps, held-out loss of the trained weights, tokens a second."""
        import torch

        self.model.draw(seed)
        self.model.zero_grad()
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), fused=True)
        losses = torch.zeros(steps, device=self.device)
        untimed = min(UNTIMED, steps // 2)
        started = time.perf_counter()
        for step, tokens in enumerate(islice(self.batches(seed), steps)):
            if step == untimed:
                self.synchronize()
                started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
            losses[step] = self.backward(self.compiled, tokens)
            optimizer.step()
            optimizer.zero_grad()
        self.synchronize()
        seconds = time.perf_counter() - started
        trained = self.job["batch"] * self.job["length"] * (steps - untimed)
        self.model.eval()
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16):
            held_out = float(self.model(self.held_out.view(self.job["batch"], -1)))
        self.model.train()
        return {"seed": seed, "losses": losses.tolist(), "held_out": held_out, "tokens_per_second": trained / seconds}

    def synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()


def worker(job: Row) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(job["threads"])  # before torch is imported
    trainer = Trainer(job)
    row = trainer.compile()
    _turns.wait_for_turn()
    _turns.give({**row, **trainer.measure()})


# ---- the comparison --------------------------------------------------------------------------------------------------


def smoothed(losses: list[float], window: int = WINDOW) -> list[float]:
    """Means of ``window`` losses; fewer where there are not so many."""
    window = min(window, max(1, len(losses) // 2))
    return [statistics.fmean(losses[i : i + window]) for i in range(len(losses) - window + 1)]


def compare(rows: dict[str, Row]) -> Row:
    """Largest difference of smoothed curves between the sides (one seed) and between the seeds (one side), and gradients."""
    curves = {side: [smoothed(run["losses"]) for run in rows[side]["runs"]] for side in SIDES}
    between_sides = _common.largest(abs(a - b) for pair in zip(*curves.values(), strict=True) for a, b in zip(*pair, strict=True))
    spreads = [max(at) - min(at) for side in SIDES for at in zip(*curves[side], strict=True)]
    errors = {side: rows[side]["gradient_errors"] for side in SIDES}
    return {
        "between_sides": between_sides,
        "between_seeds": _common.largest(spreads),
        "final": {side: [statistics.fmean(r["losses"][-WINDOW:]) for r in rows[side]["runs"]] for side in SIDES},
        "held_out": {side: [r["held_out"] for r in rows[side]["runs"]] for side in SIDES},
        "tokens_per_second": {side: statistics.median(r["tokens_per_second"] for r in rows[side]["runs"]) for side in SIDES},
        "gradients": {side: gradient_summary(e) for side, e in errors.items() if e},
    }


def gradient_summary(errors: dict[str, float]) -> Row:
    worst = _common.largest(errors.values())
    where = next((n for n, e in errors.items() if e == worst), "a gradient that is NaN")
    return {"median": statistics.median(errors.values()), "worst": worst, "where": where}


def faults(rows: dict[str, Row], found: Row) -> list[str]:
    """What is not as it should be."""
    out = []
    ours = rows["fa_inductor"]
    if ours["fused"] != ours["sites"] or not ours["fused"]:
        out.append(f"{ours['fused']} of {ours['sites']} attentions are fused: {'; '.join(ours['reasons'])}")
    if found["between_sides"] > found["between_seeds"] or math.isinf(found["between_sides"]):
        out.append(f"the sides differ by {found['between_sides']:.3g}, the seeds by {found['between_seeds']:.3g}")
    if found["gradients"]:
        theirs, mine = (found["gradients"][side]["worst"] for side in SIDES)
        if mine > 2 * theirs or math.isinf(mine):
            out.append(f"the worst gradient is {mine:.3g} off, the other side's {theirs:.3g}")
    return out


def summary(rows: dict[str, Row], found: Row) -> str:
    lines = []
    for side in SIDES:
        means = [f"{statistics.fmean(found[key][side]):.4f}" for key in ("final", "held_out")]
        g = found["gradients"].get(side)
        errors = [f"{g['median']:.2e}", f"{g['worst']:.2e}", g["where"]] if g else ["-"] * 3
        speed = f"{found['tokens_per_second'][side]:,.0f}"
        lines.append([side, *means, *errors, speed, f"{rows[side]['compile_seconds']:.0f}"])
    headers = ["side", f"loss, last {WINDOW}", "held out", "gradient, median", "gradient, worst", "of", "tokens/s", "compile s"]
    by_seed = [
        f"seed {i}: last losses {a:.4f} and {b:.4f}" for i, (a, b) in enumerate(zip(*found["final"].values(), strict=True))
    ]
    apart = f"smoothed curves: between the sides at most {found['between_sides']:.4f}, "
    apart += f"between the seeds {found['between_seeds']:.4f}"
    return "\n".join([_common.table(lines, headers), *by_seed, apart])


def plot(payload: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 5))
    for side, style in zip(SIDES, ("-", "--"), strict=True):
        for run in payload["rows"][side]["runs"]:
            curve = smoothed(run["losses"])
            axis.plot(curve, style, color=f"C{run['seed']}", label=f"{side}, seed {run['seed']}", linewidth=1.2)
    axis.set(xlabel="step", ylabel=f"training loss, mean of {WINDOW} steps", yscale="log", title=payload["device"])
    axis.legend(ncols=len(SIDES))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- the driver ------------------------------------------------------------------------------------------------------

FULL = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "mlp": 1408, "layers": 4}
TINY = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 64, "layers": 1}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the text")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights")
    parser.add_argument("--checkpoint", action="store_true", help="recompute every layer in the backward")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="a batch in N parts, their gradients summed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a very small model, batch and text, to try the script")
    parser.add_argument("--options", default="{}", help="JSON options of our backend")
    parser.add_argument("--jobs", type=int, default=2, help="sides that compile at a time")
    parser.add_argument("--threads", type=int, default=6, help="of each side's compiler")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a side's compile, and again for its training")
    parser.add_argument("--out", default=str(_common.RESULTS / "training.json"))
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--show", metavar="JSON", help="print (and plot) an earlier run, train nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Row:
    """Trains both sides; the payload that is saved."""
    import torch

    small = {"batch": 4, "length": 48, "tokens": 5000} if options.tiny else {}
    names = ["steps", "seeds", "length", "batch", "tokens", "dropout", "checkpoint", "accumulate", "device", "threads"]
    job = {**{n: getattr(options, n) for n in names}, **small, "options": json.loads(options.options)}
    job["config"] = TINY if options.tiny else FULL
    rows: dict[str, Row] = {}
    commands = [_common.worker_command("benchmarks.training", "--worker", json.dumps({**job, "side": s})) for s in SIDES]
    _turns.run(commands, options.jobs, lambda i, row: rows.update({SIDES[i]: row}), options.timeout, options.timeout)
    for side, row in rows.items():
        if "error" in row:
            raise SystemExit(f"{side}: {row['error']}")
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "environment": _common.environment(),
        "command": " ".join(["python -m benchmarks.training", *_common.arguments()]),
        "job": job,
        "comparison": compare(rows),
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    payload = _common.shown(options, run)
    print(summary(payload["rows"], payload["comparison"]))
    wrong = faults(payload["rows"], payload["comparison"])
    gradients = ", gradients as close as the other side's" if payload["comparison"]["gradients"] else ""
    print("\n".join(wrong) or f"as it should be: every attention fused, curves within the seeds{gradients}")
    if options.plot:
        plot(payload, Path(options.plot))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
