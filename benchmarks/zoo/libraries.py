"""diffusers, x-transformers and open_clip: their own attention layers, asked for their unfused paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.base import BATCH, LENGTH, WIDTH, Built, First, floats, register, require, right_padding


def x() -> Tensor:
    return floats(BATCH, LENGTH, WIDTH)


# ---- diffusers ---------------------------------------------------------------------------------------------


class DiffusersAttention(nn.Module):
    """diffusers' Attention with one of its unfused processors."""

    def __init__(self, processor: str = "AttnProcessor", processor_args: tuple[Any, ...] = (), **options: Any) -> None:
        super().__init__()
        library = require("diffusers.models.attention_processor")
        options = {"query_dim": WIDTH, "heads": 4, "dim_head": 16, **options}
        self.inner = library.Attention(**options, processor=getattr(library, processor)(*processor_args))

    def forward(self, hidden: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.inner(hidden, encoder_hidden_states=context, attention_mask=mask)


def diffusers(name: str, make: Any, sites: int = 1, **fields: Any) -> None:
    register(f"diffusers_{name}", "diffusers", make, sites=sites, needs=("diffusers",), grad_inputs=(0,), **fields)


def context() -> Tensor:
    return floats(BATCH, 11, 40, seed=6)


diffusers("self", lambda: (DiffusersAttention(), (x(),), {}))
diffusers("upcast", lambda: (DiffusersAttention(upcast_attention=True, upcast_softmax=True), (x(),), {}))
diffusers("cross", lambda: (DiffusersAttention(cross_attention_dim=40), (x(), context()), {}))
diffusers(
    "cross_masked",
    lambda: (
        DiffusersAttention(cross_attention_dim=40),
        (x(), context(), torch.where(floats(BATCH, 1, 11) > 1.0, -10000.0, 0.0)),
        {},
    ),
)
diffusers(
    "spatial_norm_group",
    lambda: (
        DiffusersAttention(norm_num_groups=8, bias=True, residual_connection=True),
        (floats(BATCH, WIDTH, 4, 4),),
        {},
    ),
)
diffusers("sliced", lambda: (DiffusersAttention("SlicedAttnProcessor", (2,)), (x(),), {}), sites=4)


def _unet() -> Built:
    library = require("diffusers")
    processors = require("diffusers.models.attention_processor")
    net = library.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=40,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    net.set_attn_processor(processors.AttnProcessor())
    return First(net), (floats(BATCH, 4, 8, 8), torch.tensor([3, 7]), context()), {"return_dict": False}


diffusers("unet", _unet, sites=8)


def _vae() -> Built:
    library = require("diffusers")
    processors = require("diffusers.models.attention_processor")
    net = library.AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        layers_per_block=1,
    )
    net.set_attn_processor(processors.AttnProcessor())
    return First(net), (floats(BATCH, 3, 16, 16),), {"return_dict": False}


diffusers("vae", _vae, sites=2)

# ---- x-transformers ----------------------------------------------------------------------------------------


def x_attention(name: str, inputs: Any = None, sites: int = 1, kind: str = "pos", **options: Any) -> None:
    def make() -> Built:
        library = require("x_transformers.x_transformers")
        args, kwargs = inputs() if inputs else ((x(),), {})
        return First(library.Attention(dim=WIDTH, heads=4, dim_head=16, flash=False, **options)), args, kwargs

    register(f"xt_{name}", "x-transformers", make, sites=sites, kind=kind, needs=("x_transformers",), grad_inputs=(0,))


def x_layers(name: str, inputs: Any = None, sites: int = 2, cls: str = "Decoder", **options: Any) -> None:
    def make() -> Built:
        library = require("x_transformers.x_transformers")
        args, kwargs = inputs() if inputs else ((x(),), {})
        return First(getattr(library, cls)(dim=WIDTH, depth=2, heads=4, attn_dim_head=16, **options)), args, kwargs

    register(f"xt_{name}", "x-transformers", make, sites=sites, needs=("x_transformers",), grad_inputs=(0,))


x_attention("plain")
x_attention("causal", causal=True)
x_attention("one_kv_head", causal=True, one_kv_head=True)
x_attention("kv_heads", causal=True, kv_heads=2)
x_attention("memory_kv", num_mem_kv=4)
x_attention("qk_norm", qk_norm=True, qk_norm_scale=10)
x_attention("softclamp", softclamp_logits=True, logit_softclamp_value=30.0, causal=True)
x_attention("masked", lambda: ((x(),), {"mask": right_padding().bool()}))
x_attention("cross", lambda: ((x(), floats(BATCH, 13, WIDTH)), {}))
x_attention("top_k", sparse_topk=5, causal=True, kind="neg", sites=0)
x_attention("talking_heads", pre_talking_heads=True, post_talking_heads=True, causal=True, kind="neg", sites=0)
x_layers("alibi", alibi_pos_bias=True, alibi_num_heads=2)
x_layers("t5_bias", rel_pos_bias=True)
x_layers("rotary", rotary_pos_emb=True)
x_layers("dynamic_bias", dynamic_pos_bias=True)
x_layers("encoder_masked", lambda: ((x(),), {"mask": right_padding().bool()}), cls="Encoder")
x_layers("decoder_cross", lambda: ((x(),), {"context": floats(BATCH, 13, WIDTH)}), sites=4, cross_attend=True)

# ---- open_clip ---------------------------------------------------------------------------------------------


def open_clip(name: str, make: Any, sites: int, kind: str) -> None:
    register(f"open_clip_{name}", "open_clip", make, sites=sites, kind=kind, needs=("open_clip",), grad_inputs=(0,))


def _blocks() -> Built:
    library = require("open_clip.transformer")
    return First(nn.Sequential(*(library.ResidualAttentionBlock(WIDTH, 4) for _ in range(2)))), (x(),), {}


def _pooler() -> Built:
    library = require("open_clip.transformer")
    return First(library.AttentionalPooler(WIDTH, WIDTH, n_head=4, n_queries=6)), (x(),), {}


def _custom_block() -> Built:
    library = require("open_clip.transformer")
    block = library.CustomResidualAttentionBlock(WIDTH, 4, scale_heads=True, scale_attn=True)
    return First(block), (x(),), {}


open_clip("blocks", _blocks, sites=2, kind="sdpa")
open_clip("pooler", _pooler, sites=1, kind="sdpa")
open_clip("scaled_block", _custom_block, sites=1, kind="any")
