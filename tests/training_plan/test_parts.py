"""Parts of a plan with values of wrong types are rejected in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate, Status
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.error import PlanError
from planner.training_plan.file import from_dict, load_plan, save_plan
from planner.training_plan.model import Predicted, Routing
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (Schedule, ("x", "middle", (), ()), "head 'middle' is unknown; choose one of first, last"),
    (Schedule, ("x", "first", ((0,), ()), ()), "paths[1] visits no device"),
    (Schedule, ("x", "first", ((-1,),), ()), "an entry of paths is -1; it must be"),
    (Schedule, ("x", "first", ((0,),), ((("X", 0),),)), "an entry of order is ('X', 0); give F, H"),
    (Schedule, ("x", "first", ((0,),), ((("F",),),)), "an entry of order is ('F',); give F, H"),
    (Schedule, ("x", "first", ((0,),), ((("F", "0"),),)), "a microbatch of order is '0'; it must"),
    (Schedule, (5, "first", ((0,),), ()), "name must be of type str, found 5"),
    (AveragingGroup, ((), (), ()), "members must hold a device at least"),
    (Schedule, ("x", "first", 5, ()), "paths must be a list, found 5"),
    (Schedule, ("x", "first", (1, 2), ()), "paths must be a list, found 1"),
    (AveragingGroup, (5, (1.0,), (True,)), "members must be a list, found 5"),
    (AveragingGroup, ((0.5,), (1.0,), (True,)), "an entry of members is 0.5"),
    (AveragingGroup, ((0,), ("x",), (True,)), "a share of an averaging group is 'x'"),
    (AveragingGroup, ((0,), (1.0,), (1,)), "contributes must be of type bool, found 1"),
    (AveragingGroup.equal, ((),), "an averaging group has no members"),
    (OuterOptimizer, ("adam", 0.7, 0.9), "outer optimizer 'adam' is unknown"),
    (OuterOptimizer, ("nesterov", None, 0.9), "outer learning_rate is None"),
    (Sync, (1.5,), "every_steps is 1.5; it must be a whole number"),
    (OuterOptimizer, ("nesterov", 0, 0.9), "outer learning_rate is 0; give a number above 0"),
    (Sync, (0,), "every_steps is 0"),
    (Sync, (2, None, 1), "delayed must be of type bool, found 1"),
    (Sync, (1, None, True), "sync.delayed: averages changes of parameters a step later"),
    (Routing, (1.5,), "smoothing is 1.5; give a weight from 0 to 1"),
    (Routing, (0.1, "time"), "told 'time' is unknown; choose one of answer, work"),
    (Sync, (2, "nesterov"), "outer must be of type OuterOptimizer"),
    (Predicted, (1.0, None, 1.0), "predicted.averaging_s is None"),
]


@pytest.mark.parametrize(("make", "given", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_parts(make: Callable[..., Any], given: tuple[Any, ...], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(PlanError) as caught:
        make(*given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": None}, "cluster must be of type Cluster, found None"),
        ({"workload": "gpt2"}, "workload must be of type Workload, found 'gpt2'"),
        ({"assignment": [[0, 1]]}, "assignment must be of type AssignmentPlan"),
        ({"codec": "zip"}, "codec 'zip' is unknown; choose one of none, int8"),
        ({"wiring": "free"}, "wiring 'free' is unknown; choose one of fixed, stochastic"),
        ({"routing": 0.1}, "routing must be of type Routing, found 0.1"),
        ({"sync": 2}, "sync must be of type Sync, found 2"),
        ({"recompute": True}, "recompute must be a list, found True"),
        ({"recompute": (-1, 0)}, "an entry of recompute"),
        ({"left_out": (1,)}, "an entry of left_out must be of type str, found 1"),
        (
            {"stage_layers": ((0, "2"), (2, 4))},
            "an entry of a range of stage_layers is '2'; it must be a whole number",
        ),
        (
            {"assignment": AssignmentPlan((("a", 3), (2, 1)), None)},  # type: ignore[arg-type]
            "an entry of assignment.groups[0] is 'a'; it must be a whole number",
        ),
        (
            {"averaging": ((), ((0, 3),))},
            "an entry of averaging[1] must be of type AveragingGroup, found 0",
        ),
        ({"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ({"certificates": {1: None}}, "a key of certificates must be of type str, found 1"),
        (
            {"certificates": {"step": Certificate("m", "so", 1.0, None, None, "", 0.0, 0)}},  # type: ignore[arg-type]
            "certificates.step.status must be a Status, found 'so'",
        ),
        (
            {"assignment": AssignmentPlan(((0, 2), (3, 1)), np.zeros(4, int))},
            "assignment.grid is array([0, 0, 0, 0]); give whole numbers in rows",
        ),
        ({"stage_layers": ((0, 2, 3),)}, "a range of stage_layers is (0, 2, 3); give where it"),
        ({"workload": "gpt2"}, "workload must be of type Workload"),
        ({"schedules": ()}, "schedules must hold at least one, found none"),
        ({"cycle": 0}, "cycle must be a list, found 0"),
        ({"seed": "0"}, "seed is '0'; it must be a whole number of at least 0"),
        ({"certificates": {"step": 1}}, "certificates.step must be of type Certificate"),
    ],
)
def test_wrong_plans(changes: dict[str, Any], message: str) -> None:
    """The same for whole plans."""
    with pytest.raises(PlanError, match=re.escape(message)):
        make_plan([[0, 3], [2, 1]]).replace(**changes)


def test_values_are_converted_and_copied(tmp_path: Path) -> None:
    """In the file and in the hash; later changes by the caller have no effect."""
    plan = make_plan([[0, 3], [2, 1]])
    old, group, cycle = plan.schedules[0], plan.averaging[0][0][0], [np.int64(0)]
    given: dict[str, Any] = {
        "seed": np.int64(plan.seed),
        "assignment": AssignmentPlan(
            [np.array(stage) for stage in plan.assignment.groups],  # type: ignore[arg-type]
            plan.assignment.grid,
        ),
        "stage_layers": np.array(plan.stage_layers),
        "schedules": [
            Schedule(
                old.name,
                old.head,
                np.array(old.paths),  # type: ignore[arg-type]
                [[list(op) for op in ops] for ops in old.order],  # type: ignore[arg-type]
            )
        ],
        "averaging": [
            [[AveragingGroup(np.array(group.members), np.array(group.shares), np.ones(2, bool))]],  # type: ignore[arg-type]
            plan.averaging[1],
        ],
        "sync": Sync(np.int64(1), None, np.bool_(False)),  # type: ignore[arg-type]
        "recompute": np.zeros(2, bool),
        "cycle": cycle,
    }
    same = plan.replace(**given)
    cycle.append(np.int64(1))
    assert same == plan and same.content_hash == plan.content_hash
    assert from_dict(json.loads(json.dumps(same.to_dict()))) == plan
    save_plan(same, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_integer_shares_equal_floats(tmp_path: Path) -> None:
    """They are the same in a file."""
    plan = make_plan([[0, 3], [2, 1]])
    one = AveragingGroup(plan.assignment.groups[0], (1, 0), (True, True))
    other = plan.replace(averaging=(((one,),), plan.averaging[1]))
    save_plan(other, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == other


def test_non_finite_numbers_are_not_saved(tmp_path: Path) -> None:
    """Nothing is written."""
    plan = make_plan([[0, 3], [2, 1]])
    step = Certificate("m", Status.FEASIBLE, 1.0, None, None, "", float("nan"), 0)
    with pytest.raises(PlanError, match="holds what JSON has not"):
        save_plan(plan.replace(certificates={"step": step}), tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_invalid_plan_has_html() -> None:
    """In a notebook, while it is being built."""
    plan = make_plan([[0, 3], [2, 1]]).replace(recompute=(True,))
    assert "<td>1</td>" in plan._repr_html_()
