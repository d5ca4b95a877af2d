"""`arrange_paths` against brute force over all arrangements and the checker."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from planner.checker.dispatch import check
from planner.mapf import arrange_paths, solve_paths
from planner.mapf.arranged_bounds import arranged_bound_s
from planner.mapf.solve import inner_run
from planner.problems import ArrangedPathProblem, PathProblem, ProblemError
from planner.problems.waves import count_waves
from planner.search.certificate import Status
from planner.search.stop import AnyOf, MaxIterations, MaxRuntime
from tests.mapf.conftest import random_problem, reference
from tests.mapf.test_solve import brute_force


def random_arranged(
    seed: int, sizes: tuple[int, ...], path_stages: int = 3, **changes: object
) -> ArrangedPathProblem:
    """A random problem whose durations also depend on the stage."""
    problem = random_problem(seed, sizes, path_stages, **changes)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    stages = rng.uniform(0.5, 1.5, (len(sizes), 1))
    return ArrangedPathProblem.of(problem).replace(
        forward_s=problem.forward_s * stages, backward_s=problem.backward_s * stages
    )


@pytest.mark.parametrize("live_memory", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_arrangement_matches_brute_force(seed: int, live_memory: bool) -> None:
    """Four devices, one per stage: the optimum over all 24 arrangements, and the bound."""
    problem = random_arranged(seed, (1, 1, 1, 1), 2, memory=2, live_memory=live_memory)
    orders = itertools.permutations(range(4))
    best = min(brute_force(problem.arranged([[d] for d in order])) for order in orders)
    result = arrange_paths(problem, MaxIterations(60), seed)
    assert check(result, problem) == []
    assert result.objective == pytest.approx(best)
    assert 0 < arranged_bound_s(problem) <= best


@pytest.mark.parametrize("live_memory", [False, True])
def test_arrangement_respects_different_memory(live_memory: bool) -> None:
    """No device gets a role that its memory cannot fill (TC1)."""
    for seed in range(3):
        memory = np.random.default_rng(seed).integers(2, 6, 9)
        problem = random_arranged(seed, (2, 3, 2, 2), memory=memory, live_memory=live_memory)
        result = arrange_paths(problem, MaxIterations(10), seed)
        assert result.plan is not None and check(result, problem) == []


def test_device_moves_between_stages() -> None:
    """A slow stage that every path needs takes devices from the others, unless sizes are fixed."""
    n = 9
    transfer = np.full((n, n), 0.01)
    work = np.array([[0.1], [0.1], [3.0]])
    free = ArrangedPathProblem(transfer, (3, 4, 2), work, work, 0.1, 3, 4, 4, live_memory=True)
    fixed = free.replace(fixed_sizes=True)
    first = [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    moved = arrange_paths(free, MaxIterations(30), 0, first)
    kept = arrange_paths(fixed, MaxIterations(30), 0, first)
    assert check(moved, free) == [] and check(kept, fixed) == []
    assert moved.plan is not None and kept.plan is not None
    assert moved.objective is not None and kept.objective is not None
    assert [len(group) for group in kept.plan.groups] == [3, 4, 2]
    assert len(moved.plan.groups[0]) == 3 and len(moved.plan.groups[2]) >= 3
    assert moved.objective < 0.75 * kept.objective
    assert [v.rule for v in check(moved.plan, fixed)] == ["groups"]


def test_joint_search_improves_the_given_arrangement() -> None:
    """The reference instance: exchanging devices shortens what paths alone cannot."""
    given = reference()
    problem = ArrangedPathProblem.of(given)
    paths = solve_paths(given, MaxIterations(8))
    joint = arrange_paths(problem, MaxIterations(30), 0, given.stage_devices)
    again = arrange_paths(problem, MaxIterations(30), 0, given.stage_devices)
    assert check(joint, problem) == []
    assert paths.objective is not None and joint.objective is not None
    assert joint.objective < paths.objective
    assert joint.plan == again.plan and joint.objective == again.objective


def test_time_limit_and_one_stage() -> None:
    result = arrange_paths(ArrangedPathProblem.of(reference()), MaxRuntime(0.5))
    assert result.plan is not None and result.stop_reason == "time limit"
    alone = ArrangedPathProblem(np.zeros((2, 2)), (2,), 1.0, 2.0, 0.5, 1, 3, 3)
    assert arrange_paths(alone, MaxIterations(3)).objective == pytest.approx(10.5)


def test_infeasible_and_invalid_input() -> None:
    problem = ArrangedPathProblem.of(random_problem(0))
    little = problem.replace(memory=1)
    assert arrange_paths(little, MaxIterations(3)).status is Status.INFEASIBLE
    other_sizes = ArrangedPathProblem(np.zeros((6, 6)), (2, 1, 3), 1.0, 1.0, 0.0, 3, 2, 2)
    # the stage of one device holds half of what must go through it; with two it holds all
    moved = arrange_paths(other_sizes, MaxIterations(1))
    assert moved.plan is not None and check(moved, other_sizes) == []
    assert [len(group) for group in moved.plan.groups] == [2, 2, 2]
    fixed = other_sizes.replace(fixed_sizes=True)
    assert arrange_paths(fixed, MaxIterations(1)).status is Status.INFEASIBLE
    with pytest.raises(ProblemError, match="memory is inf"):
        random_problem(0, memory=np.inf)
    with pytest.raises(ProblemError, match=r"add up to the 7 devices, found \[2, 2\]"):
        problem.replace(stage_sizes=(2, 2))
    with pytest.raises(ProblemError, match="forward_s must be one number, 7 or 4 x 7"):
        problem.replace(forward_s=np.ones(3))
    with pytest.raises(ProblemError, match="groups must have the sizes"):
        problem.arranged([[0], [1, 2], [3, 4], [5, 6]])
    with pytest.raises(ProblemError, match="memory is"):
        problem.replace(memory=1.5)


def test_arranged_round_trip() -> None:
    given = random_problem(3, live_memory=True)
    again = ArrangedPathProblem.of(given).arranged(given.stage_devices)
    assert again.stage_devices == given.stage_devices
    for name in set(PathProblem.__dataclass_fields__) - {"stage_devices"}:
        np.testing.assert_array_equal(getattr(again, name), getattr(given, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_sizes": (1.5, 2, 2, 1.5)}, "a stage size must be a whole number, found 1.5"),
        ({"stage_sizes": 7}, "stage_sizes must be a list of whole numbers"),
        ({"transfer_s": 5}, "N x N"),
        ({"path_stages": 2.5}, "path_stages must be a whole number"),
        ({"microbatches_per_start": 1.5}, "microbatches_per_start must be a whole number"),
        ({"memory": [1, 2]}, r"memory must be one number, 7 or 4 x 7 of them, found shape \(2,\)"),
        ({"memory": np.full((4, 7), 1.5)}, "memory is 1.5 at 0, 0"),
        ({"head_s": [1, 2]}, "head_s must be one number or 7 of them"),
        ({"forward_s": "fast"}, "forward_s must be one number, 7 or 4 x 7 of them"),
        ({"backward_s": [[1], [1, 2]]}, "backward_s must be one number, 7 or 4 x 7 of them"),
        ({"forward_s": -1}, "forward_s of device 0 is -1"),
        ({"fixed_sizes": None}, "fixed_sizes must be True or False"),
    ],
)
def test_invalid_problems_raise(change: dict[str, object], message: str) -> None:
    """The message states the rule, the value and the remedy."""
    with pytest.raises(ProblemError, match=message):
        ArrangedPathProblem.of(random_problem(0)).replace(**change)


def test_wrong_types_raise_one_line_errors() -> None:
    """The message is one line in terms of the problem, not of Python or NumPy."""
    problem: Any = random_problem(0)
    free: Any = ArrangedPathProblem.of(problem)
    five: Any = 5
    halves: Any = [[0, 1.5], [2, 3], [4, 5], [6]]
    for call, message in (
        (lambda: solve_paths(problem, None), "stop must be a stopping criterion, found None"),
        (lambda: solve_paths(None, MaxIterations(1)), "problem must be of type PathProblem"),
        (lambda: solve_paths(free, MaxIterations(1)), "problem must be of type PathProblem"),
        (lambda: arrange_paths(free, None), "stop must be a stopping criterion, found None"),
        (lambda: arrange_paths(None, MaxIterations(1)), "must be of type ArrangedPathProblem"),
        (lambda: arrange_paths(free, MaxIterations(1), 0, five), "first must be a list of devices"),
        (
            lambda: arrange_paths(free, MaxIterations(1), 0, halves),
            "a device of stage_devices must be a whole number",
        ),
        (lambda: count_waves(None), "problem must be of type PathProblem"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("live_memory", [False, True])
def test_initial_arrangements_respect_memory(
    live_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round robin gives two stages a device without memory; another arrangement has paths."""
    memory = np.zeros((3, 6), dtype=int)
    memory[0] = [4, 4, 4, 4, 0, 0]
    memory[1, 3] = memory[2, 2] = 9
    problem = ArrangedPathProblem(
        np.ones((6, 6)), (2, 2, 2), 1.0, 1.0, 0.1, 3, memory, 4, live_memory=live_memory
    )
    dealt = [[0, 1], [2, 4], [3, 5]]
    for first in (None, dealt):
        found = arrange_paths(problem, MaxIterations(1), 0, first)
        assert found.plan is not None and check(found, problem) == []
    monkeypatch.setattr("planner.mapf.arrange._initial_arrangements", lambda problem: iter([dealt]))
    given_up = arrange_paths(problem, MaxIterations(1))
    assert given_up.status is Status.UNKNOWN
    assert "on the first arrangement stage 1" in given_up.stop_reason


def test_time_limit_does_not_change_an_iteration_limited_run() -> None:
    """A generous time limit does not change the plan; a short one limits inner runs."""
    problem = reference()
    counted = solve_paths(problem, MaxIterations(3), seed=1)
    with_time_limit = solve_paths(problem, AnyOf(MaxIterations(3), MaxRuntime(3600)), seed=1)
    assert with_time_limit.plan == counted.plan and with_time_limit.bound == counted.bound
    run = AnyOf(MaxIterations(1000), MaxRuntime(5)).start()
    assert not run.paced_by_time and MaxRuntime(5).start().paced_by_time
    inner = inner_run(run, 0.5)
    assert inner.remaining_iterations == 64 and 0 < inner.remaining_s <= 5
    assert inner_run(MaxIterations(10).start(), 0.5).remaining_iterations == 5
    assert math.isinf(inner_run(MaxIterations(10).start(), 0.5).remaining_s)
    assert inner_run(MaxRuntime(8).start(), 0.25).remaining_s <= 2
