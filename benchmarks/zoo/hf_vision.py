"""transformers: vision and vision-language models."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.base import BATCH, floats, image, right_padding, tokens
from benchmarks.zoo.transformers_common import TEXT, VISION, hf, padded_text

SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "num_channels": 3,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "mlp_ratio": 2.0,
}


def picture(size: int = 32, channels: int = 3) -> Any:
    return lambda: ((image(size, channels),), {})


def backbone(transformers: Any) -> Any:
    return transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )


def detection(transformers: Any) -> dict[str, Any]:
    return {
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_queries": 7,
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone(transformers),
    }


hf("vit", "ViTModel", VISION, picture())
hf("vit_random", "ViTModel", {**VISION, "attention_probs_dropout_prob": 0.1}, picture(), random=True)
hf("deit", "DeiTModel", VISION, picture())
hf("beit", "BeitModel", {**VISION, "use_relative_position_bias": True, "use_mask_token": False}, picture())
hf("data2vec_vision", "Data2VecVisionModel", {**VISION, "use_shared_relative_position_bias": True}, picture())
hf("dinov2", "Dinov2Model", {**VISION, "mlp_ratio": 2}, picture())
hf("dinov3", "DINOv3ViTModel", {**VISION, "num_register_tokens": 2}, picture())
hf("vit_mae", "ViTMAEModel", {**VISION, "mask_ratio": 0.0}, lambda: ((image(),), {"noise": floats(BATCH, 16)}))
hf(
    "vitdet",
    "VitDetModel",
    {**VISION, "use_relative_position_embeddings": True, "window_size": 2, "window_block_indices": [0]},
    picture(),
)
hf("swin", "SwinModel", SWIN, picture(), sites=4)
hf("swinv2", "Swinv2Model", {**SWIN, "pretrained_window_sizes": [0, 0]}, picture(), sites=4)
hf("donut_swin", "DonutSwinModel", SWIN, picture(), sites=4)
hf(
    "cvt",
    "CvtModel",
    {
        "embed_dim": [16, 32, 32],
        "num_heads": [1, 2, 2],
        "depth": [1, 2, 3],
        "mlp_ratio": [2.0] * 3,
        "drop_path_rate": [0.0] * 3,
    },
    picture(64),
    sites=6,
)
#: Two stages of one block each.
PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [32, 64],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
}
hf(
    "segformer",
    "SegformerModel",
    {**PYRAMID, "sr_ratios": [4, 2], "patch_sizes": [7, 3], "decoder_hidden_size": 32},
    picture(),
)
hf(
    "pvt",
    "PvtModel",
    {**PYRAMID, "image_size": 32, "sequence_reduction_ratios": [4, 1], "patch_sizes": [4, 2]},
    picture(),
)
hf(
    "glpn",
    "GLPNModel",
    {**PYRAMID, "sr_ratios": [4, 2], "patch_sizes": [7, 3]},
    picture(),
)
hf(
    "levit",
    "LevitModel",
    {
        "image_size": 64,
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [16] * 3,
        "mlp_ratio": [2] * 3,
        "attention_ratio": [2] * 3,
    },
    picture(64),
    sites=None,
)
hf(
    "hiera",
    "HieraModel",
    {
        "image_size": [32, 32],
        "masked_unit_attention": [True, False],
        "embed_dim": 32,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "masked_unit_size": [4, 4],
        "num_query_pool": 1,
        "query_stride": [2, 2],
    },
    picture(),
    sites=None,
)
hf(
    "sam_vision",
    "sam.modeling_sam.SamVisionModel",
    {**VISION, "window_size": 2, "global_attn_indexes": [1], "use_rel_pos": True, "output_channels": 32, "mlp_dim": 96},
    picture(),
    config_class="sam.configuration_sam.SamVisionConfig",
)
hf("clip_vision", "CLIPVisionModel", VISION, picture())
hf("clip_text", "CLIPTextModel", {**TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}, padded_text)
hf("siglip_vision", "SiglipVisionModel", VISION, picture(), sites=3, pick="pooler_output")
hf(
    "blip_text",
    "blip.modeling_blip_text.BlipTextModel",
    {**TEXT, "is_decoder": True, "encoder_hidden_size": 64, "use_cache": False},
    lambda: (
        (tokens(),),
        {
            "attention_mask": right_padding(),
            "encoder_hidden_states": floats(BATCH, 9, 64),
            "is_decoder": True,
            "use_cache": False,
        },
    ),
    sites=4,
    config_class="blip.configuration_blip.BlipTextConfig",
)
hf(
    "vilt",
    "ViltModel",
    {**TEXT, **VISION},
    lambda: ((tokens(length=8),), {"pixel_values": image(), "attention_mask": torch.ones(BATCH, 8, dtype=torch.long)}),
)
hf("owlvit_vision", "OwlViTVisionModel", VISION, picture())
hf(
    "videomae",
    "VideoMAEModel",
    {**VISION, "image_size": 16, "num_frames": 4, "tubelet_size": 2},
    lambda: ((floats(BATCH, 4, 3, 16, 16),), {}),
)
hf(
    "vivit",
    "VivitModel",
    {**VISION, "image_size": 16, "num_frames": 4, "tubelet_size": [2, 8, 8]},
    lambda: ((floats(BATCH, 4, 3, 16, 16),), {}),
)
hf(
    "timesformer",
    "TimesformerModel",
    {**VISION, "image_size": 16, "num_frames": 4},
    lambda: ((floats(BATCH, 4, 3, 16, 16),), {}),
    sites=4,
)
hf(
    "yolos",
    "YolosModel",
    {**VISION, "image_size": [32, 32], "num_detection_tokens": 5, "use_mid_position_embeddings": False},
    picture(),
)
hf("detr", "DetrModel", detection, picture(64), sites=3)
hf("table_transformer", "TableTransformerModel", detection, picture(64), sites=3)
hf(
    "perceiver",
    "PerceiverModel",
    {
        "num_latents": 6,
        "d_latents": 32,
        "d_model": 64,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 32,
    },
    lambda: ((floats(BATCH, 24, 64),), {}),
)
hf(
    "mobilevit",
    "MobileViTModel",
    {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
        "num_attention_heads": 4,
    },
    picture(64),
    sites=None,
)
hf(
    "decision_transformer",
    "DecisionTransformerModel",
    {
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 80,
        "state_dim": 5,
        "act_dim": 3,
        "max_ep_len": 64,
        "vocab_size": 1,
    },
    lambda: (
        (),
        {
            "states": floats(BATCH, 8, 5),
            "actions": floats(BATCH, 8, 3),
            "rewards": floats(BATCH, 8, 1),
            "returns_to_go": floats(BATCH, 8, 1),
            "timesteps": torch.arange(8).repeat(BATCH, 1),
            "attention_mask": torch.ones(BATCH, 8, dtype=torch.long),
        },
    ),
)
hf(
    "groupvit_vision",
    "GroupViTVisionModel",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "depths": [1, 1],
        "num_group_tokens": [4, 0],
        "num_output_groups": [4, 4],
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    picture(),
    sites=None,
    kind="any",
    note="grouping softmax runs over groups",
)
