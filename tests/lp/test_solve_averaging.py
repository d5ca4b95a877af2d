"""The exact method against brute force; ties, bounds and limits."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planner.lp.contributor_search as search_module
import planner.lp.fewest_reducers as reducers_module
from benchmarks.averaging_promises import promises
from planner.bench.averaging_instances import instance
from planner.checker.averaging import check_averaging
from planner.lp.capacity import BandwidthLimits
from planner.lp.capacity import max_total_rate as combinatorial_total
from planner.lp.rates import best_rates, satisfies_pair_limits
from planner.lp.solve import solve_averaging
from planner.problems import AveragingProblem, ProblemError
from planner.search.certificate import Status
from planner.search.highs import milp
from planner.search.stop import MaxIterations, MaxRuntime
from tests.lp.averaging_oracle import (
    GBIT,
    attains,
    brute_force,
    fewest_reducers,
    max_total_rate,
    random_problem,
    sets_of,
)


def assert_best(problem: AveragingProblem, expected: Any) -> None:
    """Optimal, valid by the independent checker, and bounded from above."""
    result = solve_averaging(problem)
    if expected <= 1e-9:
        assert result.status is Status.INFEASIBLE and result.plan is None
        return
    assert result.status is Status.OPTIMAL
    assert check_averaging(result.plan, problem) == []
    assert result.objective == pytest.approx(expected, rel=1e-6)
    assert result.bound >= expected * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_enumeration_equals_brute_force(seed: int) -> None:
    """Small problems: every set of contributors at once."""
    problem = random_problem(np.random.default_rng(seed))
    assert_best(problem, brute_force(problem))


@pytest.mark.parametrize("seed", range(100, 140))
def test_branch_and_bound_equals_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with enumeration off: knapsack bounds and the mixed-integer program."""
    monkeypatch.setattr(search_module, "MAX_ENUMERATED", 0)
    problem = random_problem(np.random.default_rng(seed))
    assert_best(problem, brute_force(problem))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 4),
            st.floats(0, 10),
            st.floats(0, 10),
            st.booleans(),
        ),
        min_size=2,
        max_size=5,
    ),
    st.floats(0.1, 50),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 3)),
)
# the even rates violate a pair limit by less than the LP's tolerance
@example(
    [(0.0, 2.6235, 1e-10, True), (2.313, 5.36672, 7.78508, True)], 5.240645, False, 0.6057939990084
)
def test_generated_instances(peers: Any, batch: Any, overlap: Any, link: Any) -> None:
    """The objective equals brute force, and the checker accepts the plan."""
    samples, upload, download, can_reduce = (list(x) for x in zip(*peers, strict=True))
    samples[0] += 0.5
    can_reduce[-1] = True
    problem = AveragingProblem(
        samples, upload, download, batch, 1.0, link, None, can_reduce, overlap
    )
    best = brute_force(problem)
    result = solve_averaging(problem)
    if result.plan is None:
        assert result.status is Status.INFEASIBLE and best <= 1e-6
    else:
        # rates a thousand times below the others are within the oracle's own tolerance
        assert result.objective == pytest.approx(best, rel=1e-6, abs=2e-6)
        assert check_averaging(result.plan, problem) == []


def test_closed_form_equals_the_lp() -> None:
    """The combinatorial R(K) is the LP's for every K, single contributors included."""
    rng = np.random.default_rng(3)
    for _ in range(25):
        problem = random_problem(rng, link_bytes_per_s=None)
        for computes in sets_of(problem.contributors):
            expected = max_total_rate(problem, computes)
            assert combinatorial_total(problem, computes) == pytest.approx(
                expected, rel=1e-9, abs=1e-9
            )


def test_closed_form_is_precise() -> None:
    """Speeds from 1e-9 to 1e12 in one collaboration: R(K) to 1e-9, in exact arithmetic."""
    rng = np.random.default_rng(6)
    for _ in range(30):
        n = int(rng.integers(3, 7))
        problem = AveragingProblem(
            np.ones(n), 10.0 ** rng.uniform(-9, 12, n), 10.0 ** rng.uniform(-9, 12, n), 1.0, 1.0
        )
        for computes in sets_of(problem.contributors):
            if computes.sum() > 1:
                total = combinatorial_total(problem, computes)
                assert attains(problem, computes, total * (1 - 1e-9))
                assert not attains(problem, computes, total * (1 + 1e-9))
        # batch and vector in the units of the slowest: what is fast elsewhere costs no digits
        problem = problem.replace(batch_size=1e-9, gradient_bytes=1e-9)
        result = solve_averaging(problem)
        assert result.status is Status.OPTIMAL
        assert check_averaging(result.plan, problem) == []


