"""transformers: text encoders."""

from __future__ import annotations

import torch

from benchmarks.zoo.base import BATCH, LENGTH, right_padding, tokens
from benchmarks.zoo.transformers_common import TEXT, hf, padded_text, text


def boxed() -> tuple[tuple, dict]:
    """Token ids with one page rectangle a token."""
    corner = torch.arange(LENGTH).remainder(30)
    boxes = torch.stack([corner, corner, corner + 7, corner + 9], -1).expand(BATCH, -1, -1).contiguous()
    return (tokens(),), {"bbox": boxes, "attention_mask": right_padding()}


SMALL_EMBEDDING = {**TEXT, "embedding_size": 32}

hf("bert", "BertModel", TEXT, padded_text)
hf("bert_unmasked", "BertModel", TEXT, text)
hf("bert_random", "BertModel", TEXT, padded_text, random=True, note="dropout 0.1 stays on in training")
hf("bert_causal", "BertModel", {**TEXT, "is_decoder": True, "use_cache": False}, padded_text)
hf("bert_generation", "BertGenerationEncoder", TEXT, padded_text)
hf(
    "distilbert",
    "DistilBertModel",
    {"vocab_size": 96, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    padded_text,
)
hf("albert", "AlbertModel", SMALL_EMBEDDING, padded_text)
hf("electra", "ElectraModel", SMALL_EMBEDDING, padded_text)
hf("xlm_roberta", "XLMRobertaModel", TEXT, padded_text)
hf("roberta_prelayernorm", "RobertaPreLayerNormModel", TEXT, padded_text)
hf("xmod", "XmodModel", {**TEXT, "languages": ["en_XX"], "default_language": "en_XX"}, padded_text)
hf("ernie", "ErnieModel", TEXT, padded_text)
hf(
    "modernbert",
    "ModernBertModel",
    {
        **TEXT,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    padded_text,
)
hf("eurobert", "EuroBertModel", {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "mask_token_id": 3}, padded_text)
hf(
    "mobilebert",
    "MobileBertModel",
    {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 1, "true_hidden_size": 32},
    padded_text,
)
hf(
    "squeezebert",
    "SqueezeBertModel",
    SMALL_EMBEDDING | {"embedding_size": 64},
    padded_text,
    note="conv layout, k transposed at the projection",
)
hf("ibert", "IBertModel", TEXT, padded_text)
hf("flaubert", "FlaubertModel", {"vocab_size": 96, "emb_dim": 64, "n_layers": 2, "n_heads": 4}, padded_text)
hf("xlm", "XLMModel", {"vocab_size": 96, "emb_dim": 64, "n_layers": 2, "n_heads": 4}, padded_text)
hf("xlnet", "XLNetModel", {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96}, padded_text)
hf(
    "funnel",
    "FunnelBaseModel",
    {
        "vocab_size": 96,
        "d_model": 64,
        "n_head": 4,
        "d_head": 16,
        "d_inner": 96,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
    },
    padded_text,
)
hf("mpnet", "MPNetModel", TEXT, padded_text)
hf(
    "deberta",
    "DebertaModel",
    {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    padded_text,
    sites=None,
    note="scripted functions break the graph inside the attention",
)
hf(
    "deberta_v2",
    "DebertaV2Model",
    {**TEXT, "relative_attention": True, "pos_att_type": ["c2p"], "position_buckets": 8},
    padded_text,
)
hf("roformer", "RoFormerModel", {**TEXT, "embedding_size": 64}, padded_text)
hf("esm", "EsmModel", {**TEXT, "pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary"}, padded_text)
hf("splinter", "SplinterModel", TEXT, padded_text)
hf(
    "markuplm",
    "MarkupLMModel",
    {
        **TEXT,
        "max_xpath_tag_unit_embeddings": 8,
        "max_xpath_subs_unit_embeddings": 8,
        "max_depth": 2,
        "tag_pad_id": 7,
        "subs_pad_id": 7,
        "pad_token_id": 0,
    },
    padded_text,
)
hf(
    "bros",
    "BrosModel",
    {**TEXT, "dim_bbox": 8, "bbox_scale": 1.0},
    lambda: ((tokens(),), {"bbox": torch.rand(BATCH, LENGTH, 8), "attention_mask": right_padding()}),
)
hf(
    "lilt",
    "LiltModel",
    {**TEXT, "hidden_size": 96, "channel_shrink_ratio": 4, "max_2d_position_embeddings": 64},
    boxed,
    sites=3,
)
hf("layoutlm", "LayoutLMModel", {**TEXT, "max_2d_position_embeddings": 64}, boxed)
hf(
    "visual_bert",
    "VisualBertModel",
    {**TEXT, "visual_embedding_dim": 32},
    lambda: (
        (tokens(),),
        {
            "attention_mask": right_padding(),
            "visual_embeds": torch.randn(BATCH, 5, 32),
            "visual_attention_mask": torch.ones(BATCH, 5),
        },
    ),
)
hf("convbert", "ConvBertModel", {**TEXT, "embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3}, padded_text)
hf("big_bird_full", "BigBirdModel", {**TEXT, "attention_type": "original_full"}, padded_text)
hf(
    "yoso",
    "YosoModel",
    {**TEXT, "use_expectation": True},
    padded_text,
    sites=0,
    kind="neg",
    note="hash-collision weights",
)
hf(
    "longformer",
    "LongformerModel",
    {**TEXT, "attention_window": 8},
    padded_text,
    sites=None,
    kind="any",
    note="chunked scores",
)
hf("roc_bert", "RoCBertModel", {**TEXT, "enable_shape": False, "enable_pronunciation": False}, padded_text)
hf("nomic_bert", "NomicBertModel", {**TEXT, "pad_token_id": 0}, padded_text)
