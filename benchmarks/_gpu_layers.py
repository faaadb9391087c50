"""The layers that the models of ``_gpu_models.py`` are made of; shapes are named there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Standard deviation of the entries of q and k: scores of about unit variance would make the softmax nearly flat.
QK_STD = 1.7


@dataclass(frozen=True)
class Config:
    """Sizes of one model.

    Attributes:
        hidden, heads, kv_heads, head_dim, mlp, layers: as usual; ``mlp`` is the inner width.
        window: keys that a row of a sliding layer sees, itself included; for Swin the side of a window in tokens.
        batch: sequence length -> batch size, chosen so that eager training fits a GPU of 139 GiB.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    batch: dict[int, int]
    layers: int = 4
    window: int = 0


# ---- parts -----------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """As transformers writes it: float32 inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Projections(nn.Module):
    """Separate q, k, v and output projections, heads split off: what all text models share."""

    def __init__(self, c: Config, bias: bool = False) -> None:
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.hidden, c.heads * c.head_dim, bias=bias)
        self.k = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=bias)
        self.v = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=bias)
        self.o = nn.Linear(c.heads * c.head_dim, c.hidden, bias=bias)
        for part in (self.q, self.k):
            nn.init.normal_(part.weight, std=QK_STD * c.hidden**-0.5)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        heads = lambda y: y.view(batch, length, -1, self.c.head_dim).transpose(1, 2)  # noqa: E731
        return heads(self.q(x)), heads(self.k(x)), heads(self.v(x))

    def join(self, y: Tensor) -> Tensor:
        batch, _, length, _ = y.shape
        return self.o(y.transpose(1, 2).contiguous().view(batch, length, -1))


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """[B, HKV, S, D] to [B, HKV * groups, S, D], as transformers writes it."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, dim).reshape(batch, heads * groups, length, dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def rope(length: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D] of the rotary embedding, base 10000."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=like.device, dtype=torch.float32) / dim)
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def causal_mask(length: int, like: Tensor, window: int = 0) -> Tensor:
    """0 where a key is seen, the lowest number elsewhere: [1, 1, S, S], shared by the layers."""
    rows = torch.arange(length, device=like.device)[:, None]
    keys = torch.arange(length, device=like.device)[None, :]
    seen = keys <= rows
    if window:
        seen = seen & (rows - keys < window)
    hidden = torch.full((), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return torch.where(seen, torch.zeros_like(hidden), hidden)[None, None]


# ---- decoders --------------------------------------------------------------------------------------------------------


class DecoderAttention(Projections):
    """Causal, grouped heads, RoPE; optionally softcap (Gemma 2) and sinks (GPT-OSS)."""

    def __init__(self, c: Config, spelling: str, cap: float = 0.0, sinks: bool = False) -> None:
        super().__init__(c, bias=sinks)
        self.spelling, self.cap = spelling, cap
        self.sinks = nn.Parameter(torch.randn(c.heads)) if sinks else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.split(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.spelling == "sdpa":
            return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        groups = self.c.heads // self.c.kv_heads
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.c.head_dim**-0.5
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        if mask is not None:
            scores = scores + mask
        if self.sinks is None:
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        else:
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
            scores = torch.cat([scores, sinks], dim=-1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
            weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
        return self.join(torch.matmul(weights, v))


class DecoderLayer(nn.Module):
    """``sandwich``: norms after attention and MLP too, as Gemma 2 has."""

    def __init__(self, c: Config, attention: nn.Module, activation: Any = F.silu, sandwich: bool = False) -> None:
        super().__init__()
        self.attention, self.mlp = attention, GatedMLP(c.hidden, c.mlp, activation)
        self.norms = nn.ModuleList(RMSNorm(c.hidden) for _ in range(2))
        self.after = nn.ModuleList(RMSNorm(c.hidden) if sandwich else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        x = x + self.after[0](self.attention(self.norms[0](x), *shared))
        return x + self.after[1](self.mlp(self.norms[1](x)))
