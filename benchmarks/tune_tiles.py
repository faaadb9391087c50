"""Time tile configurations of the kernels on the GPU at hand: where the rows of templates/configs.py come from.

    python -m benchmarks.tune_tiles --out results.json --jobs dkdv:128:full:4096 forward:128:bias:4096

A job is pass:head_dim:program:length, optionally followed by the tiles to try, as in ``:64x64w4s2T,64x128w8s3``
(T: tensor descriptors). ``packed`` has documents of log-normal lengths. 16384 tokens or one sequence, hidden size 2048,
bfloat16, unit normal operands; median of triton.testing.do_bench. Sizes and strides are numbers in the kernels' text, as
Inductor renders them under static shapes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from benchmarks import _packed
from fa_inductor.spec import AttentionSpec
from fa_inductor.templates.configs import TileConfig

TOKENS, HIDDEN = 16384, 2048
#: Keys of a window; documents of equal length in a sequence.
WINDOW, DOCUMENTS = 1024, 8
_CAUSAL = "attention(score=where((q_idx >= kv_idx){more}, {live}, -inf){rest})"
PROGRAMS = {
    "full": "attention(score=score * {scale})",
    "bias": "attention(score=score * {scale} + f0[h, q_idx, kv_idx])",
    **{
        name: _CAUSAL.replace("{more}", more).replace("{live}", live).replace("{rest}", rest)
        for name, more, live, rest in (
            ("causal", "", "score * {scale}", ""),
            ("alibi", "", "score * {scale} + f0[h] * cast_float(kv_idx - q_idx)", ""),
            ("softcap", "", "tanh(score * {scale} * 0.03333333333333333) * 30.0", ""),
            ("window", f" & (q_idx - kv_idx < {WINDOW})", "score * {scale}", ""),
            ("document", " & (i0[b, q_idx] == i0[b, kv_idx])", "score * {scale}", ""),
            ("packed", " & (i0[b, q_idx] == i0[b, kv_idx])", "score * {scale}", ""),
            ("sinks", "", "score * {scale}", ", sinks=[f0[h]]"),
        )
    },
}
Job = tuple[str, int, str, int, TileConfig]
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


def configurations(which: str, dim: int) -> list[TileConfig]:
    """What to try. Tiles that could not fit in shared memory at 256 are halved."""
    found = []
    for m, n, warps, stages in TILES[which]:
        for tma in (False, True):
            found.append(TileConfig(m, n, warps, stages, tma=tma))
    if dim >= 256:
        small = [replace(c, block_n=max(16, c.block_n // 2), num_stages=min(c.num_stages, 2)) for c in found]
        found = list(dict.fromkeys(c for c in [*found, *small] if c.block_m * c.block_n <= 128 * 64))
    return found


def parse(job: str) -> list[Job]:
    """The configurations of one --jobs argument."""
    which, dim, program, length, *tiles = job.split(":")
    if not tiles:
        return [(which, int(dim), program, int(length), c) for c in configurations(which, int(dim))]
    found = []
    for text in tiles[0].split(","):
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)(T?)", text)
        if match is None:
            raise SystemExit(f"{text!r} is not of the form 64x64w4s2T")
        m, n, w, st = map(int, match.groups()[:4])
        found.append(TileConfig(m, n, w, st, tma=bool(match[5])))
    return [(which, int(dim), program, int(length), c) for c in found]


def _captures(program: str, heads: int, batch: int, length: int) -> list[Any]:
    import torch

    if program == "bias":
        return [torch.randn(heads, length, length, device="cuda", dtype=torch.bfloat16)]
    if program == "alibi":
        return [torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)], device="cuda")]
    if program == "document":
        return [(torch.arange(length, device="cuda") * DOCUMENTS // length).expand(batch, length).contiguous()]
    if program == "packed":
        return [torch.tensor(_packed.ids(length), device="cuda").expand(batch, length).contiguous()]
    return [torch.randn(heads, device="cuda")] if program == "sinks" else []


def _kept(program: str, length: int) -> float:
    """Share of the scores that a program keeps."""
    if program == "window":
        w = min(WINDOW, length)
        return (w * (w + 1) / 2 + (length - w) * w) / length**2
    if program == "document":
        return 0.5 / DOCUMENTS
    if program == "packed":
        return _packed.kept(length) / length**2
    return 1.0 if program in ("full", "bias") else 0.5


class Case:
    """One kernel at one shape: builds the operands and times a configuration."""

    def __init__(self, which: str, dim: int, program: str, length: int, real: bool) -> None:
        import torch

        from fa_inductor.templates import direct

        direct.set_allocator(torch.device("cuda"))
        self.which, self.dim, self.length = which, dim, length
        self.spec = AttentionSpec.parse(PROGRAMS[program].replace("{scale}", repr(dim**-0.5)))
        heads, batch = HIDDEN // dim, max(1, TOKENS // length)
        shape = (batch, heads, length, dim)
        make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v, self.do = (make(*shape) for _ in range(4))
        self.captures = _captures(program, heads, batch, length)
        self.out, self.dv = torch.empty_like(self.q), torch.empty_like(self.v)
        self.lse = torch.zeros(shape[:3], device="cuda")
        self.delta, self.row_log = torch.zeros_like(self.lse), torch.zeros_like(self.lse)
        self.problem = direct.problem_of(self.q, self.k, self.v, self.captures, (), [self.do])
        if real:
            # The statistics decide how large the weights are, and with them how much power the tensor cores draw.
            configs = direct.choose_all(self.spec, self.problem, 80)
            out, self.lse = direct.forward(self.q, self.k, self.v, self.captures, (), self.spec, configs)
            self.delta = (out.float() * self.do.float()).sum(-1)
        products = {"forward": 4, "dkdv": 8, "dq": 6}[which]
        self.flops = products * batch * heads * length * length * dim * _kept(program, length)
        self.heads = batch * heads

    def prepare(self, config: TileConfig) -> tuple[Any, list[Any], int, dict[str, int]]:
        from fa_inductor.templates import backward, direct, forward, standalone

        render = {
            "forward": forward.forward_kernel, "dkdv": backward.dkdv_kernel, "dq": backward.dq_kernel
        }[self.which]  # fmt: skip
        kernel = render(self.spec, self.problem, config)
        tensors = {
            "Q": self.q, "K": self.k, "V": self.v, "DO": self.do, "LSE": self.lse, "DELTA": self.delta, "DV": self.dv,
            "ROW_MAX": self.lse, "ROW_LOG": self.row_log, **direct.named(self.captures, self.spec, self.problem),
        }  # fmt: skip
        function, values = standalone.prepare(kernel, tensors, self.out, fixed=True)
        block = config.block_n if self.which == "dkdv" else config.block_m
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return function, values, -(-self.length // block) * self.heads, options

    def compile(self, config: TileConfig) -> None:
        function, values, grid, options = self.prepare(config)
        function.warmup(*values, grid=(grid,), **options)

    def time(self, config: TileConfig) -> float:
        """Milliseconds."""
        from triton.testing import do_bench

        function, values, grid, options = self.prepare(config)
        return float(do_bench(lambda: function[(grid,)](*values, **options), warmup=10, rep=40, return_mode="median"))


def _compile(job: Job) -> tuple[Job, str]:
    *case, config = job
    try:
        Case(*case, real=False).compile(config)
    except Exception as e:
        return job, f"{type(e).__name__}: {e}"[:120]
    return job, ""


def _time(case: Case, config: TileConfig, reason: str) -> dict[str, Any]:
    ms = None
    if not reason:
        try:
            ms = case.time(config)
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"[:120]
    return {**asdict(config), "ms": ms, "tflops": case.flops / ms * 1e-9 if ms else 0.0, "reason": reason}


def _label(r: dict[str, Any]) -> str:
    tile = f"{r['block_m']}x{r['block_n']}w{r['num_warps']}s{r['num_stages']}"
    return tile + "T" * r["tma"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="tune_tiles.json")
    parser.add_argument("--jobs", nargs="+", required=True)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--top", type=int, default=6)
    args = parser.parse_args()
    jobs = [job for text in args.jobs for job in parse(text)]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        failures = {job: reason for job, reason in pool.imap_unordered(_compile, jobs, chunksize=2) if reason}
    results: list[dict[str, Any]] = []
    for key in dict.fromkeys(job[:4] for job in jobs):
        case = Case(*key, real=True)
        rows = [_time(case, job[4], failures.get(job, "")) for job in jobs if job[:4] == key]
        results += [{"pass": key[0], "dim": key[1], "program": key[2], "length": key[3], **r} for r in rows]
        rows.sort(key=lambda r: -r["tflops"])
        cells = [f"{_label(r)} {r['tflops']:.0f}" for r in rows[: args.top]]
        print(*key, sum(1 for r in rows if r["ms"] is None), "failed:", "; ".join(cells), flush=True)
    with open(args.out, "w") as f:
        json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
