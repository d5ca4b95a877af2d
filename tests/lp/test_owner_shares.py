"""Shares of owners against every split of the vector into small parts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.lp.owner_shares import owner_shares

Floats = NDArray[np.float64]


def rounds_s(
    shares: Floats,
    upload: Floats,
    download: Floats,
    pairs: Floats,
    trains: NDArray[np.bool_],
    ratio: float,
) -> float:
    """Seconds of both rounds of one vector, message by message."""
    total, members = 0.0, range(len(shares))
    for spreads in (False, True):
        size = np.zeros((len(shares), len(shares)))
        for i in members:
            for owner in members:
                if i != owner and trains[i]:
                    size[(owner, i) if spreads else (i, owner)] = shares[owner]
        lines = (size.sum(axis=1) / upload, size.sum(axis=0) / download)
        longest = max(float(lines[0].max()), float(lines[1].max()), float((size / pairs).max()))
        total += longest * (ratio if spreads else 1.0)
    return total


@settings(max_examples=60, deadline=None)
@given(
    trainers=st.integers(2, 3),
    aggregators=st.integers(0, 1),
    limit=st.sampled_from([0.5, 0.75, 1.0]),
    ratio=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_split_is_faster(
    trainers: int, aggregators: int, limit: float, ratio: float, seed: int
) -> None:
    rng, n = np.random.default_rng(seed), trainers + aggregators
    upload, download = rng.uniform(1, 10, (2, n))
    pairs = rng.uniform(1, 10, (n, n))
    trains = np.arange(n) < trainers
    limits = np.where(rng.random(n) < 0.8, np.where(trains, limit, 1.0), 0.0)
    shares = owner_shares(upload, download, pairs, limits, trains, ratio)
    parts = 12
    splits = [
        np.array(split) / parts
        for split in product(range(parts + 1), repeat=n)
        if sum(split) == parts
        and all(x <= most * parts for x, most in zip(split, limits, strict=True))
    ]
    if shares is None:
        assert not splits
        return
    assert shares.sum() == pytest.approx(1)
    assert (shares <= limits).all()
    links = (upload, download, pairs, trains, ratio)
    assert rounds_s(shares, *links) <= min(rounds_s(s, *links) for s in splits) * (1 + 1e-9)


def test_too_few_owners_have_no_shares() -> None:
    speed = np.ones(3)
    assert owner_shares(speed, speed, np.ones((3, 3)), np.array([0.5, 0.0, 0.0])) is None
