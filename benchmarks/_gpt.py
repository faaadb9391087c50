"""The model that ``training.py`` trains: a decoder with grouped heads whose attention is spelled out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._gpu_layers import Config, GatedMLP, Projections, RMSNorm, repeat_kv, rope, rotate


@dataclass(frozen=True)
class Variant:
    """``dropout`` of the attention weights; ``checkpointed`` recomputes every layer in the backward."""

    dropout: float = 0.0
    checkpointed: bool = False


class Attention(Projections):
    """Causal: matmul, masked_fill, softmax, matmul."""

    def __init__(self, c: Config, dropout: float) -> None:
        super().__init__(c)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.c.heads // self.c.kv_heads
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.c.head_dim**0.5
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        if self.dropout:
            weights = F.dropout(weights, self.dropout, self.training)
        return self.join(torch.matmul(weights, v))


class Layer(nn.Module):
    def __init__(self, c: Config, variant: Variant) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(c, variant.dropout), GatedMLP(c.hidden, c.mlp)
        self.norms = nn.ModuleList(RMSNorm(c.hidden) for _ in range(2))

    def forward(self, x: Tensor, *shared: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), *shared)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Tokens [B, S + 1] to the mean cross entropy of predicting each from those before it."""

    def __init__(self, c: Config, vocabulary: int, variant: Variant) -> None:
        super().__init__()
        self.c, self.variant = c, variant
        self.embedding = nn.Embedding(vocabulary, c.hidden)
        self.layers = nn.ModuleList(Layer(c, variant) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden)
        self.head = nn.Linear(c.hidden, vocabulary, bias=False)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """New weights in place, so that a compiled model stays compiled."""
        g = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if "norm" in name:
                p.fill_(1.0)
            else:
                p.copy_(0.02 * torch.randn(p.shape, generator=g))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shared = (*rope(length, self.c.head_dim, x), hidden)
        for layer in self.layers:
            x = checkpoint(layer, x, *shared, use_reentrant=False) if self.variant.checkpointed else layer(x, *shared)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
