"""Every bound on eq. 1 against enumeration, and detection of wrong bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.checker.assignment_bounds import recomputed_bound_s
from planner.checker.dispatch import check
from planner.genetic import auto, solve, solve_assignment
from planner.genetic import chain_bound as chain
from planner.genetic.boundary_sets import BoundarySets
from planner.genetic.bounds import forest_bound, quick_bound, star_bound
from planner.genetic.chain_bound import ChainBound, ChainParams
from planner.genetic.chain_decision import is_achievable
from planner.genetic.classes import (
    ClassCosts,
    ClassModelResult,
    counts_of,
    groups_from_counts,
    interchangeable,
)
from planner.genetic.classes import solve_classes as real_solve_classes
from planner.genetic.data import assignment_data, groups_of
from planner.matching import open_path
from planner.problems import AssignmentProblem
from planner.problems.assignment_method import AssignmentMethod
from planner.search.incumbent import WrongBoundError
from planner.search.stop import MaxIterations
from tests.genetic.assignment_instances import (
    SHAPES,
    best_groups,
    brute_force,
    partitions,
    problem_of,
    random_network,
)

ABOVE = 1 + 1e-9
SMALL: list[dict[str, object]] = [
    *SHAPES,
    {"stages": 4, "pipelines": 2},
    {"stage_sizes": (2, 2, 1, 2)},
]
SEVERAL = [shape for shape in SMALL if shape.get("stages") != 1]


def slots_of(groups: list[tuple[int, ...]]) -> np.ndarray:
    return np.array([d for group in groups for d in group])


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("sites", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_star_and_forest_bounds_are_valid(shape: dict[str, object], sites: int | None) -> None:
    """Each part is at most the optimum of eq. 2 or eq. 4 alone, and their sum that of eq. 1."""
    for seed in range(2):
        problem = problem_of(shape, seed, sites)
        data = assignment_data(problem)
        dp_cost = problem.data_parallel_s(best_groups(problem, problem.data_parallel_s))
        pipeline = problem.pipeline_s(best_groups(problem, problem.pipeline_s))
        assert 0 <= star_bound(data) <= dp_cost * ABOVE
        assert 0 <= forest_bound(data) <= pipeline * ABOVE
        assert quick_bound(data) <= brute_force(problem) * ABOVE


def test_star_and_forest_bounds_are_attained() -> None:
    """The star bound is tight for a single group, and the forest bound for a single link."""
    together = problem_of({"stages": 1, "pipelines": 5}, 1)
    assert star_bound(assignment_data(together)) == pytest.approx(brute_force(together), rel=1e-12)
    apart = problem_of({"stages": 2, "pipelines": 1}, 1)
    assert forest_bound(assignment_data(apart)) == pytest.approx(brute_force(apart), rel=1e-12)


@pytest.mark.parametrize("shape", SEVERAL, ids=str)
@pytest.mark.parametrize("known", ["first", "best"])
def test_chain_bound_is_valid_after_every_decision(shape: dict[str, object], known: str) -> None:
    """From a poor incumbent and from the optimum; it ends close to the optimum."""
    problem = problem_of(shape, 4)
    data, best = assignment_data(problem), best_groups(problem)
    optimum = problem.cost(best)
    first = np.arange(len(data.stage_of_slot)) if known == "first" else slots_of(best)
    bound = ChainBound(data, first)
    assert ChainBound.applies(data)
    for asked in range(400):
        assert bound.bound <= optimum * ABOVE
        queries = bound.queries(2)
        if not queries:
            break
        for query in queries:
            bound.record(query, query.solve(data))
            assert bound.bound <= optimum * ABOVE
        if asked == 5:
            bound.tighten(slots_of(best))
    assert bound.bound >= quick_bound(data) / ABOVE
    assert bound.bound >= 0.95 * optimum


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[7]], ids=str)
def test_undecided_queries_do_not_raise_the_bound(shape: dict[str, object]) -> None:
    """Queries without an outcome leave the bound unchanged."""
    problem = problem_of(shape, 4)
    bound = ChainBound(
        assignment_data(problem), np.arange(len(problem.network)), ChainParams(min_step=0.1)
    )
    before = bound.bound
    for _ in range(50):
        for query in bound.queries(2):
            bound.record(query, None)
    assert bound.bound == before


@pytest.mark.parametrize("shape", SEVERAL, ids=str)
def test_decisions_agree_with_enumeration(shape: dict[str, object]) -> None:
    """`is_achievable` is True at the least level of any plan, and False just below."""
    problem = problem_of(shape, 6)
    data, sets = assignment_data(problem), BoundarySets(assignment_data(problem))
    plans = [
        (
            problem.data_parallel_s(groups),
            [2 * problem.boundary_s(j, groups[j], groups[j + 1]) for j in range(sets.boundaries)],
        )
        for groups in partitions(list(range(len(problem.network))), problem.stage_sizes)
    ]
    ceiling = float(np.median([dp_cost for dp_cost, _ in plans]))
    for mask in sorted(sets.mask_of.values())[1:]:
        kept = [j for j in range(sets.boundaries) if mask >> j & 1]
        for limit in (np.inf, ceiling):
            least = min(max(b[j] for j in kept) for dp_cost, b in plans if dp_cost <= limit)
            assert is_achievable(data, mask, least, limit, 5.0) is True
            assert is_achievable(data, mask, least * (1 - 1e-4), limit, 5.0) is False


def test_boundary_sets_are_grouped_by_run_lengths() -> None:
    """Seven boundaries have 128 sets, with one key per integer partition of 8."""
    sets = BoundarySets(assignment_data(problem_of({"stages": 8, "pipelines": 2}, 0)))
    assert len(sets.mask_of) == 22
    assert sets.contains((8,), (2, 2, 2, 2)) and sets.contains((4, 4), (3, 2, 2, 1))
    assert not sets.contains((4, 4), (5, 1, 1, 1)) and not sets.contains((6, 2), (4, 4))


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("sites", [1, 2, 3])
def test_class_model_is_exact(shape: dict[str, object], sites: int) -> None:
    """Its plan is optimal and its bound valid, also under a short limit."""
    problem = problem_of(shape, 8, sites)
    data, optimum = assignment_data(problem), brute_force(problem)
    classes = interchangeable(problem)
    costs = ClassCosts.of(data, classes)
    trivial = groups_of(data, np.arange(len(data.stage_of_slot)))
    given: dict[str, Any] = {"upper": problem.cost(trivial), "hint": counts_of(costs, trivial)}
    short = real_solve_classes(data, costs, **given, max_work=1e-3)
    assert short.bound <= optimum * ABOVE
    full = real_solve_classes(data, costs, **given, max_work=20.0)
    assert optimum * (1 - 1e-6) <= full.bound <= optimum * ABOVE
    assert full.counts is not None
    assert problem.cost(groups_from_counts(costs, full.counts)) == pytest.approx(optimum, rel=1e-6)


def test_class_costs_equal_device_costs() -> None:
    """Any two devices of two classes have the same costs."""
    problem = problem_of({"stages": 3, "pipelines": 4}, 2, 4)
    data, classes = assignment_data(problem), interchangeable(problem)
    costs = ClassCosts.of(data, classes)
    for c, some in enumerate(classes):
        for e, others in enumerate(classes):
            for d in some:
                for f in others:
                    if d != f:
                        assert costs.pp_cost[0, c, e] == data.pp_cost[0, d, f]
                        assert costs.dp_cost[0, c, e] == data.dp_cost[0, d, f]
        if len(some) == 1:
            assert costs.pp_cost[0, c, c] == costs.dp_cost[0, c, c] == 0


def assert_wrong_bound_raises(problem: AssignmentProblem, method: str) -> None:
    """Solve with a planted error; the exception identifies problem, seed and method."""
    with pytest.raises(WrongBoundError, match=rf"problem [0-9a-f]{{12}}, seed 3, method {method}"):
        solve_assignment(problem, MaxIterations(120), 3, method)


@pytest.mark.parametrize("method", list(AssignmentMethod))
def test_wrong_quick_bound_is_detected(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound 50% above the optimum raises in every method."""
    problem = problem_of(SHAPES[3], 3)
    wrong = 1.5 * brute_force(problem)
    monkeypatch.setattr(solve, "quick_bound", lambda _: wrong)
    assert_wrong_bound_raises(problem, method)


