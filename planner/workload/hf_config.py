"""Reads and writes Hugging Face ``config.json`` files of transformers.

Fields that may change a size and are not supported are refused by name, and so are unknown fields,
unless they are empty (null, false). Features that change no size but that the executor lacks become
`Architecture.priced_only`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.utils.input_files import read_json
from planner.utils.text import did_you_mean
from planner.utils.validate import short_repr
from planner.workload.hf_families import MODELS
from planner.workload.hf_fields import ConfigFields
from planner.workload.layers import Architecture, Family
from planner.workload.presets import changed
from planner.workload.transformer import Fields, transformer

CONFIG = "config.json"
WITH_IMAGES = "gemma3"
"""A ``model_type`` whose file contains a text model."""
LEFT_OUT = "the part that sees images, which is left out"
SAYS_NOTHING = re.compile(
    r"architectures|model_type|(_?name_or_path)|transformers_version|(torch_)?dtype|use_cache|"
    r".*_token_id|initializer_range|(attn|embd|resid)_pdrop|attention_dropout|summary_.*|"
    r"task_specific_params|reorder_and_upcast_attn|pretraining_tp|id2label|label2id|num_labels|"
    r"output_(attentions|hidden_states)|return_dict|return_dict_in_generate|output_scores|"
    r"(_?attn|_?experts)_implementation.*|chunk_size_feed_forward|tokenizer_class|auto_map|"
    r"predict_special_tokens|problem_type|gradient_checkpointing|tf_legacy_loss|"
    r"(boi|eoi|image)_token_index|mm_tokens_per_image|cache_implementation|"
    r"max_length|min_length|top_[kp]|temperature|num_beams|num_beam_groups|num_return_sequences|"
    r"length_penalty|(encoder_)?repetition_penalty|diversity_penalty|typical_p|early_stopping|"
    r"(encoder_)?no_repeat_ngram_size|do_sample|bad_words_ids|force_words_ids|suppress_tokens|"
    r"begin_suppress_tokens|remove_invalid_values|exponential_decay_length_penalty|min_p|"
    r"(max|min)_new_tokens|max_time|penalty_alpha|(epsilon|eta)_cutoff|guidance_scale|"
    r"renormalize_logits|low_memory|stop_strings|sequence_bias|constraints|prefix|generation_.*|"
    r"prompt_lookup_num_tokens|finetuning_task|torchscript|use_bfloat16|_flash_attn_2_enabled|"
    r".*_dropout|_commit_hash|is_llama_config|max_sequence_length|unsloth_.*|transformers\.js_config"
)
"""Fields without effect here: labels, tokens, dropout (never used), storage, generation, tools."""

NOTHING_AT_0 = re.compile(r"n(um)?_shared_experts|shared_expert_.*|num_nextn_predict_layers")
"""Numbers of parts that a model lacks if they are 0."""
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Suffixes of class names whose head is over the vocabulary alone."""
DEFAULT_SEQUENCE = 8192
"""Largest number of tokens per sample, unless a longer sequence is requested."""

DEFAULT_BATCH = 512


def from_hf_config(path: str | Path, **changes: Any) -> Fields:
    """A workload from a ``config.json`` of one of `planner.workload.hf_families.MODELS`.

    Samples have as many tokens as the model has positions (``max_position_embeddings``), up to
    `DEFAULT_SEQUENCE`; ``sequence`` sets another length.
    """
    config = read_config(path)
    batch = changes.pop("batch_samples", None)
    arch = architecture_of(config, path)
    if arch.sequence > DEFAULT_SEQUENCE:
        arch = replace(arch, sequence=DEFAULT_SEQUENCE, positions=arch.position_rows)
    workload = transformer(
        str(config.get("_name_or_path") or _name(Path(path))),
        arch,
        batch_samples=DEFAULT_BATCH if batch is None else batch,
        source=f"Hugging Face config.json, model_type {config['model_type']}",
    )
    return changed(workload, changes)


def _name(path: Path) -> str:
    """The file's name, or its folder's where every model's file is called ``config.json``."""
    return (path.stem if path.stem != "config" else path.absolute().parent.name) or path.stem


