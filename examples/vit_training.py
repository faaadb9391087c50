"""One training step of a ViT, compiled with and without fa_inductor: report, loss and gradients beside eager, time.

    python examples/vit_training.py                          # CPU, float32, under a minute
    python examples/vit_training.py --device cuda --image 1024 --layers 8 --width 1024 --heads 16

Needs torch and fa_inductor alone. The scale is on q, as in timm's models: plain torch.compile has no pattern for that spelling.
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

CLASSES = 10
PATCH = 16


class Attention(nn.Module):
    """Multi-head attention over all tokens, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images [B, 3, S, S] to logits [B, CLASSES]."""

    def __init__(self, image: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // PATCH) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def loss_and_gradients(
    model: nn.Module, call: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> tuple[float, list[Tensor]]:
    """The loss of one batch and the gradient of each parameter of `model`, which `call` runs."""
    model.zero_grad()
    loss = F.cross_entropy(call(images).float(), labels)
    loss.backward()
    return loss.item(), [p.grad.float().clone() for p in model.parameters() if p.grad is not None]


def relative(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest over the parameters of |got - expected| / |expected|, in the Euclidean norm."""
    return max(((g - e).norm() / e.norm()).item() for g, e in zip(got, expected, strict=True) if e.norm() > 0)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 on a GPU")
    parser.add_argument("--image", type=int, default=384, help="side in pixels, a multiple of 16: (side / 16)^2 + 1 tokens")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print, and give back what was printed."""
    a = arguments(argv)
    torch.manual_seed(0)
    dtype = getattr(torch, a.dtype or ("float32" if a.device == "cpu" else "bfloat16"))
    model = ViT(a.image, a.layers, a.width, a.heads).to(a.device, dtype)
    images = torch.randn(a.batch, 3, a.image, a.image, device=a.device, dtype=dtype)
    labels = torch.randint(CLASSES, (a.batch,), device=a.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay, so that every step is the same step

    plain = torch.compile(model, dynamic=False)
    fused = torch.compile(model, backend="fa_inductor", dynamic=False)
    eager_loss, eager_gradients = loss_and_gradients(model, model, images, labels)
    with collecting() as report:
        our_loss, our_gradients = loss_and_gradients(model, fused, images, labels)
    their_loss, their_gradients = loss_and_gradients(model, plain, images, labels)
    print(report)

    ms: dict[str, list[float]] = {"plain": [], "fused": []}
    for _ in range(a.repeats):
        for name, call in (("plain", plain), ("fused", fused)):
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(call(images).float(), labels).backward()
            optimizer.step()
            if a.device == "cuda":
                torch.cuda.synchronize()
            ms[name].append((time.perf_counter() - start) * 1e3)
    compiled, with_fa = (statistics.median(ms[name]) for name in ("plain", "fused"))

    differences = [relative(g, eager_gradients) for g in (their_gradients, our_gradients)]
    print(f"\n{'training step':24}{'ms':>10}{'loss':>14}{'gradients, largest relative difference':>42}")
    print(f"{'eager':24}{'':10}{eager_loss:14.6f}")
    print(f"{'torch.compile':24}{compiled:10.2f}{their_loss:14.6f}{differences[0]:42.1e}")
    print(f"{'with fa_inductor':24}{with_fa:10.2f}{our_loss:14.6f}{differences[1]:42.1e}")
    print(f"speed-up {compiled / with_fa:.2f}x")
    return {"report": report, "losses": (eager_loss, our_loss), "differences": differences, "ms": (compiled, with_fa)}


if __name__ == "__main__":
    main()
