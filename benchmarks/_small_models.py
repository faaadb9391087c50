"""The models that ``models.py`` and ``compile_time.py`` measure: real code, random weights, sizes of a small model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo

VOCAB, WIDTH, HEADS, HIDDEN = 2048, 256, 4, 704

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class SmallModel:
    """``make(layers, length)`` returns the module and the keyword arguments of one call at that sequence length."""

    name: str
    text: str
    make: Callable[[int, int], tuple[nn.Module, dict[str, Any]]]


class LastHidden(nn.Module):
    """A transformers model whose output is its last hidden state [B, S, C]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Tensor:
        return self.inner(**inputs)[0]


def pretrained(name: str, config: dict[str, Any]) -> nn.Module:
    transformers = zoo.base.require("transformers")
    transformers.utils.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    return LastHidden(cls._from_config(cls.config_class(**config), attn_implementation="eager"))


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(5, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(batch: int, length: int, left: bool) -> Tensor:
    """1 where a token is real: the last sample lacks a quarter of the length."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, 3 * length // 4 :] = 0
    return mask.flip(1) if left else mask


def decoder(
    name: str, left_padded: bool = False, **extra: Any
) -> Callable[[int, int], tuple[nn.Module, dict[str, Any]]]:
    def make(layers: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
        config = {
            **TEXT,
            "num_hidden_layers": layers,
            "num_key_value_heads": 2,
            "max_position_embeddings": length,
            **extra,
        }
        inputs: dict[str, Any] = {"input_ids": ids(2 if left_padded else 1, length), "use_cache": False}
        if left_padded:
            inputs["attention_mask"] = padding(2, length, left=True)
        return pretrained(name, config), inputs

    return make


def gpt2(layers: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    config = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": HEADS, "n_layer": layers, "n_positions": length}
    config.update(bos_token_id=1, eos_token_id=2)
    return pretrained("GPT2Model", config), {"input_ids": ids(1, length), "use_cache": False}


def bert(layers: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    config = {**TEXT, "num_hidden_layers": layers, "max_position_embeddings": length}
    return pretrained("BertModel", config), {
        "input_ids": ids(2, length),
        "attention_mask": padding(2, length, left=False),
    }


def vit(layers: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """``length`` patches of 4 x 4 pixels, and the class token."""
    rows = 1
    while rows * rows * 4 <= length:
        rows *= 2
    size = (rows * 4, length // rows * 4)
    config = {
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "image_size": size,
        "patch_size": 4,
    }
    return pretrained("ViTModel", config), {"pixel_values": torch.randn(1, 3, *size)}


def t5(layers: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    config = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "d_kv": WIDTH // HEADS,
        "d_ff": HIDDEN,
        "num_layers": layers,
        "num_heads": HEADS,
        "decoder_start_token_id": 0,
    }
    return pretrained("T5Model", config), {
        "input_ids": ids(1, length),
        "decoder_input_ids": ids(1, length),
        "use_cache": False,
    }


class PlainGPT(nn.Module):
    """A GPT as tutorials write it: fused qkv projection, registered lower triangle, masked_fill with -inf."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock(length) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class PlainBlock(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.register_buffer(
            "lower", torch.tril(torch.ones(length, length, dtype=torch.bool)).view(1, 1, length, length)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / (WIDTH // HEADS) ** 0.5)
        scores = scores.masked_fill(~self.lower[:, :, :length, :length], float("-inf"))
        y = torch.softmax(scores, dim=-1) @ v
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


def plain_gpt(layers: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    return PlainGPT(layers, length), {"input_ids": ids(1, length)}


MODELS = {
    model.name: model
    for model in (
        SmallModel("llama", "grouped heads, causal", decoder("LlamaModel")),
        SmallModel("llama_padded", "causal and left padding, batch 2", decoder("LlamaModel", left_padded=True)),
        SmallModel("gpt2", "causal", gpt2),
        SmallModel("plain_gpt", "causal from a registered buffer", plain_gpt),
        SmallModel("mistral", "sliding window of 256", decoder("MistralModel", sliding_window=256)),
        SmallModel(
            "gemma2",
            "softcap, window of 256 in every other layer",
            decoder("Gemma2Model", sliding_window=256, head_dim=64, query_pre_attn_scalar=64),
        ),
        SmallModel("bert", "padding, batch 2", bert),
        SmallModel("vit", "no mask", vit),
        SmallModel("t5", "trained relative bias, no scale, cross attention", t5),
    )
}
