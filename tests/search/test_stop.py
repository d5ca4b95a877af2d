"""Stopping criteria: reusable values that can be combined."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from planner.genetic import solve_assignment
from planner.mapf import solve_paths
from planner.network.network import Network
from planner.problems import AssignmentProblem, PathProblem
from planner.search.certificate import Status
from planner.search.result import Result
from planner.search.stop import (
    AnyOf,
    Deadline,
    DelegatingCriterion,
    Effort,
    MaxIterations,
    MaxRuntime,
    NoImprovement,
    TargetGap,
)


def test_iteration_limit_can_be_used_twice() -> None:
    """The counter belongs to the run."""
    rule = MaxIterations(2)
    for _ in range(2):
        run = rule.start()
        assert run.remaining_iterations == 2
        assert run.update() is None
        assert run.update() == "iteration limit"


def test_no_improvement_counts_from_the_last_one() -> None:
    """An improvement resets it."""
    run = NoImprovement(2).start()
    assert run.update() is None
    run.record_objective(3.0)
    assert run.update() is None
    assert run.update() == "no improvement"


def test_iterations_on_estimates_are_not_without_improvement() -> None:
    """They count towards other limits."""
    run = AnyOf(NoImprovement(2), MaxIterations(9)).start()
    run.evaluates_plans = False
    assert run.update(5) is None and run.iterations == 5
    run.evaluates_plans = True
    assert run.update(2) == "no improvement"


def test_gap_and_optimality() -> None:
    """TargetGap stops at its gap, every rule at a closed one."""
    run = AnyOf(TargetGap(0.1), MaxRuntime(100)).start()
    run.record_objective(10.0)
    run.bound = 8.0
    assert run.check() is None
    run.bound = 9.5
    assert run.check() == "target gap"
    closed = MaxRuntime(100).start()
    closed.record_objective(10.0)
    closed.bound = 10.0
    assert closed.check() == "optimal"


def test_any_of_takes_the_tightest_limits() -> None:
    """Both seconds and iterations."""
    rule = AnyOf(MaxRuntime(5), MaxIterations(7), AnyOf(MaxRuntime(3)))
    assert rule.seconds() == 3
    assert rule.iterations() == 7


def test_paced_by_time() -> None:
    """A run is paced by time only if no other limit exists."""
    assert MaxRuntime(5).start().paced_by_time
    assert AnyOf(MaxRuntime(5), NoImprovement(3)).start().paced_by_time
    assert not AnyOf(MaxRuntime(5), MaxIterations(7)).start().paced_by_time
    assert not TargetGap(0.1).start().paced_by_time


def test_interrupt_becomes_a_reason() -> None:
    """Ctrl-C inside the search ends it, and the best so far is kept."""
    run = MaxRuntime(5).start()
    with run.interruptible():
        run.record_objective(1.0)
        raise KeyboardInterrupt
    assert run.reason == "interrupted"
    assert run.objective == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaxRuntime(0),
        lambda: MaxRuntime(float("nan")),
        lambda: MaxIterations(-1),
        lambda: TargetGap(-0.1),
        lambda: NoImprovement(0),
        lambda: AnyOf(),
        lambda: Effort(0),
        lambda: Effort(float("inf")),
    ],
)
def test_invalid_limits_raise(make: Any) -> None:
    """The message contains the value."""
    with pytest.raises(ValueError, match="found"):
        make()


def test_status_follows_the_gap() -> None:
    """OPTIMAL exactly when the gap is at most 1e-6."""
    about: dict[str, Any] = {"runtime_s": 0.0, "stop_reason": "", "seed": 0, "method": ""}
    assert Result.of("p", 1.0, 1.0 - 1e-7, **about).status is Status.OPTIMAL
    assert Result.of("p", 1.0, 1.0 - 1e-5, **about).status is Status.FEASIBLE
    assert Result.of("p", 1.0, None, **about).gap is None


@pytest.mark.parametrize("wrong", [None, 5, "10 s", MaxRuntime])
def test_invalid_criterion_raises(wrong: object) -> None:
    """Solvers and AnyOf raise the same message."""
    network = Network(np.full((4, 4), 0.1), np.full((4, 4), 1e6))
    problem = AssignmentProblem(network, 2, 2, 1e6, 1e6)
    with pytest.raises(ValueError, match="stop must be a stopping criterion, found"):
        solve_assignment(problem, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AnyOf takes stopping criteria, found"):
        AnyOf(wrong)  # type: ignore[arg-type]


def test_invalid_problem_raises() -> None:
    """The message names the kind that the solver takes."""
    for solve, kind in ((solve_assignment, "AssignmentProblem"), (solve_paths, "PathProblem")):
        with pytest.raises(ValueError, match=f"must be of type {kind}, found None"):
            solve(None, MaxIterations(1))


@pytest.mark.parametrize("wrong", [None, "ten", [1]])
def test_non_numeric_limits_raise(wrong: object) -> None:
    """Other types raise."""
    for rule in (MaxRuntime, MaxIterations, TargetGap, NoImprovement):
        with pytest.raises(ValueError, match="must be"):
            rule(wrong)  # type: ignore[arg-type]


def test_effort_counts_in_the_solvers_own_steps() -> None:
    """The same rule gives each solver as many steps as it says a unit has."""
    rule = Effort(2.5)
    run = rule.start(steps_per_effort=4)
    assert run.remaining_iterations == 10
    assert not run.paced_by_time
    assert run.update(9) is None
    assert run.update() == "effort limit"
    assert rule.start(0.01).remaining_iterations == 1
    assert AnyOf(rule, MaxRuntime(3)).start(4).remaining_iterations == 10


def test_portions() -> None:
    """A share of every limit, at least one count; seconds may be set."""
    rule = AnyOf(MaxRuntime(8), MaxIterations(3), TargetGap(0.1), NoImprovement(5), Effort(4))
    part = rule.portion(0.25)
    assert part.seconds() == 2
    assert part.iterations(1) == 1
    assert part.criteria[2:4] == rule.criteria[2:4]
    assert part.criteria[4] == Effort(1.0)
    assert rule.portion(0.25, 5.0).seconds() == 5.0


def test_paced_by_time_without_counts() -> None:
    """A run is paced by time only if no count is limited."""
    assert MaxRuntime(1).start().paced_by_time
    assert not AnyOf(MaxRuntime(1), MaxIterations(5)).start().paced_by_time
    assert not MaxIterations(5).start().paced_by_time
    assert not TargetGap(0.0).start().paced_by_time


def test_the_same_effort_gives_the_same_plans() -> None:
    """An unreached time limit changes nothing."""
    rng = np.random.default_rng(3)
    network = Network(rng.uniform(0.01, 0.2, (12, 12)), rng.uniform(1e7, 1e9, (12, 12)))
    assignment = AssignmentProblem(network, 4, 3, 1e6, 1e8)
    paths = PathProblem(
        network.symmetrised().transfer_s(1e6),
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        *(0.02, 0.04, 0.01, 3, 2, 4),
        live_memory=True,
    )
    rules = (Effort(0.3), AnyOf(Effort(0.3), MaxRuntime(1000)))
    placed = [solve_assignment(assignment, rule, 5) for rule in rules]
    assert placed[0].plan == placed[1].plan and placed[0].bound == placed[1].bound
    routed = [solve_paths(paths, rule, 5) for rule in rules]
    assert routed[0].plan == routed[1].plan and routed[0].bound == routed[1].bound


def test_deadline_is_independent_of_the_start() -> None:
    """Time before the run counts; a portion refers to the remaining time."""
    over = Deadline(time.perf_counter() - 1)
    assert over.start().check() == "time limit"
    assert over.start().remaining_s < 0.1
    rule = Deadline(time.perf_counter() + 1e6)
    assert rule.start().check() is None
    assert rule.start().paced_by_time
    assert rule.start().remaining_s == pytest.approx(1e6, rel=1e-3)
    assert rule.portion(0.5).max_runtime_s == pytest.approx(5e5, rel=1e-3)
    assert rule.portion(0.5, 3.0) == MaxRuntime(3.0)


def test_any_of_reports_plans_to_all_its_criteria() -> None:
    """A criterion inside `AnyOf` sees every plan that the search finds."""
    seen: list[tuple[str, float]] = []

    @dataclass(frozen=True)
    class Listener(DelegatingCriterion):
        name: str = ""

        def found(self, objective: float, plan: Any) -> None:
            seen.append((self.name, objective))

    limit = MaxIterations(1)
    AnyOf(Listener(limit, "a"), Listener(limit, "b")).found(2.0, None)
    assert seen == [("a", 2.0), ("b", 2.0)]
