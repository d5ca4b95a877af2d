"""Every bound against exhaustive search on tiny instances: never above, and sometimes reached."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

import planner.mapf.exact_solver
import planner.mapf.solve
from planner.checker.dispatch import check
from planner.checker.path_bounds import recomputed_bound_s
from planner.mapf import arrange_paths, solve_paths
from planner.mapf.arranged_bounds import arranged_bound, arranged_bound_s
from planner.mapf.arrays import PathArrays
from planner.mapf.bounds import PathBound, simple_bound
from planner.mapf.collision_free_bound import collision_free_bound_s
from planner.mapf.focal_queue import FocalQueue
from planner.mapf.path_enumeration import all_paths
from planner.mapf.start_turnover import turnover_s
from planner.problems import ArrangedPathProblem, PathProblem
from planner.search.cp_sat import solver_for
from planner.search.incumbent import WrongBoundError
from planner.search.stop import MaxIterations
from tests.mapf.conftest import random_problem
from tests.mapf.graph_mapf import GraphProblem, solve_graph_mapf
from tests.mapf.graphs import grid
from tests.mapf.test_solve import brute_force

TINY = [
    ((1, 2, 1, 1), 3, 2, 2, False),
    ((1, 2, 1, 1), 3, 2, 1, True),
    ((1, 1, 1), 2, 2, 2, False),
    ((1, 1), 2, 3, 2, True),
    ((1, 1), 2, 3, 1, True),
    ((2, 1, 1), 3, 1, 2, False),
    ((1, 1, 1), 3, 2, 2, False),
]
"""Devices per stage, stages on a path, microbatches per start device, memory, live memory."""


def tiny(seed: int, case: int, **changes: object) -> PathProblem:
    """An instance that exhaustive search solves in moments."""
    sizes, path_stages, each, memory, live = TINY[case]
    return random_problem(
        seed, sizes, path_stages, memory=memory, each=each, live_memory=live, **changes
    )


def one_device_s(f: float, b: float, memory: int, count: int, chain: float) -> float:
    """Brute force over all orders of F and B on a device with chains of at least ``chain``."""
    best = math.inf
    for places in itertools.combinations(range(2 * count), count):
        free, ended = 0.0, 0
        starts: list[float] = []
        for k in range(2 * count):
            if k in places:
                if len(starts) - ended >= memory:
                    break
                starts.append(free)
                free += f
            else:
                if ended >= len(starts):
                    break
                # microbatches are alike: the first to begin is the first to end
                free = max(free + b, starts[ended] + chain)
                ended += 1
        else:
            best = min(best, free)
    return best


def test_turnover_of_one_device() -> None:
    """Against every order of F and B."""
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(60):
        f, b = rng.uniform(0, 3, 2).tolist()
        memory, count = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        chain = f + b + float(rng.uniform(0, 12))
        least = one_device_s(f, b, memory, count, chain)
        bound = turnover_s(f, 0.0, b, memory, count, chain)
        assert bound <= least * (1 + 1e-12)
        reached += bound >= least * (1 - 1e-12)
    assert reached > 20
    assert turnover_s(1.0, 2.0, 3.0, 2, 4, 6.0) == 24.0


def test_stage_visits_by_hand() -> None:
    """Three visits of F 2 s and B 3 s on one device, nothing else: a bound of 15 s, attained."""
    problem = PathProblem(np.zeros((2, 2)), [[0], [1]], [0, 2], [0, 3], 0, 2, 3, 3)
    bound = simple_bound(PathArrays.of(problem))
    assert bound.witness == {"kind": "stage visits", "stage": 1}
    assert bound.seconds == pytest.approx(15, rel=1e-9) and brute_force(problem) == 15
    assert recomputed_bound_s(bound.witness, problem) == 15
    # a second device takes one of them, and transfers of 1 s come before and after
    two = PathProblem(
        [[0, 1, 1], [1, 0, 9], [1, 9, 0]], [[0], [1, 2]], [0, 2, 4], [0, 3, 6], 0, 2, 3, 3
    )
    assert simple_bound(PathArrays.of(two)).seconds == pytest.approx(12, rel=1e-9)
    assert brute_force(two) >= 12


@pytest.mark.parametrize("case", range(len(TINY)))
def test_bounds_of_given_arrangements(case: int) -> None:
    """Simple bound, bound without collisions and both as recomputed, under the optimum."""
    nearest = dict.fromkeys(("simple", "collision-free", "recomputed"), 0.0)
    for seed in range(4):
        problem = tiny(seed, case)
        arrays = PathArrays.of(problem)
        least = brute_force(problem)
        simple = simple_bound(arrays)
        again = recomputed_bound_s(simple.witness, problem)
        assert again is not None and simple.seconds <= again * (1 + 1e-9)
        free = collision_free_bound_s(
            arrays,
            {s: all_paths(arrays, s) for s in problem.stage_devices[0]},
            least,
            solver_for(max_work=5.0),
        )
        for name, bound in (
            ("simple", simple.seconds),
            ("collision-free", free),
            ("recomputed", again),
        ):
            assert 0 < bound <= least * (1 + 1e-12)
            nearest[name] = max(nearest[name], bound / least)
    if case in (3, 5):
        # one start device after the other, or two that hardly meet
        assert min(nearest.values()) > 1 - 1e-5
    assert min(nearest.values()) > 0.7


@pytest.mark.parametrize("live", [False, True])
def test_bounds_over_all_arrangements(live: bool) -> None:
    """The bound is below the best of all arrangements, and attained by equal devices."""
    for seed in range(3):
        problem = ArrangedPathProblem.of(
            random_problem(seed, (1, 1, 1), 3, memory=2, each=2, live_memory=live)
        )
        orders = itertools.permutations(range(3))
        least = min(brute_force(problem.arranged([[d] for d in order])) for order in orders)
        bound = arranged_bound(problem)
        again = recomputed_bound_s(bound.witness, problem)
        assert again is not None
        assert 0 < bound.seconds <= again * (1 + 1e-9) <= least * (1 + 2e-9)
    turnover = ArrangedPathProblem(np.zeros((2, 2)), (1, 1), 1.0, 2.0, 0.5, 2, 4, 1)
    assert arranged_bound(turnover).witness == {"kind": "turnover of start devices"}
    assert arranged_bound_s(turnover) == brute_force(turnover.arranged([[0], [1]])) == 6.5
    # 32 visits by two devices, one of them quick on stage 0 only: 1 s and 10 s each at best
    times = [[0.5, 5.0], [5.0, 5.0]]
    work = arranged_bound(ArrangedPathProblem(np.zeros((2, 2)), (1, 1), times, times, 0, 2, 16, 16))
    assert work.witness == {"kind": "work"} and work.seconds == pytest.approx(32 / 1.1)
    one = ArrangedPathProblem(np.zeros((1, 1)), (1,), 1.0, 2.0, 0.0, 1, 3, 3)
    assert arranged_bound_s(one) == brute_force(one.arranged([[0]])) == 9.0


def test_recomputed_bounds_of_larger_problems() -> None:
    """The solver's and the checker's bounds agree, with swaps, live memory and varied devices."""
    for seed in range(12):
        problem = random_problem(
            seed,
            (3, 2, 3, 2, 2),
            4,
            memory=np.random.default_rng(seed).integers(1 if seed % 2 else 4, 6, 12),
            each=4,
            live_memory=seed % 2 == 1,
            max_swaps=seed % 3,
        )
        bound = simple_bound(PathArrays.of(problem))
        again = recomputed_bound_s(bound.witness, problem)
        assert again == pytest.approx(bound.seconds, rel=1e-9)
        free = ArrangedPathProblem.of(problem)
        bound = arranged_bound(free)
        again = recomputed_bound_s(bound.witness, free)
        assert again is not None and bound.seconds <= again * (1 + 1e-9)


@pytest.mark.parametrize(
    "witness",
    [
        None,
        5,
        {},
        {"kind": "guess"},
        {"kind": "turnover"},
        {"kind": "turnover", "device": 1.0},
        {"kind": "turnover", "device": True},
        {"kind": "turnover", "device": -1},
        {"kind": "turnover", "device": 99},
        {"kind": "stage visits", "stage": 0},
        {"kind": "stage visits", "stage": "1"},
        {"kind": "work"},
    ],
)
def test_malformed_witnesses_prove_nothing(witness: object) -> None:
    """The checker recomputes no bound from them."""
    problem = random_problem(0)
    other = next(d for d in range(len(problem)) if d not in problem.stage_devices[0])
    assert recomputed_bound_s(witness, problem) is None
    assert recomputed_bound_s({"kind": "turnover", "device": other}, problem) is None
    assert (
        recomputed_bound_s({"kind": "turnover", "device": 0}, ArrangedPathProblem.of(problem))
        is None
    )


def test_checker_detects_an_edited_bound() -> None:
    """A bound raised by a thousandth, or with an invalid witness."""
    problem = random_problem(1)
    free = ArrangedPathProblem.of(problem)
    for result, asked in (
        (solve_paths(problem, MaxIterations(0)), problem),
        (arrange_paths(free, MaxIterations(0)), free),
    ):
        assert result.witness is not None and result.basis and check(result, asked) == []
        assert result.bound is not None and result.objective is not None
        again = recomputed_bound_s(result.witness, asked)
        assert again is not None
        raised = dataclasses.replace(result, bound=again * 1.001)
        assert [v.rule for v in check(raised, asked)] == ["bound"]
        strange = dataclasses.replace(result, witness={"kind": "guess"})
        assert [v.rule for v in check(strange, asked)] == ["bound"]
        word = dataclasses.replace(result, witness=None)
        assert check(word, asked) == []


@pytest.mark.parametrize("method", ["auto", "cbs", "straight", "dtfm-skip", "no-tc2", "reuse"])
def test_wrong_bound_is_detected(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound 50% above the optimum raises, whichever method finds the plan."""
    changes: dict[str, object] = {"path_stages": 4} if method == "straight" else {}
    if method == "reuse":
        changes = {"memory": 2, "each": 4, "sizes": (2, 2, 2), "live_memory": True}
    problem = random_problem(4, **{"memory": 4, **changes})  # type: ignore[arg-type]
    truth = solve_paths(problem, MaxIterations(40), method=method).objective
    assert truth is not None
    wrong = PathBound(1.5 * truth, "a guess", {"kind": "guess"})
    monkeypatch.setattr(planner.mapf.solve, "simple_bound", lambda arrays: wrong)
    with pytest.raises(WrongBoundError, match=r"a guess.*seed 0, method"):
        solve_paths(problem, MaxIterations(40), method=method)


