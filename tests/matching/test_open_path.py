"""Open paths against brute force; bounds beyond the exact size."""

from __future__ import annotations

import sys
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from planner.matching import bottleneck_assignment, open_path
from planner.matching.path_tsp import (
    EXACT_NODES,
    OpenPathParams,
    _assignment_bound,
    _descend,
    _patched_assignment,
    _solve_circuit,
    path_length,
)
from planner.search.certificate import Status
from planner.search.incumbent import Incumbent, WrongBoundError
from planner.search.stop import (
    AnyOf,
    Effort,
    MaxIterations,
    MaxRuntime,
    StoppingCriterion,
    TargetGap,
)

pytestmark = pytest.mark.interpreted

MODULE = sys.modules["planner.matching.path_tsp"]


def brute_force(cost: np.ndarray) -> float:
    """Length of the shortest open path."""
    return min(path_length(cost, order) for order in permutations(range(len(cost))))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("symmetric", [True, False])
def test_small_paths_are_exact(n: int, symmetric: bool) -> None:
    """Held-Karp finds the optimum, for one-way costs too."""
    cost = np.random.default_rng(n).random((n, n))
    if symmetric:
        cost = cost + cost.T
    np.fill_diagonal(cost, 0)
    result = open_path(cost)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(brute_force(cost), abs=1e-12)
    assert sorted(result.plan or ()) == list(range(n))


def test_line_is_walked_end_to_end() -> None:
    """Points on a line: the path is the line, from its smaller end."""
    place = np.array([3.0, 0.0, 4.0, 1.0, 2.0])
    result = open_path(np.abs(place[:, None] - place[None, :]))
    assert result.plan == (1, 3, 4, 0, 2)
    assert result.objective == 4.0


@pytest.mark.parametrize("n", [EXACT_NODES + 4, 40])
def test_long_paths_have_a_valid_bound(n: int) -> None:
    """On a line the optimum is known; the bound does not exceed it."""
    place = np.random.default_rng(n).permutation(n).astype(float)
    result = open_path(np.abs(place[:, None] - place[None, :]), MaxIterations(3))
    assert result.objective is not None and result.bound is not None
    assert result.bound <= n - 1 <= result.objective + 1e-9
    assert sorted(result.plan or ()) == list(range(n))


def test_cp_sat_closes_a_long_path() -> None:
    """Beyond the exact size CP-SAT proves a random instance."""
    points = np.random.default_rng(0).random((20, 2))
    cost = np.linalg.norm(points[:, None] - points[None, :], axis=2)
    result = open_path(cost, MaxIterations(60))
    assert result.status is Status.OPTIMAL


def test_infinite_cost_raises() -> None:
    """A path may need any pair."""
    with pytest.raises(ValueError, match="finite"):
        open_path([[0.0, np.inf], [1.0, 0.0]])
    with pytest.raises(ValueError, match="n x n"):
        open_path([[0.0, 1.0]])


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_assignment_bound_is_valid(n: int, low: float) -> None:
    """For one-way costs, also below zero."""
    for seed in range(5):
        cost = np.random.default_rng(seed).uniform(low, 1, (n, n))
        np.fill_diagonal(cost, 0)
        best = brute_force(cost)
        assert _assignment_bound(cost) <= best + 1e-12


@pytest.mark.parametrize("stop", [MaxIterations(1), MaxRuntime(60)], ids=str)
def test_circuit_bound_is_valid(stop: StoppingCriterion) -> None:
    """From a poor order CP-SAT finds the best one, and its bound does not exceed it."""
    for seed in range(3):
        cost = np.random.default_rng(seed).uniform(1, 9, (7, 7))
        np.fill_diagonal(cost, 0)
        order = tuple(range(7))
        incumbent: Incumbent[tuple[int, ...]] = Incumbent(
            stop.start(), cost, method="circuit", seed=0
        )
        incumbent.offer(path_length(cost, order), order)
        _solve_circuit(cost, incumbent, OpenPathParams())
        best = brute_force(cost)
        assert incumbent.objective == pytest.approx(best, rel=1e-9)
        assert incumbent.bound is not None
        assert best * (1 - 1e-6) <= incumbent.bound <= best
        assert incumbent.basis == "CP-SAT circuit"


@pytest.mark.parametrize("n", [2, 9, 40])
def test_patched_assignment_is_a_path(n: int) -> None:
    """It visits every node once, and is optimal where the relaxation is one cycle."""
    rng = np.random.default_rng(n)
    path = _patched_assignment(rng.random((n, n)))
    assert sorted(path.tolist()) == list(range(n))
    order = rng.permutation(n)
    cost = np.ones((n, n))
    cost[order[:-1], order[1:]] = 0.0
    assert path_length(cost, tuple(_patched_assignment(cost).tolist())) == 0.0


