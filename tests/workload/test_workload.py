"""Workloads, compared with the papers' numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.workload.hf_config import architecture_of, to_hf_config
from planner.workload.layers import Architecture, Family
from planner.workload.presets import PRESETS
from planner.workload.workload import Workload


@pytest.mark.parametrize(
    ("name", "parameters", "within"),
    [
        ("gpt3-1.3b", 1.3e9, 0.10),
        ("llama-500m", 0.5e9, 0.26),
        ("llama-1.5b", 1.5e9, 0.10),
        ("llama-3-1b", 1.2358e9, 0.001),
        ("gpt2-tiny", 14e6, 0.02),
        ("gpt2-small", 180e6, 0.10),
        ("gpt2-medium", 405e6, 0.01),
        ("gpt2-large", 800e6, 0.05),
        ("albert-large", 17.7e6, 0.06),
        ("resnet-50", 25.557e6, 0.001),
        ("swarm-base", 12 * 7.08e6, 0.01),
        ("swarm-xxlarge", 12 * 201e6, 0.01),
        ("swarm-gpt3", 12 * 1.81e9, 0.01),
    ],
)
def test_parameters_are_the_papers(name: str, parameters: float, within: float) -> None:
    """Table 1 of DiLoCo-SWARM, Table 6 of SWARM, otherwise model names."""
    assert Workload.preset(name).parameters == pytest.approx(parameters, rel=within)


@pytest.mark.parametrize(
    ("name", "flops"), [("swarm-base", 2.2e10), ("swarm-xxlarge", 6.2e11), ("swarm-gpt3", 5.5e12)]
)
def test_swarm_layer_flops(name: str, flops: float) -> None:
    """Table 6 counts forward and backward of one layer for 512 tokens, without attention."""
    assert 3 * Workload.preset(name).layers[0].forward_flops == pytest.approx(flops, rel=0.15)


def test_resnet_50_flops() -> None:
    """4.09 G multiply-adds at 224 x 224."""
    assert Workload.preset("resnet-50").forward_flops == pytest.approx(2 * 4.09e9, rel=0.01)


def test_gpt3_stage_matches_the_dtfm_constants() -> None:
    """Three of 24 layers: 0.65 GB of gradients in the paper's rounding, 8 MB per sample."""
    w = Workload.preset("gpt3-1.3b")
    split = w.even_split(8)
    assert split[0] == (0, 3)
    gradients = w.gradient_bytes(split, head_stage=7)
    assert gradients[3] == pytest.approx(0.65e9, rel=0.08)
    assert w.activation_bytes(split)[0] == 2048 * 2048 * 2


@pytest.mark.parametrize("name", PRESETS)
def test_presets_state_their_source_and_survive_json(name: str) -> None:
    """Every preset."""
    w = Workload.preset(name)
    assert w.source
    assert Workload.from_dict(json.loads(json.dumps(w.to_dict()))) == w


def test_even_split_covers_all_layers() -> None:
    """Longer stages come first."""
    assert Workload.preset("gpt2-tiny").even_split(3) == ((0, 2), (2, 3), (3, 4))
    with pytest.raises(ValueError, match="cannot be cut into 5 stages"):
        Workload.preset("gpt2-tiny").even_split(5)


def test_overrides() -> None:
    """A shorter sequence shrinks activations; unknown fields are rejected."""
    short = Workload.preset("gpt2-tiny", sequence=128, batch_samples=16)
    assert short.layers[0].output_bytes == 128 * 128 * 2
    assert short.batch_samples == 16
    with pytest.raises(ValueError, match="no field 'colour'"):
        Workload.preset("gpt2-tiny", colour=1)
    with pytest.raises(ValueError, match="no workload 'gpt9'"):
        Workload.preset("gpt9")
    with pytest.raises(ValueError, match="is no transformer whose sequence"):
        Workload.preset("resnet-50", sequence=3)
    with pytest.raises(ValueError, match="multiple of heads"):
        Workload.transformer("x", Architecture(Family.GPT2, 1, 10, 3, 3, 4, 5, 6), batch_samples=1)


