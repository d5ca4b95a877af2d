"""Supported families of models in ``config.json``, and the meaning of their fields.

Missing fields have the defaults of ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.utils.validate import short_repr
from planner.workload.experts import Experts
from planner.workload.hf_fields import ConfigFields
from planner.workload.layers import ROPE_THETA, Architecture, Family

MISTRAL_WINDOW = GEMMA_WINDOW = 4096
GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to all tokens."""
FIRST_WINDOW_LAYER = 28
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = {
    *("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python"),
    *(
        "gelu_10",
        "gelu_accurate",
        "quick_gelu",
        "relu",
        "relu2",
        "relu6",
        "mish",
        "tanh",
        "sigmoid",
    ),
}
"""Activation functions without parameters."""


@dataclass(frozen=True)
class Rules:
    """How files of one ``model_type`` are read.

    Attributes
    ----------
    reads
        Fields that the architecture depends on, or that change no size.
    build
        Builds the architecture.
    """

    reads: frozenset[str]
    build: Callable[[ConfigFields], Architecture]


ROTARY = {
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
    *("sliding_window", "layer_types", "tie_word_embeddings"),
}
ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
WINDOWS_FROM = {"use_sliding_window", "max_window_layers"}
ROUTING = {
    *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}
SPARSE_LAYERS = {"moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"}
GEMMA = {
    *("hidden_activation", "attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping"),
    "final_logit_softcapping",
}


def _gpt2(get: ConfigFields) -> Architecture:
    hidden, heads = get.integer("n_embd"), get.integer("n_head")
    positions = get.integer("n_positions", "n_ctx")
    notes = _activation(get, "activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh"))
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if get.flag(name, usual) is not usual:
            notes.append(f"{name} {not usual}")
    return Architecture(
        Family.GPT2,
        get.integer("n_layer"),
        hidden,
        heads,
        heads,
        get.integer("n_inner", default=4 * hidden),
        get.integer("vocab_size"),
        positions,
        get.flag("tie_word_embeddings", True),
        norm_eps=get.number("layer_norm_epsilon", 1e-5),
        positions=positions,
        priced_only=tuple(notes),
    )


def _llama(get: ConfigFields) -> Architecture:
    bias = get.flag("attention_bias", False)
    heads = None if get.has("num_key_value_heads") else get.integer("num_attention_heads")
    usual = {} if heads is None else {"num_key_value_heads": heads}
    return replace(
        _rotary(get, usual),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=get.flag("mlp_bias", False),
    )


def _mistral(get: ConfigFields) -> Architecture:
    # transformers ignores layer_types here; null means all tokens, a missing field the default
    has_window = "sliding_window" in get.names()
    window = get.integer_or_none("sliding_window") if has_window else MISTRAL_WINDOW
    return replace(_rotary(get), window=window)


def _phi3(get: ConfigFields) -> Architecture:
    heads = None if get.has("num_key_value_heads") else get.integer("num_attention_heads")
    usual = {"rms_norm_eps": 1e-5} | ({} if heads is None else {"num_key_value_heads": heads})
    arch = _rotary(get, usual)
    return replace(
        arch,
        window=get.integer_or_none("sliding_window"),
        priced_only=(*arch.priced_only, "matrices of queries, keys and values in one"),
    )


def _mixtral(get: ConfigFields) -> Architecture:
    arch = _rotary(get, {"rms_norm_eps": 1e-5, "rope_theta": 1e6})
    experts = Experts(
        get.integer("num_local_experts", "num_experts"),
        get.integer("num_experts_per_tok"),
        arch.ffn,
    )
    return replace(arch, window=get.integer_or_none("sliding_window"), experts=experts)


def _qwen2(get: ConfigFields) -> Architecture:
    return _with_window(get, replace(_rotary(get), qkv_bias=True), _from_a_layer_on(get))


def _qwen3(get: ConfigFields) -> Architecture:
    bias = get.flag("attention_bias", False)
    arch = replace(_rotary(get, {"head_dim": 128}), qk_norm=True, qkv_bias=bias, out_bias=bias)
    return _with_window(get, arch, _from_a_layer_on(get))


