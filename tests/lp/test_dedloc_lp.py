"""LP (5): the paper's model as oracle of the reduced forms, exports, and the paper's rule."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest
from scipy.optimize import linprog

import planner.lp.dedloc_lp as forms
import planner.lp.dedloc_lp_aggregated as sums
from planner.bench.averaging_instances import instance
from planner.checker.averaging import check_averaging
from planner.lp.dedloc_lp import lp_bound, solve_relaxed
from planner.lp.dedloc_lp_rows import RelaxedSolution, ScaledProblem, big_m
from planner.lp.paper_model import build_paper_model
from planner.lp.paper_rule import eq6_shares, paper_rule
from planner.lp.solve import solve_averaging
from planner.lp.transportation import solve_transportation
from planner.problems import AveragingProblem, ProblemError
from planner.search.certificate import Status
from tests.lp.averaging_oracle import random_problem


def violation_of_lp5(problem: AveragingProblem, solution: Any) -> Any:
    """Largest excess over any constraint of (5), relative to the fastest peer."""
    a, g, c = solution.a, solution.g, solution.c
    n = len(problem)
    off = ~np.eye(n, dtype=bool)
    worst = [
        ((a + g) * off).sum(axis=1) - problem.upload_bytes_per_s,
        ((a + g) * off).sum(axis=0) - problem.download_bytes_per_s,
        solution.xi * problem.gradient_bytes - g.sum(axis=0),
    ]
    if problem.link_bytes_per_s is not None:
        worst.append((a + g)[off] - problem.link_bytes_per_s[off])
    for k in range(n):
        # i = k is no row: what stays on a peer is free
        rows = g - a[k][:, None] - (1 - c[k]) * big_m(problem)[:, None]
        worst.append(np.delete(rows, k, axis=0).ravel())
    samples = float(problem.samples_per_s @ c) / problem.batch_size
    assert solution.xi <= samples * (1 + 1e-6)
    scale = max(problem.upload_bytes_per_s.max(), problem.download_bytes_per_s.max())
    return max(float(np.max(x)) for x in worst) / scale


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_reduced_form_equals_the_paper_model(solver: Any) -> None:
    """Same value, and a point that satisfies every row of (5)."""
    rng = np.random.default_rng(5)
    for _ in range(40 if solver == "highs" else 10):
        problem = random_problem(rng, overlap=True)
        solution = solve_relaxed(problem)
        expected = build_paper_model(problem).solve(solver).xi
        assert solution.xi == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert violation_of_lp5(problem, solution) < 1e-6


def test_full_form_equals_the_aggregated_one() -> None:
    """The two reduced forms, one the fallback of the other."""
    for seed in range(4):
        for ratio in (0.3, 0.8, 1.0):
            problem = instance(12, seed, ratio, link_factor=0.3)
            scaled = ScaledProblem(problem)
            full = forms.solve_in_full(scaled)
            assert full.xi == pytest.approx(solve_relaxed(problem).xi, rel=1e-6)
            assert violation_of_lp5(problem, full) < 1e-6


def test_cuts_are_needed_and_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the transportation problem is infeasible, cuts reach the paper model's optimum."""
    monkeypatch.setattr(
        forms, "solve_in_full", lambda scaled: pytest.fail("the full form was needed")
    )
    monkeypatch.setattr(sums, "MAX_ROUNDS", 50)
    for seed in range(4):
        problem = instance(8, seed, 0.8, link_factor=0.2)
        assert lp_bound(problem) == pytest.approx(build_paper_model(problem).solve().xi, rel=1e-6)


def test_transport_is_a_maximum_flow() -> None:
    """Against the linear program: flows that cover all needs, or cuts that are violated."""
    rng = np.random.default_rng(2)
    found = {True: 0, False: 0}
    for _ in range(150):
        n = int(rng.integers(2, 9))
        room = rng.uniform(0, 1, (n, n)) * (rng.random((n, n)) < rng.uniform(0.3, 1))
        np.fill_diagonal(room, 0.0)
        supply, need = rng.uniform(0, 2, n), rng.uniform(0, 1, n)
        need *= rng.uniform(0.1, 1.2) * supply.sum() / need.sum()
        one, each = np.ones((1, n)), np.eye(n)
        rows = np.vstack([np.kron(each, one), np.kron(one, each)])
        best = linprog(
            -np.ones(n * n),
            A_ub=rows,
            b_ub=np.concatenate([supply, need]),
            bounds=np.column_stack([np.zeros(n * n), room.ravel()]),
        )
        short = float(need.sum() + best.fun)
        g, cuts = solve_transportation(supply, need, room)
        found[g is not None] += 1
        assert (g is not None) == (short < 1e-6)
        if g is not None:
            assert (g >= 0).all() and (g <= room + 1e-12).all()
            assert (g.sum(axis=1) <= supply + 1e-12).all()
            assert (g.sum(axis=0) >= need - 1e-6).all()
        for suppliers, receivers in cuts:
            through = supply.sum() - supply[suppliers].sum()
            through += room[np.ix_(suppliers, receivers)].sum()
            assert need[receivers].sum() - through == pytest.approx(short, abs=1e-6)
    assert min(found.values()) > 20


