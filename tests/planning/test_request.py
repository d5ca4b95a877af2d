"""`PlanRequest`: frozen, validated, and equal whether given whole or by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.planning import shape
from planner.training_plan.model import Routing
from tests.conftest import random_network, tiny_workload


def cluster_of(n: int) -> pl.Cluster:
    """Equal devices on different links."""
    return pl.Cluster(random_network(n), pl.Devices(1e9, 16e9))


def test_keyword_arguments_replace_fields() -> None:
    """Both ways give the same plan."""
    request = pl.PlanRequest(stages=2, schedule="gpipe", codec="int8")
    stop = pl.MaxIterations(20)
    given = pl.plan(cluster_of(4), tiny_workload(), request=request, stop=stop).plan
    by_field = pl.plan(
        cluster_of(4),
        tiny_workload(),
        request=pl.PlanRequest(stages=4, codec="int8"),
        stop=stop,
        stages=2,
        schedule="gpipe",
    ).plan
    assert given is not None and by_field is not None
    assert given.content_hash == by_field.content_hash
    assert request.replace(stages=4).stages == 4 and request.stages == 2
    with pytest.raises(AttributeError):
        request.stages = 3  # type: ignore[misc]


def test_layers_and_microbatches_can_be_fixed() -> None:
    """As further decisions."""
    fixed = pl.plan(
        cluster_of(4),
        tiny_workload(),
        stages=2,
        stage_layers=[(0, 3), (3, 4)],
        microbatch_samples=2,
        stop=pl.MaxIterations(20),
    ).plan
    assert fixed is not None and pl.check(fixed) == []
    assert fixed.stage_layers == ((0, 3), (3, 4))
    assert len(fixed.schedules[0].paths) == 4
    shapes = pl.plan(
        cluster_of(4),
        tiny_workload(),
        stages="auto",
        microbatch_samples=2,
        stop=pl.MaxIterations(20),
    )
    assert {c.microbatch_samples for c in shapes.candidates} == {2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "a plan has no 'colour' to ask for; it has stages, pipelines"),
        ({"stages": 2.0}, "stages must be a whole number, found 2.0"),
        ({"stages": 2, "stage_layers": [(0, 2), (3, 4)]}, "2 ranges that follow each other"),
        ({"stages": 2, "stage_layers": [(0, 4)]}, "stage_layers must be 2 ranges"),
        (
            {"stages": "auto", "stage_layers": [(0, 4)]},
            "stage_layers follows from stages 'auto'; leave stage_layers out",
        ),
        ({"stages": 2, "path_stages": 2, "stage_layers": [(0, 4)]}, "lists 1 stages but there"),
        ({"stages": 2, "averaging": "fair"}, "averaging 'fair' is unknown; choose one of equal"),
        ({"stages": 2, "head": "middle"}, "head 'middle' is unknown; choose one of first, last"),
        ({"stages": 2, "calibration": "times.json"}, "calibration must be of type Calibration"),
        ({"stages": 2, "seed": -1}, "seed is -1; it must be a whole number >= 0"),
        ({"stages": 2, "group_size": 1}, "group_size is 1; it must be at least 2"),
        ({"stages": 2, "microbatch_samples": 0}, "microbatch_samples is 0; it must be at least 1"),
        ({"stages": 2, "stage_layers": 3}, "stage_layers must list a range"),
        ({"stages": 2, "stage_layers": [(0, 1, 2)]}, "stage_layers must list a range"),
        ({"stage_sizes": 5, "path_stages": 2}, "stage_sizes must list the devices of every stage"),
        ({"stage_sizes": (4, 0), "path_stages": 2}, "a stage size must be at least 1"),
        ({"stages": 2, "network_name": 5}, "network_name must be of type str, found 5"),
        ({"pipelines": 2}, "the shape of the plan is missing; give stages, or 'auto'"),
        (
            {"schedule": "gpipe"},
            "schedule is 'gpipe', which only straight .*; give a number of stages",
        ),
        ({"recompute": [0]}, "recompute goes with a number of stages; give stages too"),
        ({"stage_layers": [(0, 3)]}, "stage_layers lists 3 layers, the model has 4; correct"),
        ({"microbatch_samples": 5}, "batch_samples must be a multiple of microbatch_samples"),
        ({"method": "genetic"}, "method is 'genetic', which only straight pipelines and partial"),
        ({"method": "ga"}, "method 'ga' is unknown; choose one of auto"),
        ({"stages": 2, "recompute": "some"}, "recompute must list numbers of stages, or be 'all'"),
        (
            {"wiring": "round"},
            "wiring 'round' is unknown; choose one of straight, flow, stochastic",
        ),
        ({"wiring": "straight"}, "the shape of the plan is missing; give stages, or 'auto'"),
        (
            {"wiring": "flow", "stages": "auto"},
            "stages 'auto' goes with straight pipelines, found wiring 'flow'",
        ),
        (
            {"wiring": "flow", "stages": 5},
            "stages must be 1 to 4, the devices that can compute or the layers",
        ),
        (
            {"routing": Routing(0.2)},
            "smoothing is 0.2, for wiring 'stochastic'",
        ),
        (
            {"wiring": "stochastic", "tensor_parallel": "auto"},
            "tensor_parallel is auto with wiring 'stochastic': devices of several GPUs do not",
        ),
        ({"wiring": "flow", "pipelines": 2}, "pipelines is 2, which only straight pipelines"),
        ({"wiring": "flow", "stages": 2, "recompute": [2]}, "recompute names stage 2"),
        ({"wiring": "flow", "stages": 2, "stage_layers": [(0, 4)]}, "leave stages out"),
        (
            {"wiring": "flow", "path_stages": 2, "stages": 2},
            "wiring is 'flow', .*; leave path_stages out",
        ),
    ],
)
def test_invalid_requests(change: dict[str, Any], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(ValueError, match=message):
        pl.plan(cluster_of(4), tiny_workload(), stop=pl.MaxIterations(1), **change)


def test_numbers_that_change_nothing_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU a worker, however it is said; a batch of more microbatches than a step may have."""
    pl.PlanRequest(wiring="stochastic", tensor_parallel={"a": 1})
    monkeypatch.setattr(shape, "MAX_MICROBATCHES", 64)
    work = tiny_workload().replace(batch_samples=128)
    plan = pl.plan(cluster_of(2), work, stages="auto", stop=pl.MaxIterations(1)).plan
    assert plan is not None and plan.workload.microbatch_samples > 1