@pytest.mark.parametrize("method", ["auto", "classes"])
@pytest.mark.parametrize("wrong", ["bound", "infeasible"])
def test_wrong_class_model_is_detected(
    method: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound above the optimum, and a model that lost the known plan."""
    problem = problem_of(SHAPES[3], 3)

    def wrong_result(*arguments: Any, **options: Any) -> ClassModelResult:
        if wrong == "infeasible":
            # no plan fits below the limit with these costs
            monkeypatch.setattr(arguments[1], "dp_cost", 1e3 * arguments[1].dp_cost)
            return real_solve_classes(*arguments, **options)
        outcome = real_solve_classes(*arguments, **options)
        return outcome._replace(bound=1.5 * outcome.bound)

    class Loose(ClassCosts):
        """Mutable costs."""

        __setattr__ = object.__setattr__
        __delattr__ = object.__delattr__

    monkeypatch.setattr(auto, "ClassCosts", Loose)
    monkeypatch.setattr(auto, "solve_classes", wrong_result)
    assert_wrong_bound_raises(problem, method)


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[7]], ids=str)
def test_wrong_decision_is_detected(
    shape: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every decision is infeasible, the bound exceeds the incumbent."""
    monkeypatch.setattr(chain, "is_achievable", lambda *_: False)
    monkeypatch.setattr(auto.AutoSolver, "_class_model_applies", lambda *_: False)
    assert_wrong_bound_raises(problem_of(shape, 3), "auto")


def test_wrong_decision_under_a_ceiling_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong decision under a ceiling that admits the incumbent lifts the bound above it."""
    problem = problem_of(SHAPES[3], 3)
    data, best = assignment_data(problem), best_groups(problem)
    optimum = problem.cost(best)
    bound = ChainBound(data, slots_of(best))
    lies = 0
    for _ in range(200):
        queries = bound.queries(2)
        if not queries or bound.bound > optimum * ABOVE:
            break
        for query in queries:
            capped = np.isfinite(query.interval.ceiling)
            lies += capped
            bound.record(query, False if capped else query.solve(data))
    assert lies and bound.bound > optimum * ABOVE


def test_wrong_path_bound_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one device, where the open-path bound is used."""
    real = open_path

    def wrong_result(*arguments: Any) -> Any:
        path = real(*arguments)
        assert path.bound is not None
        return replace(path, bound=1.5 * path.bound)

    monkeypatch.setattr(auto, "open_path", wrong_result)
    assert_wrong_bound_raises(problem_of({"stages": 6, "pipelines": 1}, 2), "auto")


@pytest.mark.parametrize("shape", [*SMALL, {"stages": 6, "pipelines": 7}], ids=str)
def test_checker_recomputes_the_quick_bound(shape: dict[str, object]) -> None:
    """The checker's own computation gives the same value, with and without equal links."""
    for seed, sites in ((0, None), (1, 2), (2, 3)):
        problem = problem_of(shape, seed, sites)
        again = recomputed_bound_s(
            {"kind": "star and forest"},
            problem.network,
            problem.stage_sizes,
            problem.activation_bytes,
            problem.gradient_bytes,
        )
        assert again == pytest.approx(quick_bound(assignment_data(problem)), rel=1e-12)


def test_check_rejects_a_bound_above_its_witness() -> None:
    """A stored bound that was raised, an unknown witness, and one of another shape."""
    problem = AssignmentProblem(random_network(12, 1), 3, 4, 3e8, 5e8)
    result = solve_assignment(problem, MaxIterations(3), method="region-greedy")
    assert result.witness == {"kind": "star and forest"} and result.bound is not None
    assert check(result, problem) == []
    raised = replace(result, bound=result.bound * 1.001)
    assert "bound" in {v.rule for v in check(raised, problem)}
    strange = replace(result, witness={"kind": "a dream"})
    assert "proves nothing here" in str(check(strange, problem)[0])
    bytes_of = (problem.activation_bytes, problem.gradient_bytes)
    for sizes in ((4, 4), (4, 4, 3), (), (12,)):
        assert recomputed_bound_s(result.witness, problem.network, sizes, *bytes_of) is None


def test_basis_of_every_bound() -> None:
    """The basis names the kind of proof."""
    free, alike = problem_of(SHAPES[3], 3), problem_of({"stages": 3, "pipelines": 4}, 3, 3)
    assert solve_assignment(free, MaxIterations(1), method="search").basis == "star and forest"
    basis = solve_assignment(alike, MaxIterations(40), method="classes").basis
    assert basis == f"CP-SAT: model of {len(interchangeable(alike))} classes of devices"
    path = solve_assignment(problem_of({"stages": 6, "pipelines": 1}, 2), MaxIterations(1))
    assert path.basis == "open path of all devices: Held-Karp"
    many = AssignmentProblem(random_network(24, 1), 4, 6, 3e8, 5e8)
    assert solve_assignment(many, MaxIterations(5)).basis.startswith("chain bound: CP-SAT")


def test_check_rejects_an_edited_bound_in_a_plan() -> None:
    """The checker recomputes the assignment's bound from the plan's stages and bytes."""
    cluster = pl.Cluster(random_network(12, 2), pl.Devices.of_gpu("A100"))
    work = pl.Workload.preset("gpt2-tiny", sequence=128, batch_samples=16)
    for head in ("first", "last"):
        result = pl.plan(cluster, work, stages=3, method="search", head=head, stop=MaxIterations(2))
        plan = result.plan
        assert plan is not None and check(plan) == []
        own = plan.certificates["assignment"]
        assert own.witness == {"kind": "star and forest"}
        assert own.bound is not None and own.objective is not None
        bound = own.bound * (1 + 1e-6)
        gap = (own.objective - bound) / own.objective
        edited = {**plan.certificates, "assignment": replace(own, bound=bound, gap=gap)}
        found = check(plan.replace(certificates=edited))
        assert [(v.rule, v.where) for v in found] == [("bound", "certificates.assignment.bound")]
