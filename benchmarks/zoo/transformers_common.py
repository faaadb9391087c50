"""Building tiny transformers models with eager attention, without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.base import VOCAB, Built, First, left_padding, register, require, right_padding, tokens

Inputs = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 80,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}


def text() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tokens(),), {}


def padded_text() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tokens(),), {"attention_mask": right_padding()}


def no_cache() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tokens(),), {"use_cache": False}


def no_cache_left_padded() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tokens(),), {"use_cache": False, "attention_mask": left_padding()}


def with_cache() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tokens(),), {"use_cache": True}


def pair() -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=15, seed=4), "use_cache": False}
    return (), {**kwargs, "attention_mask": right_padding()}


def pair_unmasked() -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = pair()
    del kwargs["attention_mask"]
    return args, kwargs


def hf(
    name: str,
    cls: str,
    config: dict[str, Any] | Callable[[Any], dict[str, Any]],
    inputs: Inputs,
    sites: int | None = 2,
    *,
    pick: str | None = None,
    cache: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    config_class: str | None = None,
    **fields: Any,
) -> None:
    """Register ``transformers.<cls>`` built from ``config`` (a callable receives the transformers module).

    A dotted ``cls`` is looked up below ``transformers.models``. The configuration class is the model's own unless
    ``config_class`` names another.
    """

    def find(transformers: Any, path: str) -> Any:
        if "." not in path:
            return getattr(transformers, path)
        module, _, attribute = path.rpartition(".")
        return getattr(require(f"transformers.models.{module}"), attribute)

    def make() -> Built:
        transformers = require("transformers")
        transformers.utils.logging.set_verbosity_error()
        model_class = find(transformers, cls)
        values = config(transformers) if callable(config) else config
        chosen = find(transformers, config_class) if config_class else model_class.config_class
        model = model_class._from_config(chosen(**values), attn_implementation="eager")
        fill_empty(model)
        args, kwargs = inputs()
        return First(wrap(model) if wrap else model, pick=pick, cache=cache), args, kwargs

    register(f"hf_{name}", "transformers", make, sites=sites, needs=("transformers",), **fields)


def fill_empty(model: nn.Module) -> None:
    """Redraw tables that an initialiser left at one constant value, so that losing one shows in the values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            constant = (
                parameter.numel() > 1
                and parameter.is_floating_point()
                and bool((parameter == parameter.flatten()[0]).all())
            )
            if constant and ("relative" in name or "bias_table" in name or "sinks" in name):
                parameter.normal_(0.0, 0.5)
