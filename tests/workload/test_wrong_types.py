"""Layers, workloads and calibrations with values of wrong types are rejected in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from planner.workload.calibration import Calibration
from planner.workload.layers import Architecture, Layer
from planner.workload.workload import Workload


def layer(**changes: Any) -> Layer:
    """A small layer with a change."""
    good = {"name": "a", "parameters": 1, "forward_flops": 1, "output_bytes": 1, "saved_bytes": 1}
    return Layer(**{**good, **changes})


def workload(**changes: Any) -> Workload:
    """Two layers with a change."""
    layers = {"stem": layer(), "layers": [layer(), layer()], "head": layer()}
    return Workload(**{"name": "w", **layers, "batch_samples": 4, **changes})


def arch(**changes: Any) -> Architecture:
    """A small transformer with a change."""
    sizes = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 8, "vocabulary": 10}
    return Architecture(**{"kind": "gpt2", **sizes, "sequence": 4, **changes})


def calibration(**changes: Any) -> Calibration:
    """A calibration of one device with a change."""
    seconds = dict.fromkeys(("forward_s", "backward_s", "head_s", "update_s"), 0.1)
    good = {
        "date": "2026-01-01",
        "software": {},
        "workload": "w",
        "microbatch_samples": 1,
        "times": {"a": seconds},
        "layers": {"a": (0, 1)},
        "link_latency_s": 0.0,
        "link_bandwidth_bytes_per_s": 1e9,
    }
    return Calibration(**{**good, **changes})


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (layer, {"name": 5}, "name of a layer must be of type str, found 5"),
    (layer, {"parameters": 1.5}, "layer 'a': parameters is 1.5; it must be a whole number"),
    (layer, {"parameters": None}, "parameters is None"),
    (layer, {"forward_flops": "x"}, "layer 'a': forward_flops is 'x'; it must be a number >= 0"),
    (layer, {"output_bytes": math.nan}, "output_bytes is nan"),
    (layer, {"saved_bytes": -1}, "saved_bytes is -1"),
    (workload, {"layers": 5}, "layers must be a list"),
    (workload, {"layers": (1, 2)}, "layers[0] must be of type Layer, found 1"),
    (workload, {"stem": None}, "stem must be of type Layer, found None"),
    (workload, {"batch_samples": 1.5}, "batch_samples is 1.5; it must be a whole number"),
    (workload, {"microbatch_samples": "2"}, "microbatch_samples is '2'"),
    (workload, {"state_bytes_per_parameter": None}, "state_bytes_per_parameter is None"),
    (workload, {"architecture": 5}, "architecture must be of type Architecture, found 5"),
    (arch, {"kind": "bert"}, "architecture kind 'bert' is unknown; choose one of gpt2, llama"),
    (arch, {"layers": 2.5}, "architecture layers is 2.5"),
    (arch, {"heads": 0}, "architecture heads is 0"),
    (arch, {"heads": 3}, "hidden 8 (hidden_size) must be a multiple of heads 3"),
    (calibration, {"date": None}, "date must be of type str"),
    (calibration, {"microbatch_samples": 1.5}, "microbatch_samples is 1.5"),
    (calibration, {"times": None}, "times must be a mapping"),
    (calibration, {"times": {"a": {}}}, "devices.a.forward_s is missing"),
    (calibration, {"layers": {"a": (0, 1, 2)}}, "devices.a.layers is [0, 1, 2]"),
    (calibration, {"link_latency_s": "x"}, "link_latency_s is 'x'"),
]


@pytest.mark.parametrize(("make", "changes", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_types_are_reported(
    make: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    """Rule, value, remedy."""
    make()
    with pytest.raises(ValueError) as caught:
        make(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": 1.5}, "architecture sequence is 1.5"),
        ({"precision": "x"}, "precision 'x' is unknown; choose one of bf16, fp16, fp32"),
        ({"batch_samples": 2.5}, "batch_samples is 2.5"),
    ],
)
def test_invalid_overrides_of_presets(changes: dict[str, Any], message: str) -> None:
    """And invalid preset names."""
    with pytest.raises(ValueError, match=message):
        Workload.preset("gpt2-tiny", **changes)
    name: Any = ["gpt2-tiny"]
    with pytest.raises(ValueError, match="no workload"):
        Workload.preset(name)
