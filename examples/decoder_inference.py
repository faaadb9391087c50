"""A Llama-like decoder in plain torch, compiled with and without fa_inductor: report, difference to eager, time.

    python examples/decoder_inference.py                     # CPU, float32, under a minute
    python examples/decoder_inference.py --device cuda --tokens 4096 --layers 8 --width 2048 --heads 16 --kv-heads 4

Needs torch and fa_inductor alone. The weights are random: values and times do not depend on what they are.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_inductor.report import collecting

VOCAB = 1024


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, H, N, D]; cos and sin are [N, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


# --8<-- [start:attention]
class Attention(nn.Module):
    """Causal attention with fewer key-value heads than query heads, written out."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.dim, bias=False)
        self.k = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.out = nn.Linear(heads * self.dim, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.dim).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


# --8<-- [end:attention]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Token ids [B, N] to logits [B, N, VOCAB]."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.dim = width // heads
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        frequency = 10000.0 ** (-torch.arange(0, self.dim, 2, device=ids.device) / self.dim)
        angle = (torch.arange(ids.shape[1], device=ids.device)[:, None] * frequency).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def median_ms(calls: Sequence[Callable[[], Any]], device: str, repeats: int) -> list[float]:
    """Median time of each call. The calls take turns, so that a slow phase of the machine meets all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 on a GPU")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print, and give back what was printed."""
    a = arguments(argv)
    torch.manual_seed(0)
    dtype = getattr(torch, a.dtype or ("float32" if a.device == "cpu" else "bfloat16"))
    model = Decoder(a.layers, a.width, a.heads, a.kv_heads).to(a.device, dtype).eval()
    ids = torch.randint(VOCAB, (a.batch, a.tokens), device=a.device)

    plain = torch.compile(model, dynamic=False)
    fused = torch.compile(model, backend="fa_inductor", dynamic=False)
    eager = model(ids)
    with collecting() as report:
        ours = fused(ids)
    theirs = plain(ids)
    print(report)

    differences = [(out.float() - eager.float()).abs().max().item() for out in (theirs, ours)]
    compiled, with_fa = median_ms([lambda: plain(ids), lambda: fused(ids)], a.device, a.repeats)
    print(f"\n{'forward':24}{'ms':>10}{'max difference to eager':>28}")
    print(f"{'torch.compile':24}{compiled:10.2f}{differences[0]:28.1e}")
    print(f"{'with fa_inductor':24}{with_fa:10.2f}{differences[1]:28.1e}")
    print(f"speed-up {compiled / with_fa:.2f}x; largest logit {eager.abs().max().item():.2f}")
    return {"report": report, "differences": differences, "ms": (compiled, with_fa)}


if __name__ == "__main__":
    main()