@pytest.mark.parametrize("source", ["collision_free_bound_s", "proven_bound_s"])
def test_wrong_cp_sat_bound_is_detected(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CP-SAT bound 50% above the optimum, or an infeasible model, raises."""
    problem = random_problem(6, (2, 2, 2), 2, memory=6, each=3)
    truth = solve_paths(problem, MaxIterations(1)).objective
    assert truth is not None
    for wrong in (1.5 * truth, math.inf):
        monkeypatch.setattr(planner.mapf.exact_solver, source, lambda *_, wrong=wrong, **__: wrong)
        with pytest.raises(WrongBoundError, match="CP-SAT"):
            solve_paths(problem, MaxIterations(40))


def test_wrong_arrangement_bound_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound 50% above the optimum raises."""
    problem = ArrangedPathProblem.of(random_problem(4))
    truth = arrange_paths(problem, MaxIterations(4)).objective
    assert truth is not None
    wrong = PathBound(1.5 * truth, "a guess", {"kind": "guess"})
    # a first plan that is worse than the planted bound is allowed; the best is not
    monkeypatch.setattr("planner.mapf.arrange.arranged_bound", lambda problem: wrong)
    with pytest.raises(WrongBoundError, match="a guess"):
        arrange_paths(problem, MaxIterations(4))


def test_wrong_open_list_bound_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open-list bound 50% above the optimum raises."""
    problem = GraphProblem(grid(["...", "..."]), (((0, 0), (1, 2)), ((1, 2), (0, 0))))
    truth = solve_graph_mapf(problem, MaxIterations(1000))
    assert truth.objective is not None and truth.basis == "conflict-based search: open list"
    monkeypatch.setattr(FocalQueue, "least", property(lambda queue: 1.5 * truth.objective))
    with pytest.raises(WrongBoundError, match="open list"):
        solve_graph_mapf(problem, MaxIterations(1000))
