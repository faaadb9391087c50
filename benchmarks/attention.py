"""Attention kernels side by side on one GPU: ours, SDPA's backends, FlexAttention and eager code, forward and backward.

    python -m benchmarks.attention --out benchmarks/results/attention_h200.json [--cases d128_s4k ...] [--tuned] [--jobs 14]
    python -m benchmarks.attention --ratios RESULTS.json ... [--into benchmarks/notes/hopper_targets.md]

bfloat16, unit normal operands, median of triton.testing.do_bench. FLOPs of the forward are 4 * B * H * M * N * D,
half of that when causal, and of what a window or documents keep where those apply; the backward counts 2.5 times the
forward. ``ours``, ``general`` (ours without the kernels that are for one GPU architecture alone) and
FlexAttention are compiled with static shapes: ``default`` takes each library's own choice of tiles, ``--tuned`` adds
mode="max-autotune-no-cudagraphs" for both. Every provider's output is compared with eager
float32 code first. One process a case: all compile first, ``--jobs`` at a time, then one after the other is timed alone.

``--ratios`` measures nothing: it prints how far results are from the targets on Hopper, as ratios to cuDNN of the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _common, _targets, _turns

#: Dense bfloat16 peak of the device, FLOP/s (NVIDIA datasheets), for the share that a number is of it.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
WINDOW, DOCUMENTS, CAP = 1024, 8, 30.0


@dataclass(frozen=True)
class Case:
    """One problem: q [B, H, S, D], k and v [B, HKV, S, D], and the form of the scores."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    form: str = "full"

    @property
    def kept(self) -> float:
        """Share of the score matrix that the mask keeps."""
        n = self.length
        if self.form == "window":
            w = min(WINDOW, n)
            return (w * (w + 1) / 2 + (n - w) * w) / n**2
        if self.form == "document":
            return 0.5 / DOCUMENTS
        return 1.0 if self.form in ("full", "bias") else 0.5

    def flops(self, backward: bool) -> float:
        forward = 4.0 * self.batch * self.heads * self.length**2 * self.dim * self.kept
        return 2.5 * forward if backward else forward


