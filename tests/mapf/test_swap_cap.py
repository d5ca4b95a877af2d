"""A limit on the swaps of all paths (D.2): no solver exceeds it; CP-SAT is optimal under it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.mapf import solve_paths
from planner.mapf.arrays import PathArrays
from planner.mapf.exact_solver import ExactSolver
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.moves import PathRules, count_swaps, too_many_swaps
from planner.mapf.path_enumeration import all_paths
from planner.mapf.search import initial_plans
from planner.mapf.waves import wave_problem
from planner.problems import PathProblem
from planner.search.stop import MaxIterations
from tests.mapf.conftest import random_problem, reference
from tests.mapf.test_solve import best_schedule_s, swaps_of


def two_paths_problem(seed: int, cap: int | None) -> PathProblem:
    """Two microbatches, each through stages 1, 2 or 2, 1."""
    return random_problem(
        seed, (2, 1, 1), path_stages=3, memory=2, each=1, max_swaps=1, max_total_swaps=cap
    )


def swaps(problem: PathProblem, paths: tuple[tuple[int, ...], ...]) -> int:
    """Swaps of all paths."""
    stage = problem.stage_of
    return sum(swaps_of(tuple(stage[d] for d in path)) or 0 for path in paths)


def optimum(problem: PathProblem) -> float:
    """Brute force over all paths within the limit and all orders."""
    arrays = PathArrays.of(problem)
    cap = math.inf if problem.max_total_swaps is None else problem.max_total_swaps
    best = math.inf
    for paths in itertools.product(*(all_paths(arrays, s) for s in problem.starts)):
        if swaps(problem, paths) <= cap:
            best = min(best, best_schedule_s(problem, paths, best))
    return best


@pytest.mark.parametrize("seed", [304, 369, 377])
def test_optimum_under_a_cap(seed: int) -> None:
    """Instances on which every further swap shortens the step, and that CP-SAT proves at once."""
    found = []
    for cap in (0, 1, None):
        problem = two_paths_problem(seed, cap)
        arrays = PathArrays.of(problem)
        best = PathIncumbent(arrays, MaxIterations(1).start(), problem)
        initial_plans(arrays, best)
        ExactSolver(problem, arrays, best, seed=0).prove(1, math.inf, 2.0)
        assert best.plan is not None and check(best.path_plan(), problem) == []
        assert best.objective == pytest.approx(optimum(problem))
        assert best.bound is not None and 0 < best.bound <= best.objective
        found.append(best.objective)
    assert found[0] > found[1] + 1e-6 and found[1] > found[2] + 1e-6


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cap=st.integers(0, 3),
    max_swaps=st.integers(1, 2),
    live=st.booleans(),
    method=st.sampled_from(["auto", "cbs"]),
)
def test_no_solver_exceeds_the_swap_limit(
    seed: int, cap: int, max_swaps: int, live: bool, method: str
) -> None:
    """Annealing, waves and conflict-based search."""
    problem = random_problem(
        seed,
        (2, 2, 2, 2, 1),
        path_stages=4,
        memory=8,
        each=4,
        max_swaps=max_swaps,
        live_memory=live,
        max_total_swaps=cap,
    )
    result = solve_paths(problem, MaxIterations(40 if method == "cbs" else 1), method=method)
    if result.plan is None:
        assert method == "cbs"
        return
    assert check(result.plan, problem) == []
    assert swaps(problem, result.plan.paths) <= cap


def test_reference_instance_under_caps() -> None:
    """Without a limit there are swaps; with one, at most as many as it allows."""
    free = solve_paths(reference(), MaxIterations(700), method="cbs")
    assert free.plan is not None
    used = swaps(reference(), free.plan.paths)
    assert used > 2
    for cap, method, limit in ((0, "auto", 1), (2, "auto", 1), (0, "cbs", 700), (1, "cbs", 1200)):
        problem = reference(max_total_swaps=cap)
        result = solve_paths(problem, MaxIterations(limit), method=method)
        assert result.plan is not None and check(result.plan, problem) == []
        assert swaps(problem, result.plan.paths) <= cap
    assert [v.rule for v in check(free.plan, reference(max_total_swaps=used - 1))] == ["CC2"]
    assert check(free.plan, reference(max_total_swaps=used)) == []


def test_compiled_swap_count() -> None:
    """The compiled count agrees with the reference; the limit itself is allowed."""
    problem = random_problem(0, (1, 1, 1, 1, 1), path_stages=5, max_swaps=2)
    arrays = PathArrays.of(problem)
    paths = all_paths(arrays, problem.stage_devices[0][0])
    counts = [count_swaps(np.array(path), arrays.stage) for path in paths]
    assert counts == [swaps(problem, (path,)) for path in paths] and max(counts) == 2
    rows = np.array([paths[counts.index(2)], paths[counts.index(1)]])
    for cap, over in ((2, True), (3, False)):
        rules = PathRules.of(PathArrays.of(problem.replace(max_total_swaps=cap)))
        assert too_many_swaps(rules, rows) == over


def test_wave_gets_its_share_of_the_swap_limit() -> None:
    """Every wave repeats the swaps of the first."""
    problem = reference(microbatches_per_start=9, live_memory=True, max_total_swaps=10)
    wave = wave_problem(problem)
    assert wave is not None and wave.microbatches_per_start == 3 and wave.max_total_swaps == 3
