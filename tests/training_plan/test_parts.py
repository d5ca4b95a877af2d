"""Parts of a plan of wrong kinds end in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate, Status
from planner.training_plan.error import PlanError
from planner.training_plan.file import load_plan, save_plan
from planner.training_plan.model import (
    AveragingGroup,
    OuterOptimizer,
    Predicted,
    Routing,
    Schedule,
    Sync,
)
from tests.conftest import make_plan

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (Schedule, ("x", "middle", (), ()), "head 'middle' is unknown; choose one of first, last"),
    (Schedule, ("x", "first", ((0,), ()), ()), "paths[1] visits no device"),
    (Schedule, ("x", "first", 5, ()), "paths must be a list, found 5"),
    (Schedule, ("x", "first", (1, 2), ()), "paths must be a list, found 1"),
    (AveragingGroup, (5, (1.0,), (True,)), "members must be a list, found 5"),
    (AveragingGroup, ((0.5,), (1.0,), (True,)), "a member of an averaging group is 0.5"),
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
        ({"codec": "int4"}, "codec 'int4' is unknown; choose one of none, int8"),
        ({"wiring": "free"}, "wiring 'free' is unknown; choose one of fixed, stochastic"),
        ({"routing": 0.1}, "routing must be of type Routing, found 0.1"),
        ({"sync": 2}, "sync must be of type Sync, found 2"),
        ({"recompute": True}, "recompute must be a list, found True"),
        ({"recompute": (1, 0)}, "recompute[0] must be true or false, found 1"),
        ({"left_out": (1,)}, "left_out[0] must be text, found 1"),
        ({"stage_layers": ((0, "2"), (2, 4))}, "stage_layers[0][1] must be a whole number"),
        (
            {"assignment": AssignmentPlan((("a", 3), (2, 1)), None)},  # type: ignore[arg-type]
            "assignment.groups[0][0] must be a whole number, found 'a'",
        ),
        ({"averaging": ((), ((0, 3),))}, "averaging[1][0][0] must be of type AveragingGroup"),
        ({"schedules": ()}, "schedules must hold at least one, found none"),
        ({"cycle": 0}, "cycle must be a list, found 0"),
        ({"seed": "0"}, "seed must be a whole number, found '0'"),
        ({"certificates": {"step": 1}}, "certificates.step must be of type Certificate"),
    ],
)
def test_wrong_plans(changes: dict[str, Any], message: str) -> None:
    """The same for the plan that holds them."""
    with pytest.raises(PlanError, match=message.replace("[", r"\[")):
        make_plan([[0, 3], [2, 1]]).replace(**changes)


def test_numpys_numbers_are_numbers(tmp_path: Path) -> None:
    """Also in the file, and in the hash."""
    plan = make_plan([[0, 3], [2, 1]])
    groups: Any = tuple(tuple(np.int64(d) for d in group) for group in plan.assignment.groups)
    same = plan.replace(
        seed=np.int64(plan.seed),
        assignment=AssignmentPlan(groups, plan.assignment.grid),
        sync=Sync(np.int64(1)),  # type: ignore[arg-type]
        recompute=(np.bool_(False),) * 2,
    )
    assert same == plan
    save_plan(same, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_numbers_that_files_cannot_hold(tmp_path: Path) -> None:
    """Nothing is written."""
    plan = make_plan([[0, 3], [2, 1]])
    step = Certificate("m", Status.FEASIBLE, 1.0, None, None, "", float("nan"), 0)
    with pytest.raises(PlanError, match="holds NaN or infinity"):
        save_plan(plan.replace(certificates={"step": step}), tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_plan_that_contradicts_itself_has_a_picture() -> None:
    """In a notebook, while it is being made."""
    plan = make_plan([[0, 3], [2, 1]]).replace(recompute=(True,))
    assert "<td>1</td>" in plan._repr_html_()
