"""Sizes of published models, from ``config.json`` of the named Hugging Face repositories."""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model.

    Attributes
    ----------
    config
        Of its ``config.json``, what its sizes depend on, and what is easily mistaken for that.
    all_billions, active_billions, inner_billions
        As published: of all parameters, of those that a token meets, of those that no embedding
        and no head of their own has.
    """

    config: dict[str, Any]
    all_billions: float | None = None
    active_billions: float | None = None
    inner_billions: float | None = None


def _qwen3(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | more


def _qwen3_moe(width: int, *sizes: int) -> dict[str, Any]:
    return _qwen3(*sizes) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _qwen2_moe(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | sizes


def _mixtral(hidden: int, ffn: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": positions,
        "model_type": "mixtral",
        "num_attention_heads": heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }


def _gemma2(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, size: int, scale: int
) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": size,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": scale,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    }


def _gemma3(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
        | text,
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


PUBLISHED: dict[str, Published] = {
    "Qwen/Qwen3-0.6B": Published(
        _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True), 0.6, None, 0.44
    ),
    "Qwen/Qwen3-8B": Published(_qwen3(4096, 12288, 36, 32, 8), 8.2, None, 6.95),
    "Qwen/Qwen3-32B": Published(_qwen3(5120, 25600, 64, 64, 8), 32.8, None, 31.2),
    "Qwen/Qwen3-30B-A3B": Published(_qwen3_moe(768, 2048, 6144, 48, 32, 4), 30.5, 3.3, 29.9),
    "Qwen/Qwen3-235B-A22B": Published(_qwen3_moe(1536, 4096, 12288, 94, 64, 4), 235, 22, 234),
    "Qwen/Qwen1.5-MoE-A2.7B": Published(
        _qwen2_moe(
            hidden_size=2048,
            intermediate_size=5632,
            max_position_embeddings=8192,
            max_window_layers=21,
            moe_intermediate_size=1408,
            num_attention_heads=16,
            num_experts=60,
            num_experts_per_tok=4,
            num_hidden_layers=24,
            num_key_value_heads=16,
            shared_expert_intermediate_size=5632,
            sliding_window=32768,
        ),
        14.3,
        2.7,
    ),
    "Qwen/Qwen2-57B-A14B": Published(
        _qwen2_moe(
            hidden_size=3584,
            intermediate_size=18944,
            max_position_embeddings=131072,
            max_window_layers=28,
            moe_intermediate_size=2560,
            num_attention_heads=28,
            num_experts=64,
            num_experts_per_tok=8,
            num_hidden_layers=28,
            num_key_value_heads=4,
            shared_expert_intermediate_size=20480,
            sliding_window=131072,
        ),
        57.4,
        14,
    ),
    "mistralai/Mixtral-8x7B-v0.1": Published(_mixtral(4096, 14336, 32, 32, 32768), 46.7, 12.9),
    "mistralai/Mixtral-8x22B-v0.1": Published(_mixtral(6144, 16384, 56, 48, 65536), 141, 39),
    "google/gemma-2-2b": Published(_gemma2(2304, 9216, 26, 8, 4, 256, 256), 2.6, None, 2.024517888),
    "google/gemma-2-9b": Published(
        _gemma2(3584, 14336, 42, 16, 8, 256, 256), 9.2, None, 8.324201984
    ),
    "google/gemma-2-27b": Published(
        _gemma2(4608, 36864, 46, 32, 16, 128, 144), 27.2, None, 26.047480320
    ),
    "google/gemma-3-1b-pt": Published(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        1.0,
        None,
        0.698,
    ),
    "google/gemma-3-4b-pt": Published(
        _gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
        3.9,
        None,
        3.209,
    ),
    "google/gemma-3-12b-pt": Published(
        _gemma3(
            hidden_size=3840,
            intermediate_size=15360,
            num_attention_heads=16,
            num_hidden_layers=48,
            num_key_value_heads=8,
        ),
        11.8,
        None,
        10.759,
    ),
    "google/gemma-3-27b-pt": Published(
        _gemma3(
            head_dim=128,
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_hidden_layers=62,
            num_key_value_heads=16,
            query_pre_attn_scalar=168,
        ),
        27.0,
        None,
        25.600,
    ),
}
"""By repository; of those that see images, the parameters are the text part's."""
