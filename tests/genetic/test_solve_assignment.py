"""`solve_assignment` against brute force, and invariants on any instance."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.genetic import solve_assignment
from planner.matching import open_path
from planner.network.network import Network
from planner.problems import AssignmentProblem, ProblemError
from planner.problems.answers import AssignmentPlan
from planner.problems.assignment_method import AssignmentMethod
from planner.search.certificate import Status
from planner.search.result import Result
from planner.search.stop import AnyOf, MaxIterations, MaxRuntime
from tests.genetic.assignment_instances import SHAPES, brute_force, problem_of, random_network


def assert_consistent(problem: AssignmentProblem, result: Result[AssignmentPlan]) -> None:
    """The plan uses every device once, and objective, grid and bound agree with the definitions."""
    plan = result.plan
    assert plan is not None
    assert result.objective is not None and result.bound is not None
    assert check(result, problem) == []
    assert result.objective == problem.cost(plan.groups)
    assert result.bound <= result.objective
    if problem.pipelines is not None:
        assert plan.grid is not None
        for j in range(problem.stages - 1):
            hops = problem.hop_s(j)[plan.grid[:, j], plan.grid[:, j + 1]]
            assert hops.max() == problem.boundary_s(j, plan.groups[j], plan.groups[j + 1])


@pytest.mark.parametrize(
    "groups",
    [
        *([[0, 1], [2, -1]], [[0, 1], [2, 9]], [[0, 1], [2, 2]], [[0, 1]], [[0, 1, 2], [3]]),
        *(None, [0, 1, 2, 3], [[0, 1], [2, None]], [[0.0, 1.0], [2.0, 3.0]]),
    ],
)
def test_costs_of_other_groups_are_refused(groups: Any) -> None:
    """Groups that are no assignment have no cost."""
    ones = np.ones((4, 4))
    problem = AssignmentProblem(Network(ones, ones), 2, 2, 1.0, 1.0)
    assert problem.cost([[0, 3], [2, 1]]) > 0
    with pytest.raises(ProblemError, match=r"groups (are|have|must be) "):
        problem.cost(groups)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sites", [None, 2])
def test_auto_is_optimal_on_small_instances(shape: dict[str, object], sites: int | None) -> None:
    """The objective equals brute force, and the status is OPTIMAL."""
    problem = problem_of(shape, 7, sites)
    result = solve_assignment(problem, MaxIterations(60))
    assert_consistent(problem, result)
    assert result.objective == pytest.approx(brute_force(problem), rel=1e-9)
    assert result.status is Status.OPTIMAL


@pytest.mark.parametrize("method", list(AssignmentMethod))
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=str)
def test_every_method_returns_a_valid_bound(
    method: AssignmentMethod, shape: dict[str, object]
) -> None:
    """No method claims more than brute force allows."""
    problem = problem_of(shape, 3)
    result = solve_assignment(problem, MaxIterations(30), method=method)
    assert_consistent(problem, result)
    best = brute_force(problem)
    assert result.bound <= best * (1 + 1e-9) <= result.objective * (1 + 2e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), st.sampled_from([None, 1, 3]))
def test_random_networks(seed: int, shape: dict[str, object], sites: int | None) -> None:
    """Generated networks, with and without interchangeable devices."""
    problem = problem_of(shape, seed, sites)
    result = solve_assignment(problem, MaxIterations(40), seed=seed % 5)
    assert_consistent(problem, result)
    best = brute_force(problem)
    assert result.bound <= best * (1 + 1e-9)
    assert result.objective == pytest.approx(best, rel=1e-6)


def test_renaming_devices_keeps_the_optimum() -> None:
    """The order in which devices are listed does not matter."""
    problem = problem_of(SHAPES[2], 11)
    turn = np.random.default_rng(0).permutation(len(problem.network))
    turned = problem.replace(network=problem.network.subset(turn.tolist()))
    first, second = (solve_assignment(p, MaxIterations(60)) for p in (problem, turned))
    assert first.objective == pytest.approx(second.objective, rel=1e-9)


def test_scaling_time_scales_the_optimum() -> None:
    """Three times the latency and a third of the bandwidth: three times the cost."""
    problem = problem_of(SHAPES[3], 12)
    net = problem.network
    slow = problem.replace(
        network=Network(
            3 * net.latency_s, np.where(np.eye(len(net)), 1, net.bandwidth_bytes_per_s) / 3
        )
    )
    first, second = (solve_assignment(p, MaxIterations(60)) for p in (problem, slow))
    assert 3 * first.objective == pytest.approx(second.objective, rel=1e-9)


def test_constant_latency_adds_a_known_amount() -> None:
    """A latency c on every pair costs 2 c per partner in a group and per boundary."""
    problem = problem_of(SHAPES[3], 13)
    shifted = problem.replace(
        network=Network(
            problem.network.latency_s + 0.5,
            np.where(np.eye(6), 1, problem.network.bandwidth_bytes_per_s),
        )
    )
    first, second = (solve_assignment(p, MaxIterations(60)) for p in (problem, shifted))
    extra = 2 * 0.5 * (2 - 1) + 2 * 0.5 * (3 - 1)
    assert first.objective + extra == pytest.approx(second.objective, rel=1e-9)


def test_one_device() -> None:
    """The trivial plan costs nothing and is optimal."""
    problem = AssignmentProblem(Network([[0.0]], [[1.0]]), 1, 1, 1e8, 1e8)
    result = solve_assignment(problem, MaxIterations(5))
    assert result.objective == 0.0
    assert result.status is Status.OPTIMAL
    assert result.plan is not None and result.plan.groups == ((0,),)


def test_one_pipeline_is_an_open_path() -> None:
    """Groups of one: Held-Karp solves the rest of the problem."""
    problem = AssignmentProblem(random_network(13, 4), 13, 1, 3e8, 5e8)
    result = solve_assignment(problem, MaxIterations(60))
    assert_consistent(problem, result)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(open_path(2 * problem.hop_s(0)).objective)


def test_unknown_method_raises() -> None:
    """The message lists the methods."""
    with pytest.raises(ValueError, match="must be one of auto, search"):
        solve_assignment(problem_of(SHAPES[2], 0), MaxIterations(1), method="magic")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 2.5}, "stages must be a whole number, found 2.5"),
        ({"pipelines": 2.0}, "pipelines must be a whole number, found 2.0"),
        ({"stages": None, "pipelines": None, "stage_sizes": (3.5, 2.5)}, "whole number, found 3.5"),
        ({"stages": None, "pipelines": None, "stage_sizes": 6}, "list the devices of each stage"),
        ({"network": "aws"}, "network must be of type Network, found 'aws'"),
    ],
)
def test_invalid_counts_raise(change: dict[str, object], message: str) -> None:
    """Counts must be whole numbers and are never truncated."""
    given: dict[str, object] = {"network": random_network(6, 0), "stages": 2, "pipelines": 3}
    with pytest.raises(ProblemError, match=message):
        AssignmentProblem(**{**given, **change})  # type: ignore[arg-type]


def test_invalid_arguments_raise() -> None:
    """One clear line each."""
    problem = problem_of(SHAPES[2], 0)
    with pytest.raises(ValueError, match="stop must be a stopping criterion, found None; give one"):
        solve_assignment(problem, None)
    with pytest.raises(ValueError, match="problem must be of type AssignmentProblem, found None"):
        solve_assignment(None, MaxIterations(1))
    with pytest.raises(ValueError, match="seed must be a whole number, found 'x'"):
        solve_assignment(problem, MaxIterations(1), seed="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "sites"),
    [
        ({"stages": 3, "pipelines": 4}, 3),
        ({"stages": 3, "pipelines": 4}, None),
        ({"stages": 18, "pipelines": 1}, None),
    ],
)
def test_unreached_time_limit_changes_nothing(shape: dict[str, object], sites: int | None) -> None:
    """A limit in seconds that is not reached changes nothing."""
    problem = problem_of(shape, 5, sites)
    rule = MaxIterations(30)
    first, second = (
        solve_assignment(problem, stop, 1) for stop in (rule, AnyOf(rule, MaxRuntime(1000)))
    )
    assert first.plan is not None and second.plan is not None
    assert first.plan.groups == second.plan.groups
    assert (first.objective, first.bound) == (second.objective, second.bound)


def test_tiny_time_limit_still_gives_a_plan() -> None:
    """Whatever the limit, the plan is valid."""
    problem = AssignmentProblem(random_network(24, 0), 4, 6, 1e8, 1e8)
    assert_consistent(problem, solve_assignment(problem, MaxRuntime(0.01)))


SCRIPT = """
import numpy as np
from planner.checker.dispatch import check
from planner.genetic import solve_assignment
from planner.network.network import Network
from planner.problems import AssignmentProblem
from planner.search.stop import MaxIterations
rng = np.random.default_rng(5)
network = Network(rng.uniform(0.001, 0.1, (24, 24)), rng.uniform(1e8, 5e9, (24, 24)))
problem = AssignmentProblem(network, 4, 6, 3e8, 5e8)
for method in ("auto", "search", "genetic"):
    result = solve_assignment(problem, MaxIterations(25), seed=3, method=method)
    print(result.plan.grid.tolist(), result.objective.hex(), result.bound.hex())
"""


def test_same_seed_same_bytes_in_another_process() -> None:
    """Plans, objectives and bounds agree to the last bit under a limit on iterations."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1
    assert next(iter(outputs)).count("\n") == 3
