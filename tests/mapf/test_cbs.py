"""The paper's conflict-based search: constraint intervals, conflicts, routes, the whole."""

from __future__ import annotations

import math

import pytest

from planner.check import check
from planner.mapf import solve_paths
from planner.mapf.cbs import Router
from planner.mapf.chains import all_paths, chain_s
from planner.mapf.intervals import Constraints, Forbidden, Stay, earliest, first_conflict
from planner.mapf.tables import Tables
from planner.result import Status
from planner.stop import MaxIterations
from tests.mapf.conftest import random_problem, reference


def test_earliest_time_between_blocks() -> None:
    """Half-open: a stay may touch a block; one without length fits anywhere."""
    blocks = [(4.0, 6.0), (1.0, 3.0)]
    assert earliest(0.0, 1.0, blocks) == 0.0
    assert earliest(0.5, 1.0, blocks) == 3.0
    assert earliest(0.5, 1.5, blocks) == 6.0
    assert earliest(2.0, 0.0, blocks) == 2.0
    assert earliest(0.0, 1.0, [(-math.inf, math.inf)]) == math.inf


def test_first_conflict_is_the_earliest_of_different_agents() -> None:
    """Own stays and touching ones do not count."""
    stays = [
        Stay(0, 7, 0, 2),
        Stay(0, 7, 1, 3),
        Stay(1, 7, 3, 5),
        Stay(2, 8, 4, 6),
        Stay(1, 8, 5, 5),
        Stay(1, 8, 5, 7),
    ]
    assert first_conflict(stays) == (stays[3], stays[5])
    assert first_conflict(stays[:4]) is None


def test_constraints_are_values_without_doubles() -> None:
    """Adding gives another value; blocks are per agent."""
    rule = Forbidden(1, 5, 0.0, 2.0)
    both = Constraints().plus(rule, Forbidden(2, 5, 0.0, 1.0))
    assert both.plus(rule) == both
    assert both.of(1) == {5: [(0.0, 2.0)]}


@pytest.mark.parametrize("seed", range(4))
def test_routes_are_shortest_chains(seed: int) -> None:
    """Without constraints; and with a device forbidden, the shortest of the others."""
    problem = random_problem(seed, (1, 2, 3, 2, 1), path_stages=4, each=1, memory=9)
    tables = Tables.of(problem)
    start = problem.stage_devices[0][0]
    paths = all_paths(tables, start)
    router = Router(tables)
    free = router.route(0, {})
    assert free is not None
    assert free.end_s == pytest.approx(min(chain_s(tables, p) for p in paths))
    closed = free.path[1]
    route = router.route(0, {closed: [(-math.inf, math.inf)]})
    assert route is not None
    others = [chain_s(tables, p) for p in paths if closed not in p]
    assert route.end_s == pytest.approx(min(others))
    waits = router.route(0, {start: [(0.0, 5.0)]})
    assert waits is not None and waits.end_s == pytest.approx(free.end_s + 5)


def test_reference_instance_by_conflict_based_search() -> None:
    """Valid paths; the public code's, executed first in, first out, take 41.5 s."""
    problem = reference()
    result = solve_paths(problem, MaxIterations(60), method="cbs")
    assert result.plan is not None and check(result.plan, problem) == []
    assert result.objective is not None and result.objective < 45
    early = solve_paths(problem, MaxIterations(1), method="cbs")
    assert early.status is Status.UNKNOWN and early.stop_reason == "iteration limit"