def _qwen2_moe(get: ConfigFields) -> Architecture:
    arch = _rotary(get)
    experts = replace(
        _qwen_experts(get, arch.layers),
        shared_ffn=get.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    arch = replace(arch, qkv_bias=get.flag("qkv_bias", True), experts=experts)
    if not get.flag("use_sliding_window", False):
        return arch
    if not get.strings("layer_types"):
        raise ValueError(
            "use_sliding_window is true, and releases of transformers differ in which layers that "
            "is; say layer_types"
        )
    return _with_window(get, arch, lambda _: False)


def _qwen3_moe(get: ConfigFields) -> Architecture:
    bias = get.flag("attention_bias", False)
    arch = replace(_rotary(get), qk_norm=True, qkv_bias=bias, out_bias=bias)
    arch = replace(arch, experts=_qwen_experts(get, arch.layers))
    # published by Qwen, and the default of this family
    if not get.flag("use_qk_norm", True):
        raise ValueError("use_qk_norm is false; models of qwen3_moe have norms of queries and keys")
    if (shared := get.raw("shared_expert_intermediate_size")) not in (None, 0):
        raise ValueError(
            f"field 'shared_expert_intermediate_size' is {short_repr(shared)}; models of "
            "qwen3_moe have "
            "no shared expert, so it must be 0"
        )
    sliding = get.flag("use_sliding_window", False)
    return replace(arch, window=get.integer("sliding_window")) if sliding else arch


def _gemma2(get: ConfigFields) -> Architecture:
    return _with_window(get, _gemma(get, {}), lambda k: k % 2 == 0, GEMMA_WINDOW)


def _gemma3(get: ConfigFields) -> Architecture:
    pattern = get.integer(
        "sliding_window_pattern", "_sliding_window_pattern", default=GEMMA3_PATTERN
    )
    # published files leave these out
    usual = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    }
    arch = replace(_gemma(get, usual), qk_norm=True)
    return _with_window(get, arch, lambda k: (k + 1) % pattern != 0, GEMMA_WINDOW)


