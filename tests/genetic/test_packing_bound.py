"""The packing bound: below every assignment, recomputed by the checker, and better than others."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.bench.network_generator import random_network as world
from planner.checker.assignment_bounds import recomputed_bound_s
from planner.checker.dispatch import check
from planner.genetic import packing_bound
from planner.genetic.bounds import quick_bound
from planner.genetic.data import assignment_data
from planner.genetic.packing_bound import PackingBound, partitions
from planner.genetic.solve import solve_assignment
from planner.network.network import Network
from planner.problems import AssignmentProblem
from planner.search.incumbent import WrongBoundError
from planner.search.stop import MaxIterations
from tests.genetic.assignment_instances import brute_force

SHAPES = [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4)]


def clustered(seed: int, stages: int, pipelines: int) -> AssignmentProblem:
    """Devices in a few places, near each other there; or all of them anywhere."""
    rng = np.random.default_rng(seed)
    n = stages * pipelines
    place = rng.integers(0, rng.integers(1, n + 1), n)
    inside = place[:, None] == place
    latency = np.where(inside, 1e-3, rng.uniform(0.01, 0.2, (n, n)))
    bandwidth = np.where(inside, 1e9, rng.uniform(1e7, 2e8, (n, n)))
    sizes = rng.choice([1e5, 1e7, 3e8], 2)
    return AssignmentProblem(Network(latency, bandwidth), stages, pipelines, *sizes.tolist())


def bound_of(problem: AssignmentProblem, upper: float, refinements: int = 6) -> PackingBound:
    bound = PackingBound(assignment_data(problem), upper)
    for _ in range(refinements):
        if not bound.refine():
            break
    return bound


def test_an_interrupt_after_a_bound_still_raises() -> None:
    """CP-SAT's own handler of Ctrl-C would remove Python's, and the next one end the process."""
    assert bound_of(clustered(3, 3, 3), np.inf).refine() is not None
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def again(problem: AssignmentProblem, witness: Any) -> float | None:
    """As the checker computes it, from what a file holds."""
    return recomputed_bound_s(
        json.loads(json.dumps(witness)),
        problem.network,
        problem.stage_sizes,
        problem.activation_bytes,
        problem.gradient_bytes,
    )


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES))
def test_no_assignment_costs_less(seed: int, shape: tuple[int, int]) -> None:
    """Of all of them; the checker's integer programs agree."""
    problem = clustered(seed, *shape)
    least = brute_force(problem)
    bound = bound_of(problem, 1.3 * least)
    assert bound.bound <= least * (1 + 1e-9)
    assert again(problem, bound.witness) == pytest.approx(bound.bound, rel=1e-9)


def test_it_is_far_above_other_bounds_where_places_do_not_fill_stages() -> None:
    """48 devices in 12 places: a large part of the gap; the checker accepts it, and no more."""
    problem = AssignmentProblem(world(12, 48, 1), 6, 8, 0.47e9, 0.65e9)
    searched = solve_assignment(problem, MaxIterations(40), method="search")
    assert searched.objective is not None and searched.bound is not None
    proven = bound_of(problem, searched.objective, 16)
    gap, before = (
        1 - bound / searched.objective
        for bound in (proven.bound, quick_bound(assignment_data(problem)))
    )
    assert gap < 0.6 * before
    found = replace(searched, bound=proven.bound * (1 - 1e-9), witness=proven.witness)
    assert check(found, problem) == []
    raised = replace(found, bound=1.01 * proven.bound)
    assert {violation.rule for violation in check(raised, problem)} == {"bound"}


def test_the_default_method_has_it() -> None:
    """Where stages are too many for the chain bound."""
    place = np.arange(45) % 7
    inside = place[:, None] == place
    rng = np.random.default_rng(3)
    network = Network(
        np.where(inside, 1e-3, rng.uniform(0.05, 0.2, (45, 45))),
        np.where(inside, 1e9, rng.uniform(1e7, 5e7, (45, 45))),
    )
    problem = AssignmentProblem(network, 15, 3, 3e8, 5e8)
    found = solve_assignment(problem, MaxIterations(4))
    assert found.basis == "packing" and check(found, problem) == []


def test_changed_witnesses_prove_nothing() -> None:
    """A level that was raised, an interval that was left out, a floor that was raised."""
    problem = clustered(5, 4, 2)
    upper = 1.2 * brute_force(problem)
    witness: Any = bound_of(problem, upper).witness
    whole = again(problem, witness)
    assert whole is not None and whole > 0
    intervals = witness["intervals"]
    last = next(k for k in reversed(range(len(intervals))) if intervals[k][2] is not None)
    wrong: list[Any] = [
        intervals[1:],
        [*intervals[:1], *intervals[2:]],
        [[2 * intervals[0][0] + 1, *intervals[0][1:]], *intervals[1:]],
        [*intervals[:last], [*intervals[last][:2], None], *intervals[last + 1 :]],
        [
            *intervals[:last],
            [*intervals[last][:2], [3 * level for level in intervals[last][2]]],
            *intervals[last + 1 :],
        ],
        [[*intervals[0][:2], [0.0] * 9], *intervals[1:]],
        [["a", 1.0, None]],
        [],
    ]
    for changed in wrong:
        assert again(problem, witness | {"intervals": changed}) is None, changed
    # fewer claims prove less
    weaker = [[a, b, None if x is None else x[:-1]] for a, b, x in intervals]
    less = again(problem, witness | {"intervals": weaker})
    assert less is not None and less <= whole


def test_a_wrong_packing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing fits, what the search found is impossible."""
    rng = np.random.default_rng(1)
    network = Network(rng.uniform(0.01, 0.2, (24, 24)), rng.uniform(1e7, 2e8, (24, 24)))
    problem = AssignmentProblem(network, 4, 6, 3e8, 5e8)
    monkeypatch.setattr(PackingBound, "_packs", lambda *_: False)
    with pytest.raises(WrongBoundError):
        solve_assignment(problem, MaxIterations(20))


def test_undecided_packings_count_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = clustered(5, 4, 2)
    upper = brute_force(problem)
    full = bound_of(problem, upper).bound
    few = PackingBound(assignment_data(problem), upper, max_models=3).bound
    monkeypatch.setattr(packing_bound, "WORK_OF_A_MODEL", 0.0)
    assert few <= full * (1 + 1e-12) and bound_of(problem, upper).bound <= full * (1 + 1e-12)


def test_partitions() -> None:
    assert list(partitions(5, 2)) == [(4, 1), (3, 2)]
    assert sum(len(list(partitions(12, k))) for k in range(1, 13)) == 77
