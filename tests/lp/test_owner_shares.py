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
    shares: Floats, upload: Floats, download: Floats, pairs: Floats, ratio: float = 1.0
) -> float:
    """Seconds of both rounds of one vector, message by message."""
    total = 0.0
    for spreads in (False, True):
        longest = 0.0
        for i in range(len(shares)):
            others = [k for k in range(len(shares)) if k != i]
            sent = {k: shares[i if spreads else k] for k in others}
            received = {k: shares[k if spreads else i] for k in others}
            longest = max(longest, sum(sent.values()) / upload[i])
            longest = max(longest, sum(received.values()) / download[i])
            longest = max(longest, *(sent[k] / pairs[i, k] for k in others))
        total += longest * (ratio if spreads else 1.0)
    return total


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(2, 4),
    limit=st.sampled_from([0.5, 0.75, 1.0]),
    ratio=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_split_is_faster(members: int, limit: float, ratio: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    upload, download = rng.uniform(1, 10, (2, members))
    pairs = rng.uniform(1, 10, (members, members))
    can_own = rng.random(members) < 0.8
    shares = owner_shares(upload, download, pairs, can_own, limit, ratio)
    parts = 12
    splits = [
        np.array(split) / parts
        for split in product(range(parts + 1), repeat=members)
        if sum(split) == parts
        and max(split) <= limit * parts
        and not any(split[k] and not can_own[k] for k in range(members))
    ]
    if shares is None:
        assert not splits
        return
    assert shares.sum() == pytest.approx(1)
    assert shares.max() <= limit
    assert not shares[~can_own].any()
    links = (upload, download, pairs, ratio)
    assert rounds_s(shares, *links) <= min(rounds_s(s, *links) for s in splits) * (1 + 1e-9)


def test_too_few_owners_have_no_shares() -> None:
    speed = np.ones(3)
    alone = np.array([True, False, False])
    assert owner_shares(speed, speed, np.ones((3, 3)), alone, 0.5) is None