def test_rates_under_pair_limits_equal_the_full_lp() -> None:
    """Lazily added pair rows end at the full LP's value, with a rigorous bound."""
    rng = np.random.default_rng(4)
    lazy = 0
    for _ in range(40):
        problem = random_problem(rng, link_bytes_per_s=None)
        n = len(problem)
        problem = problem.replace(link_bytes_per_s=rng.uniform(0.02, 0.2, (n, n)))
        computes = problem.contributors
        found = best_rates(BandwidthLimits(problem), computes)
        expected = max_total_rate(problem, computes)
        assert found.total == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert found.bound >= expected * (1 - 1e-9)
        assert satisfies_pair_limits(BandwidthLimits(problem), computes, found.rates)
        lazy += found.bound != found.total
    assert lazy > 5


def test_dropping_a_contributor_never_lowers_the_total_rate() -> None:
    """The monotonicity that the search rests on."""
    rng = np.random.default_rng(5)
    for _ in range(15):
        problem = random_problem(rng, most=5)
        totals = {c.tobytes(): max_total_rate(problem, c) for c in sets_of(problem.contributors)}
        for key, total in totals.items():
            chosen = np.frombuffer(key, dtype=bool)
            for i in np.flatnonzero(chosen):
                fewer = chosen.copy()
                fewer[i] = False
                if fewer.any():
                    assert totals[fewer.tobytes()] >= total * (1 - 1e-7) - 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_ties_take_the_fewest_reducers(seed: int) -> None:
    """Against brute force over contributors and reducers; half of the problems are uniform."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, most=4)
    if seed % 2:
        ones = np.ones(len(problem))
        problem = problem.replace(
            samples_per_s=ones, upload_bytes_per_s=ones, download_bytes_per_s=ones
        )
    result = solve_averaging(problem)
    if result.plan is not None:
        assert len(result.plan.reducers) == fewest_reducers(problem)
        assert solve_averaging(problem).plan == result.plan


def test_hand_computed_pair() -> None:
    """Two equal peers: half the vector each; a step sends half and returns half, R = u."""
    problem = AveragingProblem([1, 1], 1.0, 1.0, batch_size=0.5, gradient_bytes=1.0)
    result = solve_averaging(problem)
    # one contributor alone computes 2 steps/s, but then u = d = 1 still bounds R
    assert result.objective == pytest.approx(1.0)
    assert result.status is Status.OPTIMAL


def test_one_peer_needs_no_network() -> None:
    """A single peer does not average."""
    problem = AveragingProblem([3.0], 0.0, 0.0, batch_size=6, gradient_bytes=10)
    result = solve_averaging(problem)
    assert result.status is Status.OPTIMAL and result.objective == 0.5
    assert check_averaging(result.plan, problem) == []
    assert solve_averaging(problem, "relaxed").objective == 0.5
    assert solve_averaging(problem.replace(overlap=False)).objective == 0.5


def test_unreachable_peer_is_infeasible() -> None:
    """Everyone must receive the average: no download, or no link from any reducer, is fatal."""
    deaf = AveragingProblem([1, 1, 1], 1.0, [1, 1, 0], 1, 1, can_aggregate=[1, 1, 0])
    links = np.ones((3, 3))
    links[:, 2] = links[2, :] = 0
    for problem in (deaf, AveragingProblem([1, 1, 1], 1.0, 1.0, 1, 1, links)):
        result = solve_averaging(problem)
        assert result.status is Status.INFEASIBLE and result.plan is None
        assert result.objective is None and "cannot be reached" in result.stop_reason


def test_unlinked_peers_are_worked_around() -> None:
    """A missing link only excludes rates that use it."""
    links = np.ones((3, 3))
    links[0, 1] = links[1, 0] = 0
    problem = AveragingProblem([1, 1, 1], 1.0, 1.0, 3, 1, links)
    plan = solve_averaging(problem).plan
    assert plan.reducers == (2,)
    assert_best(problem, brute_force(problem))


def test_client_mode_peers_contribute_but_do_not_reduce() -> None:
    """can_aggregate false: r_i = 0, and the peer still receives."""
    problem = AveragingProblem([1] * 4, 1.0, 1.0, 4.0, 1.0, can_aggregate=[1, 0, 0, 1])
    plan = solve_averaging(problem).plan
    assert set(plan.reducers) <= {0, 3} and plan.computes[1:3].any()


def test_alternating_is_slower_than_overlapping() -> None:
    """Alternating phases are slower than overlapping ones, by at most a factor of two."""
    for seed in range(10):
        problem = random_problem(np.random.default_rng(seed), overlap=True)
        both = solve_averaging(problem).objective
        one = solve_averaging(problem.replace(overlap=False)).objective
        if both is not None:
            assert both / 2 * (1 - 1e-6) <= one <= both * (1 + 1e-6)


@pytest.mark.parametrize(("peers", "links"), [(24, True), (64, True), (200, True), (400, False)])
def test_generator_instances_are_solved_to_optimality(peers: int, links: Any) -> None:
    """The benchmark's instances: proven optimal, accepted by the checker."""
    for ratio in (0.8, 1.0):
        problem = instance(peers, 1, ratio, links)
        result = solve_averaging(problem)
        assert result.status is Status.OPTIMAL
        assert check_averaging(result.plan, problem) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_binding_links_are_solved_to_optimality(seed: int) -> None:
    """Links at a twentieth of the generator's: pair rows and branching are needed."""
    problem = instance(24, seed, 0.8, link_factor=0.05)
    result = solve_averaging(problem)
    assert result.status is Status.OPTIMAL
    assert check_averaging(result.plan, problem) == []


