"""Tokens a second of a decoder with a static cache in a generate-style loop on one GPU.

    python -m benchmarks.generate --jobs 6 --out benchmarks/results/generate_h200.json [--contexts 2048 8192 32768]

``--model torch`` (the default): a Llama-like decoder in plain torch, written as transformers writes its eager attention and its
StaticCache; ``--model transformers``: LlamaForCausalLM and StaticCache themselves. 8 layers, hidden size 4096, heads 32:8 of 128,
an MLP of 14336, random bfloat16 weights. Each step writes keys and values at its position
(``index_copy_``), attends to the whole cache under the mask ``key <= position``, and takes the likeliest token. The cache
holds random keys and values in front of the last ``--tokens`` positions of the context, which are decoded: ``tokens_per_s`` counts
those of all sequences of the batch. ``ours`` and ``compile`` (plain torch.compile) get the same model, ``sdpa`` is plain
torch.compile of the model written with scaled_dot_product_attention; ``_graphs``: with CUDA graphs. ``recompiles``: graphs
compiled after the fourth token. ``error``: of the logits, relative to the model run without a compiler. One process a row, as
in ``attention.py``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import _common, _turns

PROVIDERS = ("ours", "compile", "sdpa", "ours_graphs", "compile_graphs", "sdpa_graphs")
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB = 8, 4096, 32, 8, 128, 14336, 32000


def _from_transformers(context: int, batch: int, spelling: str, sizes: tuple[int, ...]) -> Any:
    """LlamaForCausalLM with its cache, on the default device, called as the plain decoder is."""
    import torch
    from torch import Tensor, nn
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    layers, hidden, heads, kv_heads, mlp = sizes
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=VOCAB,
        num_key_value_heads=kv_heads, max_position_embeddings=context, attn_implementation=spelling,
    )  # fmt: skip

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            device = torch.get_default_device()
            self.model = LlamaForCausalLM(config).to(torch.float32 if device.type == "cpu" else torch.bfloat16)
            self.cache = StaticCache(config=config, max_cache_len=context)
            self.cache.early_initialization(batch, kv_heads, hidden // heads, self.model.dtype, device)
            for layer in self.cache.layers:
                layer.keys.normal_()
                layer.values.normal_()

        def start(self, first: int) -> None:
            for layer in self.cache.layers:  # newer versions count what was written themselves
                if isinstance(getattr(layer, "cumulative_length", None), Tensor):
                    layer.cumulative_length.fill_(first)

        def forward(self, ids: Tensor, position: Tensor) -> Tensor:
            at = position[None].expand(batch, 1)
            given = {"past_key_values": self.cache, "position_ids": at, "cache_position": position, "use_cache": True}
            return self.model(input_ids=ids, **given).logits[:, -1]

    return Decoder().eval().requires_grad_(False)


def build(
    context: int, batch: int, spelling: str, device: str = "cuda", small: bool = False, library: str = "torch"
) -> Any:
    """The model; ``small`` for a machine without a GPU."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from benchmarks._gpu_layers import GatedMLP, RMSNorm, repeat_kv, rope, rotate

    layers, hidden, heads, kv_heads, mlp = (2, 64, 4, 2, 128) if small else (LAYERS, HIDDEN, HEADS, KV_HEADS, MLP)
    dim = hidden // heads
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(hidden, heads * dim, bias=False)
            self.k, self.v = (nn.Linear(hidden, kv_heads * dim, bias=False) for _ in range(2))
            self.o = nn.Linear(heads * dim, hidden, bias=False)
            for name in ("keys", "values"):
                self.register_buffer(name, torch.randn(batch, kv_heads, context, dim, dtype=dtype))

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, position: Tensor) -> Tensor:
            q, k, v = (p(x).view(*x.shape[:2], -1, dim).transpose(1, 2) for p in (self.q, self.k, self.v))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            if spelling == "sdpa":
                out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
            else:
                k, v = (repeat_kv(c, heads // kv_heads) for c in (self.keys, self.values))
                weights = torch.matmul(q, k.transpose(2, 3)) * dim**-0.5 + mask
                out = torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), v)
            return self.o(out.transpose(1, 2).contiguous().view(*x.shape[:2], -1))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = Attention(), GatedMLP(hidden, mlp)
            self.first, self.second = RMSNorm(hidden), RMSNorm(hidden)

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            x = x + self.attention(self.first(x), *more)
            return x + self.mlp(self.second(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(VOCAB, hidden), RMSNorm(hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(hidden, VOCAB, bias=False)
            cos, sin = rope(context, dim, self.head.weight)
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)

        def forward(self, ids: Tensor, position: Tensor) -> Tensor:
            """Ids [B, 1] at ``position`` [1] -> logits [B, VOCAB]."""
            x = self.tokens(ids)
            seen = torch.arange(context, device=ids.device)[None, :] <= position[:, None]
            low = torch.finfo(x.dtype).min
            mask = torch.where(seen, 0.0, low).to(x.dtype)[None, None]
            cos, sin = self.cos[position], self.sin[position]
            for layer in self.layers:
                x = layer(x, cos, sin, mask, position)
            return self.head(self.norm(x))[:, -1]

    torch.manual_seed(0)
    with torch.device(device):
        if library == "transformers":
            return _from_transformers(context, batch, spelling, (layers, hidden, heads, kv_heads, mlp))
        model = Decoder().to(dtype)
    return model.eval().requires_grad_(False)


def generate(model: Any, step: Any, ids: Any, first: int, tokens: int) -> Any:
    """Ids [B, tokens] that follow ``ids`` [B, 1] from position ``first`` on; ``step``: the model, compiled or not."""
    import torch

    if hasattr(model, "start"):
        model.start(first)
    found, position = [], torch.tensor([first], device=ids.device)
    for _ in range(tokens):
        ids = step(ids, position).argmax(-1, keepdim=True)
        found.append(ids)
        position = position + 1
    return torch.cat(found, 1)


def _first_logits(model: Any, step: Any, ids: Any, first: int) -> Any:
    import torch

    if hasattr(model, "start"):
        model.start(first)
    return step(ids, torch.tensor([first], device=ids.device))


def worker(context: int, batch: int, provider: str, tokens: int, library: str) -> None:
    import torch
    from torch._dynamo.utils import counters

    kind = provider.removesuffix("_graphs")
    mode = "reduce-overhead" if provider.endswith("_graphs") else None
    row: dict[str, Any] = {"context": context, "batch": batch, "provider": provider}
    try:
        model = build(context, batch, "sdpa" if kind == "sdpa" else "eager", library=library)
        torch.cuda.empty_cache()
        how: dict[str, Any] = {"mode": mode}
        if kind == "ours":
            from fa_inductor.backend import fa_inductor

            # A backend of its own takes the mode as an option of Inductor.
            options = {"strict": True, **({"triton.cudagraphs": True} if mode else {})}
            how = {"backend": fa_inductor, "options": options}
        step = torch.compile(model, **how)
        ids = torch.arange(batch, device="cuda")[:, None]
        first = context - tokens
        with torch.no_grad():
            generate(model, step, ids, first, 4)
            compiled = counters["stats"]["unique_graphs"]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the float32 weights took: the processes of all rows wait side by side
            _turns.wait_for_turn()
            generate(model, step, ids, first, 8)
            best = 0.0
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                made = generate(model, step, ids, first, tokens)
                torch.cuda.synchronize()
                best = max(best, batch * tokens / (time.perf_counter() - start))
            row["tokens_per_s"], row["recompiles"] = best, counters["stats"]["unique_graphs"] - compiled
            row["ms_per_step"] = 1e3 * batch / best
            row["ids"] = made[0, :4].tolist()
            logits, right = (_first_logits(model, f, ids, first) for f in (step, model))
            row["error"] = float((logits.float() - right.float()).norm() / right.float().norm())
    except Exception as e:
        row["reason"] = f"{type(e).__name__}: {e}"[:300]
    _turns.give(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(_common.RESULTS / "generate.json"))
    parser.add_argument("--model", default="torch", choices=("torch", "transformers"))
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one process may compile")
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.contexts[0], args.batch, args.worker, args.tokens, args.model)
        return

    head = _common.gpu_head("benchmarks.generate")
    rows = [(c, p) for c in args.contexts for p in args.providers]
    results: list[dict[str, Any]] = []

    def done(i: int, row: Any) -> None:
        if "tokens_per_s" not in row and "reason" not in row:  # the process as a whole failed
            row = {"context": rows[i][0], "provider": rows[i][1], "reason": str(row.get("error"))[-300:]}
        results.append(row)
        said = row.get("reason", "")
        if "tokens_per_s" in row:
            said = f"{row['tokens_per_s']:.0f} tokens/s, {row['recompiles']} recompiles ({row['error']:.1e})"
        print(f"{row['context']} {row['provider']}: {said}", flush=True)
        _common.save(args.out, {**head, "results": results})

    sizes = ["--batch", str(args.batch), "--tokens", str(args.tokens), "--model", args.model]
    commands = [_common.worker_command("benchmarks.generate", "--worker", p, "--contexts", str(c), *sizes) for c, p in rows]
    _turns.run(commands, args.jobs, done, args.timeout)


if __name__ == "__main__":
    main()
