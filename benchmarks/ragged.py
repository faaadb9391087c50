"""Packed documents on one GPU: causal attention within each, useful TFLOP/s forward and backward.

    python -m benchmarks.ragged --jobs 6 --out benchmarks/results/ragged_h200.json [--tokens 32768]

bfloat16, one sequence of documents of log-normal length (:mod:`benchmarks._packed`), 16 heads, head dim 128. Useful are the FLOPs
of the scores that are kept, 4 * D each, 2.5 times that in the backward. ``ours`` gets the attention spelled out with the mask
``(doc[:, None] == doc[None, :]) & causal``; ``dense`` is our causal kernel over all tokens as one document, which counts all that
it keeps; ``padded`` is cuDNN's causal attention over a batch of the documents, each padded to the longest; ``flex`` is
FlexAttention with the block mask, made outside of what is timed. The median of ``triton.testing.do_bench``. One process a
provider, as in ``attention.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import _common, _packed, _turns

HEADS, DIM = 16, 128
PROVIDERS = ("ours", "dense", "padded", "flex")


class Problem:
    """The operands and each provider's callable ``(q, k, v) -> out``."""

    def __init__(self, tokens: int, provider: str) -> None:
        import torch

        self.tokens, self.provider, self.lengths = tokens, provider, _packed.lengths(tokens)
        self.documents = torch.tensor(_packed.ids(tokens), device="cuda")
        batch, length = (len(self.lengths), max(self.lengths)) if provider == "padded" else (1, tokens)
        make = lambda: torch.randn(batch, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = (make().requires_grad_() for _ in range(3))
        self.grad_out = make()

    @property
    def useful(self) -> int:
        """FLOPs of a forward."""
        kept = self.tokens * (self.tokens + 1) // 2 if self.provider == "dense" else _packed.kept(self.tokens)
        return 4 * HEADS * DIM * kept

    def spelled(self, q: Any, k: Any, v: Any) -> Any:
        import torch

        rows = torch.arange(q.shape[2], device=q.device)
        keep = rows[:, None] >= rows[None, :]
        if self.provider != "dense":
            keep = keep & (self.documents[:, None] == self.documents[None, :])
        score = (q @ k.transpose(-1, -2)) * DIM**-0.5
        return score.masked_fill(~keep, float("-inf")).softmax(-1) @ v

    def callable(self) -> Callable[..., Any]:
        import torch

        if self.provider in ("ours", "dense"):
            from fa_inductor.backend import fa_inductor

            return torch.compile(self.spelled, backend=fa_inductor, dynamic=False, options={"strict": True})
        if self.provider == "padded":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            def run(q: Any, k: Any, v: Any) -> Any:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            return run
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        documents = self.documents
        keep = lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])  # noqa: E731
        mask = create_block_mask(keep, None, None, self.tokens, self.tokens, device="cuda", _compile=True)
        return torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), dynamic=False)

    def error(self, out: Any) -> float | None:
        """Largest relative error over documents, against float32; None where another attention is computed."""
        import torch

        if self.provider in ("dense", "padded"):
            return None
        first, worst = 0, 0.0
        for n in self.lengths:
            if n > 8192:
                first += n
                continue
            q, k, v, o = (x[:, :, first : first + n].detach().float() for x in (self.q, self.k, self.v, out))
            true = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            worst = max(worst, float((o - true).norm() / true.norm()))
            first += n
        return worst


def worker(tokens: int, provider: str) -> None:
    import torch
    import torch._functorch.config
    from triton.testing import do_bench

    # The timed backward runs many times over one graph, whose buffers must then stay.
    torch._functorch.config.donated_buffer = False
    torch.manual_seed(0)
    problem = Problem(tokens, provider)
    row: dict[str, Any] = {"provider": provider}
    operands = (problem.q, problem.k, problem.v)
    try:
        run = problem.callable()
        with torch.no_grad():
            run(*operands)
        torch.autograd.grad(run(*operands), operands, problem.grad_out)
        _turns.wait_for_turn()
        with torch.no_grad():
            row["error"] = problem.error(run(*operands))
            forward = do_bench(lambda: run(*operands), warmup=25, rep=100, return_mode="median")
        out = run(*operands)
        backward = do_bench(
            lambda: torch.autograd.grad(out, operands, problem.grad_out, retain_graph=True),
            warmup=25, rep=100, return_mode="median",
        )  # fmt: skip
        for which, ms, times in (("forward", forward, 1.0), ("backward", backward, 2.5)):
            row |= {f"{which}_ms": float(ms), f"{which}_tflops": times * problem.useful / float(ms) * 1e-9}
    except Exception as e:
        row["reason"] = f"{type(e).__name__}: {e}"[:300]
    _turns.give(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(_common.RESULTS / "ragged.json"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one process may compile")
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.tokens, args.worker)
        return

    head = {
        **_common.gpu_head("benchmarks.ragged"),
        "lengths": _packed.lengths(args.tokens),
    }
    results: list[dict[str, Any]] = []

    def done(i: int, row: Any) -> None:
        if "error" in row and "forward_ms" not in row:  # the process as a whole failed
            row = {"provider": args.providers[i], "reason": str(row["error"])[-300:]}
        results.append(row)
        if "forward_ms" in row:
            print(f"{row['provider']}: {row['forward_tflops']:.0f} / {row['backward_tflops']:.0f} ({row['error']})", flush=True)
        else:
            print(f"{row['provider']}: - {row['reason']}", flush=True)
        _common.save(args.out, {**head, "results": results})

    extra = ["--tokens", str(args.tokens)]
    commands = [_common.worker_command("benchmarks.ragged", "--worker", p, *extra) for p in args.providers]
    _turns.run(commands, args.jobs, done, args.timeout)


if __name__ == "__main__":
    main()