def test_a_limit_returns_the_best_so_far_with_its_bound() -> None:
    """MaxIterations stops the branching; the bound stays valid."""
    problem = instance(24, 0, 0.8, link_factor=0.05)
    result = solve_averaging(problem, stop=MaxIterations(1))
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert result.bound >= result.objective
    assert check_averaging(result.plan, problem) == []
    again = solve_averaging(problem, stop=MaxIterations(1))
    assert again.plan == result.plan and again.bound == result.bound


def test_tie_breaking_respects_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every MILP gets at most the remaining time."""
    limits: list[float] = []

    def slow(*args: Any, options: Any, **kwargs: Any) -> Any:
        limits.append(options["time_limit"])
        time.sleep(0.1)
        return milp(*args, options=options, **kwargs)

    monkeypatch.setattr(reducers_module, "milp", slow)
    problem = instance(24, 1, 0.8, link_factor=0.05)
    assert solve_averaging(problem, stop=MaxRuntime(600)).plan is not None
    assert len(limits) > 2 and max(limits) <= 600
    assert all(later <= earlier - 0.1 for earlier, later in pairwise(limits))


def test_promises_are_ordered() -> None:
    """Attained <= proven <= eq. 2 <= LP (5), and the paper's rule attains no more than the best."""
    rng = np.random.default_rng(8)
    for _ in range(6):
        problem = random_problem(rng, most=5, overlap=True)
        found = promises(problem, eq2=True)
        slack = 1 + 1e-6
        assert found.rule <= found.attained * slack + 1e-12
        assert found.attained <= found.proven * slack
        assert found.attained <= found.eq2 * slack + 1e-9
        assert found.eq2 <= found.lp5 * slack + 1e-9


@pytest.mark.parametrize("method", ["exact", "relaxed"])
def test_wrong_types_raise(method: str) -> None:
    """Wrong types of problem or stopping criterion raise one-line messages."""
    problem = instance(8, 0)
    wrong: Any
    for wrong in (None, 5, {"samples_per_s": [1]}):
        with pytest.raises(ProblemError, match="must be of type AveragingProblem, found"):
            solve_averaging(wrong, method)
    for wrong in (5, "10 s", MaxIterations):
        with pytest.raises(ValueError, match="stop must be a stopping criterion, found"):
            solve_averaging(problem, method, wrong)


def test_unknown_method_is_refused() -> None:
    """The message lists the methods."""
    with pytest.raises(ProblemError, match="exact, relaxed"):
        solve_averaging(instance(8, 0), "guess")


def test_expected_samples_add_up_to_the_batch() -> None:
    """B s_i / S for contributors, nothing for the others."""
    problem = instance(24, 2, 1.0)
    plan = solve_averaging(problem).plan
    assert plan.samples_per_step.sum() == pytest.approx(problem.batch_size)
    assert (plan.samples_per_step > 0).tolist() == plan.computes.tolist()
    assert plan.shares.sum() == pytest.approx(1)


PROGRAM = """
import hashlib, sys
from benchmarks.averaging_promises import promises
from planner.bench.averaging_instances import instance
from planner.lp.solve import solve_averaging
digest = hashlib.sha256()
for peers, factor in ((8, 1.0), (12, 0.1), (24, 1.0), (24, 0.05)):
    problem = instance(peers, 3, 0.9, link_factor=factor)
    for method in ("exact", "relaxed"):
        digest.update(solve_averaging(problem, method).plan.to_bytes())
print(digest.hexdigest())
"""


def test_plans_are_identical_across_processes() -> None:
    """Two processes with different hash seeds and thread counts give the same bytes."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "PYTHONPATH": "."},
        ).stdout
        for seed, threads in (("0", "1"), ("7", "2"))
    }
    assert len(outputs) == 1


def test_gigabit_numbers() -> None:
    """Real magnitudes: eight peers of 1 Gb/s average 100 MB in 2 (n - 1) / n of the wire time."""
    problem = AveragingProblem([1] * 8, GBIT, GBIT, 8 * 1.4 * 0.99, 100e6)
    result = solve_averaging(problem)
    assert result.objective == pytest.approx(1 / 1.4)


def test_single_contributor_sums_what_it_cannot_download() -> None:
    """K = {3}: R = 2/3 exceeds d_3 = 1/2, so that peer 3 must sum at least 1/6 itself."""
    problem = AveragingProblem(
        [0.5, 0, 0, 1], [0, 2, 1, 1], [1, 1, 1, 0.5], 1, 1, None, None, [0, 1, 1, 1], False
    )
    result = solve_averaging(problem)
    assert result.objective == pytest.approx(brute_force(problem)) == pytest.approx(0.4)
    assert check_averaging(result.plan, problem) == []
    assert result.plan.rates[3] >= 1 / 6 - 1e-9
