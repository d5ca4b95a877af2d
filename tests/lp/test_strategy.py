"""Section 3.2: the four collaborations that recover known strategies, and mixes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.lp.groups import optimal_group_size
from planner.lp.solve import build_plan, solve_averaging
from planner.lp.strategy import Strategy, recognise
from planner.problems import AveragingProblem
from tests.lp.averaging_oracle import GBIT

GRADIENT = 100e6


def collaboration(speeds: Any, samples: Any, steps_per_s: Any) -> Any:
    """Symmetric peers whose GPUs need all of them for ``steps_per_s``."""
    speed = np.array(speeds) * GBIT
    return AveragingProblem(samples, speed, speed, sum(samples) / steps_per_s, GRADIENT)


def test_homogeneous_peers_use_all_reduce() -> None:
    """Example 1: butterfly all-reduce, equal parts."""
    limit = GBIT / GRADIENT / (2 * 7 / 8)
    plan = solve_averaging(collaboration([1] * 8, [1] * 8, limit)).plan
    assert recognise(plan).equals is Strategy.ALL_REDUCE
    assert plan.shares == pytest.approx(np.full(8, 1 / 8))


def test_fast_aggregator_is_a_parameter_server() -> None:
    """Example 2: one participant with very high bandwidth and low compute."""
    limit = GBIT / GRADIENT
    plan = solve_averaging(collaboration([1] * 8 + [100], [1] * 8 + [0], limit)).plan
    assert recognise(plan).equals is Strategy.PARAMETER_SERVER
    assert plan.reducers == (8,)


def test_equal_aggregators_are_byteps() -> None:
    """Example 3: the same bandwidth as the GPU peers, auxiliary summation services."""
    problem = collaboration([1] * 12, [1] * 8 + [0] * 4, 1.0)
    limit = 1e3
    everyone = problem.replace(batch_size=8 / limit)
    # all GPU peers contribute: a bandwidth-bound step
    from planner.lp.capacity import BandwidthLimits
    from planner.lp.rates import best_rates

    rates = best_rates(BandwidthLimits(everyone), everyone.contributors).rates
    plan = build_plan(everyone, everyone.contributors, rates)
    assert recognise(plan).equals is Strategy.BYTEPS
    assert plan.shares[8:] == pytest.approx(np.full(4, plan.shares[8]))
    assert plan.shares[8] > plan.shares[0] > 0
    # the same plan is the optimum where the batch needs all of them at that rate
    needed = everyone.replace(batch_size=8 * GRADIENT / rates.sum())
    solved = solve_averaging(needed).plan
    assert solved.computes[:8].all() and recognise(solved).equals is Strategy.BYTEPS
    assert solved.shares == pytest.approx(plan.shares, abs=1e-6)


def test_high_failure_rates_lead_to_decentralised_pairs() -> None:
    """Example 4: any collaboration with a sufficiently high failure rate converges to m = 2."""
    m = optimal_group_size(16, 0.5)
    limit = GBIT / GRADIENT / (2 * 15 / 16)
    plan = solve_averaging(collaboration([1] * 16, [1] * 16, limit)).plan
    assert m == 2
    assert recognise(plan, group_size=m).equals is Strategy.PAIRS
    assert recognise(plan, group_size=16).equals is Strategy.ALL_REDUCE


def test_hybrids_are_mixes_that_sum_to_one() -> None:
    """Setup C of Table 1: the slow peers sum little, the fast ones most."""
    problem = collaboration([1] * 8 + [0.2] * 16, [1] * 24, 1.0)
    rates = np.array([8.0] * 8 + [1.0] * 16)
    found = recognise(build_plan(problem, problem.contributors, rates))
    assert found.equals is None
    assert sum(part for _, part in found.mix) == pytest.approx(1)
    assert {s for s, _ in found.mix} == {Strategy.ALL_REDUCE, Strategy.PARAMETER_SERVER}
    assert "all-reduce" in str(found) and "%" in str(found)


def test_small_parts_are_not_shown() -> None:
    """All-reduce but for rounding does not read as a mix with 0% of something."""
    problem = collaboration([1] * 8, [1] * 8, 1.0)
    rates = np.ones(8)
    rates[0] = 1.0001
    found = recognise(build_plan(problem, problem.contributors, rates))
    assert found.equals is None and str(found) == "100% all-reduce"


def test_without_contributors_nothing_is_averaged() -> None:
    """What the relaxed rule gives where every c is fractional is no parameter server."""
    problem = collaboration([1] * 3, [1] * 3, 1.0)
    plan = build_plan(problem, np.zeros(3, dtype=bool), np.array([0.0, 0.0, 1.0]))
    assert recognise(plan).equals is Strategy.LOCAL


def test_a_single_peer_averages_nothing() -> None:
    """No network, no strategy."""
    plan = solve_averaging(AveragingProblem([1.0], 1.0, 1.0, 1, 1)).plan
    assert recognise(plan).equals is Strategy.LOCAL