def _grid() -> list[Case]:
    cases = []
    for length, label in ((512, "512"), (2048, "2k"), (4096, "4k"), (16384, "16k")):
        for dim in (64, 128, 256):
            heads = 2048 // dim
            for form in ("full", "causal"):
                name = f"d{dim}_s{label}" + ("_causal" if form == "causal" else "")
                cases.append(Case(name, 16384 // length, heads, heads, length, dim, form))
    cases.append(Case("gqa_s8k_causal", 2, 32, 8, 8192, 128, "causal"))
    for form in ("bias", "alibi", "softcap", "window", "document", "sinks"):
        cases.append(Case(f"{form}_d128_s4k", 4, 16, 16, 4096, 128, form))
    return cases


CASES = {c.name: c for c in _grid()}
#: Common training shapes, and the forms that FlexAttention expresses too.
DEFAULT = (
    "d64_s4k", "d64_s4k_causal", "d128_s512", "d128_s512_causal", "d128_s2k_causal", "d128_s4k", "d128_s4k_causal",
    "d128_s16k", "d128_s16k_causal", "gqa_s8k_causal", "d256_s4k_causal", "bias_d128_s4k", "alibi_d128_s4k",
    "softcap_d128_s4k", "window_d128_s4k", "document_d128_s4k", "sinks_d128_s4k",
)  # fmt: skip


class Problem:
    """The operands of a case and each provider's callable ``(q, k, v) -> out``."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case = case
        make = lambda h: torch.randn(  # noqa: E731
            case.batch, h, case.length, case.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        self.q, self.k, self.v = make(case.heads), make(case.kv_heads), make(case.kv_heads)
        self.grad_out = torch.randn_like(self.q.detach())
        self.scale = case.dim**-0.5
        n, h = case.length, case.heads
        self.slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / h) for i in range(h)], device="cuda")
        self.document = (torch.arange(n, device="cuda") * DOCUMENTS // n).expand(case.batch, n).contiguous()
        self.sink = torch.randn(h, device="cuda")
        self.bias = torch.randn(h, n, n, device="cuda", dtype=torch.bfloat16) if case.form == "bias" else None

    def program(self) -> tuple[str, list[Any]]:
        """Our program and its captures."""
        s, causal = f"score * {self.scale!r}", "q_idx >= kv_idx"
        form = self.case.form
        if form == "full":
            return f"attention(score={s})", []
        if form == "causal":
            return f"attention(score=where({causal}, {s}, -inf))", []
        if form == "bias":
            return f"attention(score={s} + f0[h, q_idx, kv_idx])", [self.bias]
        if form == "alibi":
            return f"attention(score=where({causal}, {s} + f0[h] * cast_float(kv_idx - q_idx), -inf))", [self.slopes]
        if form == "softcap":
            return f"attention(score=where({causal}, tanh({s} * {1 / CAP!r}) * {CAP}, -inf))", []
        if form == "window":
            return f"attention(score=where(({causal}) & (q_idx - kv_idx < {WINDOW}), {s}, -inf))", []
        if form == "document":
            same = "(i0[b, q_idx] == i0[b, kv_idx])"
            return f"attention(score=where(({causal}) & {same}, {s}, -inf))", [self.document]
        return f"attention(score=where({causal}, {s}, -inf), sinks=[f0[h]])", [self.sink]

    def ours(self, mode: str | None, kernel: str = "triton") -> Callable[..., Any]:
        import torch

        from fa_inductor import lowerings, ops

        lowerings.register()
        program, captures = self.program()
        return torch.compile(
            lambda q, k, v: ops.flash_attention(q, k, v, captures, [], program, kernel)[0], mode=mode, dynamic=False
        )

    def sdpa(self, backend: str) -> Callable[..., Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.case.form not in ("full", "causal"):
            raise NotImplementedError(f"{backend} has no {self.case.form}")
        chosen = getattr(SDPBackend, backend)

        def run(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.case.form == "causal", scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
                )

        return run

    def flex(self, mode: str | None) -> Callable[..., Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        form, case = self.case.form, self.case
        slopes, bias, document, sink = self.slopes, self.bias, self.document, self.sink
        score_mods = {
            "bias": lambda s, b, h, q, k: s + bias[h, q, k],
            "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
            "softcap": lambda s, b, h, q, k: torch.tanh(s / CAP) * CAP,
        }
        masks = {
            "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
            "document": lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k]),
        }
        mask = None
        if form not in ("full", "bias"):
            batch = case.batch if form == "document" else None
            causal = masks.get(form, lambda b, h, q, k: q >= k)
            mask = create_block_mask(causal, batch, None, case.length, case.length, device="cuda")

        def run(q: Any, k: Any, v: Any) -> Any:
            gqa = case.heads != case.kv_heads
            options = {"score_mod": score_mods.get(form), "block_mask": mask, "scale": self.scale, "enable_gqa": gqa}
            if form != "sinks":
                return flex_attention(q, k, v, **options)
            out, lse = flex_attention(q, k, v, return_lse=True, **options)
            return out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1).to(out.dtype)

        return torch.compile(run, mode=mode, dynamic=False)

    def eager(self) -> Callable[..., Any]:
        from fa_inductor.reference import attention
        from fa_inductor.spec import AttentionSpec

        program, captures = self.program()
        spec = AttentionSpec.parse(program)
        return lambda q, k, v: attention(q, k, v, captures, [], spec)[0]

    def provider(self, name: str) -> Callable[..., Any]:
        kind = name.removesuffix("_tuned")
        tuned = "max-autotune-no-cudagraphs" if name.endswith("_tuned") else None
        if kind == "ours":
            return self.ours(tuned)
        if kind == "general":
            return self.ours(tuned, "general")
        if kind == "flex":
            return self.flex(tuned)
        if kind == "eager":
            return self.eager()
        return self.sdpa({"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}[kind])


def prepare(problem: Problem, name: str) -> Callable[..., Any] | Exception:
    """One provider's callable, its forward and backward compiled, or why it cannot run."""
    import torch

    try:
        run = problem.provider(name)
        with torch.no_grad():
            run(problem.q, problem.k, problem.v)
        out = run(problem.q, problem.k, problem.v)
        torch.autograd.grad(out, (problem.q, problem.k, problem.v), problem.grad_out)
    except Exception as e:
        return e
    return run


def measure(problem: Problem, name: str, run: Callable[..., Any] | Exception, check: Any) -> dict[str, Any]:
    """Milliseconds, TFLOP/s and error of one provider; ``reason`` where it cannot run."""
    import torch
    from triton.testing import do_bench

    result: dict[str, Any] = {"case": problem.case.name, "provider": name}
    try:
        if isinstance(run, Exception):
            raise run
        q, k, v = problem.q, problem.k, problem.v
        with torch.no_grad():
            result["error"] = float((run(q, k, v).float() - check).norm() / check.norm())
            forward = do_bench(lambda: run(q, k, v), warmup=25, rep=100, return_mode="median")
        out = run(q, k, v)
        backward = do_bench(
            lambda: torch.autograd.grad(out, (q, k, v), problem.grad_out, retain_graph=True),
            warmup=25, rep=100, return_mode="median",
        )  # fmt: skip
    except Exception as e:
        result["reason"] = f"{type(e).__name__}: {e}"[:200]
        return result
    for which, ms in (("forward", forward), ("backward", backward)):
        result[f"{which}_ms"] = float(ms)
        result[f"{which}_tflops"] = problem.case.flops(which == "backward") / ms * 1e-9
    return result


def truth(problem: Problem) -> Any:
    """The reference's output, head by head to bound memory."""
    import torch

    from fa_inductor.reference import attention
    from fa_inductor.spec import AttentionSpec

    program, captures = problem.program()
    spec, case = AttentionSpec.parse(program), problem.case
    if case.batch * case.heads * case.length**2 > 2**31:
        # Too large for a dense reference: the fused kernels are compared with cuDNN's, whose values others have
        # checked.
        with torch.no_grad():
            return problem.provider("cudnn")(problem.q, problem.k, problem.v).float()
    with torch.no_grad():
        return attention(problem.q, problem.k, problem.v, captures, [], spec)[0].float()


def plot(results: list[dict[str, Any]], path: Path, device: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(r["case"] for r in results))
    providers = list(dict.fromkeys(r["provider"] for r in results))
    figure, axes = plt.subplots(2, 1, figsize=(max(8, 1.3 * len(cases)), 8))
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        for i, provider in enumerate(providers):
            values = {r["case"]: r.get(f"{which}_tflops", 0.0) for r in results if r["provider"] == provider}
            xs = [j + 0.8 * (i - len(providers) / 2) / len(providers) for j in range(len(cases))]
            axis.bar(xs, [values.get(c, 0.0) for c in cases], 0.8 / len(providers), label=provider)
        axis.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
        axis.set_ylabel(f"{which}, TFLOP/s")
    axes[0].legend(ncols=len(providers))
    axes[0].set_title(f"{device}, bfloat16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def worker(name: str, providers: list[str]) -> None:
    """One case in a process of its own: compile, wait, measure."""
    import torch
    import torch._functorch.config

    # The timed backward runs many times over one graph, whose buffers must then stay.
    torch._functorch.config.donated_buffer = False
    torch.manual_seed(0)
    problem = Problem(CASES[name])
    runs = {p: prepare(problem, p) for p in providers}
    _turns.wait_for_turn()
    check = truth(problem)
    _turns.give([measure(problem, p, run, check) for p, run in runs.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(_common.RESULTS / "attention.json"))
    parser.add_argument("--cases", nargs="+", default=list(DEFAULT), choices=list(CASES), metavar="CASE")
    parser.add_argument("--providers", nargs="+", default=["ours", "flex", "cudnn", "flash"])
    parser.add_argument("--tuned", action="store_true", help="also time ours and FlexAttention under max-autotune")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one process may compile")
    parser.add_argument("--worker", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--ratios", nargs="+", type=Path, metavar="JSON", help="print a table of the targets from these results")
    parser.add_argument("--into", type=Path, metavar="MD", help="with --ratios: renew the table in this file")
    args = parser.parse_args()
    if args.ratios:
        print(_targets.table(args.ratios))
        if args.into:
            args.into.write_text(_targets.insert(args.into.read_text(), args.ratios))
        return
    providers = args.providers + (["ours_tuned", "flex_tuned"] if args.tuned else [])
    if args.worker:
        worker(args.worker, args.providers)
        return
    import torch

    device = torch.cuda.get_device_name()
    peak = next((p for n, p in PEAK.items() if n in device), None)
    command = " ".join(["python -m benchmarks.attention", *_common.arguments()])
    results: list[dict[str, Any]] = []

    def done(i: int, rows: Any) -> None:
        name = args.cases[i]
        if isinstance(rows, dict):  # the process as a whole failed
            rows = [{"case": name, "provider": p, "reason": rows["error"]} for p in providers]
        for r in rows:
            if peak and "forward_tflops" in r:
                r["peak_share"] = r["forward_tflops"] * 1e12 / peak
        results.extend(rows)
        cells = [
            f"{r['provider']} {r['forward_tflops']:.0f}/{r['backward_tflops']:.0f} ({r['error']:.1e})"
            if "forward_tflops" in r
            else f"{r['provider']} - {r['reason'][:60]}"
            for r in rows
        ]
        print(f"{name}: {'; '.join(cells)}", flush=True)
        _common.save(
            args.out, {"device": device, "environment": _common.environment(), "command": command, "results": results}
        )

    # A worker takes --tuned's providers from the list.
    commands = [
        _common.worker_command("benchmarks.attention", "--worker", name, "--providers", *providers) for name in args.cases
    ]
    _turns.run(commands, args.jobs, done, args.timeout)
    try:
        plot(results, Path(args.out).with_suffix(".png"), device)
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
