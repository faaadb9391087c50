"""transformers: decoder-only language models."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.base import left_padding, tokens
from benchmarks.zoo.transformers_common import (
    DECODER,
    TEXT,
    hf,
    no_cache,
    no_cache_left_padded,
    with_cache,
)

GPT2 = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 80,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL_HEADS = {**DECODER, "num_key_value_heads": 4}
WIDE_HEADS = {**DECODER, "head_dim": 24}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
LATENT = {
    **FULL_HEADS,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}


def decoder(name: str, cls: str, config: Any, inputs: Any = no_cache, **fields: Any) -> None:
    hf(name, cls, config, inputs, **fields)


decoder("gpt2", "GPT2Model", GPT2)
decoder("gpt2_padded", "GPT2Model", GPT2, no_cache_left_padded)
decoder(
    "gpt2_layer_scale", "GPT2Model", {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
)
decoder("gpt_bigcode", "GPTBigCodeModel", {**GPT2, "multi_query": True})
decoder(
    "gpt_neo",
    "GPTNeoModel",
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "window_size": 8,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 80,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
decoder("gpt_neox", "GPTNeoXModel", {**TEXT, "bos_token_id": 1, "eos_token_id": 2})
decoder("gptj", "GPTJModel", {**GPT2, "rotary_dim": 8})
decoder("codegen", "CodeGenModel", {**GPT2, "rotary_dim": 8})
decoder(
    "openai_gpt",
    "OpenAIGPTModel",
    {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 80},
    lambda: ((tokens(),), {}),
)
decoder("ctrl", "CTRLModel", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96, "n_positions": 80})
decoder(
    "opt",
    "OPTModel",
    {**TEXT, "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
    no_cache_left_padded,
)
decoder(
    "xglm",
    "XGLMModel",
    {
        "vocab_size": 96,
        "d_model": 64,
        "ffn_dim": 96,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 80,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
)
decoder(
    "bloom",
    "BloomModel",
    {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    no_cache_left_padded,
)
decoder(
    "mpt",
    "MptModel",
    {"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 80, "expansion_ratio": 2},
    no_cache_left_padded,
)
FALCON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
decoder("falcon", "FalconModel", {**FALCON, "alibi": False, "multi_query": True})
decoder("falcon_alibi", "FalconModel", {**FALCON, "alibi": True, "multi_query": False}, no_cache_left_padded)
decoder(
    "falcon_grouped", "FalconModel", {**FALCON, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}
)
decoder("llama", "LlamaModel", DECODER)
decoder("llama_padded", "LlamaModel", DECODER, no_cache_left_padded)
decoder("llama_cache", "LlamaModel", DECODER, with_cache, cache=True)
decoder(
    "llama_lm_loss", "LlamaForCausalLM", DECODER, lambda: ((tokens(),), {"labels": tokens(seed=9), "use_cache": False})
)
decoder("llama_any_length", "LlamaModel", DECODER, dynamic=True)
decoder("mistral_window", "MistralModel", {**DECODER, "sliding_window": 8})
decoder(
    "mixtral", "MixtralModel", {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
)
decoder(
    "qwen2_window", "Qwen2Model", {**DECODER, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
)
decoder("qwen3", "Qwen3Model", WIDE_HEADS)
decoder("qwen3_moe", "Qwen3MoeModel", {**WIDE_HEADS, **EXPERTS})
decoder("gemma", "GemmaModel", WIDE_HEADS)
decoder("gemma2", "Gemma2Model", {**WIDE_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 24})
decoder(
    "gemma2_padded",
    "Gemma2Model",
    {**WIDE_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 24},
    no_cache_left_padded,
)
decoder(
    "gemma3",
    "Gemma3TextModel",
    {
        **WIDE_HEADS,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
decoder("phi", "PhiModel", FULL_HEADS)
decoder("phi3", "Phi3Model", DECODER)
decoder("olmo2", "Olmo2Model", DECODER)
decoder("cohere", "CohereModel", DECODER)
decoder(
    "cohere2", "Cohere2Model", {**DECODER, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
)
decoder("stablelm", "StableLmModel", DECODER)
decoder("granite", "GraniteModel", {**DECODER, "attention_multiplier": 0.3})
decoder("nemotron", "NemotronModel", DECODER)
decoder("starcoder2", "Starcoder2Model", DECODER)
decoder("persimmon", "PersimmonModel", FULL_HEADS)
decoder(
    "gpt_oss",
    "GptOssModel",
    {
        **WIDE_HEADS,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
decoder("deepseek_v3", "DeepseekV3Model", LATENT)
decoder("minicpm3", "MiniCPM3Model", LATENT)
decoder("apertus", "ApertusModel", DECODER)
decoder("smollm3", "SmolLM3Model", DECODER)
decoder("exaone4", "Exaone4Model", {**DECODER, "sliding_window": 8, "sliding_window_pattern": 2})
decoder("glm4", "Glm4Model", WIDE_HEADS)
decoder("hunyuan", "HunYuanDenseV1Model", WIDE_HEADS)
decoder("ernie4_5", "Ernie4_5Model", WIDE_HEADS)
decoder("helium", "HeliumModel", {**DECODER, "head_dim": 16})
decoder("diffllama", "DiffLlamaModel", DECODER, sites=4)
decoder("doge", "DogeModel", WIDE_HEADS, sites=None)
decoder(
    "llama4",
    "Llama4TextModel",
    {
        **WIDE_HEADS,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
    },
)
decoder(
    "jetmoe",
    "JetMoeModel",
    {**DECODER, "num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
)
decoder(
    "biogpt",
    "BioGptModel",
    {**TEXT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    lambda: ((tokens(),), {"use_cache": False, "attention_mask": left_padding()}),
)
decoder("imagegpt", "ImageGPTModel", GPT2)
