"""Peak GPU memory of one attention above the operands, against the sequence length: ours, SDPA and eager code.

    python -m benchmarks.memory --out benchmarks/results/memory_h200.json

A training step (forward and gradients of q, k, v), batch 1, 16 heads, head_dim 128, bfloat16, causal, and the same
with a score program that SDPA lacks (softcap). Peak is torch.cuda.max_memory_allocated minus what q, k, v and
grad_out hold. A straight line is fitted to ours over N; the share is ours over eager's at the longest length that
eager reaches.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

from benchmarks import _common
from benchmarks.attention import Case, Problem

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
HEADS, DIM = 16, 128
#: Above this many scores eager code does not fit the GPU.
EAGER_LIMIT = 16384


def peak(run: Callable[..., Any], problem: Problem) -> int:
    """Bytes above the operands at the highest point of a training step. Compiled and warmed up before."""
    import torch

    def step() -> None:
        out = run(problem.q, problem.k, problem.v)
        torch.autograd.grad(out, (problem.q, problem.k, problem.v), problem.grad_out)

    step()
    torch.cuda.synchronize()
    gc.collect()  # compiling leaves cycles that hold the first step's gradients
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def naive(problem: Problem) -> Callable[..., Any]:
    """Attention as people write it: two matmuls and a softmax in the operands' dtype."""
    import torch

    softcap = problem.case.form == "softcap"

    def run(q: Any, k: Any, v: Any) -> Any:
        from benchmarks.attention import CAP

        scores = q @ k.transpose(-2, -1) * problem.scale
        if softcap:
            scores = torch.tanh(scores / CAP) * CAP
        n = scores.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v

    return run


def fit(points: list[tuple[int, int]]) -> dict[str, float]:
    """Least squares line through (length, bytes), and the largest deviation relative to the value."""
    n = len(points)
    if n < 2:
        return {}
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    intercept = mean_y - slope * mean_x
    deviation = max(abs(intercept + slope * x - y) / y for x, y in points)
    return {"bytes_per_token": slope, "intercept": intercept, "largest_relative_deviation": deviation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(_common.RESULTS / "memory.json"))
    parser.add_argument("--forms", nargs="+", default=["causal", "softcap"], choices=["causal", "softcap"])
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    args = parser.parse_args()
    import torch

    results: list[dict[str, Any]] = []
    for form in args.forms:
        for length in args.lengths:
            problem = Problem(Case(f"{form}_{length}", 1, HEADS, HEADS, length, DIM, form))
            row: dict[str, Any] = {"form": form, "length": length}
            torch._dynamo.reset()
            row["ours"] = peak(problem.ours(None), problem)
            if form == "causal":
                row["sdpa"] = peak(problem.sdpa("FLASH_ATTENTION"), problem)
            if length <= EAGER_LIMIT:
                row["eager"] = peak(naive(problem), problem)
            results.append(row)
            print("  ".join(f"{k} {v / 2**20:.0f} MiB" if isinstance(v, int) and k not in ("length",) else f"{v}"
                            for k, v in row.items()), flush=True)  # fmt: skip
            del problem
            torch.cuda.empty_cache()
    fits = {f: fit([(r["length"], r["ours"]) for r in results if r["form"] == f]) for f in args.forms}
    shares = {
        f: next(r["ours"] / r["eager"] for r in reversed(results) if r["form"] == f and "eager" in r)
        for f in args.forms
    }
    print(f"line {fits}\nshare of eager {shares}")
    payload = {
        "device": torch.cuda.get_device_name(),
        "environment": _common.environment(),
        "command": " ".join(["python -m benchmarks.memory", *_common.arguments()]),
        "results": results,
        "fit": fits,
        "share_of_eager": shares,
    }
    _common.save(args.out, payload)


if __name__ == "__main__":
    main()
