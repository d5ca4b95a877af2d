"""Every bound of the averaging solvers against brute force, and detection of wrong bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner.lp.contributor_search as search_module
import planner.lp.paper_rule as rule_module
from planner.bench.averaging_instances import instance
from planner.checker.averaging_bounds import recomputed_bound
from planner.checker.dispatch import check
from planner.lp.capacity import BandwidthLimits
from planner.lp.cardinality_knapsack import cardinality_knapsack
from planner.lp.contributor_milp import ContributorModel, MilpResult
from planner.lp.contributor_search import ContributorSearch
from planner.lp.dedloc_lp import solve_relaxed
from planner.lp.dedloc_lp_rows import RelaxedSolution
from planner.lp.knapsack import knapsack
from planner.lp.rates import best_rates, satisfies_pair_limits
from planner.lp.solve import solve_averaging
from planner.problems import AveragingProblem
from planner.search.certificate import Status
from planner.search.incumbent import ROUNDING, WrongBoundError
from planner.search.stop import MaxIterations
from tests.lp.averaging_oracle import brute_force, max_total_rate, random_problem, sets_of

SLACK = 1 + 1e-7


def problem_of(seed: int, **changes: Any) -> AveragingProblem:
    """A random problem small enough for brute force."""
    return random_problem(np.random.default_rng(seed), most=5, **changes)


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_initial_bound_is_valid_and_recomputed(seed: int) -> None:
    """The initial bound is valid, and the checker recomputes the same value."""
    problem = problem_of(seed)
    search = ContributorSearch(problem, MaxIterations(0).start())
    assert search.bound * SLACK >= brute_force(problem)
    witness = search.incumbent.witness
    assert witness is not None
    again = recomputed_bound(witness, problem)
    assert again is not None
    assert search.bound == pytest.approx(again * (1 + ROUNDING), rel=1e-12)
    assert recomputed_bound({"kind": "unknown"}, problem) is None


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.1, 1.0))
def test_knapsack_bounds_are_valid(seed: int, share: float) -> None:
    """At the rate of any set, both knapsacks bound its samples from above."""
    problem = problem_of(seed)
    limits = BandwidthLimits(problem)
    for computes in sets_of(problem.contributors):
        count = int(computes.sum())
        total = max_total_rate(problem, computes) * share * (1 - 1e-9)
        if count < 2 or total <= 1e-6:
            continue
        samples = float(problem.samples_per_s[computes].sum())
        for fewest in range(2, count + 1):
            assert knapsack(limits, total, fewest).samples_per_s * SLACK >= samples
            most = int(problem.contributors.sum())
            assert (
                cardinality_knapsack(limits, total, fewest, most).samples_per_s * SLACK >= samples
            )
        assert cardinality_knapsack(limits, total, count, count).samples_per_s * SLACK >= samples


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.booleans())
def test_milp_bound_is_valid(seed: int, overlap: bool) -> None:
    """No set of the model makes more steps than its bound; the rates are brute force's."""
    problem = problem_of(seed, overlap=overlap)
    limits = BandwidthLimits(problem)
    most = int(problem.contributors.sum())
    highest = float(limits.download.min())
    if most < 2 or highest <= 0:
        return
    model = ContributorModel(limits, 2, most, 0.0, highest)
    answer = model.solve(MaxIterations(10_000).start())
    for computes in sets_of(problem.contributors):
        if computes.sum() > 1:
            samples = float(problem.samples_per_s[computes].sum())
            value = problem.steps_of(samples, max_total_rate(problem, computes))
            assert answer.bound * (1 + 1e-6) >= value - 1e-9


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_dual_bound_of_the_rates_is_valid(seed: int) -> None:
    """Weak duality bounds R for given contributors from above, and closely."""
    problem = problem_of(seed)
    for computes in sets_of(problem.contributors):
        found = best_rates(BandwidthLimits(problem), computes)
        assert found.bound * SLACK + 1e-12 >= max_total_rate(problem, computes)
        assert found.total <= found.bound * SLACK + 1e-12


