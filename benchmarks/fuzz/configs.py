"""Small valid ``config.json`` files, one per model family, as input of mutations."""

from __future__ import annotations

from typing import Any

from planner.workload.hf_config import to_hf_config
from planner.workload.hf_families import FULL, SLIDING
from planner.workload.presets import preset

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
}
WINDOW: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
}
TEXT = SIZES | WINDOW | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24}


def good_configs() -> list[dict[str, Any]]:
    """Of every ``model_type``, with the fields that its sizes depend on."""
    exported = [preset(name)["architecture"] for name in ("gpt2-tiny", "llama-1.5b")]
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "attention_bias": True}
    kinds: dict[str, dict[str, Any]] = {
        "llama": SIZES | scaled,
        "mistral": SIZES | {"sliding_window": 16},
        "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "phi3": SIZES | {"original_max_position_embeddings": 32, "pad_token_id": 0},
        "qwen2": SIZES | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
        "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 48, "qkv_bias": True},
        "qwen3": SIZES | {"use_sliding_window": True, "sliding_window": 16},
        "qwen3_moe": SIZES | EXPERTS,
        "gemma2": TEXT,
        "gemma3_text": SIZES | {"sliding_window": 16, "sliding_window_pattern": 2},
        "gemma3": {"text_config": TEXT, "vision_config": {"hidden_size": 8}},
    }
    named = [{"model_type": kind} | fields for kind, fields in kinds.items()]
    return [*map(to_hf_config, exported), *named]
