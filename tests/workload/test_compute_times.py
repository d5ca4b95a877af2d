"""Calibration files: scaled to other stages, and rejected in one line if damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.workload.calibration import Calibration
from planner.workload.compute_times import FIELDS, ComputeTimes
from planner.workload.precision import Precision
from tests.conftest import tiny_workload


def document() -> dict[str, Any]:
    """Two devices with two layers each, F 1 s, B 2 s, H 3 s, update 0.5 s."""
    times = {"forward_s": 1.0, "backward_s": 2.0, "head_s": 3.0, "update_s": 0.5}
    return {
        "format": "planner.calibration",
        "schema_version": 1,
        "date": "2026-11-20",
        "software": {"cores": 2, "threads_per_rank": 1},
        "workload": "tiny-gpt2",
        "microbatch_samples": 1,
        "link_latency_s": 1e-4,
        "link_bandwidth_bytes_per_s": 1e9,
        "devices": {"a": {"layers": [0, 2], **times}, "b": {"layers": [2, 4], **times}},
    }


def loaded(tmp_path: Path, data: Any) -> Calibration:
    """Write and load the document."""
    path = tmp_path / "times.json"
    path.write_text(json.dumps(data))
    return Calibration.load(path)


def test_times_are_scaled_by_flops_and_samples(tmp_path: Path) -> None:
    """Three layers instead of two, microbatches of two: F takes three times as long, H twice."""
    found = loaded(tmp_path, document())
    workload = tiny_workload(microbatch_samples=2)
    times = found.compute_times(["a", "b"], workload, [[0], [1]], [(0, 3), (3, 4)])
    assert times.forward_s == pytest.approx((3.0, 1.0))
    assert times.head_s == (6.0, 6.0)
    assert "scaled" in times.source
    same = found.compute_times(["a", "b"], tiny_workload(), [[0], [1]], [(0, 2), (2, 4)])
    assert same.forward_s == (1.0, 1.0)
    assert "scaled" not in same.source
    assert Calibration.load(tmp_path / "times.json").to_json_text() == found.to_json_text()


def test_number_of_ranks_that_compute_in_parallel(tmp_path: Path) -> None:
    """By cores or GPUs, at least one."""
    for software, at_once in (
        ({"cores": 8, "threads_per_rank": 3}, 2),
        ({"cores": 2, "threads_per_rank": 4}, 1),
        ({"cores": 16, "threads_per_rank": 4, "gpus": 1}, 1),
    ):
        assert loaded(tmp_path, document() | {"software": software}).at_once == at_once


def test_recomputation_adds_the_measured_forward_pass(tmp_path: Path) -> None:
    """Of the stage, scaled; the file does not depend on recomputation."""
    found = loaded(tmp_path, document())
    workload, groups = tiny_workload(microbatch_samples=2), [[0], [1]]
    plain = found.compute_times(["a", "b"], workload, groups, [(0, 3), (3, 4)])
    again = found.compute_times(["a", "b"], workload, groups, [(0, 3), (3, 4)], (True, False))
    assert again.forward_s == plain.forward_s and again.head_s == plain.head_s
    assert again.backward_s == (plain.backward_s[0] + plain.forward_s[0], plain.backward_s[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "is not a calibration"),
        ({"schema_version": 7}, "schema_version is 7"),
        ({"devices": None}, "devices must be a mapping"),
        ({"microbatch_samples": 0}, "microbatch_samples is 0"),
        ({"link_bandwidth_bytes_per_s": 0}, "link_bandwidth_bytes_per_s is 0"),
        ({"software": {}}, "'cores'"),
        ({"software": {"cores": 2, "threads_per_rank": 1, "gpus": 0}}, "software.gpus is 0"),
        ({"devices": {"a": {**document()["devices"]["a"], "layers": [1, 1]}}}, "ascending range"),
        ({"devices": {"a": {**document()["devices"]["a"], "forward_s": -5}}}, "forward_s is -5"),
        (
            {"devices": {"a": {**document()["devices"]["a"], "head_s": float("nan")}}},
            "head_s is nan",
        ),
    ],
)
def test_damage_is_reported(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One line with file and field."""
    with pytest.raises(ValueError, match=message) as caught:
        loaded(tmp_path, document() | change)
    assert "times.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_workload_or_device_is_rejected(tmp_path: Path) -> None:
    """And layers that the workload does not have."""
    found = loaded(tmp_path, document())
    with pytest.raises(ValueError, match="is for workload 'tiny-gpt2'"):
        found.compute_times(["a", "b"], tiny_workload("llama"), [[0], [1]], [(0, 2), (2, 4)])
    with pytest.raises(ValueError, match="no device 'c'"):
        found.compute_times(["a", "c"], tiny_workload(), [[0], [1]], [(0, 2), (2, 4)])
    rounded = tiny_workload().replace(precision=Precision.parse("bf16"))
    with pytest.raises(ValueError, match=r"products in fp32, the plan's are in bf16; calibrate"):
        found.compute_times(["a", "b"], rounded, [[0], [1]], [(0, 2), (2, 4)])
    measured = loaded(tmp_path, document() | {"compute": "bf16"})
    assert Calibration.load(tmp_path / "times.json").to_json_text() == measured.to_json_text()
    measured.compute_times(["a", "b"], rounded, [[0], [1]], [(0, 2), (2, 4)])
    with pytest.raises(ValueError, match=r"times\.json: compute 'fp8' is unknown; .*; calibrate"):
        loaded(tmp_path, document() | {"compute": "fp8"})
    deep = document()
    deep["devices"]["b"]["layers"] = [2, 99]
    with pytest.raises(ValueError, match="layers up to 99"):
        loaded(tmp_path, deep).compute_times(
            ["a", "b"], tiny_workload(), [[0], [1]], [(0, 2), (2, 4)]
        )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("forward_s", (1.0, float("nan")), r"compute_times.forward_s is nan; it must be"),
        ("forward_s", 1.0, r"compute_times.forward_s must be a list, found 1.0"),
        ("update_s", (0.0, -1.0), r"compute_times.update_s is -1.0; it must be a number >= 0"),
        ("message_s", "0", r"compute_times.message_s is '0'; it must be"),
        ("source", None, r"source must be of type str, found None"),
    ],
)
def test_seconds_are_numbers(field: str, value: Any, message: str) -> None:
    """The compiled simulator relies on it."""
    given = {"source": "a stopwatch", **dict.fromkeys(FIELDS, (1.0, 1.0)), field: value}
    with pytest.raises(ValueError, match=message):
        ComputeTimes(**given)
