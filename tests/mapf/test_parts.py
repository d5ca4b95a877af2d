"""Chains, moves, bounds and the compiled scheduler, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.checker.dispatch import check
from planner.mapf.arrays import PathArrays
from planner.mapf.bounds import shortest_chain_s, simple_bound
from planner.mapf.collision_free_bound import collision_free_bound_s
from planner.mapf.construction import construct, construction_order
from planner.mapf.fixed_order import FOLLOW_TIMES, schedule_paths
from planner.mapf.list_scheduling import build_plan
from planner.mapf.moves import in_order
from planner.mapf.path_enumeration import all_paths, chain_s, count_paths
from planner.mapf.schedule_by_rank import schedule_by_rank
from planner.mapf.solve import solve_paths
from planner.mapf.start_turnover import earliest_begins_s
from planner.problems import PathProblem
from planner.search.cp_sat import solver_for
from planner.search.stop import MaxIterations
from tests.mapf.conftest import random_problem, reference


def test_paths_of_the_reference_instance() -> None:
    """3 of 5 stages, 3 devices each: 270; with one swap of neighbouring stages more."""
    arrays = PathArrays.of(reference())
    paths = all_paths(arrays, 0)
    assert count_paths(arrays) == 270
    assert len(paths) == len(set(paths)) == 270 + 27 * 12
    assert min(chain_s(arrays, p) for p in paths) == pytest.approx(27.2346, abs=1e-4)
    limit = 30.0
    assert all_paths(arrays, 0, limit) == [p for p in paths if chain_s(arrays, p) <= limit]


@pytest.mark.parametrize("max_swaps", [0, 1, 2])
def test_allowed_stage_orders(max_swaps: int) -> None:
    """The compiled check and the enumeration agree on CC2."""
    sizes = (1, 1, 1, 1, 1)
    problem = random_problem(0, sizes, path_stages=5, max_swaps=max_swaps)
    arrays = PathArrays.of(problem)
    start = problem.stage_devices[0][0]
    listed = set(all_paths(arrays, start))
    others = [g[0] for g in problem.stage_devices[1:]]
    allowed = {
        (start, *rest)
        for rest in itertools.permutations(others)
        if in_order(np.array([start, *rest]), arrays.stage, max_swaps)
    }
    assert listed == allowed and len(listed) == {0: 1, 1: 4, 2: 5}[max_swaps]


@pytest.mark.parametrize("seed", range(5))
def test_following_the_times_of_a_schedule_reproduces_it(seed: int) -> None:
    """A list schedule, the schedule in the order of its times, and the reference agree."""
    problem = random_problem(seed, (2, 3, 2, 2), each=3, memory=6, live_memory=seed % 2 == 0)
    arrays = PathArrays.of(problem)
    paths = construct(arrays, construction_order(arrays), 1.0)
    makespan, begin = schedule_paths(arrays, paths)
    plan = build_plan(arrays, paths, begin)
    assert check(plan, problem) == [] and plan.makespan_s == pytest.approx(makespan)
    again, same = schedule_paths(arrays, paths, begin, FOLLOW_TIMES)
    assert again == makespan
    np.testing.assert_array_equal(begin, same)
    rank = {(op.microbatch, op.kind, op.device): op.start_s for op in plan.ops}
    read = schedule_by_rank(problem, plan.paths, rank)
    assert read is not None and read.makespan_s == pytest.approx(makespan)


@pytest.mark.parametrize("seed", range(5))
def test_bounds_are_ordered(seed: int) -> None:
    """Simple bound <= relaxation <= any schedule; the shortest chain is exact."""
    problem = random_problem(seed, (2, 2, 2, 2), memory=4, each=2, live_memory=seed % 2 == 0)
    arrays = PathArrays.of(problem)
    starts = list(problem.stage_devices[0])
    for start in starts:
        exact = min(chain_s(arrays, p) for p in all_paths(arrays, start))
        assert shortest_chain_s(arrays, start) == pytest.approx(exact)
    makespan, _ = schedule_paths(arrays, construct(arrays, construction_order(arrays), 0.0))
    bound = collision_free_bound_s(
        arrays,
        {s: all_paths(arrays, s) for s in starts},
        makespan,
        solver_for(max_work=5.0),
    )
    assert 0 < bound <= makespan * (1 + 1e-9)
    assert 0 < simple_bound(arrays).seconds <= makespan


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory", [1, 2, 3])
def test_bound_of_live_memory(seed: int, memory: int) -> None:
    """The turnover bound holds for the best schedule found."""
    problem = random_problem(seed, (2, 2, 2), memory=memory, each=4, live_memory=True)
    found = solve_paths(problem, MaxIterations(4), seed)
    assert found.objective is not None
    bound = simple_bound(PathArrays.of(problem)).seconds
    assert 0.5 * found.objective < bound <= found.objective * (1 + 1e-9)


def test_turnover_by_hand() -> None:
    """Four microbatches, memory 2, chain 20, F 1, B 2: F at 0, 1, 20, 23."""
    problem = PathProblem(
        [[0, 4], [4, 0]], [[0], [1]], [1, 0], [2, 1], 0, 2, 2, 4, live_memory=True
    )
    arrays = PathArrays.of(problem)
    assert shortest_chain_s(arrays, 0) == 20
    assert earliest_begins_s(1.0, 2.0, 2, 4, 20.0) == [0, 1, 20, 23]
    assert solve_paths(problem, MaxIterations(4)).objective == pytest.approx(43)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_following_perturbed_times_is_valid(seed: int, spread: float) -> None:
    """Schedules in a perturbed order are valid and agree with the reference."""
    problem = random_problem(seed, (2, 2, 2, 2), memory=2, each=6, live_memory=True)
    arrays = PathArrays.of(problem)
    paths = construct(arrays, construction_order(arrays), 1.0)
    _, begin = schedule_paths(arrays, paths)
    order = begin + np.random.default_rng(seed).normal(0.0, spread, begin.shape)
    makespan, times = schedule_paths(arrays, paths, order, FOLLOW_TIMES)
    plan = build_plan(arrays, paths, times)
    assert plan.makespan_s == pytest.approx(makespan)
    assert check(plan, problem) == []
    rank = {(op.microbatch, op.kind, op.device): op.start_s for op in plan.ops}
    read = schedule_by_rank(problem, plan.paths, rank)
    assert read is not None and read.makespan_s == pytest.approx(makespan)


def test_bound_without_triangle_inequality() -> None:
    """A device that is near by way of another stage: brute force is 40 s, by hand."""
    links = [[0, 0, 10], [0, 0, 0], [10, 0, 0]]
    problem = PathProblem(links, [[0], [1], [2]], [0, 0, 5], [0, 0, 5], 0, 3, 3, 3)
    assert simple_bound(PathArrays.of(problem)).seconds <= 40
    result = solve_paths(problem, MaxIterations(4))
    assert check(result, problem) == [] and result.objective is not None
    assert result.objective <= 40 + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_bound_with_widely_spread_transfers(seed: int) -> None:
    """Links spread over four orders of magnitude: the bound holds for the best plan found."""
    problem = random_problem(seed, (1, 2, 2, 1), memory=6, each=3)
    wild = 10.0 ** np.random.default_rng(seed).uniform(-2, 2, problem.transfer_s.shape)
    problem = problem.replace(transfer_s=wild, live_memory=seed % 2 == 0)
    found = solve_paths(problem, MaxIterations(4), seed)
    assert found.objective is not None
    assert simple_bound(PathArrays.of(problem)).seconds <= found.objective * (1 + 1e-9)
