"""The paper's conflict-based search: routes, capacity conflicts, and whole solves."""

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
from planner.mapf.cbs import CbsOptions, ConflictObjective, ConflictSearch
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.intervals import Constraint
from planner.mapf.path_enumeration import all_paths, chain_s
from planner.mapf.router import ALWAYS, PathRouter
from planner.mapf.skippipe_cbs import CapacityConflict, Limit, SkipPipeDomain, SkipPipeSearch
from planner.problems import PathProblem
from planner.search.certificate import Status
from planner.search.stop import MaxIterations
from tests.mapf.conftest import random_problem, reference
from tests.mapf.oracles import earliest


@pytest.mark.parametrize("seed", range(4))
def test_routes_are_shortest_chains(seed: int) -> None:
    """Without rules; and with a device forbidden, the shortest of the others."""
    problem = random_problem(seed, (1, 2, 3, 2, 1), path_stages=4, each=1, memory=9)
    arrays = PathArrays.of(problem)
    start = problem.stage_devices[0][0]
    paths = all_paths(arrays, start)
    router = PathRouter(arrays)
    free = router.route(0, ())
    assert free is not None
    assert free.end_s == pytest.approx(min(chain_s(arrays, p) for p in paths))
    closed = free.path[1]
    route = router.route(0, [Constraint(closed, *ALWAYS)])
    assert route is not None
    others = [chain_s(arrays, p) for p in paths if closed not in p]
    assert route.end_s == pytest.approx(min(others))
    waits = router.route(0, [Constraint(start, 0.0, 5.0)])
    assert waits is not None and waits.end_s == pytest.approx(free.end_s + 5)
    nowhere = [Constraint(d, *ALWAYS) for d in range(len(problem)) if d != start]
    assert router.route(0, nowhere) is None


def end_s(problem: PathProblem, path: tuple[int, ...], constraints: list[Constraint]) -> float:
    """Earliest end of a path under constraints, by the reference `earliest`."""
    steps = [(d, problem.forward_s[d]) for d in path]
    steps += [(path[0], problem.head_s[path[0]])]
    steps += [(d, problem.backward_s[d]) for d in reversed(path)]
    ready, at = 0.0, path[0]
    for d, seconds in steps:
        blocks = [
            (constraint.begin, constraint.end)
            for constraint in constraints
            if constraint.resource == d
        ]
        begin = earliest(ready + float(problem.transfer_s[at, d]), float(seconds), blocks)
        ready, at = begin + float(seconds), d
    return ready


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 25), max_swaps=st.integers(0, 2))
def test_routes_are_fastest_under_rules(seed: int, count: int, max_swaps: int) -> None:
    """Every path timed under the same rules: none ends earlier."""
    problem = random_problem(
        seed, (1, 2, 2, 2, 1), path_stages=4, each=1, memory=9, max_swaps=max_swaps
    )
    rng = np.random.default_rng(seed)
    constraints = []
    for _ in range(count):
        begin = float(rng.uniform(0, 15))
        place = int(rng.integers(len(problem)))
        constraints.append(Constraint(place, begin, begin + float(rng.uniform(0.1, 6))))
    arrays = PathArrays.of(problem)
    ends = {
        p: end_s(problem, p, constraints) for p in all_paths(arrays, problem.stage_devices[0][0])
    }
    route = PathRouter(arrays).route(0, constraints)
    assert route is not None
    assert route.end_s == pytest.approx(ends[route.path])
    assert route.end_s == pytest.approx(min(ends.values()))
    for occupancy, constraint in itertools.product(route.occupancies, constraints):
        apart = occupancy.end <= constraint.begin + 1e-9 or constraint.end <= occupancy.begin + 1e-9
        assert occupancy.resource != constraint.resource or apart


def test_capacity_conflict_reroutes_the_fastest_agents() -> None:
    """The slowest agents keep their routes; branches differ in who is rerouted (CC3)."""
    problem = random_problem(3, (3, 2, 2, 2), path_stages=3, each=2, memory=6)
    router = PathRouter(PathArrays.of(problem))
    domain = SkipPipeDomain(router, True)
    search = ConflictSearch(
        domain, MaxIterations(100).start(), CbsOptions(ConflictObjective.MAKESPAN)
    )
    root = search.root()
    assert root is not None
    crowd = root.conflicts[0]
    assert isinstance(crowd, CapacityConflict) and crowd.limit is Limit.STAGE and crowd.excess > 0
    ends = [root.routes[b].end_s for b in crowd.agents]
    assert ends == sorted(ends)
    branches = domain.split(crowd, root)
    leaving = [sorted({agent for agent, _ in branch}) for branch in branches]
    assert leaving[0] == sorted(crowd.agents[: crowd.excess])
    assert len({tuple(of) for of in leaving}) == len(leaving) > 1
    fewest, most = problem.visits
    found = list(itertools.islice(search.solutions([root]), 3))
    assert found
    for node in found:
        for devices in problem.stage_devices[1:]:
            visits = sum(d in devices for route in node.routes for d in route.path)
            assert fewest <= visits <= most
        assert node.cost >= root.cost


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.sampled_from([(2, 2, 2, 1), (3, 2, 2, 2, 2), (2, 1, 2, 1), (3, 3, 3, 3)]),
    path_stages=st.integers(2, 4),
    live=st.booleans(),
)
def test_valid_paths_by_conflict_based_search(
    seed: int, sizes: tuple[int, ...], path_stages: int, live: bool
) -> None:
    """Plans are valid and no bound exceeds its plan's makespan."""
    problem = random_problem(seed, sizes, path_stages, memory=6, live_memory=live)
    result = solve_paths(problem, MaxIterations(80), method="cbs")
    if result.status is Status.INFEASIBLE:
        assert solve_paths(problem, MaxIterations(1)).status is Status.INFEASIBLE
        return
    if result.plan is None:
        assert result.status is Status.UNKNOWN
        return
    assert check(result.plan, problem) == []
    assert result.objective == result.plan.makespan_s
    assert result.bound is not None and result.bound <= result.objective * (1 + 1e-9)


def test_reference_instance_by_conflict_based_search() -> None:
    """The public code's paths, executed first in, first out, take 41.5 s."""
    problem = reference()
    result = solve_paths(problem, MaxIterations(700), method="cbs")
    assert result.plan is not None and check(result.plan, problem) == []
    assert result.objective is not None and result.objective < 41.5
    again = solve_paths(problem, MaxIterations(700), method="cbs")
    assert again.plan == result.plan and again.objective == result.objective
    early = solve_paths(problem, MaxIterations(1), method="cbs")
    assert early.status is Status.UNKNOWN and early.stop_reason == "iteration limit"
    assert math.isfinite(result.runtime_s)


def test_cbs_repeats_the_paths_of_one_wave() -> None:
    """Repeated, they are valid and shorter than what as many nodes find for 72 agents at once."""
    wave = random_problem(3, (3, 2, 2, 2), path_stages=3, each=1, memory=3)
    problem = wave.replace(microbatches_per_start=24, live_memory=True)
    limit = MaxIterations(40)
    found, again = (solve_paths(problem, limit, method="cbs") for _ in range(2))
    assert found.plan is not None and again.plan is not None and found.objective is not None
    assert check(found, problem) == []
    assert found.plan.paths == again.plan.paths
    arrays = PathArrays.of(problem)
    at_once = PathIncumbent(arrays, limit.start(), problem)
    SkipPipeSearch(arrays, at_once, at_once.run).search()
    assert at_once.plan is not None and found.objective < 0.95 * at_once.objective
