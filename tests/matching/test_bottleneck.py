"""Bottleneck assignment against brute force and SciPy."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from planner.matching import bottleneck_assignment

pytestmark = pytest.mark.interpreted


def brute_force(cost: np.ndarray) -> float:
    """Smallest possible largest entry over all matchings of the smaller side."""
    if cost.shape[0] > cost.shape[1]:
        cost = cost.T
    rows, columns = cost.shape
    return min(
        float(max(cost[r, c] for r, c in enumerate(choice)))
        for choice in permutations(range(columns), rows)
    )


def assert_matching(cost: np.ndarray, value: float, columns: np.ndarray) -> None:
    """The columns cover the smaller side once, and the value is their largest entry."""
    used = columns[columns >= 0]
    assert len(set(used.tolist())) == len(used) == min(cost.shape)
    assert value == max(cost[r, c] for r, c in enumerate(columns) if c >= 0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 3), (5, 5), (3, 6), (6, 4)])
@pytest.mark.parametrize("kind", ["real", "ties", "infinite"])
def test_matches_brute_force(shape: tuple[int, int], kind: str) -> None:
    """All shapes, with ties and with infinite entries."""
    rng = np.random.default_rng(hash((shape, len(kind))) % 2**32)
    for _ in range(20):
        cost = rng.random(shape) if kind == "real" else rng.integers(0, 4, shape).astype(float)
        if kind == "infinite":
            cost[rng.random(shape) < 0.4] = np.inf
        value, columns = bottleneck_assignment(cost)
        assert value == brute_force(cost)
        assert_matching(cost, value, columns)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_threshold_is_tight(n: int, seed: int) -> None:
    """Below the value there is no perfect matching (SciPy's Hopcroft-Karp)."""
    cost = np.random.default_rng(seed).integers(0, 50, (n, n)).astype(float)
    value, columns = bottleneck_assignment(cost)
    assert_matching(cost, value, columns)
    below = maximum_bipartite_matching(csr_array(cost < value), "column")
    assert (below >= 0).sum() < n


def test_unavoidable_infinity_is_reported() -> None:
    """A row without finite entries makes the value infinite, not an error."""
    value, columns = bottleneck_assignment([[np.inf, np.inf], [1.0, 2.0]])
    assert value == np.inf
    assert sorted(columns) == [0, 1]


def test_unmatched_rows_are_minus_one() -> None:
    """With more rows than columns the left-over rows say so."""
    value, columns = bottleneck_assignment([[3.0], [1.0], [2.0]])
    assert value == 1.0
    assert columns.tolist() == [-1, 0, -1]


def test_empty_matrix() -> None:
    """Nothing to match costs nothing."""
    value, columns = bottleneck_assignment(np.zeros((2, 0)))
    assert value == 0.0
    assert columns.tolist() == [-1, -1]


def test_nan_raises() -> None:
    """NaN is an error with its place and a remedy."""
    with pytest.raises(ValueError, match=r"cost\[0, 1\] is NaN; use infinity"):
        bottleneck_assignment([[1.0, np.nan], [1.0, 2.0]])
    with pytest.raises(ValueError, match="two dimensions"):
        bottleneck_assignment([1.0, 2.0])


def test_does_not_change_its_input() -> None:
    """The caller's matrix stays as it is."""
    cost = np.arange(12.0).reshape(3, 4)
    before = cost.copy()
    bottleneck_assignment(cost)
    assert np.array_equal(cost, before)


@pytest.mark.parametrize(
    "cost",
    [
        np.ma.array([[1.0, 7.0], [8.0, 2.0]], mask=[[True, False], [False, False]]),
        [[1j]],
        [["1", "2"]],
    ],
)
def test_masks_text_and_complex_numbers_are_refused(cost: Any) -> None:
    """A mask would be ignored, and text or an imaginary part is no cost."""
    with pytest.raises(ValueError, match="cost"):
        bottleneck_assignment(cost)