def test_long_paths_use_their_limit() -> None:
    """Beyond CP-SAT's sizes iterated local search improves the path until the limit."""
    points = np.random.default_rng(0).random((OpenPathParams().circuit_nodes + 10, 2))
    cost = np.linalg.norm(points[:, None] - points[None, :], axis=2)
    short, long = (open_path(cost, MaxIterations(count)) for count in (4, 300))
    assert long.stop_reason == "iteration limit"
    assert long.objective is not None and short.objective is not None
    assert long.objective < 0.99 * short.objective
    assert sorted(long.plan or ()) == list(range(len(cost)))


@pytest.mark.parametrize("stop", [MaxIterations(150), Effort(0.01)], ids=str)
def test_limits_are_used_after_cp_sat(
    stop: StoppingCriterion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local searches go on if CP-SAT does not close the gap; without a limit they end, too."""
    monkeypatch.setattr(MODULE, "_solve_circuit", lambda *_: None)
    points = np.random.default_rng(0).random((60, 2))
    cost = np.linalg.norm(points[:, None] - points[None, :], axis=2)
    assert open_path(cost, stop).stop_reason.endswith("limit")
    monkeypatch.setattr(MODULE, "OpenPathParams", partial(OpenPathParams, max_iterated=5))
    assert open_path(cost, TargetGap(0.0)).stop_reason == "limit"


def test_wrong_bounds_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relaxation or a CP-SAT bound above the optimum raises."""
    place = np.random.default_rng(1).permutation(20).astype(float)
    cost = np.abs(place[:, None] - place[None, :])
    real = MODULE._assignment_bound
    with monkeypatch.context() as planted:
        planted.setattr(MODULE, "_assignment_bound", lambda _: 1.5 * 19)
        with pytest.raises(WrongBoundError, match=r"assignment relaxation.*seed 4"):
            open_path(cost, MaxIterations(30), seed=4)

    def wrong_circuit(_: Any, best: Incumbent[Any], __: Any) -> None:
        best.offer_bound(1.5 * 19, "CP-SAT circuit")

    monkeypatch.setattr(MODULE, "_assignment_bound", lambda given: real(given) / 2)
    monkeypatch.setattr(MODULE, "_solve_circuit", wrong_circuit)
    with pytest.raises(WrongBoundError, match="CP-SAT circuit"):
        open_path(cost, MaxIterations(30))


def test_unreached_time_limit_changes_nothing() -> None:
    """A limit in seconds that is not reached changes nothing."""
    cost = np.random.default_rng(3).uniform(1, 9, (22, 22))
    rule = MaxIterations(40)
    first, second = (open_path(cost, stop) for stop in (rule, AnyOf(rule, MaxRuntime(1000))))
    assert first.plan == second.plan
    assert (first.objective, first.bound) == (second.objective, second.bound)


@pytest.mark.parametrize("wrong", ["x", None, [[1, 2], [3]], [["a"]], {"cost": 1}, 3.0])
def test_invalid_matrices_raise(wrong: Any) -> None:
    """Both functions raise a one-line message with a remedy."""
    for function in (open_path, bottleneck_assignment):
        with pytest.raises(ValueError, match=r"^cost must (be a matrix|have two dim).*; \w") as why:
            function(wrong)
        assert "\n" not in str(why.value)


def test_invalid_arguments_raise() -> None:
    """Stopping rule and seed."""
    with pytest.raises(ValueError, match="stop must be a stopping criterion, found 5"):
        open_path(np.ones((20, 20)), 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be a whole number, found 'x'"):
        open_path(np.ones((3, 3)), seed="x")  # type: ignore[arg-type]


def test_wrong_held_karp_value_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Held-Karp value that differs from its order's length is detected."""
    import planner.matching.path_tsp as module

    cost = np.random.default_rng(0).uniform(1, 9, (9, 9))
    true = module._held_karp(cost)
    monkeypatch.setattr(module, "_held_karp", lambda _: (true[0], 1.5 * true[1]))
    with pytest.raises(WrongBoundError, match="Held-Karp"):
        open_path(cost)
    monkeypatch.setattr(module, "_held_karp", lambda _: (np.arange(9), true[1]))
    assert open_path(cost).status is not Status.OPTIMAL


@pytest.mark.parametrize("seed", range(8))
def test_local_optima_cannot_be_improved_by_moving_a_block(seed: int) -> None:
    """Blocks of up to three nodes, in both directions, on asymmetric costs."""
    random = np.random.default_rng(seed)
    n = 9 + seed
    cost = random.random((n, n))
    np.fill_diagonal(cost, 0.0)
    order = _descend(cost, random.permutation(n).astype(np.int64)).tolist()
    length = path_length(cost, tuple(order))
    for size in range(1, 4):
        for start in range(n - size + 1):
            block, rest = order[start : start + size], order[:start] + order[start + size :]
            for place in range(len(rest) + 1):
                moved = tuple(rest[:place] + block + rest[place:])
                assert path_length(cost, moved) >= length - 1e-9
    for i in range(n):
        for j in range(i + 1, n):
            turned = tuple(order[:i] + order[i : j + 1][::-1] + order[j + 1 :])
            assert path_length(cost, turned) >= length - 1e-9
