"""Attention as torch itself ships it: nn.MultiheadAttention, the Transformer layers, scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.base import BATCH, HEADS, LENGTH, WIDTH, Built, First, floats, register, right_padding


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on one input; ``weights`` asks for the probabilities, ``keep`` also returns them."""

    def __init__(self, weights: bool, keep: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.weights, self.keep = weights, keep

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Any:
        y, weights = self.inner(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=self.weights)
        return (y, weights) if self.keep else y


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, kdim=40, vdim=48, batch_first=True)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.inner(x, keys, values)[0]


class Call(nn.Module):
    """scaled_dot_product_attention with fixed keyword arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def causal() -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


def x() -> Tensor:
    return floats(BATCH, LENGTH, WIDTH)


def add(name: str, make: Any, **fields: Any) -> None:
    fields.setdefault("sites", 1)
    fields.setdefault("grad_inputs", (0,))

    def build() -> Built:
        module, *args = make()
        return module, tuple(args), {}

    register(name, "torch.nn", build, **fields)


def padded() -> Tensor:
    return right_padding() == 0


add("mha", lambda: (SelfAttention(True), x()))
add("mha_causal", lambda: (SelfAttention(True), x(), causal()))
add("mha_padded", lambda: (SelfAttention(True), x(), None, padded()))
add(
    "mha_causal_padded",
    lambda: (SelfAttention(True), x(), causal(), torch.zeros(BATCH, LENGTH).masked_fill(padded(), float("-inf"))),
    note="-inf is added to -inf",
)
add("mha_bias_kv", lambda: (SelfAttention(True, add_bias_kv=True, add_zero_attn=True), x()))
add("mha_cross", lambda: (CrossAttention(), x(), floats(BATCH, 11, 40), floats(BATCH, 11, 48)))
add("mha_dropout", lambda: (SelfAttention(True, dropout=0.1), x()), random=True)
add("mha_keeps_weights", lambda: (SelfAttention(True, keep=True), x()), kind="neg", sites=None)
add("mha_no_weights", lambda: (SelfAttention(False), x()), kind="sdpa")
add("mha_no_weights_causal", lambda: (SelfAttention(False), x(), causal()), kind="sdpa")
add("encoder_layer", lambda: (nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True), x()), kind="sdpa")
add(
    "decoder_layer",
    lambda: (nn.TransformerDecoderLayer(WIDTH, HEADS, 96, batch_first=True), x(), floats(BATCH, 9, WIDTH)),
    kind="sdpa",
    sites=2,
)


add(
    "decoder_stack",
    lambda: (nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 96, batch_first=True), 2), x(), x()),
    kind="sdpa",
    sites=4,
)


def _operands(kv_heads: int = HEADS, keys: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    head = WIDTH // HEADS
    return (
        floats(BATCH, HEADS, LENGTH, head, seed=1),
        floats(BATCH, kv_heads, keys, head, seed=2),
        floats(BATCH, kv_heads, keys, head, seed=3),
    )


_ALL = {"kind": "sdpa", "grad_inputs": (0, 1, 2)}
add("call_plain", lambda: (Call(), *_operands()), **_ALL)
add("call_causal", lambda: (Call(is_causal=True), *_operands()), **_ALL)
add("call_scale", lambda: (Call(scale=0.5), *_operands(keys=37)), **_ALL)
add("call_bool_mask", lambda: (Call(), *_operands(), torch.rand(LENGTH, LENGTH).fill_diagonal_(1) > 0.4), **_ALL)
add(
    "call_float_mask",
    lambda: (Call(), *_operands(), floats(1, HEADS, LENGTH, LENGTH)),
    kind="sdpa",
    grad_inputs=(0, 1, 2, 3),
)
add("call_grouped", lambda: (Call(enable_gqa=True, is_causal=True), *_operands(kv_heads=2)), **_ALL)


class Stack(nn.Module):
    """A plain GPT in the style that tutorials teach: fused qkv, registered lower triangle, weight-tied head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.place = nn.Parameter(torch.randn(64, WIDTH) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("lower", torch.tril(torch.ones(64, 64, dtype=torch.bool)))

    def forward(self, ids: Tensor) -> Tensor:
        b, n = ids.shape
        h = self.embed(ids) + self.place[:n]
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, v = (z.view(b, n, HEADS, -1).transpose(1, 2) for z in qkv(norm(h)).split(WIDTH, dim=2))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / k.shape[-1] ** 0.5)
            weights = scores.masked_fill(~self.lower[:n, :n], float("-inf")).softmax(dim=-1)
            h = h + out((weights @ v).transpose(1, 2).reshape(b, n, WIDTH))
        return h @ self.embed.weight.T


def _gpt() -> Built:
    return Stack(), (torch.randint(0, 96, (BATCH, LENGTH)),), {}


register("plain_gpt", "torch.nn", _gpt, sites=2)
register("plain_gpt_any_length", "torch.nn", _gpt, sites=2, dynamic=True)
register("first_of_sequence", "torch.nn", lambda: (First(nn.Sequential(SelfAttention(True))), (x(),), {}), sites=1)
