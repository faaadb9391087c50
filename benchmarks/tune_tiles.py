"""Time tile configurations of the kernels on the GPU at hand: where the rows of templates/configs.py come from.

    python -m benchmarks.tune_tiles --out results.json [--dims 64 128] [--passes forward dkdv dq]

16384 tokens, hidden size 2048, bfloat16, sequence length 4096, random data; median of triton.testing.do_bench. The
sizes and strides are numbers in the kernels' text, as Inductor renders them under static shapes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.configs import TileConfig

TOKENS, HIDDEN, LENGTH = 16384, 2048, 4096
PROGRAMS = {
    "full": "attention(score=score * {scale})",
    "causal": "attention(score=where(q_idx >= kv_idx, score * {scale}, -inf))",
}
_FORWARD = [
    *product((128,), (128,), (8,), (2, 3)), *product((128,), (64,), (8,), (2, 3, 4)), (128, 64, 4, 2), (128, 64, 4, 3),
    *product((64,), (64,), (4,), (2, 3)), (64, 128, 4, 2), (128, 128, 4, 2), (128, 32, 8, 4), (64, 32, 4, 3),
]  # fmt: skip
_DKDV = [
    *product((64,), (128,), (8,), (2, 3)), *product((64,), (64,), (4,), (2, 3)), (128, 64, 8, 2), (128, 128, 8, 1),
    (128, 128, 8, 2), (32, 128, 8, 2), (32, 64, 4, 2), (64, 64, 8, 2), (64, 128, 4, 2), (32, 128, 4, 2),
]  # fmt: skip
_DQ = [
    *product((128,), (64,), (8,), (2, 3)), (128, 128, 8, 2), *product((64,), (64,), (4,), (2, 3)), (64, 128, 8, 2),
    (128, 32, 8, 3), (128, 64, 4, 2), (64, 32, 4, 3), (128, 32, 4, 3),
]  # fmt: skip
TILES = {"forward": _FORWARD, "dkdv": _DKDV, "dq": _DQ}
_SPECIALISED = {
    "forward": [(128, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3)],
    "dkdv": [(64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 4, 2), (32, 128, 4, 2)],
    "dq": [(128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2), (128, 128, 4, 2)],
}


def configurations(which: str, dim: int) -> list[TileConfig]:
    """What to try. Tiles that could not fit in shared memory at 256 are halved."""
    found = []
    for m, n, warps, stages in TILES[which]:
        for tma in (False, True):
            found.append(TileConfig(m, n, warps, stages, tma=tma))
    found += [TileConfig(*t, tma=True, warp_specialize=True) for t in _SPECIALISED[which]]
    if dim >= 256:
        small = [replace(c, block_n=max(16, c.block_n // 2), num_stages=min(c.num_stages, 2)) for c in found]
        found = list(dict.fromkeys(c for c in [*found, *small] if c.block_m * c.block_n <= 128 * 64))
    return found


class Case:
    """One kernel at one shape: builds the operands and times a configuration."""

    def __init__(self, which: str, dim: int, program: str) -> None:
        import torch

        from fa_inductor.templates import direct

        direct.set_allocator(torch.device("cuda"))
        self.which, self.dim = which, dim
        self.spec = AttentionSpec.parse(PROGRAMS[program].format(scale=dim**-0.5))
        heads, batch = HIDDEN // dim, TOKENS // LENGTH
        shape = (batch, heads, LENGTH, dim)
        make = lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v, self.do = make(), make(), make(), make()
        self.out, self.dv = torch.empty_like(self.q), torch.empty_like(self.v)
        self.lse = torch.full(shape[:3], 8.0, device="cuda")
        self.delta = torch.zeros_like(self.lse)
        self.problem = direct.problem_of(self.q, self.k, self.v, [], (), [self.do])
        products = {"forward": 4, "dkdv": 8, "dq": 6}[which]
        self.flops = products * batch * heads * LENGTH * LENGTH * dim * (0.5 if program == "causal" else 1.0)
        self.heads = batch * heads

    def prepare(self, config: TileConfig) -> tuple[Any, list[Any], int, dict[str, int]]:
        from fa_inductor.templates import backward, forward, standalone

        render = {
            "forward": forward.forward_kernel, "dkdv": backward.dkdv_kernel, "dq": backward.dq_kernel
        }[self.which]  # fmt: skip
        kernel = render(self.spec, self.problem, config)
        tensors = {
            "Q": self.q, "K": self.k, "V": self.v, "DO": self.do, "LSE": self.lse, "DELTA": self.delta, "DV": self.dv
        }  # fmt: skip
        function, values = standalone.prepare(kernel, tensors, self.out, fixed=True)
        block = config.block_n if self.which == "dkdv" else config.block_m
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return function, values, -(-LENGTH // block) * self.heads, options

    def compile(self, config: TileConfig) -> None:
        function, values, grid, options = self.prepare(config)
        function.warmup(*values, grid=(grid,), **options)

    def time(self, config: TileConfig) -> float:
        """Milliseconds."""
        from triton.testing import do_bench

        function, values, grid, options = self.prepare(config)
        return float(do_bench(lambda: function[(grid,)](*values, **options), warmup=10, rep=40, return_mode="median"))


def _compile(job: tuple[str, int, str, TileConfig]) -> tuple[tuple[str, int, str, TileConfig], str]:
    which, dim, program, config = job
    try:
        Case(which, dim, program).compile(config)
    except Exception as e:
        return job, f"{type(e).__name__}: {e}"[:120]
    return job, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune_tiles.json")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--passes", nargs="+", default=list(TILES))
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--top", type=int, default=4)
    args = parser.parse_args()
    jobs = [
        (which, dim, program, config)
        for which, dim, program in product(args.passes, args.dims, PROGRAMS)
        for config in configurations(which, dim)
    ]
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=40) as pool:
        failures = {job: reason for job, reason in pool.imap_unordered(_compile, jobs, chunksize=2) if reason}
    results: list[dict[str, Any]] = []
    for which, dim, program in product(args.passes, args.dims, PROGRAMS):
        case, rows = Case(which, dim, program), []
        for config in configurations(which, dim):
            reason = failures.get((which, dim, program, config), "")
            ms = None
            if not reason:
                try:
                    ms = case.time(config)
                except Exception as e:
                    reason = f"{type(e).__name__}: {e}"[:120]
            row = {"pass": which, "dim": dim, "program": program, **asdict(config), "ms": ms, "reason": reason}
            row["tflops"] = case.flops / ms * 1e-9 if ms else 0.0
            rows.append(row)
        results += rows
        rows.sort(key=lambda r: -r["tflops"])
        print(which, dim, program, sum(1 for r in rows if r["ms"] is None), "failed")
        for r in rows[: args.top]:
            flags = ("tma " if r["tma"] else "") + ("ws" if r["warp_specialize"] else "")
            print(f"   {r['block_m']}x{r['block_n']} w{r['num_warps']} st{r['num_stages']} {flags}: "
                  f"{r['ms']:.3f} ms {r['tflops']:.0f} TFLOP/s")  # fmt: skip
    with open(args.out, "w") as f:
        json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
