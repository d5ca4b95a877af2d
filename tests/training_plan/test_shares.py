"""Division of a vector into whole-number parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.training_plan.shares import integer_parts, share_ranges


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=12).filter(lambda x: sum(x) > 1e-3),
    st.integers(1, 10**9),
)
def test_parts_sum_to_the_length(shares: Any, length: Any) -> None:
    """Zero shares get nothing."""
    parts = integer_parts(shares, length)
    assert parts.sum() == length
    assert (parts >= 0).all() and not parts[np.array(shares) == 0].any()


def test_hand_computed_parts() -> None:
    """Exact shares stay exact; ties go to the smaller index."""
    assert integer_parts([0.5, 0.25, 0.25], 8).tolist() == [4, 2, 2]
    assert integer_parts([1, 1, 1], 10).tolist() == [4, 3, 3]
    assert integer_parts([6, 3, 1], 10).tolist() == [6, 3, 1]


def test_largest_remainder_stays_within_one_of_the_quota() -> None:
    """The quota rule."""
    shares = np.random.default_rng(0).random(20)
    shares /= shares.sum()
    parts = integer_parts(shares, 1_000_003)
    assert (np.abs(parts - shares * 1_000_003) < 1).all()


@given(
    st.integers(0, 1000),
    st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda s: sum(s) > 0.01),
)
def test_ranges_cover_the_vector_within_one_of_the_shares(length: Any, raw: Any) -> None:
    """Also with more shares than values."""
    shares = [x / sum(raw) for x in raw]
    ranges = share_ranges(length, shares)
    assert [i for part in ranges for i in range(*part)] == list(range(length))
    for (start, stop), share in zip(ranges, shares, strict=True):
        assert abs((stop - start) - share * length) <= 1 + 1e-6


def test_only_ratios_count() -> None:
    """Also if the sum overflows."""
    assert integer_parts([1e308, 1e308], 6).tolist() == [3, 3]


def test_empty_parts_keep_their_shares() -> None:
    """2.5 of 5 values never becomes 5."""
    assert integer_parts([0.5, *[0.05] * 10], 5).tolist() == [3, 1, 1, *[0] * 8]


@pytest.mark.parametrize(
    ("shares", "length", "message"),
    [
        ([0, 0], 8, "positive sum"),
        ([1, -1], 8, ">= 0"),
        ([1, 1], 0, "length is 0; it must be a whole number of at least 1"),
        ([1, 1], 2.5, "length is 2.5; it must be a whole number"),
        ([1, 1], "8", "length is '8'; it must be a whole number"),
    ],
)
def test_invalid_shares(shares: Any, length: Any, message: str) -> None:
    """Rule and value."""
    with pytest.raises(ValueError, match=message):
        integer_parts(shares, length)
