"""Decoding steps on one GPU: few queries against a long cache, bytes of K and V read a second.

    python -m benchmarks.decode --jobs 8 --out benchmarks/results/decode_h200.json [--cases b16_8k ...]

bfloat16, GQA 32:8, head dim 128. ``ours``, ``compile`` (plain torch.compile) and ``flex`` are compiled with static shapes;
``ours`` and ``compile`` get the same spelled-out attention; ``cudnn`` and ``flash`` are scaled_dot_product_attention.
``lengths`` cases mask each sequence beyond its own length, which counts as read: half of the keys on average. ``page`` cases
hold the cache in pages of so many keys in random order, looked up by ``pages[table]`` in front of the attention; ``int8`` and
``e4m3`` ones in 8 bits with a scale for each token and head, multiplied in bfloat16 in front of it. There ``cudnn`` and ``flash``
follow the same compiled preparation, ``mib`` is what a call allocates at most, and bytes are those that are stored. The median of
``triton.testing.do_bench``, which clears the L2 cache before each call; ``copy`` is what a device copy reads and writes
in the same run. Every output is compared with float64. One process a case, as in ``attention.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import _common, _turns

HEADS, KV_HEADS, DIM = 32, 8, 128
PROVIDERS = ("ours", "compile", "cudnn", "flash", "flex")


@dataclass(frozen=True)
class Case:
    """``queries`` queries of each of ``batch`` sequences against ``keys`` keys."""

    name: str
    batch: int
    keys: int
    queries: int = 1
    lengths: bool = False
    page: int = 0
    stored: str = ""


CASES = {
    c.name: c
    for c in (
        Case("b16_8k", 16, 8192), Case("b1_64k", 1, 65536), Case("b16_32k", 16, 32768), Case("b8_8k_q8", 8, 8192, 8),
        Case("b1_8k", 1, 8192), Case("b64_2k", 64, 2048), Case("b16_8k_lengths", 16, 8192, lengths=True),
        Case("b16_8k_page64", 16, 8192, page=64), Case("b16_8k_page16", 16, 8192, page=16),
        Case("b16_8k_page1", 16, 8192, page=1), Case("b16_8k_int8", 16, 8192, stored="int8"),
        Case("b16_8k_e4m3", 16, 8192, stored="float8_e4m3fn"), Case("b16_8k_int8_page16", 16, 8192, page=16, stored="int8"),
    )
}  # fmt: skip


class Problem:
    """The operands of a case and each provider's callable ``(q, k, v, lengths) -> out``."""

    def __init__(self, case: Case) -> None:
        import torch

        def normal(heads: int, length: int) -> Any:
            return torch.randn(case.batch, heads, length, DIM, device="cuda", dtype=torch.bfloat16)

        self.case = case
        self.q, self.k, self.v = normal(HEADS, case.queries), normal(KV_HEADS, case.keys), normal(KV_HEADS, case.keys)
        self.k_scale = self.v_scale = self.table = None
        if case.stored:
            top = 127.0 if case.stored == "int8" else 448.0
            self.k, self.k_scale = self._stored(self.k, top)
            self.v, self.v_scale = self._stored(self.v, top)
        if case.page:
            blocks = case.keys // case.page
            self.table = torch.randperm(case.batch * blocks, device="cuda").view(case.batch, blocks)
            self.k, self.v, self.k_scale, self.v_scale = map(self._paged, (self.k, self.v, self.k_scale, self.v_scale))
        steps = (torch.arange(case.batch, device="cuda") + 0.5) / case.batch
        self.lengths = (steps * case.keys).long() if case.lengths else torch.full((case.batch,), case.keys, device="cuda")

    def _stored(self, x: Any, top: float) -> tuple[Any, Any]:
        """(x in 8 bits, scale [B, HKV, N, 1])."""
        import torch

        scale = (x.float().abs().amax(-1, keepdim=True) / top).to(x.dtype)
        small = x.float() / scale.float()
        return (small.round() if self.case.stored == "int8" else small).to(getattr(torch, self.case.stored)), scale

    def _paged(self, x: Any) -> Any:
        """[B, HKV, N, D] as pages [P, page, HKV, D], or rows [N, HKV, D] where a page is one key."""
        import torch

        if x is None:
            return None
        rows = x.transpose(1, 2).reshape(-1, self.case.page, *x.shape[1::2])
        pages = torch.empty_like(rows)
        pages[self.table.flatten()] = rows
        return pages.squeeze(1) if self.case.page == 1 else pages

    def looked_up(self, x: Any, scale: Any) -> Any:
        """[B, HKV, N, D] in bfloat16."""
        import torch

        if self.table is not None:
            found = x[self.table]
            x = (found if self.case.page == 1 else found.flatten(1, 2)).transpose(1, 2)
            scale = scale if scale is None else scale[self.table].flatten(1, -3).transpose(1, 2)
        return x if scale is None else x.to(torch.bfloat16) * scale

    @property
    def bytes_read(self) -> int:
        keys, each = int(self.lengths.sum()), self.k.element_size() * DIM + (2 if self.k_scale is not None else 0)
        return 2 * each * KV_HEADS * keys

    def eager(self, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        k, v = self.looked_up(k, self.k_scale), self.looked_up(v, self.v_scale)
        return self.attention(q, k, v, lengths)

    def attention(self, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        import torch

        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        score = q @ k.transpose(-1, -2) * DIM**-0.5
        if self.case.lengths:
            keep = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
            score = score.masked_fill(~keep, float("-inf"))
        return score.float().softmax(-1).to(v.dtype) @ v

    def exact(self) -> Any:
        import torch

        k, v = self.looked_up(self.k, self.k_scale), self.looked_up(self.v, self.v_scale)
        rows = [self.attention(*(x[i : i + 1].double() for x in (self.q, k, v)), self.lengths[i : i + 1])
                for i in range(self.case.batch)]  # fmt: skip
        return torch.cat(rows)

    def sdpa(self, backend: str) -> Callable[..., Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)
        keep = torch.arange(self.case.keys, device="cuda") < self.lengths[:, None, None, None]
        # A mask that is read at run time; flash attention takes none.
        mask = keep.expand(-1, 1, self.case.queries, -1).contiguous() if self.case.lengths else None

        prepare = lambda k, v: (self.looked_up(k, self.k_scale), self.looked_up(v, self.v_scale))  # noqa: E731
        prepare = torch.compile(prepare, dynamic=False) if self.case.page or self.case.stored else lambda k, v: (k, v)

        def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
            k, v = prepare(k, v)
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return run

    def flex(self) -> Callable[..., Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if self.case.lengths:
            lengths = self.lengths
            mask = create_block_mask(
                lambda b, h, q, k: k < lengths[b], self.case.batch, None, self.case.queries, self.case.keys, device="cuda"
            )
        if self.case.page or self.case.stored:
            raise NotImplementedError("FlexAttention has neither tables of pages nor scales of stored elements")
        return torch.compile(lambda q, k, v, n: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), dynamic=False)

    def provider(self, name: str) -> Callable[..., Any]:
        import torch

        if name == "ours":
            from fa_inductor.backend import fa_inductor

            return torch.compile(self.eager, backend=fa_inductor, dynamic=False, options={"strict": True})
        if name == "compile":
            return torch.compile(self.eager, dynamic=False)
        if name == "flex":
            return self.flex()
        return self.sdpa({"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}[name])


def worker(name: str, providers: list[str]) -> None:
    """One case in a process of its own: compile, wait, measure."""
    import torch
    from triton.testing import do_bench

    torch.manual_seed(0)
    problem = Problem(CASES[name])
    operands = (problem.q, problem.k, problem.v, problem.lengths)
    runs: dict[str, Any] = {}
    rows: list[dict[str, Any]] = [{"case": name, "provider": p} for p in providers]
    with torch.no_grad():
        for row in rows:
            try:
                run = problem.provider(row["provider"])
                run(*operands)
                runs[row["provider"]] = run
            except Exception as e:
                row["reason"] = f"{type(e).__name__}: {e}"[:200]
        torch.cuda.empty_cache()  # the processes of all cases wait side by side
        _turns.wait_for_turn()
        check = problem.exact()
        for row in rows:
            if row["provider"] in runs:
                run = runs[row["provider"]]
                row["error"] = float((run(*operands).double() - check).norm() / check.norm())
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                run(*operands)
                row["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
                row["ms"] = float(do_bench(lambda run=run: run(*operands), warmup=25, rep=100, return_mode="median"))
                row["gbs"] = problem.bytes_read / row["ms"] * 1e-6
    _turns.give(rows)


def copy_rate() -> float:
    """GB/s that a copy of 1 GiB reads and writes."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(2**30, device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    return 2 * 2**30 / float(do_bench(lambda: target.copy_(source), return_mode="median")) * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(_common.RESULTS / "decode.json"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one process may compile")
    parser.add_argument("--worker", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.providers)
        return

    head = {
        **_common.gpu_head("benchmarks.decode"),
        "copy_gbs": copy_rate(),
    }
    print(f"copy: {head['copy_gbs']:.0f} GB/s", flush=True)
    results: list[dict[str, Any]] = []

    def done(i: int, rows: Any) -> None:
        if isinstance(rows, dict):  # the process as a whole failed
            rows = [{"case": args.cases[i], "provider": p, "reason": rows["error"]} for p in args.providers]
        results.extend(rows)
        cells = [
            f"{r['provider']} {r['gbs']:.0f} ({r['error']:.1e}, {r['mib']:.0f} MiB)"
            if "gbs" in r
            else f"{r['provider']} - {r['reason'][:60]}"
            for r in rows
        ]
        print(f"{args.cases[i]}: {'; '.join(cells)}", flush=True)
        _common.save(args.out, {**head, "results": results})

    commands = [
        _common.worker_command("benchmarks.decode", "--worker", name, "--providers", *args.providers) for name in args.cases
    ]
    _turns.run(commands, args.jobs, done, args.timeout)


if __name__ == "__main__":
    main()
