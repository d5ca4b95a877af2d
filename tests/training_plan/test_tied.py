"""Plans whose first and last stage average the matrix shared by embedding and head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.cli.main import main
from planner.planning.linear_programs import averaging_of_stage
from planner.simulator.simulator import predict
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.file import load_plan, save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.training_plan.validation import contradictions
from tests.conftest import make_plan, tiny_workload

GRID = [[0, 3], [2, 1]]


def tied_plan() -> TrainingPlan:
    """Two pipelines of two stages."""
    return make_plan(GRID, workload=tiny_workload(tied=True))


def test_tied_matrix_is_averaged_separately() -> None:
    """It is in neither stage's vector, and all devices of both stages average it."""
    plan = tied_plan()
    work = plan.workload
    assert work.architecture is not None
    matrix = work.architecture.vocabulary * work.architecture.hidden
    assert plan.averages_tied and len(plan.averaging) == 3
    own = work.gradient_bytes(plan.stage_layers, 1)
    each = matrix * work.gradient_bytes_per_parameter
    assert plan.vector_bytes() == (own[0] - each, own[1] - each, each)
    ((group,),) = plan.averaging[-1]
    assert group.members == plan.averaged_by(2) == (0, 1, 2, 3)
    assert pl.check(plan) == []
    # the program of a stage is about what it averages by itself
    problem, _ = averaging_of_stage(plan, 0)
    assert problem.gradient_bytes == own[0] - each


def test_averaging_time_includes_the_tied_matrix() -> None:
    """On an idle system, a step takes at most pipeline plus averaging time."""
    plan = tied_plan()
    parts = plan.predicted
    assert parts.step_s <= (parts.pipeline_s + parts.averaging_s) * (1 + 1e-9)
    bare = plan.replace(averaging=plan.averaging[:2])
    # without it the last stage averages its copy by itself
    assert pl.simulate(bare).averaging_s < parts.averaging_s


@pytest.mark.parametrize("grid", [[[0], [1]], [[0, 1]]])
def test_one_stage_needs_no_tied_averaging(grid: list[list[int]]) -> None:
    """Nor does a head on the embedding's stage."""
    head = "last" if len(grid[0]) == 1 else "first"
    plan = make_plan(grid, workload=tiny_workload(tied=True), head=head)
    assert not plan.averages_tied and not plan.must_average_tied
    assert pl.check(plan) == []


def test_file_round_trip(tmp_path: Path) -> None:
    """A field of its own; a plan without it has another hash."""
    plan = tied_plan()
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and again.averages_tied
    data = plan.to_dict()["averaging"]
    assert len(data["stages"]) == 2 and len(data["tied"]["rounds"]) == 1
    bare = plan.replace(averaging=plan.averaging[:2])
    assert "tied" not in bare.to_dict()["averaging"] and bare.content_hash != plan.content_hash
    # plans of older releases have none: still read, and priced as they were
    save_plan(bare.replace(predicted=predict(bare)), tmp_path / "bare.json")
    assert pl.check(load_plan(tmp_path / "bare.json")) == []


def _with_tied(*groups: AveragingGroup) -> dict[str, Any]:
    return {"averaging": (*tied_plan().averaging[:2], (groups,))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_with_tied(AveragingGroup.equal((0, 1, 2))), "averaging.tied.rounds[0]: its groups must"),
        (
            _with_tied(AveragingGroup.equal((0, 1)), AveragingGroup.equal((2, 3))),
            "averaging.tied: device 0 gets the gradient of device 2 with weight 0",
        ),
        ({"sync": Sync(4)}, "averaging.tied: averages gradients in every step"),
        ({"sync": Sync(1, OuterOptimizer())}, "averaging.tied: averages gradients in every step"),
        (
            {"workload": tiny_workload(tied=True).replace(tied_parameters=100)},
            "workload.tied_parameters: must be",
        ),
        (
            {"workload": tiny_workload(tied=True).replace(tied_parameters=0)},
            "averaging.tied: no two stages share a matrix",
        ),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    """Reported with their field."""
    assert message in next(iter(contradictions(tied_plan().replace(**changes))))


def test_an_architecture_that_is_not_tied_shares_nothing() -> None:
    """Regardless of parameter counts."""
    plan = tied_plan()
    arch = plan.workload.architecture
    assert arch is not None
    work = plan.workload.replace(architecture=replace(arch, tied=False))
    assert "workload.tied_parameters: must be 0" in next(
        iter(contradictions(plan.replace(workload=work)))
    )


def test_plan_without_tied_averaging_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is valid, but cannot be executed."""
    plan = tied_plan()
    for given, said in ((plan, False), (plan.replace(averaging=plan.averaging[:2]), True)):
        priced = given.replace(predicted=predict(given))
        save_plan(priced, tmp_path / "plan.json")
        main(["check", str(tmp_path / "plan.json")])
        assert (
            "not modelled: head and embedding share a matrix" in capsys.readouterr().out
        ) is said
