"""A transformer from its Hugging Face ``config.json``, and the file of one.

What changes the model and is not done here is refused by name; so is a field that nobody here
knows, unless it says nothing (null, false, empty).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.network.files import read_json
from planner.network.values import real, short
from planner.workload.layers import ROPE_THETA, Architecture, Family
from planner.workload.presets import Fields, changed, transformer

CONFIG = "config.json"
KINDS = ("gpt2", "llama", "mistral", "qwen2")
MISTRAL_WINDOW = 4096
SAYS_NOTHING = re.compile(
    r"architectures|model_type|(_?name_or_path)|transformers_version|(torch_)?dtype|use_cache|"
    r".*_token_id|initializer_range|(attn|embd|resid)_pdrop|attention_dropout|summary_.*|"
    r"task_specific_params|reorder_and_upcast_attn|pretraining_tp|id2label|label2id|num_labels|"
    r"output_(attentions|hidden_states)|return_dict|return_dict_in_generate|output_scores|"
    r"(_?attn|_?experts)_implementation.*|chunk_size_feed_forward|tokenizer_class|auto_map|"
    r"predict_special_tokens|problem_type|gradient_checkpointing|tf_legacy_loss|"
    r"max_length|min_length|top_[kp]|temperature|num_beams|num_beam_groups|num_return_sequences|"
    r"length_penalty|repetition_penalty|diversity_penalty|typical_p|early_stopping"
)
"""Of labels, tokens, dropout (never done here), storage and text generation."""
READ = {
    "gpt2": {
        *("n_embd", "n_head", "n_layer", "n_inner", "vocab_size", "n_positions", "n_ctx"),
        *("layer_norm_epsilon", "tie_word_embeddings"),
    },
    "llama": {
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "max_position_embeddings", "head_dim"),
        *("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "sliding_window"),
        *("use_sliding_window", "max_window_layers", "layer_types", "tie_word_embeddings"),
    },
}
"""By family, fields that the architecture is made of."""
MUST_BE: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1, 1.0),
    },
}
"""By family, fields whose other values change the model in a way that is not done here."""


def from_hf_config(path: str | Path, **changes: Any) -> Fields:
    """From a Hugging Face ``config.json`` of the GPT-2 or the LLaMA family (Mistral, Qwen2).

    Parameters
    ----------
    path
        Of the file.
    changes
        ``sequence`` (tokens per sample), ``precision``, or
        `planner.workload.presets.WORKLOAD_FIELDS`; None leaves one as it is.

    Returns
    -------
    Fields
        Fields of a `Workload`.

    Raises
    ------
    ValueError
        One line with the path, the field and what is wrong.
    """
    config = read_config(path)
    batch = changes.pop("batch_samples", None) or 512
    workload = transformer(
        str(config.get("_name_or_path") or Path(path).stem),
        architecture_of(config, path),
        batch_samples=batch,
        source=f"Hugging Face config.json, model_type {config['model_type']}",
    )
    return changed(workload, changes)


def read_config(path: str | Path) -> dict[str, Any]:
    """The fields of a ``config.json``.

    Parameters
    ----------
    path
        Of the file.

    Returns
    -------
    dict[str, Any]
        As they are.

    Raises
    ------
    ValueError
        It is no JSON object.
    """
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold an object; give a Hugging Face config.json")
    return config


def architecture_of(config: dict[str, Any], path: str | Path) -> Architecture:
    """The architecture that a ``config.json`` describes.

    Parameters
    ----------
    config
        Its fields.
    path
        Of the file, for messages.

    Returns
    -------
    Architecture
        Samples are as long as its positions.

    Raises
    ------
    ValueError
        A field that is missing, that is not done here, or that nobody knows.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(
            f"{path}: model_type {kind!r} is not supported; it must be gpt2, llama, mistral or "
            "qwen2"
        )
    family = "gpt2" if kind == "gpt2" else "llama"
    for name, value in config.items():
        silent = value is None or value is False or value == [] or value == {}
        if name in READ[family] or silent or SAYS_NOTHING.fullmatch(name):
            continue
        allowed = MUST_BE[family].get(name)
        if allowed is None:
            raise ValueError(
                f"{path}: field {name!r} ({value!r}) is not known here and may change the model; "
                "take it out if it does not"
            )
        if value not in allowed:
            raise ValueError(
                f"{path}: {name} is {value!r}, and the executor does {allowed[0]!r} only; take "
                "another model"
            )
    for name, values in MUST_BE[family].items():
        # a false where something true is needed was let by as saying nothing
        if config.get(name) is False and False not in values:
            raise ValueError(f"{path}: {name} is False, and the executor does {values[0]!r} only")
    get = _Getter(config, path)
    try:
        return _gpt2(get) if family == "gpt2" else _llama(get, kind)
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith(f"{path}:") else f"{path}: {said}") from None