def read_config(path: str | Path) -> dict[str, Any]:
    """Fields of a ``config.json``."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold an object; give a Hugging Face config.json")
    return config


def architecture_of(config: dict[str, Any], path: str | Path) -> Architecture:
    """The architecture that a ``config.json`` describes."""
    kind = config.get("model_type")
    if kind == WITH_IMAGES:
        return _text_part(config, path)
    rules = MODELS.get(kind) if isinstance(kind, str) else None
    if rules is None:
        raise ValueError(
            f"{path}: model_type {short_repr(kind)} is not supported; it must be "
            f"{', '.join(MODELS)} or "
            f"{WITH_IMAGES}"
        )
    _require_known(config, rules.reads, path)
    _require_language_model(config, path)
    try:
        return rules.build(ConfigFields(config, path))
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if message.startswith(f"{path}:") else f"{path}: {message}"
        ) from None


def _require_language_model(config: dict[str, Any], path: str | Path) -> None:
    """Refuse a class whose head is not over the vocabulary."""
    named = config.get("architectures")
    stem = config["model_type"].removesuffix("_text").replace("_", "")
    class_names = {f"{stem}{head}".lower() for head in LANGUAGE_MODELS}
    for name in named if isinstance(named, list) else [] if named is None else [named]:
        if str(name).lower() not in class_names:
            raise ValueError(
                f"{path}: architectures is {short_repr(name)}, whose head is not over the "
                "vocabulary "
                f"alone, or missing; give the config.json of a language model, such as {stem}'s "
                "that ends in ForCausalLM"
            )


def _require_known(config: dict[str, Any], known_fields: Collection[str], path: str | Path) -> None:
    for name, value in config.items():
        silent = value is None or value is False or value == [] or value == {}
        silent = silent or (value == 0 and NOTHING_AT_0.fullmatch(name) is not None)
        if name not in known_fields and not silent and not SAYS_NOTHING.fullmatch(name):
            raise ValueError(
                f"{path}: field {short_repr(name)} ({short_repr(value)}) is not known here"
                f"{did_you_mean(name, known_fields)} and "
                "may change the model; take it out if it does not"
            )


def _text_part(config: dict[str, Any], path: str | Path) -> Architecture:
    """The text model of a multimodal one."""
    _require_known(config, {"text_config", "vision_config", "tie_word_embeddings"}, path)
    _require_language_model(config, path)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(
            f"{path}: text_config is {short_repr(text)}; it must be an object with the text "
            "part's sizes"
        )
    kind = f"{WITH_IMAGES}_text"
    inside = {"model_type": kind} | text
    if inside["model_type"] != kind:
        raise ValueError(
            f"{path}: text_config: model_type is {short_repr(inside['model_type'])}; it must be "
            f"{kind}"
        )
    if "tie_word_embeddings" in config:
        inside["tie_word_embeddings"] = config["tie_word_embeddings"]
    arch = architecture_of(inside, f"{path}: text_config")
    return replace(arch, priced_only=(*arch.priced_only, LEFT_OUT))


def to_hf_config(arch: Architecture) -> dict[str, Any]:
    """Fields from which ``transformers`` builds the architecture.

    Returns
    -------
    dict[str, Any]
        Fields of a ``config.json``, without dropout.
    """
    if arch.unexecuted:
        raise ValueError(
            f"architecture: the executor does not do {arch.unexecuted[0]}, so it has no such model "
            "to export; plan for one that it trains"
        )
    fields = {
        "vocab_size": arch.vocabulary,
        "tie_word_embeddings": arch.tied,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if arch.kind is Family.GPT2:
        if arch.kv_heads != arch.heads or arch.head_size is not None:
            raise ValueError(
                "architecture: GPT-2 of transformers has as many key-value heads as heads, and no "
                "head_size; export cannot say this model"
            )
        return fields | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": arch.layers,
            "n_embd": arch.hidden,
            "n_head": arch.heads,
            "n_inner": arch.ffn,
            "n_positions": arch.position_rows,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": arch.norm_eps,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }
    fields |= {
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.attention_size,
        "intermediate_size": arch.ffn,
        "max_position_embeddings": max(arch.position_rows, arch.sequence),
        "hidden_act": "silu",
        "rms_norm_eps": arch.norm_eps,
        # releases before 5 read the first, those after it the second
        "rope_theta": arch.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "attention_dropout": 0.0,
    }
    if arch.qkv_bias or arch.qk_norm:
        if arch.qkv_bias and arch.qk_norm:
            raise ValueError(
                "architecture: no model of transformers has qk_norm, and biases of queries, keys "
                "and values alone; export cannot say this model"
            )
        sliding = {"use_sliding_window": arch.window is not None, "sliding_window": arch.window}
        name = "qwen2" if arch.qkv_bias else "qwen3"
        model = {"model_type": name, "architectures": [f"{name.capitalize()}ForCausalLM"]}
        return fields | model | sliding | {"max_window_layers": 0 if arch.window else arch.layers}
    if arch.window is not None:
        model = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        return fields | model | {"sliding_window": arch.window}
    return fields | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
