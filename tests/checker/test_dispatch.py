"""Results and whole plans: every rule can fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from planner.checker.assignment import assignment_cost_s
from planner.checker.dispatch import check
from planner.lp.solve import solve_averaging
from planner.network.cluster import Cluster, Devices
from planner.problems import ArrangedPathProblem, AveragingProblem, PathProblem
from planner.problems.answers import (
    ArrangedPathPlan,
    AssignmentPlan,
    AveragingPlan,
    PathOp,
    PathPlan,
)
from planner.search.certificate import Certificate, Status
from planner.search.result import Result
from planner.training_plan.model import Predicted
from tests.checker.test_assignment import problem4
from tests.conftest import make_plan, random_network


def test_results_must_state_the_cost_of_their_plan() -> None:
    """A wrong objective, a status that contradicts the gap, a missing plan."""
    problem = problem4()
    plan = next(
        p
        for p in (AssignmentPlan.of_grid(g) for g in ([[0, 2], [1, 3]], [[0, 3], [1, 2]]))
        if not check(p, problem)
    )
    cost = problem.cost(plan.groups)
    about: dict[str, Any] = {"runtime_s": 0.0, "stop_reason": "", "seed": 0, "method": ""}
    assert not check(Result.of(plan, cost, cost / 2, **about), problem)
    assert [v.rule for v in check(Result.of(plan, cost * 1.1, None, **about), problem)] == ["eq. 1"]
    bad = Result(plan, Status.OPTIMAL, cost, cost / 2, 0.0, "", 0, "")
    assert [v.rule for v in check(bad, problem)] == ["status"]
    none: Result[AssignmentPlan] = Result(None, Status.FEASIBLE, None, None, 0.0, "", 0, "")
    assert [v.rule for v in check(none, problem)] == ["status"]


def test_bounds_are_on_the_right_side_of_the_objective() -> None:
    """Bounds are below minimised and above maximised objectives, and finite."""
    problem = problem4()
    grids = ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    plan = next(p for p in map(AssignmentPlan.of_grid, grids) if not check(p, problem))
    cost = problem.cost(plan.groups)
    about: dict[str, Any] = {"runtime_s": 0.0, "stop_reason": "", "seed": 0, "method": ""}
    fine = Result.of(plan, cost, cost / 2, **about)
    assert not check(fine, problem)
    for bound in (2 * cost, float("nan"), -1.0):
        assert [v.rule for v in check(replace(fine, bound=bound), problem)] == ["bound"]
    for status in (Status.INFEASIBLE, Status.UNKNOWN):
        bare = replace(fine, bound=None, status=status)
        assert [v.rule for v in check(bare, problem)] == ["status"]
    peers = AveragingProblem([1.0, 2.0], [2.0, 2.0], [2.0, 2.0], 4, 1.0)
    most = solve_averaging(peers)
    assert most.objective is not None and not check(most, peers)
    lower = replace(most, bound=most.objective / 2, status=Status.FEASIBLE, witness=None)
    assert [v.rule for v in check(lower, peers)] == ["bound"]
    above = replace(most, bound=most.objective * 2, status=Status.FEASIBLE, witness=None)
    assert not check(above, peers)
    assert most.plan is not None
    unknown = replace(most.plan, steps_per_s=float("nan"))
    assert "steps_per_s" in {v.rule for v in check(unknown, peers)}


@pytest.mark.parametrize("device", [0.0, True, "0", None])
def test_device_indices_must_be_integers(device: Any) -> None:
    """Values that equal an integer but are none are reported."""
    plan = AssignmentPlan(((device, 2), (1, 3)), None)
    assert [(v.rule, v.where) for v in check(plan, problem4())] == [("form", "groups[0][0]")]


def test_broken_training_plans_are_reported() -> None:
    """Wrong prediction, too little memory, another network, a bound above the cost."""
    plan = make_plan([[0, 1]])
    assert check(plan) == []
    slow = plan.replace(predicted=Predicted(1.0, 1.0, 2.0))
    assert {v.rule for v in check(slow)} == {"timeline", "averaging", "step time"}
    small = plan.replace(cluster=plan.cluster.replace(devices=Devices(1e12, 1e5)))
    assert {v.rule for v in check(small)} == {"memory"}
    other = Cluster(random_network(2, seed=5), Devices(1e12, 16e9))
    assert {v.rule for v in check(plan, other)} == {"network"}
    groups = plan.assignment.groups
    cost = assignment_cost_s(groups, plan.cluster.network, [9999.0], [1.0, 1.0])
    lying = Certificate("m", Status.FEASIBLE, cost, cost * 1e9, None, "", 0.0, 0)
    rules = {v.rule for v in check(plan.replace(certificates={"assignment": lying}))}
    assert {"eq. 1", "bound"} <= rules


def test_unknown_types_are_refused() -> None:
    """`check` raises TypeError."""
    with pytest.raises(TypeError, match="cannot check a dict"):
        check({})


def certified(**changes: Any) -> list[str]:
    """Rules that a plan breaks whose step certificate is changed."""
    plan = make_plan([[0, 1]])
    step = plan.predicted.step_s
    fields: dict[str, Any] = {
        "objective": step,
        "bound": step / 2,
        "gap": 0.5,
        "status": Status.FEASIBLE,
    }
    made = Certificate(
        **{"method": "m", "stop_reason": "", "runtime_s": 0.0, "seed": 0, **fields, **changes}
    )
    return sorted({v.rule for v in check(plan.replace(certificates={"step": made}))})


def test_certificates_must_agree_with_the_plan() -> None:
    """Objective, bound, gap and status of the step."""
    step = make_plan([[0, 1]]).predicted.step_s
    assert certified() == []
    assert certified(objective=step / 2, bound=step / 4) == ["step time"]
    assert certified(bound=2 * step, gap=1.0) == ["bound"]
    assert certified(bound=-step, gap=2.0) == ["bound"]
    assert certified(gap=None) == ["gap"]
    assert certified(status=Status.OPTIMAL) == ["status"]
    assert certified(status=Status.INFEASIBLE) == ["status"]


def test_compute_times_by_flops_are_recomputed() -> None:
    """A thousandth of the time is reported; times with another source are accepted."""
    plan = make_plan([[0, 1]])
    times = plan.compute_times
    fast = replace(times, forward_s=tuple(x / 1000 for x in times.forward_s))
    assert "FLOPs" in {v.rule for v in check(plan.replace(compute_times=fast))}
    told = replace(fast, source="a stopwatch")
    assert "FLOPs" not in {v.rule for v in check(plan.replace(compute_times=told))}


def test_plan_and_cluster_or_problem_must_match() -> None:
    """Other devices are a violation, a wrong second argument an error."""
    plan = make_plan([[0, 1]])
    other = plan.cluster.replace(devices=Devices(1e12, 8e9))
    assert {v.rule for v in check(plan, other)} == {"devices"}
    assert check(plan, plan.cluster) == []
    with pytest.raises(TypeError, match="is checked against Cluster, found AssignmentProblem"):
        check(plan, problem4())
    with pytest.raises(TypeError, match="against AssignmentProblem, found NoneType"):
        check(AssignmentPlan.of_grid([[0, 2], [1, 3]]))
    # where eq. 1 is claimed, equal groups need the grid that it is about
    claimed = Certificate("m", Status.FEASIBLE, 1.0, None, None, "", 0.0, 0)
    without = plan.replace(assignment=AssignmentPlan(plan.assignment.groups, None))
    assert "grid" not in {v.rule for v in check(without)}
    without = without.replace(certificates={"assignment": claimed})
    assert "grid" in {v.rule for v in check(without)}


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        (AssignmentPlan("ab", None), "groups"),  # type: ignore[arg-type]
        (AssignmentPlan((0, 1), None), "groups[0]"),  # type: ignore[arg-type]
        (AssignmentPlan(((0, 2), (1, 3)), [[0, 2], [1, 3]]), "grid"),  # type: ignore[arg-type]
        (AssignmentPlan(((0, 2), (1, 3)), np.array([0, 2])), "grid"),
        (AveragingPlan(np.array(True), np.ones(2), 1.0, np.ones(2)), "computes"),
        (AveragingPlan(np.ones(2, bool), np.array(1.0), 1.0, np.ones(2)), "rates"),
        (AveragingPlan(np.ones(2, bool), np.ones(2), "1", np.ones(2)), "steps_per_s"),  # type: ignore[arg-type]
        (PathPlan(None, ()), "paths"),
        (PathPlan(((0, 1.5),), ()), "paths[0][1]"),  # type: ignore[arg-type]
        (PathPlan(((0, 1),), None), "ops"),
        (PathPlan(((0, 1),), ((0, 0, "F", 0.0, 1.0),)), "ops[0]"),  # type: ignore[arg-type]
        (PathPlan(((0, 1),), (PathOp(0, 0, "F", "0", 1.0),)), "ops[0].start_s"),  # type: ignore[arg-type]
        (ArrangedPathPlan(((0,), 1), PathPlan((), ())), "groups[1]"),  # type: ignore[arg-type]
        (ArrangedPathPlan(((0,), (1,)), ((0, 1),)), "paths"),  # type: ignore[arg-type]
    ],
)
def test_fields_of_wrong_types_are_reported(plan: Any, where: str) -> None:
    """Only the wrong field is reported, also inside a result."""
    problem: Any = {
        AssignmentPlan: problem4(),
        AveragingPlan: AveragingProblem([1.0, 2.0], [2.0, 2.0], [2.0, 2.0], 4, 1.0),
        PathPlan: PathProblem(np.ones((2, 2)), [[0], [1]], 1.0, 1.0, 1.0, 2, 2, 1),
        ArrangedPathPlan: ArrangedPathProblem(np.ones((2, 2)), [1, 1], 1.0, 1.0, 1.0, 2, 2, 1),
    }[type(plan)]
    assert [(v.rule, v.where) for v in check(plan, problem)] == [("form", where)]
    result: Result[Any] = Result(plan, Status.FEASIBLE, None, None, 0.0, "", 0, "")
    assert [(v.rule, v.where) for v in check(result, problem)] == [("form", where)]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"status": "FEASIBLE"}, "status"),
        ({"objective": "1"}, "objective"),
        ({"bound": np.ones(2)}, "bound"),
        ({"bound": 10**400}, "bound"),
        ({"witness": "word"}, "witness"),
        ({"witness": {"kind": np.ones(2)}}, "witness"),
        ({"seed": None}, "seed"),
    ],
)
def test_result_fields_of_wrong_types_are_reported(changes: dict[str, Any], where: str) -> None:
    """Fields of a result with a valid plan."""
    plan = AssignmentPlan.of_grid([[0, 2], [1, 3]])
    right: Result[Any] = Result(plan, Status.FEASIBLE, None, None, 0.0, "", 0, "")
    wrong = replace(right, **changes)
    assert [(v.rule, v.where) for v in check(wrong, problem4())] == [("form", where)]


def test_witness_must_be_json() -> None:
    """A witness that cannot be written to JSON is reported."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for witness in ({"kind": np.ones(20)}, {"kind": deep}, {"kind": {1: 2}}):
        with pytest.raises(ValueError, match="witness holds what JSON cannot"):
            Certificate("m", Status.FEASIBLE, 1.0, None, None, "", 0.0, 0, "", witness)
    assert Certificate("m", "FEASIBLE", 1.0, None, None, "", 0.0, 0).status is Status.FEASIBLE  # type: ignore[arg-type]


def test_subclasses_and_foreign_classes() -> None:
    """Subclasses of known types are accepted, foreign classes are reported."""

    class Thing:
        """Nobody can ask for its annotation."""

    @dataclass(frozen=True, eq=False)
    class Mine(AssignmentPlan):
        """With a field of one's own."""

        note: Thing | None = None

    plan = AssignmentPlan.of_grid([[0, 2], [1, 3]])
    assert check(Mine(plan.groups, plan.grid), problem4()) == []

    @dataclass
    class Foreign:
        """None of ours."""

        field: Thing

    for one in (Foreign(Thing()), 3, None):
        with pytest.raises(TypeError, match="cannot check a"):
            check(one, problem4())