def test_arguments_of_wrong_types() -> None:
    """Reported in one line."""
    stop = pl.MaxIterations(1)
    with pytest.raises(ValueError, match="cluster must be of type Cluster"):
        pl.plan(random_network(4), tiny_workload(), stages=2, stop=stop)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workload must be of type Workload"):
        pl.plan(cluster_of(4), "gpt2", stages=2, stop=stop)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="request must be of type PlanRequest"):
        pl.plan(cluster_of(4), tiny_workload(), request={"stages": 2}, stop=stop)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop must be a stopping criterion, found None"):
        pl.plan(cluster_of(4), tiny_workload(), stages=2, stop=None)


@pytest.mark.parametrize(
    ("codec", "bits"), [("fp16", 16), ("int8", 8 + 32 / 1024), ("int4", 4.03125)]
)
def test_boundary_codecs_shrink_messages(codec: str, bits: float, tmp_path: Path) -> None:
    """Memory does not change; the plan file stores the codec."""
    cluster = pl.Cluster(random_network(4), pl.Devices(1e9, 16e9))
    plain, coded = (
        pl.plan(
            cluster, tiny_workload(), stages=2, stop=pl.MaxIterations(10), boundary_codec=c
        ).plan
        for c in ("none", codec)
    )
    assert plain is not None and coded is not None
    before, after = (pl.simulate(p).transfers[0].message_bytes for p in (plain, coded))
    assert after == pytest.approx(before * bits / 32)
    assert coded.predicted.step_s < plain.predicted.step_s
    assert coded.workload.layers[0].saved_bytes == plain.workload.layers[0].saved_bytes
    assert pl.check(coded) == []
    pl.save_plan(coded, tmp_path / "p.json")
    assert pl.load_plan(tmp_path / "p.json").workload == coded.workload
    with pytest.raises(ValueError, match="already"):
        coded.workload.with_boundary_codec("none")
