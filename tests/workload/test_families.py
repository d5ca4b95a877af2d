"""Model families: parameters are those of ``transformers`` and as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz.configs import good_configs
from planner.workload.hf_config import WITH_IMAGES, to_hf_config
from planner.workload.hf_families import MODELS
from planner.workload.layers import Architecture
from planner.workload.transformer import active_parameters
from planner.workload.workload import Workload
from tests.workload.published_configs import PUBLISHED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SAMPLES, TOKENS = 2, 12
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 12,
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
TINY: dict[str, dict[str, Any]] = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "attention_bias": True},
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        **ROUTED,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen2 moe": {
        "model_type": "qwen2_moe",
        **ROUTED,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [0],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"model_type": "gemma2"},
    "gemma3": {"model_type": "gemma3_text"},
    "gemma3 untied": {"model_type": "gemma3_text", "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral"},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
}
"""Small ones, with what the published do not have."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 64,
}


def workload_of(config: dict[str, Any], folder: Path, **changes: Any) -> Workload:
    """Load a workload from a config."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return Workload.from_hf_config(path, **changes)


def architecture(config: dict[str, Any], folder: Path) -> Architecture:
    """Load an architecture from a config."""
    found = workload_of(config, folder).architecture
    assert found is not None
    return found


def text_model(config: dict[str, Any], device: str) -> Any:
    """Build the language model with ``transformers``."""
    said = transformers.AutoConfig.for_model(**config)
    said = getattr(said, "text_config", said)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(said)


def parameters(model: Any) -> int:
    """Count parameters; a tied matrix counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str, tmp_path: Path) -> None:
    """Exactly those of ``transformers``, and as published up to rounding."""
    published = PUBLISHED[name]
    work = workload_of(published.config, tmp_path)
    arch = work.architecture
    assert arch is not None
    assert work.parameters == parameters(text_model(published.config, "meta"))
    # written again by this release of transformers, with other names and all that was left out
    transformers.AutoConfig.for_model(**published.config).save_pretrained(tmp_path / "again")
    again = Workload.from_hf_config(tmp_path / "again" / "config.json")
    assert again.architecture == arch
    embedding = (1 if arch.tied else 2) * arch.vocabulary * arch.hidden
    for found, said in (
        (work.parameters, published.all_billions),
        (active_parameters(arch), published.active_billions),
        (work.parameters - embedding, published.inner_billions),
    ):
        if said is not None:
            # some round, some cut
            unit = 10.0 ** -len(str(said).partition(".")[2])
            assert -0.5 * unit <= found / 1e9 - said < unit, (found, said)


@pytest.mark.parametrize("name", [*TINY, "gpt2"])
def test_parameters_and_flops_of_small_models(name: str, tmp_path: Path) -> None:
    """FLOPs of matrix products are counted in a run of ``transformers``."""
    from torch.utils.flop_counter import FlopCounterMode

    config = GPT2 if name == "gpt2" else SMALL | TINY[name]
    work = workload_of(config, tmp_path, sequence=TOKENS)
    model = text_model(config, "cpu").eval()
    # fused kernels compute the same and are not counted
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    assert work.parameters == parameters(model)
    tokens = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 61
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(tokens)
    # the angles of rotary positions are a product too
    assert counted.get_total_flops() == pytest.approx(SAMPLES * work.forward_flops, rel=1e-4)


def test_layers_of_a_model_differ(tmp_path: Path) -> None:
    """Experts in every second layer but one; windows in five of six."""
    work = workload_of(SMALL | TINY["qwen3 moe"], tmp_path, sequence=TOKENS)
    sparse = [layer.parameters > work.layers[0].parameters for layer in work.layers]
    assert sparse == [False, True, False, False, False, True]
    # 8 experts of 3 x 32 x 20, and 32 x 8 of the router, for 3 x 32 x 48
    assert work.layers[1].parameters - work.layers[0].parameters == 8 * 1920 + 256 - 4608
    assert work.layers[1].forward_flops - work.layers[0].forward_flops == pytest.approx(
        2 * TOKENS * (3 * 1920 + 256 - 4608)
    )
    long = workload_of(SMALL | TINY["gemma3"] | {"sliding_window": 5}, tmp_path, sequence=TOKENS)
    full, windowed = long.layers[5].forward_flops, long.layers[0].forward_flops
    assert [layer.forward_flops for layer in long.layers] == [*[windowed] * 5, full]
    # queries of 4 heads of 12: scores and values
    assert full - windowed == pytest.approx(4 * 48 * TOKENS * (TOKENS - 5))
    short = workload_of(
        SMALL | TINY["gemma3"] | {"sliding_window": TOKENS}, tmp_path, sequence=TOKENS
    )
    assert {layer.forward_flops for layer in short.layers} == {full}


