"""Calls that hold a whole attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.patterns.forms.base import BATCH, DIM, HEADS, KEYS, ROWS, form
from tests.patterns.forms.softmax import plain


@form()
def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@form(lambda d: (*d.qkv(), d.keep(BATCH, 1, ROWS, KEYS)))
def sdpa_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


@form(lambda d: d.qkv(kv_heads=2))
def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@form(lambda d: (d.normal(BATCH, ROWS, HEADS * DIM),))
class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@form()
def checkpointed(q, k, v):
    return checkpoint(lambda q, k, v: plain(q, k, v) * 2.0, q, k, v, use_reentrant=False)
