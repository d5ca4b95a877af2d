"""Edited bounds, gaps and states of a plan file's certificates are reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner as pl
import planner.planning.solve as planning
from planner.checker.bound_basis import bound_bases
from planner.checker.step_bound import straight_step_bound_s
from planner.planning.step_bound import StepBound
from planner.search.certificate import relative_gap
from planner.search.incumbent import WrongBoundError
from planner.training_plan.file import from_dict
from tests.conftest import random_network, tiny_workload


@pytest.fixture(scope="module")
def plan() -> pl.TrainingPlan:
    """Eight devices, four stages."""
    cluster = pl.Cluster(random_network(8), pl.Devices(1e9, 16e9))
    made = pl.plan(cluster, tiny_workload(), stages=4, stop=pl.MaxIterations(50)).plan
    assert made is not None
    return made


def edited(plan: pl.TrainingPlan, part: str, **changes: Any) -> set[str]:
    """Rules that the checker finds broken once a certificate in the file was edited."""
    data = plan.to_dict()
    data["certificates"][part] |= changes
    return {v.rule for v in pl.check(from_dict(data))}


def test_certificates_state_their_basis(plan: pl.TrainingPlan) -> None:
    """The basis is in the plan, in its file and in the text output."""
    again = from_dict(plan.to_dict())
    assert again.certificates == plan.certificates
    assert pl.check(again) == []
    step = plan.certificates["step"]
    assert step.witness is not None and step.basis
    said = {standing.part: standing for standing in bound_bases(again)}
    recomputed = said["step"].recomputed
    assert recomputed == pytest.approx(step.bound, rel=1e-8)
    assert "recomputed: " in str(said["step"])


def test_bound_above_what_its_witness_proves_is_reported(plan: pl.TrainingPlan) -> None:
    """Also with a gap that matches the edited bound."""
    step = plan.certificates["step"]
    assert step.bound is not None and step.objective is not None
    bound = (step.bound + step.objective) / 2
    gap = relative_gap(step.objective, bound)
    assert edited(plan, "step", bound=bound, gap=gap) == {"bound"}
    claimed = {"bound": step.objective, "gap": 0.0, "status": "OPTIMAL"}
    assert "bound" in edited(plan, "step", **claimed)
    assert "gap" in edited(plan, "step", bound=bound)
    assert "status" in edited(plan, "step", status="OPTIMAL")


def test_witness_that_proves_nothing_is_reported(plan: pl.TrainingPlan) -> None:
    """A witness of unknown kind, a malformed one, and one of another plan."""
    for witness in (
        {"kind": "faith"},
        {"kind": "straight step"},
        {"kind": "straight step", "shapes": []},
        {"kind": "straight step", "shapes": [{"layers": [[0, 4]], "microbatch_samples": 1}]},
        {"kind": "straight step", "shapes": [{"layers": "all", "microbatch_samples": 1}]},
        {"kind": "straight step", "shapes": [{"layers": [[0, 4]], "microbatch_samples": 0}]},
    ):
        assert edited(plan, "step", witness=witness) == {"bound"}


def test_witness_by_flops_requires_times_by_flops(plan: pl.TrainingPlan) -> None:
    """It proves nothing if times were measured or paths skip stages."""
    step = plan.certificates["step"]
    assert step.witness is not None
    assert straight_step_bound_s(step.witness, plan) == pytest.approx(step.bound, rel=1e-8)
    measured = replace(plan.compute_times, source="measured")
    assert straight_step_bound_s(step.witness, plan.replace(compute_times=measured)) is None
    cluster = pl.Cluster(random_network(8), pl.Devices(1e9, 16e9))
    partial_paths = pl.plan(
        cluster, tiny_workload(), stages=4, path_stages=2, full_every=0, stop=pl.MaxIterations(3)
    ).plan
    assert partial_paths is not None and partial_paths.assignment.grid is not None
    shape = {"layers": [list(part) for part in partial_paths.stage_layers], "microbatch_samples": 1}
    assert (
        straight_step_bound_s({"kind": "straight step", "shapes": [shape]}, partial_paths) is None
    )


def test_least_of_shapes_is_recomputed() -> None:
    """``auto`` states the least bound over all shapes that it tried."""
    cluster = pl.Cluster(random_network(8), pl.Devices(1e9, 16e9))
    made = pl.plan(
        cluster, tiny_workload(batch_samples=16), stages="auto", stop=pl.MaxIterations(40)
    ).plan
    assert made is not None and pl.check(made) == []
    step = made.certificates["step"]
    assert step.witness is not None and len(step.witness["shapes"]) > 3
    fewer = {**step.witness, "shapes": step.witness["shapes"][:0]}
    assert edited(made, "step", witness=fewer) == {"bound"}


def test_planning_fails_on_wrong_step_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound above the step that was planned ends the planning, for straight and skipped paths."""
    cluster = pl.Cluster(random_network(8), pl.Devices(1e9, 16e9))
    monkeypatch.setattr(planning, "step_bound", lambda *_: StepBound(1e9, "a wrong proof", None))
    for fields in ({"stages": 4}, {"stages": 4, "path_stages": 3}, {"stages": "auto"}):
        with pytest.raises(WrongBoundError, match="a wrong proof"):
            pl.plan(cluster, tiny_workload(), stop=pl.MaxIterations(3), seed=2, **fields)


def test_certificates_without_basis_load(plan: pl.TrainingPlan) -> None:
    """Files of versions without witnesses load."""
    data = plan.to_dict()
    for certificate in data["certificates"].values():
        del certificate["basis"], certificate["witness"]
    again = from_dict(data)
    assert pl.check(again) == []
    assert again.certificates["step"] == replace(plan.certificates["step"], basis="", witness=None)


def test_result_must_agree_with_the_certificate(plan: pl.TrainingPlan) -> None:
    """An edited result of `pl.plan` is reported too."""
    cluster = pl.Cluster(random_network(8), pl.Devices(1e9, 16e9))
    result = pl.plan(cluster, tiny_workload(), stages=4, stop=pl.MaxIterations(50))
    assert pl.check(result) == []
    for change in ({"objective": 0.5}, {"bound": result.objective}, {"witness": None}):
        assert "step" in {v.rule for v in pl.check(replace(result, **change))}


def test_witness_requires_a_plan_within_its_limits() -> None:
    """A bound on paths without swaps proves nothing about a plan with swaps."""
    cluster = pl.Cluster(random_network(8, 3), pl.Devices(1e9, 16e9))
    fields: dict[str, Any] = {"stage_sizes": (2, 2, 2, 2), "path_stages": 3, "full_every": 0}
    for seed in range(20):
        made = pl.plan(
            cluster, tiny_workload(), stop=pl.MaxIterations(6), seed=seed, max_swaps=1, **fields
        ).plan
        paths = made.certificates["paths"]
        stages = [[made.stage_of[d] for d in path] for path in made.schedules[0].paths]
        if paths.witness is None or all(s == sorted(s) for s in stages):
            continue
        assert pl.check(made) == []
        for limit in ({"max_swaps": 0}, {"in_flight": 1}):
            assert "bound" in edited(made, "paths", witness={**paths.witness, **limit})
        return
    raise AssertionError("no plan swapped with a witness; change the instance")


def test_integers_beyond_floats_are_reported(plan: pl.TrainingPlan) -> None:
    """They give a violation, not an exception."""
    for shape in ({"layers": [[0, 10**400]], "microbatch_samples": 1},):
        witness = {"kind": "straight step", "shapes": [shape]}
        assert "bound" in edited(plan, "step", witness=witness)