def test_a_solver_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound is still one, and its rates can be had."""
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: SimpleNamespace(status=4))
    for seed in range(40):
        problem = problem_of(seed)
        limits = BandwidthLimits(problem)
        for computes in sets_of(problem.contributors):
            found = best_rates(limits, computes)
            assert found.bound * SLACK + 1e-12 >= max_total_rate(problem, computes)
            assert found.total <= found.bound * SLACK + 1e-12
            assert satisfies_pair_limits(limits, computes, found.rates)


@pytest.mark.parametrize("enumerated", [True, False])
def test_no_optimum_is_claimed_from_rates_of_a_failed_solver(
    monkeypatch: pytest.MonkeyPatch, enumerated: bool
) -> None:
    """Sets whose rates could not be found stay in the bound, also where all sets were tried."""
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: SimpleNamespace(status=4))
    if not enumerated:
        monkeypatch.setattr(search_module, "MAX_ENUMERATED", 0)
    open_gaps = 0
    for seed in range(40):
        problem = problem_of(seed)
        best, result = brute_force(problem), solve_averaging(problem)
        if result.bound is None:
            assert result.status != Status.INFEASIBLE or best <= 1e-9
            continue
        assert result.bound * SLACK >= best
        if result.status == Status.OPTIMAL:
            assert result.objective is not None and result.objective * SLACK >= best * (1 - 1e-6)
        open_gaps += result.status == Status.FEASIBLE
    assert open_gaps > 0


def test_closed_results_pass_the_checker_and_edited_bounds_do_not() -> None:
    """A bound tighter than its witness proves is rejected."""
    problem = instance(24, 0, 2.0)
    result = solve_averaging(problem)
    assert result.witness is not None and check(result, problem) == []
    assert result.bound is not None and result.objective is not None
    from dataclasses import replace

    tighter = replace(result, bound=result.objective, witness={"kind": "unknown"})
    assert "bound" in {v.rule for v in check(tighter, problem)}


def wrong_knapsack(*args: Any) -> Any:
    """A knapsack with half of the samples."""
    found = knapsack(*args)
    return found._replace(samples_per_s=found.samples_per_s / 2)


def wrong_cardinality_knapsack(*args: Any) -> Any:
    """A cardinality knapsack with half of the samples."""
    found = cardinality_knapsack(*args)
    return found._replace(samples_per_s=found.samples_per_s / 2)


def infeasible_milp(model: ContributorModel, run: Any) -> MilpResult:
    """An infeasible MILP."""
    return MilpResult(None, np.zeros(model.limits.n), 0.0, 0.0, -np.inf)


def wrong_lp(problem: AveragingProblem) -> RelaxedSolution:
    """LP (5) at a hundredth of its value."""
    found = solve_relaxed(problem)
    return RelaxedSolution(found.xi / 100, found.a, found.g, found.c)


@pytest.mark.parametrize(
    ("where", "name", "wrong", "method"),
    [
        (ContributorSearch, "_max_rate_bound", lambda _: 1.0, "exact"),
        (search_module, "knapsack", wrong_knapsack, "exact"),
        (search_module, "cardinality_knapsack", wrong_cardinality_knapsack, "exact"),
        (ContributorModel, "solve", infeasible_milp, "exact"),
        (rule_module, "solve_relaxed", wrong_lp, "relaxed"),
    ],
)
def test_wrong_bounds_are_detected(
    where: Any, name: str, wrong: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that excludes the incumbent raises and names problem, seed and method."""
    # links that bind, so that the first bound does not end the search
    problem = instance(24, 0, 2.0) if method == "relaxed" else instance(24, 0, 0.8, True, 0.05)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(WrongBoundError, match=rf"problem \w{{12}}, seed 0, method {method}"):
        solve_averaging(problem, method)