class _Getter:
    """Fields of a config, refused where they are of the wrong kind."""

    def __init__(self, config: dict[str, Any], path: str | Path) -> None:
        self._config, self._path = config, path

    def has(self, name: str) -> bool:
        return self._config.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        return self._config.get(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self._path}: {name} is {value!r}; it must be true or false")
        return value

    def words(self, name: str) -> set[str]:
        value = self._config.get(name) or []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ValueError(f"{self._path}: {name} is {value!r}; it must be a list of names")
        return set(value)

    def whole(self, *names: str) -> int:
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{self._path}: {name} is {value!r}; it must be a whole number >= 1"
                )
            return int(value)
        raise ValueError(f"{self._path}: field {names[0]!r} is missing; it is needed for its size")

    def number(self, name: str, default: float) -> float:
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{self._path}: {name} is {short(value)}; it must be a number above 0")
        return real(f"{self._path}: {name}", value)


def _gpt2(get: _Getter) -> Architecture:
    hidden, heads, positions = get.whole("n_embd"), get.whole("n_head"), _positions(get)
    return Architecture(
        Family.GPT2,
        get.whole("n_layer"),
        hidden,
        heads,
        heads,
        get.whole("n_inner") if get.has("n_inner") else 4 * hidden,
        get.whole("vocab_size"),
        positions,
        # what transformers takes where a file is silent, here and below
        get.flag("tie_word_embeddings", True),
        norm_eps=get.number("layer_norm_epsilon", 1e-5),
        positions=positions,
    )


def _positions(get: _Getter) -> int:
    return get.whole("n_positions", "n_ctx")


def _llama(get: _Getter, kind: str) -> Architecture:
    heads, hidden = get.whole("num_attention_heads"), get.whole("hidden_size")
    positions = get.whole("max_position_embeddings")
    size = _or_none(get, "head_dim")
    layers = get.whole("num_hidden_layers")
    # of the others, transformers takes a number of its own where a file is silent
    by_heads = get.has("num_key_value_heads") or kind != "llama"
    return Architecture(
        Family.LLAMA,
        layers,
        hidden,
        heads,
        get.whole("num_key_value_heads") if by_heads else heads,
        get.whole("intermediate_size"),
        get.whole("vocab_size"),
        positions,
        get.flag("tie_word_embeddings", False),
        head_size=None if size is not None and size * heads == hidden else size,
        norm_eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(get),
        qkv_bias=kind == "qwen2",
        window=_window(get, kind, layers),
        positions=positions,
    )


def _rope_theta(get: _Getter) -> float:
    """The base of rotary positions that are not scaled."""
    theta = get.number("rope_theta", ROPE_THETA)
    for field in ("rope_parameters", "rope_scaling"):
        told = get.raw(field) or {}
        if not isinstance(told, dict):
            raise ValueError(f"{field} is {told!r}; it must be an object or null")
        kind = told.get("rope_type", told.get("type", "default"))
        rest = set(told) - {"rope_type", "type", "rope_theta"}
        if kind != "default" or rest - {"partial_rotary_factor"}:
            raise ValueError(
                f"{field} is {told!r}, and the executor scales no rotary positions; take a model "
                "without"
            )
        if told.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"{field}: partial_rotary_factor is not 1; take another model")
        theta = _Getter(told, field).number("rope_theta", theta)
    return theta


def _window(get: _Getter, kind: str, layers: int) -> int | None:
    """Tokens that a token attends to, in all layers alike."""
    types = get.words("layer_types")
    if kind == "llama" or types == {"full_attention"}:
        return None
    if kind == "mistral":
        # null says all tokens, silence what transformers takes then
        silent = get.raw("sliding_window", 0) == 0
        return MISTRAL_WINDOW if silent else _or_none(get, "sliding_window")
    if not get.flag("use_sliding_window", False):
        return None
    first = 0
    if types != {"sliding_attention"} and get.raw("max_window_layers", 28) != 0:
        first = get.whole("max_window_layers") if get.has("max_window_layers") else 28
    if first >= layers:
        return None
    if first > 0 or len(types) > 1:
        raise ValueError(
            "use_sliding_window is true for some layers only, which the executor does not do; take "
            "another model"
        )
    return get.whole("sliding_window")


def _or_none(get: _Getter, name: str) -> int | None:
    return get.whole(name) if get.has(name) else None


def to_hf_config(arch: Architecture) -> dict[str, Any]:
    """What ``transformers`` builds the architecture from.

    Parameters
    ----------
    arch
        Sizes of the transformer.

    Returns
    -------
    dict[str, Any]
        Fields of a ``config.json``; without dropout, as it was trained.

    Raises
    ------
    ValueError
        No model of ``transformers`` is built so.
    """
    said = {
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
        return said | {
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
    said |= {
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
    if arch.qkv_bias:
        sliding = {"use_sliding_window": arch.window is not None, "sliding_window": arch.window}
        model = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        return said | model | sliding | {"max_window_layers": 0 if arch.window else arch.layers}
    if arch.window is not None:
        model = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        return said | model | {"sliding_window": arch.window}
    return said | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