LLAMA = SMALL | {"model_type": "llama"}
QWEN2 = SMALL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": SMALL | {"model_type": "gemma3_text"},
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of rope_type 'yarn'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA | {"mlp_bias": True}, "biases of a gated feed-forward part"),
        (LLAMA | {"attention_bias": True}, "biases of attention's output"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act gelu"),
        (QWEN2 | {"max_window_layers": 1}, "a window in some of the layers"),
        (SMALL | TINY["mixtral"], "experts"),
        (SMALL | TINY["gemma2"], "Gemma's layers"),
        (GEMMA3, "Gemma's layers"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights False"),
    ],
)
def test_models_that_are_for_planning_only(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Planned, stored as JSON, with a reason why they cannot run; no exported config."""
    work = workload_of(config, tmp_path)
    arch = work.architecture
    assert arch is not None
    assert said in arch.unexecuted[0]
    assert Workload.from_dict(json.loads(json.dumps(work.to_dict()))) == work
    with pytest.raises(ValueError, match="the executor does not do"):
        to_hf_config(arch)


MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
QWEN3_CODER: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "moe_intermediate_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "qkv_bias": False,
    "use_qk_norm": True,
    "shared_expert_intermediate_size": 0,
}
PHI3: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
}
"""Phi-3-mini-128k."""


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(MISTRAL, 7_248_023_552), (QWEN3_CODER, 480_154_875_392), (PHI3, 3_821_079_552)],
)
def test_irrelevant_config_fields(config: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    """Text generation settings of older ``transformers`` releases, and notes of tools."""
    notes = {
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 3,
        "do_sample": True,
        "max_new_tokens": 128,
        "suppress_tokens": [1],
        "is_llama_config": True,
        "max_sequence_length": 2048,
        "unsloth_fixed": True,
        "unsloth_version": "2024.9",
    }
    assert workload_of(config, tmp_path).parameters == parameters
    assert workload_of(config | notes, tmp_path).parameters == parameters


@pytest.mark.parametrize(
    "name",
    [
        *("MistralModel", "MistralForRewardModel", "MistralForCausalLMWithValueHead"),
        *(
            "EagleMistralForCausalLMEagle3",
            "MistralForTokenClassification",
            "MistralForTextEncoding",
        ),
        *("EagleMistralForCausalLM", "MedusaMistralForCausalLM", "RewardForCausalLM", 5),
    ],
)
def test_models_without_a_head_over_the_vocabulary(name: object, tmp_path: Path) -> None:
    """The head is not counted."""
    for given in ([name], name, ["MistralForCausalLM", name]):
        with pytest.raises(ValueError, match=f"architectures is {name!r}, whose head is not over"):
            workload_of(MISTRAL | {"architectures": given}, tmp_path)
    for given in (None, [], ["MistralForCausalLM"], "MistralForCausalLM"):
        assert workload_of(MISTRAL | {"architectures": given}, tmp_path).parameters > 7e9


def test_vision_part_is_left_out(tmp_path: Path) -> None:
    """Only the text model is planned, which the workload states."""
    alone = workload_of(GEMMA3["text_config"], tmp_path)
    with_images = workload_of(GEMMA3 | {"vision_config": {"hidden_size": 8}}, tmp_path)
    assert with_images.layers == alone.layers
    assert "sees images" in with_images.architecture.priced_only[-1]
    untied = workload_of(GEMMA3 | {"tie_word_embeddings": False}, tmp_path)
    assert untied.parameters - alone.parameters == 61 * 32


@pytest.mark.parametrize("config", good_configs(), ids=lambda config: str(config["model_type"]))
def test_undamaged_configs_are_valid(config: dict[str, Any], tmp_path: Path) -> None:
    """A config of every family, with the sizes of ``transformers``."""
    assert {one["model_type"] for one in good_configs()} == {*MODELS, WITH_IMAGES}
    assert workload_of(config, tmp_path).parameters == parameters(text_model(config, "meta"))


def test_attention_windows_of_configs(tmp_path: Path) -> None:
    """By the family's rule, or by a list of layers."""
    types = ["sliding_attention", "full_attention"] * 3
    found = {
        "qwen2": architecture(QWEN2 | {"max_window_layers": 4}, tmp_path),
        "listed": architecture(QWEN2 | {"layer_types": types}, tmp_path),
        "gemma2": architecture(SMALL | TINY["gemma2"], tmp_path),
        "gemma3": architecture(
            SMALL | TINY["gemma3"] | {"sliding_window": 7, "sliding_window_pattern": 3}, tmp_path
        ),
        "none": architecture(SMALL | TINY["gemma2"] | {"sliding_window": None}, tmp_path),
        "mixtral": architecture(SMALL | TINY["mixtral"] | {"sliding_window": 11}, tmp_path),
        "off": architecture(QWEN2 | {"use_sliding_window": False}, tmp_path),
    }
    assert {name: (arch.window, arch.full_layers) for name, arch in found.items()} == {
        "qwen2": (9, (0, 1, 2, 3)),
        "listed": (9, (1, 3, 5)),
        "gemma2": (4096, (1, 3, 5)),
        "gemma3": (7, (2, 5)),
        "none": (None, ()),
        "mixtral": (11, ()),
        "off": (None, ()),
    }


MOE = SMALL | TINY["qwen3 moe"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MOE | {"num_experts": None}, "field 'num_experts' is missing"),
        (
            MOE | {"architectures": ["Qwen3MoeForSequenceClassification"]},
            "architectures is 'Qwen3MoeForSequenceClassification', whose head is not over",
        ),
        (MOE | {"use_qk_norm": False}, "use_qk_norm is false"),
        (MOE | {"shared_expert_intermediate_size": 8}, "no shared expert, so it must be 0"),
        (MOE | {"num_experts_per_tok": 9}, "experts active is 9, more than the 8"),
        (MOE | {"mlp_only_layers": [6]}, "mlp_only_layers is .*whole numbers from 0 to 5"),
        (MOE | {"mlp_only_layers": "none"}, "mlp_only_layers is 'none'"),
        (MOE | {"shared_expert_intermediate_size": 4}, "field 'shared_expert_intermediate_size'"),
        (MOE | {"n_shared_experts": 1}, r"field 'n_shared_experts' \(1\) is not known"),
        (SMALL | TINY["gemma2"] | {"layer_types": ["full_attention"]}, "1 entries for 6 layers"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 6}, "'linear_attention', which is not"),
        (SMALL | TINY["gemma2"] | {"hidden_activation": "xielu"}, "may have parameters of its own"),
        (LLAMA | {"hidden_act": 3}, "hidden_act is 3; it must be a name"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "field 'quantization_config'"),
        (
            SMALL | TINY["qwen2 moe"] | {"use_sliding_window": True, "sliding_window": 3},
            "say layer_types",
        ),
        ({"model_type": "gemma3"}, "text_config is None; it must be an object"),
        (
            {"model_type": "gemma3", "text_config": LLAMA},
            "model_type is 'llama'; it must be gemma3",
        ),
        (GEMMA3 | {"audio_config": {"a": 1}}, "field 'audio_config'"),
        (GEMMA3 | {"text_config": SMALL | {"hidden_size": -1}}, "text_config: hidden_size is -1"),
        ({"model_type": ["llama"]}, "is not supported"),
    ],
)
def test_unsupported_configs(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One line that names file and field."""
    with pytest.raises(ValueError, match=message) as caught:
        workload_of(config, tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in said


def test_default_sequence_length_is_limited(tmp_path: Path) -> None:
    """At most 8,192 tokens; the model keeps its positions."""
    config = LLAMA | {"max_position_embeddings": 131_072}
    for sequence, expected in ((None, 8192), (512, 512), (20_000, 20_000)):
        arch = workload_of(config, tmp_path, sequence=sequence).architecture
        assert arch is not None
        assert (arch.sequence, arch.position_rows) == (expected, 131_072)
    short = workload_of(LLAMA | {"max_position_embeddings": 300}, tmp_path, sequence=None)
    assert short.architecture is not None and short.architecture.sequence == 300