def test_paper_model_has_cubic_rows(tmp_path: Path) -> None:
    """n^3 rows of eq. 4, and files in both formats that hold them."""
    problem = instance(4, 0)
    paper_model = build_paper_model(problem)
    for suffix in (".lp", ".mps"):
        path = tmp_path / f"dedloc{suffix}"
        paper_model.write(path)
        assert path.read_text().count("sender_") >= 4**3
    with pytest.raises(ProblemError, match=r"use \.lp or \.mps"):
        paper_model.write(tmp_path / "dedloc.txt")
    with pytest.raises(ProblemError, match="highs, cbc"):
        paper_model.solve("abacus")


@pytest.mark.parametrize("suffix", [".lp", ".mps"])
def test_written_models_have_the_same_optimum(tmp_path: Path, suffix: Any) -> None:
    """CBC finds xi from the file; the MPS file minimises -xi."""
    paper_model = build_paper_model(instance(5, 0))
    path = tmp_path / f"dedloc{suffix}"
    paper_model.write(path)
    answer = tmp_path / "answer.txt"
    cbc = pulp.PULP_CBC_CMD().path
    subprocess.run([cbc, str(path), "solve", "solution", str(answer)], check=True)
    xi = next(line.split()[2] for line in answer.read_text().splitlines() if " xi " in line)
    assert float(xi) * paper_model.xi_unit == pytest.approx(paper_model.solve().xi, rel=1e-6)


def test_lp5_bounds_eq_2_and_eq_2_bounds_fixed_shares() -> None:
    """With links the paper's eq. 2 can promise more than any fixed shares attain."""
    ratios = []
    rng = np.random.default_rng(11)
    for _ in range(12):
        n = int(rng.integers(3, 6))
        problem = random_problem(rng, most=n, overlap=True)
        n = len(problem)
        problem = problem.replace(link_bytes_per_s=rng.uniform(0.0, 0.1, (n, n)))
        attained = solve_averaging(problem).objective or 0.0
        eq2 = build_paper_model(problem, binary=True).solve().xi
        assert attained <= eq2 * (1 + 1e-6) + 1e-9
        assert eq2 <= lp_bound(problem) * (1 + 1e-6) + 1e-9
        if attained > 0:
            ratios.append(eq2 / attained)
    assert max(ratios) > 1.01


def test_paper_rule_attains_no_more_than_it_promises() -> None:
    """Its plan is valid as executed, and the bound is LP (5)."""
    for seed in range(6):
        for ratio in (0.3, 1.0, 2.0):
            problem = instance(8, seed, ratio)
            result = solve_averaging(problem, "relaxed")
            assert check_averaging(result.plan, problem) == []
            assert result.bound >= result.objective
            exact = solve_averaging(problem)
            assert exact.objective <= result.bound
            assert result.objective <= exact.bound * (1 + 1e-9)


def test_rule_with_every_c_fractional_attains_nothing() -> None:
    """If every c is fractional, no peer contributes and the rule attains 0."""
    problem = instance(8, 0, 0.3)
    rule = paper_rule(problem)
    assert not rule.computes.any() and rule.lp_value > 0
    result = solve_averaging(problem, "relaxed")
    assert result.objective == 0 and result.status is Status.FEASIBLE


def test_shares_follow_eq_6() -> None:
    """fraction_i proportional to min_j g_ij."""
    solution = RelaxedSolution(1.0, np.zeros((2, 2)), np.array([[3.0, 1.0], [3, 9]]), np.ones(2))
    assert eq6_shares(solution) == pytest.approx([0.25, 0.75])


def test_alternating_phases_raise() -> None:
    """Eq. 2-5 are written for delayed parameter updates."""
    problem = instance(4, 0).replace(overlap=False)
    for call in (build_paper_model, lp_bound):
        with pytest.raises(ProblemError, match="overlap=False"):
            call(problem)


@pytest.mark.parametrize("ratio", [1e-3, 1e-10, 1e-100])
def test_negligible_computing_time(ratio: Any) -> None:
    """With very fast computing the network alone determines the value."""
    problem = instance(8, 0, ratio)
    expected = lp_bound(instance(8, 0, 1e-2))
    assert lp_bound(problem) == pytest.approx(expected, rel=1e-9)
    if ratio > 1e-20:
        assert build_paper_model(problem).solve().xi == pytest.approx(expected, rel=1e-6)


def test_dead_network() -> None:
    """No bandwidth at all: (5) is 0."""
    problem = AveragingProblem([1, 1], 0.0, 0.0, 1, 1)
    assert lp_bound(problem) == 0
