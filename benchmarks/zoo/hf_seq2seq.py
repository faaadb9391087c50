"""transformers: encoder-decoder models and audio encoders."""

from __future__ import annotations

import torch

from benchmarks.zoo.base import BATCH, LENGTH, floats, right_padding, tokens
from benchmarks.zoo.transformers_common import SEQ2SEQ, hf, padded_text, pair, pair_unmasked

T5 = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}

#: One layer on either side, as most configurations name it.
LAYERS = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}

hf("t5", "T5Model", T5, pair, sites=3)
hf("t5_encoder", "T5EncoderModel", {**T5, "num_layers": 2}, padded_text)
hf("mt5", "MT5Model", {**T5, "feed_forward_proj": "gated-gelu"}, pair_unmasked, sites=3)
hf("umt5", "UMT5Model", T5, pair, sites=3)
hf(
    "switch",
    "SwitchTransformersModel",
    {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2},
    pair,
    sites=3,
)
hf("longt5", "LongT5Model", {**T5, "local_radius": 5, "encoder_attention_type": "local"}, pair, sites=3)
hf("bart", "BartModel", SEQ2SEQ, pair, sites=3)
hf("bart_unmasked", "BartModel", SEQ2SEQ, pair_unmasked, sites=3)
hf("mbart", "MBartModel", SEQ2SEQ, pair, sites=3)
hf("plbart", "PLBartModel", SEQ2SEQ, pair, sites=3)
hf("blenderbot", "BlenderbotModel", SEQ2SEQ, pair, sites=3)
hf("marian", "MarianModel", SEQ2SEQ, pair, sites=3)
hf("pegasus", "PegasusModel", SEQ2SEQ, pair, sites=3)
hf("m2m_100", "M2M100Model", {**SEQ2SEQ, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, pair, sites=3)
hf(
    "prophetnet",
    "ProphetNetModel",
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 80,
        "ngram": 2,
        "num_buckets": 8,
        "relative_max_distance": 16,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    pair,
    sites=4,
)
hf(
    "fsmt",
    "FSMTModel",
    {
        "langs": ["en", "de"],
        "src_vocab_size": 96,
        "tgt_vocab_size": 96,
        **LAYERS,
        "max_position_embeddings": 80,
    },
    pair,
    sites=3,
)
hf("bigbird_pegasus", "BigBirdPegasusModel", {**SEQ2SEQ, "attention_type": "original_full"}, pair, sites=3)
hf(
    "led",
    "LEDModel",
    {**SEQ2SEQ, "max_encoder_position_embeddings": 80, "max_decoder_position_embeddings": 80, "attention_window": 8},
    pair,
    sites=None,
    kind="any",
    note="chunked encoder, dense decoder",
)


def speech(frames: int = 2000):
    return lambda: ((floats(BATCH, frames, seed=3),), {})


SPEECH = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 96,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
hf("wav2vec2", "Wav2Vec2Model", SPEECH, speech())
hf("hubert", "HubertModel", SPEECH, speech())
hf(
    "wavlm",
    "WavLMModel",
    {**SPEECH, "num_buckets": 16, "max_bucket_distance": 32},
    speech(),
    note="calls F.multi_head_attention_forward",
)
hf("unispeech", "UniSpeechModel", SPEECH, speech())
hf(
    "wav2vec2_conformer",
    "Wav2Vec2ConformerModel",
    {**SPEECH, "position_embeddings_type": "relative"},
    speech(),
    sites=2,
)
hf(
    "wav2vec2_conformer_rotary",
    "Wav2Vec2ConformerModel",
    {**SPEECH, "position_embeddings_type": "rotary"},
    speech(),
    sites=2,
)
hf(
    "wav2vec2_bert",
    "Wav2Vec2BertModel",
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "feature_projection_input_dim": 32,
        "position_embeddings_type": "relative_key",
        "left_max_position_embeddings": 12,
        "right_max_position_embeddings": 6,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
    },
    lambda: ((floats(BATCH, LENGTH, 32),), {"attention_mask": right_padding()}),
)
hf(
    "whisper",
    "WhisperModel",
    {
        "vocab_size": 96,
        "num_mel_bins": 16,
        **LAYERS,
        "max_source_positions": 20,
        "max_target_positions": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
    lambda: ((floats(BATCH, 16, 40),), {"decoder_input_ids": tokens(length=9), "use_cache": False}),
    sites=3,
)
hf(
    "speech_to_text",
    "Speech2TextModel",
    {
        "vocab_size": 96,
        **LAYERS,
        "max_source_positions": 80,
        "max_target_positions": 40,
        "input_feat_per_channel": 16,
        "conv_channels": 32,
        "num_conv_layers": 1,
        "conv_kernel_sizes": [5],
    },
    lambda: ((floats(BATCH, 48, 16),), {"decoder_input_ids": tokens(length=9), "use_cache": False}),
    sites=3,
)
hf(
    "audio_spectrogram",
    "ASTModel",
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "patch_size": 8,
        "max_length": 48,
        "num_mel_bins": 16,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    lambda: ((floats(BATCH, 48, 16),), {}),
)
hf(
    "time_series",
    "TimeSeriesTransformerModel",
    {
        "prediction_length": 8,
        "context_length": 16,
        "input_size": 1,
        "lags_sequence": [1, 2],
        "num_time_features": 2,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    },
    lambda: (
        (),
        {
            "past_values": floats(BATCH, 18),
            "past_time_features": floats(BATCH, 18, 2),
            "past_observed_mask": torch.ones(BATCH, 18),
            "future_values": floats(BATCH, 8),
            "future_time_features": floats(BATCH, 8, 2),
            "use_cache": False,
        },
    ),
    sites=3,
)
hf(
    "patchtst",
    "PatchTSTModel",
    {
        "num_input_channels": 2,
        "context_length": 32,
        "patch_length": 4,
        "patch_stride": 4,
        "d_model": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
    },
    lambda: ((floats(BATCH, 32, 2),), {}),
)
