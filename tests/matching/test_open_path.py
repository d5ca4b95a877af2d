"""Open paths against brute force; bounds beyond the exact size."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from planner.matching import open_path
from planner.matching.open_path import EXACT_NODES, path_length
from planner.search.certificate import Status
from planner.search.stop import MaxIterations, MaxRuntime


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
    result = open_path(cost, MaxRuntime(20))
    assert result.status is Status.OPTIMAL


def test_infinite_cost_is_refused() -> None:
    """A path may need any pair."""
    with pytest.raises(ValueError, match="finite"):
        open_path([[0.0, np.inf], [1.0, 0.0]])
    with pytest.raises(ValueError, match="n x n"):
        open_path([[0.0, 1.0]])
