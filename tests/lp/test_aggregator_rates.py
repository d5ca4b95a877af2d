"""Reducer rates with aggregators: by hand, against DeDLOC's problem, and message by message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.lp.aggregator_rates import aggregator_rates
from planner.lp.capacity import BandwidthLimits
from planner.lp.rates import best_rates
from planner.problems import AveragingProblem

FREE = 1e12


def test_aggregator_by_hand() -> None:
    """Eight trainers and a helper of 1,000 bytes/s each.

    The helper hands 8 r_h out, so r_h = 125; then 14 r + 125 = 1,000, and R = 625, where the eight
    alone have 8 r with 14 r = 1,000.
    """
    n = 9
    is_aggregator = np.arange(n) == 8
    line, link = np.full(n, 1000.0), np.full((n, n), FREE)
    rates = aggregator_rates(line, line, link, is_aggregator, np.ones(n, dtype=bool))
    assert rates.tolist() == pytest.approx([62.5] * 8 + [125.0])
    alone = aggregator_rates(line, line, link, is_aggregator, ~is_aggregator)
    assert alone.sum() == pytest.approx(8 * 1000 / 14)


def test_pair_limits_of_an_aggregator() -> None:
    """Two trainers whose pair has 100 bytes/s; to and from the helper they have 30 and 40."""
    link = np.array([[1.0, 100.0, 30.0], [100.0, 1.0, 40.0], [FREE, FREE, 1.0]])
    rates = aggregator_rates(
        np.full(3, 1000.0),
        np.full(3, 1000.0),
        link,
        np.array([False, False, True]),
        np.ones(3, dtype=bool),
    )
    assert rates[2] == pytest.approx(30.0)
    assert rates[:2].sum() == pytest.approx(100.0)


@given(st.integers(0, 10**6))
def test_without_aggregators_equals_dedloc(seed: int) -> None:
    """Without aggregators, R is that of DeDLOC's problem with all peers contributing."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 6))
    up, down = rng.uniform(10, 100, (2, n))
    link = rng.uniform(5, 100, (n, n)) if rng.random() < 0.5 else np.full((n, n), FREE)
    can_reduce = rng.random(n) < 0.8
    can_reduce[0] = True
    problem = AveragingProblem(1.0, up, down, 1.0, 1.0, link, can_aggregate=can_reduce)
    best = best_rates(BandwidthLimits(problem), problem.contributors)
    found = aggregator_rates(up, down, link, np.zeros(n, dtype=bool), can_reduce)
    assert found.sum() == pytest.approx(best.total, rel=1e-7)
    assert not found[~can_reduce].any()


@given(st.integers(0, 10**6))
def test_no_other_shares_are_faster(seed: int) -> None:
    """Random shares attain at most R; the optimal ones attain it."""
    rng = np.random.default_rng(seed)
    m, h = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    n = m + h
    up, down, link = rng.uniform(10, 100, n), rng.uniform(10, 100, n), rng.uniform(5, 100, (n, n))
    is_aggregator = np.arange(n) >= m
    rates = aggregator_rates(up, down, link, is_aggregator, np.ones(n, dtype=bool))
    assert _seconds(rates / rates.sum(), up, down, link, m) == pytest.approx(1 / rates.sum())
    for _ in range(20):
        shares = rng.dirichlet(np.full(n, 0.5))
        assert _seconds(shares, up, down, link, m) >= (1 - 1e-7) / rates.sum()


def _seconds(
    shares: np.ndarray, up: np.ndarray, down: np.ndarray, link: np.ndarray, m: int
) -> float:
    """Seconds per byte, by adding up the messages of every pair and line."""
    n = len(shares)
    sent = np.zeros((n, n))
    for i in range(n):
        for k in range(n):
            if i != k:
                sent[i, k] = shares[k] * (i < m) + shares[i] * (k < m)
    return float(
        max((sent / link).max(), (sent.sum(axis=1) / up).max(), (sent.sum(axis=0) / down).max())
    )
