"""Every bound of the averaging solvers against brute force, and wrong ones that must be caught."""

from __future__ import annotations

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
from planner.lp.capacity import Limits
from planner.lp.contributor_milp import Answer, ContributorModel
from planner.lp.contributor_search import ContributorSearch
from planner.lp.knapsack import knapsack
from planner.lp.lp5 import solve_relaxed
from planner.lp.lp5_rows import RelaxedSolution
from planner.lp.rates import best_rates
from planner.lp.sized_knapsack import sized_knapsack
from planner.lp.solve import solve_averaging
from planner.problems import AveragingProblem
from planner.search.incumbent import ROUNDING, WrongBoundError
from planner.search.stop import MaxIterations
from tests.lp.averaging_oracle import brute_force, largest_total, random_problem, sets_of

SLACK = 1 + 1e-7


def problem_of(seed: int, **changes: Any) -> AveragingProblem:
    """A random problem that brute force can do."""
    return random_problem(np.random.default_rng(seed), most=5, **changes)


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_first_bound_holds_and_is_recomputed(seed: int) -> None:
    """What all compute together and each downloads; the checker's own figure is the same."""
    problem = problem_of(seed)
    search = ContributorSearch(problem, MaxIterations(0).start())
    assert search.bound * SLACK >= brute_force(problem)
    witness = search.incumbent.witness
    assert witness is not None
    again = recomputed_bound(witness, problem)
    assert again is not None
    assert search.bound == pytest.approx(again * (1 + ROUNDING), rel=1e-12)
    assert recomputed_bound({"kind": "faith"}, problem) is None


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.1, 1.0))
def test_knapsacks_allow_every_set(seed: int, share: float) -> None:
    """At the rate of any set, both knapsacks allow at least its samples."""
    problem = problem_of(seed)
    limits = Limits(problem)
    for computes in sets_of(problem.contributors):
        count = int(computes.sum())
        total = largest_total(problem, computes) * share * (1 - 1e-9)
        if count < 2 or total <= 1e-6:
            continue
        samples = float(problem.samples_per_s[computes].sum())
        for fewest in range(2, count + 1):
            assert knapsack(limits, total, fewest).samples_per_s * SLACK >= samples
            most = int(problem.contributors.sum())
            assert sized_knapsack(limits, total, fewest, most).samples_per_s * SLACK >= samples
        assert sized_knapsack(limits, total, count, count).samples_per_s * SLACK >= samples


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.booleans())
def test_programme_of_contributors_holds(seed: int, overlap: bool) -> None:
    """No set of the model makes more steps than its bound; the rates are brute force's."""
    problem = problem_of(seed, overlap=overlap)
    limits = Limits(problem)
    most = int(problem.contributors.sum())
    highest = float(limits.download.min())
    if most < 2 or highest <= 0:
        return
    model = ContributorModel(limits, 2, most, 0.0, highest)
    answer = model.solve(MaxIterations(10_000).start())
    for computes in sets_of(problem.contributors):
        if computes.sum() > 1:
            samples = float(problem.samples_per_s[computes].sum())
            value = problem.steps_of(samples, largest_total(problem, computes))
            assert answer.bound * (1 + 1e-6) >= value - 1e-9


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_dual_bound_of_the_rates_holds(seed: int) -> None:
    """Weak duality bounds R for given contributors from above, and closely."""
    problem = problem_of(seed)
    for computes in sets_of(problem.contributors):
        found = best_rates(Limits(problem), computes)
        assert found.bound * SLACK + 1e-12 >= largest_total(problem, computes)
        assert found.total <= found.bound * SLACK + 1e-12


def test_closed_results_pass_the_checker_and_edited_bounds_do_not() -> None:
    """Where a witness is there, a bound that claims more than it proves is found."""
    problem = instance(24, 0, 2.0)
    result = solve_averaging(problem)
    assert result.witness is not None and check(result, problem) == []
    assert result.bound is not None and result.objective is not None
    from dataclasses import replace

    tighter = replace(result, bound=result.objective, witness={"kind": "faith"})
    assert "bound" in {v.rule for v in check(tighter, problem)}


def half_knapsack(*args: Any) -> Any:
    """A knapsack that loses half of the samples."""
    found = knapsack(*args)
    return found._replace(samples_per_s=found.samples_per_s / 2)


def half_sized(*args: Any) -> Any:
    """The same with the contributors counted."""
    found = sized_knapsack(*args)
    return found._replace(samples_per_s=found.samples_per_s / 2)


def no_programme(model: ContributorModel, run: Any) -> Answer:
    """A programme that holds nobody."""
    return Answer(None, np.zeros(model.limits.n), 0.0, 0.0, -np.inf)


def half_lp(problem: AveragingProblem) -> RelaxedSolution:
    """LP (5) at a hundredth of its value."""
    found = solve_relaxed(problem)
    return RelaxedSolution(found.xi / 100, found.a, found.g, found.c)


@pytest.mark.parametrize(
    ("where", "name", "wrong", "method"),
    [
        (ContributorSearch, "_widest", lambda _: 1.0, "exact"),
        (search_module, "knapsack", half_knapsack, "exact"),
        (search_module, "sized_knapsack", half_sized, "exact"),
        (ContributorModel, "solve", no_programme, "exact"),
        (rule_module, "solve_relaxed", half_lp, "relaxed"),
    ],
)
def test_wrong_bounds_are_caught(
    where: Any, name: str, wrong: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that excludes the plan in hand ends the solve and names problem, seed and method."""
    # links that bind, so that the first bound does not end the search
    problem = instance(24, 0, 2.0) if method == "relaxed" else instance(24, 0, 0.8, True, 0.05)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(WrongBoundError, match=rf"problem \w{{12}}, seed 0, method {method}"):
        solve_averaging(problem, method)