def test_hugging_face_configs(tmp_path: Path) -> None:
    """GPT-2 and Llama fields; other values are rejected with their type."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 8192,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
            }
        )
    )
    made = Workload.from_hf_config(path, batch_samples=61)
    assert made.name == tmp_path.name
    assert made.parameters == Workload.preset("llama-3-1b").parameters
    gpt2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
    path.write_text(json.dumps({"model_type": "gpt2", **gpt2}))
    assert Workload.from_hf_config(path).parameters == pytest.approx(124.4e6, rel=0.001)
    path.write_text(json.dumps({"model_type": "gpt2", **gpt2, "n_embd": None}))
    with pytest.raises(ValueError, match="field 'n_embd' is missing"):
        Workload.from_hf_config(path)
    path.write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="'mamba' is not supported"):
        Workload.from_hf_config(path)


LLAMA_CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "llama"}, {"norm_eps": 1e-6, "rope_theta": 1e4, "window": None}),
        ({"model_type": "llama", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rope_theta": 7.0},
        ),
        ({"model_type": "llama", "head_dim": 16}, {"head_size": None, "attention_size": 16}),
        ({"model_type": "llama", "head_dim": 32}, {"head_size": 32, "attention_size": 32}),
        ({"model_type": "mistral"}, {"window": 4096}),
        ({"model_type": "mistral", "sliding_window": None}, {"window": None}),
        ({"model_type": "qwen2", "sliding_window": 9}, {"qkv_bias": True, "window": None}),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            {"window": 9},
        ),
        ({"model_type": "qwen3", "sliding_window": 9}, {"qk_norm": True, "head_size": 128}),
        (
            {
                "model_type": "qwen3",
                "head_dim": 16,
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 2,
            },
            {"window": 9, "head_size": None, "qkv_bias": False},
        ),
    ],
)
def test_fields_of_configs(
    changes: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    """They become the architecture, also through a plan file and an exported config."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG | changes))
    work = Workload.from_hf_config(path)
    arch = work.architecture
    assert arch is not None
    assert {name: getattr(arch, name) for name in expected} == expected
    assert Workload.from_dict(json.loads(json.dumps(work.to_dict()))) == work
    assert architecture_of(to_hf_config(arch), "made") == arch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "qk_norm": True}, r"field 'qk_norm' \(True\) is not known"),
        ({"model_type": "llama", "head_dim": 7}, "cannot be rotated"),
        ({"model_type": "llama", "rope_scaling": "default"}, "must be an object or null"),
        ({"model_type": "llama", "embedding_multiplier": 0}, "embedding_multiplier"),
        ({"model_type": "llama", "tie_word_embeddings": "no"}, "must be true or false"),
        ({"model_type": "mistral", "layer_types": 3}, "must be a list of names"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "a"},
            "max_window_layers is 'a'",
        ),
        (
            {"model_type": "mistral", "num_key_value_heads": None},
            "'num_key_value_heads' is missing",
        ),
    ],
)
def test_unsupported_configs(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """One line that names file and field."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG | changes))
    with pytest.raises(ValueError, match=message) as caught:
        Workload.from_hf_config(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_gpt2_keeps_its_positions_for_shorter_samples(tmp_path: Path) -> None:
    """The position matrix keeps its size; longer samples are rejected."""
    gpt2 = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 10, "n_positions": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **gpt2}))
    assert Workload.from_hf_config(path, sequence=4).parameters == (
        Workload.from_hf_config(path).parameters
    )
    with pytest.raises(ValueError, match="sequence 33 is longer than the 32 positions"):
        Workload.from_hf_config(path, sequence=33)
    path.write_text(json.dumps({"model_type": "gpt2", **gpt2, "add_cross_attention": True}))
    with pytest.raises(ValueError, match="'add_cross_attention'"):
        Workload.from_hf_config(path)


def test_architectures_of_older_plan_files_read_and_hash_as_before() -> None:
    """Newer fields are omitted at their default."""
    data = Workload.preset("gpt2-tiny").to_dict()["architecture"]
    assert set(data) == {
        *("kind", "layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence", "tied")
    }


PUBLISHED = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
"""Such as models of these sizes come with, and their parameters."""


@pytest.mark.parametrize(("name", "parameters"), [("gpt2", 124_439_808), ("qwen2", 494_032_768)])
def test_published_configs(name: str, parameters: int, tmp_path: Path) -> None:
    """They are accepted, with the published number of parameters."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]))
    assert Workload.from_hf_config(path).parameters == parameters