MODELS: Mapping[str, Rules] = {
    "gpt2": Rules(
        frozenset(
            {
                *("n_embd", "n_head", "n_layer", "n_inner", "vocab_size", "n_positions", "n_ctx"),
                *("layer_norm_epsilon", "tie_word_embeddings", "activation_function"),
                *("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
            }
        ),
        _gpt2,
    ),
    "llama": Rules(frozenset(ROTARY | WINDOWS_FROM | {"attention_bias", "mlp_bias"}), _llama),
    "mistral": Rules(frozenset(ROTARY | WINDOWS_FROM), _mistral),
    "mixtral": Rules(frozenset(ROTARY | ROUTING), _mixtral),
    "phi3": Rules(frozenset(ROTARY | {"original_max_position_embeddings"}), _phi3),
    "qwen2": Rules(frozenset(ROTARY | WINDOWS_FROM), _qwen2),
    "qwen2_moe": Rules(
        frozenset(
            ROTARY
            | WINDOWS_FROM
            | ROUTING
            | SPARSE_LAYERS
            | {"shared_expert_intermediate_size", "qkv_bias"}
        ),
        _qwen2_moe,
    ),
    "qwen3": Rules(frozenset(ROTARY | WINDOWS_FROM | {"attention_bias"}), _qwen3),
    "qwen3_moe": Rules(
        frozenset(
            ROTARY
            | WINDOWS_FROM
            | ROUTING
            | SPARSE_LAYERS
            | {"attention_bias", "use_qk_norm", "shared_expert_intermediate_size"}
        ),
        _qwen3_moe,
    ),
    "gemma2": Rules(frozenset(ROTARY | GEMMA | {"sliding_window_size"}), _gemma2),
    "gemma3_text": Rules(
        frozenset(
            ROTARY
            | GEMMA
            | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"}
        ),
        _gemma3,
    ),
}
"""Rules by ``model_type``."""


def _rotary(get: ConfigFields, usual: Mapping[str, Any] | None = None) -> Architecture:
    """Common fields of models with rotary positions; ``usual`` are the defaults."""
    usual = usual or {}
    heads, hidden = _size(get, "num_attention_heads", usual), get.integer("hidden_size")
    positions = _size(get, "max_position_embeddings", usual)
    size = get.integer("head_dim") if get.has("head_dim") else usual.get("head_dim")
    theta, notes = _rope(get, usual.get("rope_theta", ROPE_THETA))
    layers = get.integer("num_hidden_layers")
    _layer_types(get, layers)  # also where nothing follows from them
    return Architecture(
        Family.LLAMA,
        layers,
        hidden,
        heads,
        _size(get, "num_key_value_heads", usual),
        get.integer("intermediate_size"),
        _size(get, "vocab_size", usual),
        positions,
        get.flag("tie_word_embeddings", False),
        head_size=None if size is not None and size * heads == hidden else size,
        norm_eps=get.number("rms_norm_eps", usual.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        positions=positions,
        priced_only=(*notes, *_activation(get, "hidden_act", "silu", ("silu", "swish"))),
    )


def _size(get: ConfigFields, name: str, usual: Mapping[str, Any]) -> int:
    return get.integer(name, default=usual.get(name))


def _gemma(get: ConfigFields, usual: Mapping[str, Any]) -> Architecture:
    """Common fields of Gemma 2 and 3, covered by `Family.GEMMA`."""
    _activation(get, "hidden_activation", "gelu_pytorch_tanh", ())
    bias = get.flag("attention_bias", False)
    return replace(
        _rotary(get, {"head_dim": 256, **usual}),
        kind=Family.GEMMA,
        tied=get.flag("tie_word_embeddings", True),
        rope_theta=ROPE_THETA,
        qkv_bias=bias,
        out_bias=bias,
        post_norms=True,
        priced_only=(),
    )


def _qwen_experts(get: ConfigFields, layers: int) -> Experts:
    interval = get.integer("decoder_sparse_step", default=1)
    dense = set(get.indices("mlp_only_layers", layers))
    return Experts(
        get.integer("num_experts", "num_local_experts"),
        get.integer("num_experts_per_tok"),
        get.integer("moe_intermediate_size"),
        dense_layers=tuple(k for k in range(layers) if k in dense or (k + 1) % interval),
    )


def _activation(get: ConfigFields, name: str, usual: str, executed: tuple[str, ...]) -> list[str]:
    """A note if the executor lacks the activation; raises if it may have parameters."""
    activation = get.string(name, usual)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{name} {short_repr(activation)} may have parameters of its own, which are not "
            f"counted here; it must be one of {', '.join(sorted(ACTIVATIONS))}"
        )
    return [] if activation in executed else [f"{name} {activation}"]


def _rope(get: ConfigFields, theta: float) -> tuple[float, list[str]]:
    """The base of rotary positions, and notes on variants that the executor lacks."""
    notes = []
    theta = get.number("rope_theta", theta)
    share = get.number("partial_rotary_factor", 1.0)
    for field in ("rope_parameters", "rope_scaling"):
        settings = get.under(field)
        kind = settings.raw("rope_type", settings.raw("type", "default"))
        if kind != "default" or settings.names() - ROPE:
            notes.append(f"{field} of rope_type {short_repr(kind)}")
        share = settings.number("partial_rotary_factor", share)
        theta = settings.number("rope_theta", theta)
    if share != 1:
        notes.append(f"partial_rotary_factor {share:g}")
    return theta, notes


def _from_a_layer_on(get: ConfigFields) -> Callable[[int], bool]:
    """Qwen's rule for layers with a window, in files without ``layer_types``."""
    if not get.flag("use_sliding_window", False):
        return lambda _: False
    first = 0
    if get.raw("max_window_layers", FIRST_WINDOW_LAYER) != 0:
        first = get.integer("max_window_layers", default=FIRST_WINDOW_LAYER)
    return lambda k: k >= first


def _layer_types(get: ConfigFields, layers: int) -> list[str]:
    """One type per layer; empty if missing."""
    types = get.strings("layer_types")
    strange = sorted(set(types) - {SLIDING, FULL})
    if strange:
        raise ValueError(
            f"layer_types has {short_repr(strange[0])}, which is not priced here; it must be "
            f"{FULL} or {SLIDING}"
        )
    if types and len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries for {layers} layers; give one each")
    return types


def _with_window(
    get: ConfigFields,
    arch: Architecture,
    slides: Callable[[int], bool],
    usual: int | None = None,
) -> Architecture:
    """The architecture with windows by layer type, or by a rule; ``usual`` is the default size."""
    types = _layer_types(get, arch.layers)
    if usual is None and not get.flag("use_sliding_window", False):
        return arch
    all_layers = range(arch.layers)
    full = [k for k in all_layers if not (types[k] == SLIDING if types else slides(k))]
    if len(full) == arch.layers or (usual is not None and get.raw("sliding_window", 0) is None):
        return arch
    return replace(
        arch, window=get.integer("sliding_window", default=usual), full_layers=tuple(full)
    )
