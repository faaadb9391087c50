"""A transformer block whose attention runs in FP8: report, error against float64 and time for each format.

    python examples/fp8_block.py                                             # CPU: FP8 is rounded as a GPU would, in float32
    python examples/fp8_block.py --device cuda --tokens 8192 --width 4096 --heads 32

Needs torch and fa_inductor alone. FP8 is never chosen on its own: options={"fp8": FORMAT} asks for it, and where a form does not
run in FP8 the report says why. A CPU has no FP8 products: there options={"kernel": "reference"} computes with operands that are
rounded to FP8, so errors are those of a GPU and times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_inductor.report import collecting

FORMATS = ("off", "e4m3", "e4m3-rotated", "int8-e4m3")
#: A few channels of q and k are this much larger than the others, as they are in trained models.
OUTLIERS = 8.0


class Block(nn.Module):
    """x [B, N, W] to [B, N, W]: attention and a gated MLP, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        with torch.no_grad():
            for layer in (self.q, self.k):
                layer.weight[:: width // 16] *= OUTLIERS

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # --8<-- [start:attention]
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        # --8<-- [end:attention]
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def timed(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Median milliseconds of a call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print, and give back what was printed: a row for each format."""
    a = arguments(argv)
    torch.manual_seed(0)
    model = Block(a.width, a.heads).to(a.device, torch.bfloat16).eval()
    x = torch.randn(a.batch, a.tokens, a.width, device=a.device, dtype=torch.bfloat16)
    rows = []
    with torch.no_grad():
        exact = Block(a.width, a.heads).to(a.device, torch.float64)
        exact.load_state_dict(model.state_dict())
        true = exact(x.double())
        for fp8 in FORMATS:
            options: dict[str, Any] = {"fp8": fp8, **({"kernel": "reference"} if a.device == "cpu" else {})}
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="fa_inductor", dynamic=False, options=options)
            with collecting() as report:
                error = ((compiled(x).double() - true).norm() / (true - x.double()).norm()).item()
            ms = timed(lambda run=compiled: run(x), a.repeats, a.device)
            rows.append({"fp8": fp8, "report": report, "error": error, "ms": ms})
    print(rows[1]["report"])
    print(f"\n{'options':28}{'error':>10}{'ms':>10}   what ran")
    for row in rows:
        (site,) = row["report"].sites
        ran = f"{site.template}, {site.fp8 or 'not FP8'}" if site.status == "fused" else site.reason
        told = f'{{"fp8": "{row["fp8"]}"}}'
        print(f"{told:28}{row['error']:10.1e}{row['ms']:10.2f}   {ran}")
    return rows


if __name__ == "__main__":
    main()
