"""The models that ``models_gpu.py`` measures: plain torch modules, random weights, each attention written in two ways.

``eager`` spells attention out as the libraries' eager code does; ``sdpa`` calls ``F.scaled_dot_product_attention`` with
the narrowest arguments that it has for the form. Softcap and sinks it does not have: those models are ``eager`` only.
Shapes: x [B, S, C]; q [B, H, S, D]; k and v [B, HKV, S, D]; S tokens, C channels, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._gpu_layers import (
    MLP,
    QK_STD,
    Config,
    DecoderAttention,
    DecoderLayer,
    GatedMLP,
    Projections,
    RMSNorm,
    causal_mask,
    rope,
)

VOCAB = 8192


class Model(nn.Module):
    """Layers over an input; ``recompute`` frees each layer's activations and computes them again in the backward."""

    layers: nn.ModuleList
    recompute = False

    def run(self, x: Tensor, shared: list[tuple[Any, ...]]) -> Tensor:
        for layer, more in zip(self.layers, shared, strict=True):
            x = checkpoint(layer, x, *more, use_reentrant=False) if self.recompute else layer(x, *more)
        return x


class Decoder(Model):
    """Ids [B, S] -> hidden states [B, S, C]. ``sliding``: every other layer has the window."""

    def __init__(
        self, c: Config, spelling: str, cap: float = 0.0, sinks: bool = False, sliding: bool = False, gemma: bool = False
    ) -> None:
        super().__init__()
        self.c, self.spelling, self.sliding = c, spelling, sliding
        self.tokens, self.norm = nn.Embedding(VOCAB, c.hidden), RMSNorm(c.hidden)
        activation = (lambda x: F.gelu(x, approximate="tanh")) if gemma else F.silu
        self.layers = nn.ModuleList(
            DecoderLayer(c, DecoderAttention(c, spelling, cap, sinks), activation, gemma) for _ in range(c.layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        length = ids.shape[1]
        cos, sin = rope(length, self.c.head_dim, x)
        full = local = None
        if self.spelling == "eager":
            full = causal_mask(length, x)
            local = causal_mask(length, x, self.c.window) if self.sliding else full
        return self.norm(self.run(x, [(cos, sin, full if i % 2 else local) for i in range(self.c.layers)]))


# ---- encoders --------------------------------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    """BERT: norms after the residual, padding mask."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        self.spelling, self.scale = spelling, math.sqrt(c.head_dim)
        self.attention, self.mlp = Projections(c, bias=True), MLP(c.hidden, c.mlp)
        self.norms = nn.ModuleList(nn.LayerNorm(c.hidden) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.attention.split(x)
        if self.spelling == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / self.scale + mask
            y = torch.matmul(F.softmax(scores, dim=-1), v)
        x = self.norms[0](x + self.attention.join(y))
        return self.norms[1](x + self.mlp(x))


class Encoder(Model):
    """Ids and mask [B, S], 1 where a token is real -> hidden states [B, S, C]."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.tokens, self.places = nn.Embedding(VOCAB, c.hidden), nn.Embedding(max(c.batch), c.hidden)
        self.norm = nn.LayerNorm(c.hidden)
        self.layers = nn.ModuleList(EncoderLayer(c, spelling) for _ in range(c.layers))

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        if self.spelling == "sdpa":
            mask = real.bool()[:, None, None, :]
        else:
            mask = (1.0 - real[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        return self.run(x, [(mask,)] * len(self.layers))


class T5Layer(nn.Module):
    """No scale; ``bias`` [1, H, S, S] is added to the scores."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.attention, self.mlp = Projections(c), GatedMLP(c.hidden, c.mlp, F.gelu)
        for part in (self.attention.q, self.attention.k):  # the missing scale is in the weights, as T5 initialises them
            nn.init.normal_(part.weight, std=QK_STD * c.hidden**-0.5 * c.head_dim**-0.25)
        self.norms = nn.ModuleList(RMSNorm(c.hidden) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.attention.split(self.norms[0](x))
        if self.spelling == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        else:
            scores = torch.matmul(q, k.transpose(3, 2))
            scores = scores + bias
            y = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)
        x = x + self.attention.join(y)
        return x + self.mlp(self.norms[1](x))


class T5Encoder(Model):
    """Ids [B, S] -> hidden states. One table of 32 buckets, bidirectional, up to distance 128, for all layers."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.tokens, self.norm = nn.Embedding(VOCAB, c.hidden), RMSNorm(c.hidden)
        self.relative = nn.Embedding(32, c.heads)
        self.layers = nn.ModuleList(T5Layer(c, spelling) for _ in range(c.layers))

    @staticmethod
    def buckets(relative: Tensor) -> Tensor:
        """T5's buckets of key minus query: 8 exact ones each way, then logarithmic."""
        bucket = (relative > 0).to(torch.long) * 16
        distance = relative.abs()
        far = 8 + (torch.log(distance.float() / 8) / math.log(128 / 8) * 8).to(torch.long)
        far = torch.min(far, torch.full_like(far, 15))
        return bucket + torch.where(distance < 8, distance, far)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        bias = self.relative(self.buckets(places[None, :] - places[:, None])).permute(2, 0, 1).unsqueeze(0)
        if self.spelling == "sdpa":
            bias = bias.contiguous()  # SDPA's fused kernels want the keys innermost; heads are, as the table gives them
        return self.norm(self.run(self.tokens(ids), [(bias,)] * len(self.layers)))


# ---- vision ----------------------------------------------------------------------------------------------------------


class VisionLayer(nn.Module):
    """timm's block: one projection for q, k and v, q scaled before the product."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        self.c, self.spelling = c, spelling
        self.qkv, self.out = nn.Linear(c.hidden, 3 * c.hidden), nn.Linear(c.hidden, c.hidden)
        nn.init.normal_(self.qkv.weight[: 2 * c.hidden].detach(), std=QK_STD * c.hidden**-0.5)
        self.norms = nn.ModuleList(nn.LayerNorm(c.hidden) for _ in range(2))
        self.mlp = MLP(c.hidden, c.mlp)

    def attend(self, x: Tensor, *shared: Any) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.c.heads, self.c.head_dim).permute(2, 0, 3, 1, 4)
        y = self.product(*qkv.unbind(0), *shared)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def product(self, q: Tensor, k: Tensor, v: Tensor, *shared: Any) -> Tensor:
        if self.spelling == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        scores = q * self.c.head_dim**-0.5 @ k.transpose(-2, -1)
        return scores.softmax(dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class ViT(Model):
    """Images [B, 3, height, width] in patches of 16 -> hidden states [B, S, C]."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, c.hidden, 16, 16)
        self.places = nn.Parameter(torch.randn(1, max(c.batch), c.hidden))
        self.layers = nn.ModuleList(VisionLayer(c, spelling) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.norm(self.run(x + self.places[:, : x.shape[1]], [()] * len(self.layers)))


class SwinLayer(VisionLayer):
    """Windows of w x w tokens, a table of relative positions, a mask of the regions that a shift brings together."""

    def __init__(self, c: Config, spelling: str, side: int, shift: int) -> None:
        super().__init__(c, spelling)
        w = c.window
        self.side, self.shift = side, shift
        self.table = nn.Parameter(torch.randn((2 * w - 1) ** 2, c.heads))
        at = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        dy, dx = at[:, :, None] - at[:, None, :] + w - 1
        self.register_buffer("index", dy * (2 * w - 1) + dx)
        regions = torch.zeros(1, side, side, 1)
        cuts = (slice(0, -w), slice(-w, -shift), slice(-shift, None))
        for i, (rows, columns) in enumerate((a, b) for a in cuts for b in cuts):
            regions[:, rows, columns] = i
        regions = self.windows(regions).squeeze(-1)
        hidden = regions[:, None, :] != regions[:, :, None]
        self.register_buffer("mask", torch.zeros(hidden.shape).masked_fill(hidden, -100.0) if shift else None)

    def windows(self, x: Tensor) -> Tensor:
        """[B, side, side, C] -> [B * windows, w * w, C]."""
        batch, side, _, width = x.shape
        w = self.c.window
        x = x.view(batch, side // w, w, side // w, w, width)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, width)

    def product(self, q: Tensor, k: Tensor, v: Tensor, *shared: Any) -> Tensor:
        n, heads = q.shape[2], q.shape[1]
        bias = self.table[self.index.view(-1)].view(n, n, heads).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.spelling == "sdpa":
            if self.mask is not None:
                count = self.mask.shape[0]
                mask = self.mask.to(q.dtype).view(1, count, 1, n, n).expand(q.shape[0] // count, -1, -1, -1, -1)
                bias = bias + mask.reshape(-1, 1, n, n)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1))
        scores = q * self.c.head_dim**-0.5 @ k.transpose(-2, -1) + bias
        if self.mask is not None:
            count = self.mask.shape[0]
            scores = scores.view(-1, count, heads, n, n) + self.mask.to(q.dtype)[None, :, None]
            scores = scores.view(-1, heads, n, n)
        return scores.softmax(dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        side, w = self.side, self.c.window
        y = self.norms[0](x).view(batch, side, side, width)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attend(self.windows(y))
        y = y.view(batch, side // w, side // w, w, w, width).permute(0, 1, 3, 2, 4, 5).contiguous()
        y = y.view(batch, side, side, width)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y.view(batch, length, width)
        return x + self.mlp(self.norms[1](x))


class Swin(Model):
    """One stage: tokens of a square map [B, side * side, C] -> the same; every other layer is shifted."""

    def __init__(self, c: Config, spelling: str) -> None:
        super().__init__()
        side = math.isqrt(max(c.batch))
        self.layers = nn.ModuleList(
            SwinLayer(c, spelling, side, c.window // 2 if i % 2 else 0) for i in range(c.layers)
        )
        self.norm = nn.LayerNorm(c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.run(x, [()] * len(self.layers)))


# ---- the list --------------------------------------------------------------------------------------------------------


def ids(c: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(VOCAB, (batch, length)),)


def padded_ids(c: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    """Sample i of n lacks its last i / (2 n) of the length."""
    real = torch.ones(batch, length, dtype=torch.long)
    for i in range(batch):
        real[i, length - length * i // (2 * batch) :] = 0
    return torch.randint(VOCAB, (batch, length)), real


def images(c: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    rows = 1 << (length.bit_length() - 1) // 2
    return (torch.randn(batch, 3, rows * 16, length // rows * 16),)


def states(c: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, length, c.hidden),)


@dataclass(frozen=True)
class GpuModel:
    """``make(config, spelling)`` returns the module, ``inputs(config, length, batch)`` the arguments of one call."""

    name: str
    text: str
    config: Config
    tiny: Config
    make: Callable[[Config, str], Model]
    inputs: Callable[[Config, int, int], tuple[Tensor, ...]] = ids
    sdpa: bool = True


def _tiny(c: Config, **more: Any) -> Config:
    few = {"hidden": 32, "heads": 4, "kv_heads": 4 * c.kv_heads // c.heads or 1, "head_dim": 8, "mlp": 48}
    return replace(c, **{**few, "layers": 2, "batch": {32: 2}, **more})


_DECODER = Config(2560, 32, 8, 128, 9728, {4096: 2, 8192: 1})
_ENCODER = Config(2048, 16, 16, 128, 8192, {4096: 4, 8192: 2})
_T5 = Config(2048, 32, 32, 64, 5120, {4096: 2, 8192: 1})
_GEMMA = Config(2304, 8, 4, 256, 9216, {4096: 4, 8192: 2}, window=4096)
_GPT_OSS = Config(2880, 32, 4, 64, 11520, {4096: 2, 8192: 1}, window=128)
_VIT = Config(1536, 24, 24, 64, 6144, {1024: 16, 4096: 4})
_SWIN = Config(512, 16, 16, 32, 2048, {576: 64}, window=12)

MODELS = {
    m.name: m
    for m in (
        GpuModel("decoder", "GQA 32:8, D128, causal, RoPE, SwiGLU; Qwen3-4B's sizes", _DECODER, _tiny(_DECODER), Decoder),
        GpuModel("encoder", "16 heads, D128, padding mask; BERT's layer", _ENCODER, _tiny(_ENCODER), Encoder, padded_ids),
        GpuModel("vit", "24 heads, D64, no mask; DINOv2-g's sizes", _VIT, _tiny(_VIT), ViT, images),
        GpuModel(
            "swin", "16 heads, D32, 12 x 12 windows, relative bias, shift mask; Swin-B's third stage at 384 pixels",
            _SWIN, _tiny(_SWIN, window=4, batch={64: 2}), Swin, states,
        ),
        GpuModel("t5", "32 heads, D64, trained relative bias, no scale; T5 1.1 XL's encoder", _T5, _tiny(_T5), T5Encoder),
        GpuModel(
            "gemma2", "GQA 8:4, D256, softcap, window of 4096 in every other layer; Gemma 2 2B's sizes",
            _GEMMA, _tiny(_GEMMA, window=12),
            lambda c, s: Decoder(c, s, cap=50.0, sliding=True, gemma=True), sdpa=False,
        ),
        GpuModel(
            "gpt_oss", "GQA 32:4, D64, sinks, window of 128 in every other layer; half of GPT-OSS 20B's heads, dense MLP",
            _GPT_OSS, _tiny(_GPT_OSS, kv_heads=1, window=12),
            lambda c, s: Decoder(c, s, sinks=True, sliding=True), sdpa=False,
        ),
    )
}  # fmt: skip


def build(name: str, config: Config, spelling: str, device: str, dtype: torch.dtype) -> Model:
    """The module with the weights of seed 0."""
    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[name].make(config, spelling).to(dtype).eval()


def share(name: str, weights: Model, config: Config, spelling: str) -> Model:
    """Another module, in its own spelling, over the same parameters and buffers."""
    with torch.device("meta"):
        other = MODELS[name].make(config, spelling).eval()
    for path, module in weights.named_modules():
        twin = other.get_submodule(path)
        twin._parameters, twin._buffers = module._parameters, module._buffers
    return other


def draw(name: str, config: Config, length: int, batch: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs of seed 1; floating point ones in ``dtype``."""
    torch.manual_seed(1)
    with torch.device(device):
        made = MODELS[name].inputs(config, length, batch)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in made)
