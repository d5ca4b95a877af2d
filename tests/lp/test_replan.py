"""Peers that join and leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.bench.averaging_instances import instance
from planner.checker.averaging import check_averaging
from planner.lp.replan import replan_averaging
from planner.lp.solve import solve_averaging
from planner.problems import ProblemError
from planner.search.certificate import Status


@pytest.mark.parametrize(("peers", "ratio"), [(10, 0.8), (24, 0.8), (24, 1.0), (64, 1.0)])
def test_leaving_and_joining_gives_the_plan_of_a_fresh_start(peers: int, ratio: Any) -> None:
    """Warm and cold starts give the same plan."""
    whole = instance(peers, 1, ratio)
    stay = [i for i in range(peers) if i % 5 != 2]
    smaller = whole.subset(stay)
    before = solve_averaging(whole)
    left = replan_averaging(smaller, before.plan, stay)
    assert left.plan == solve_averaging(smaller).plan
    assert left.plan == replan_averaging(smaller, before.plan, stay).plan
    assert check_averaging(left.plan, smaller) == []
    was = [stay.index(i) if i in stay else None for i in range(peers)]
    joined = replan_averaging(whole, left.plan, was)
    assert joined.status is Status.OPTIMAL
    assert joined.plan == before.plan


def test_peers_that_can_no_longer_compute_are_dropped() -> None:
    """A former contributor without samples is not forced to contribute."""
    problem = instance(8, 0, 1.0)
    before = solve_averaging(problem).plan
    samples = np.where(before.computes, 0.0, np.maximum(problem.samples_per_s, 0.5))
    changed = problem.replace(samples_per_s=samples)
    result = replan_averaging(changed, before, list(range(8)))
    assert result.status is Status.OPTIMAL
    assert not (result.plan.computes & before.computes).any()


@pytest.mark.parametrize("was", [[0, 1], [0, 0, 1, 2, 3, 4, 5, 6], [9, *range(7)]])
def test_invalid_mapping_raises(was: Any) -> None:
    """Too short, a duplicate, or an index out of range."""
    problem = instance(8, 0)
    plan = solve_averaging(problem).plan
    with pytest.raises(ProblemError, match="previous_index"):
        replan_averaging(problem, plan, was)
