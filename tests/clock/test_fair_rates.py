"""Rates that are settled from the first level that changes, beside rates filled from nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.clock.engine import _flows
from planner.clock.kernel import _start, _stop
from planner.clock.links import MOST_SHARED, NONE
from planner.clock.pairs import Pairs
from planner.clock.state import ABSENT, EventQueue

pytestmark = pytest.mark.interpreted

RATES = [1.0, 2.0, 3.0, 5.0, 7.0, 10.0]


def filled(pairs: Pairs, active: set[int]) -> dict[int, float]:
    """Max-min fair rates: all rise together, until their own bandwidth or a full resource."""
    rate = dict.fromkeys(active, 0.0)
    rising = set(active)
    users = {r: {p for p in active if r in pairs.shared[p]} for r in range(len(pairs.capacity))}
    while rising:
        level = min(float(pairs.most[p]) for p in rising)
        for r, using in users.items():
            if using & rising:
                left = pairs.capacity[r] - sum(rate[p] for p in using - rising)
                level = min(level, left / len(using & rising))
        done = {p for p in rising if pairs.most[p] <= level * (1 + 1e-12)}
        for r, using in users.items():
            taken = sum(rate[p] for p in using - rising) + level * len(using & rising)
            if using & rising and taken >= pairs.capacity[r] * (1 - 1e-12):
                done |= using & rising
        for p in done:
            rate[p] = level
        rising -= done
    return rate


@st.composite
def networks(draw: st.DrawFn) -> Pairs:
    """Some pairs over some resources."""
    resources, count = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    capacity = np.array(
        draw(st.lists(st.sampled_from(RATES), min_size=resources, max_size=resources))
    )
    shared = np.full((count, MOST_SHARED), NONE)
    for p in range(count):
        using = draw(st.sets(st.integers(0, resources - 1), max_size=min(resources, MOST_SHARED)))
        shared[p, : len(using)] = sorted(using)
    own = np.array(draw(st.lists(st.sampled_from(RATES), min_size=count, max_size=count)))
    limits = np.where(shared == NONE, np.inf, capacity[np.maximum(shared, 0)]).min(axis=1)
    users = np.bincount(shared[shared != NONE], minlength=resources)
    first = np.concatenate([[0], np.cumsum(users)])
    nobody = np.zeros(count, dtype=np.int64)
    most = np.minimum(own, limits)
    return Pairs(nobody, nobody, np.zeros(count), own, most, shared, capacity, first)


@given(pairs=networks(), data=st.data())
def test_rates_are_those_of_filling_anew(pairs: Pairs, data: st.DataObject) -> None:
    """After every begin and end of a message, whatever came before."""
    count = len(pairs.most)
    flows, queue = _flows(pairs, count), EventQueue.of(count, count)
    active: set[int] = set()
    for moment in range(data.draw(st.integers(1, 20))):
        p = data.draw(st.integers(0, count - 1))
        flows.to_go[p] = 1e9
        if p in active:
            active.remove(p)
            _stop(pairs, flows, queue, p, float(moment))
        else:
            active.add(p)
            _start(pairs, flows, queue, p, float(moment))
        # when messages will have left is of no interest here
        queue.size[0], queue.at[:] = 0, ABSENT
        expected = filled(pairs, active)
        for q in active:
            assert flows.fair[q] == pytest.approx(expected[q], rel=1e-11)
            assert flows.rate[q] == pytest.approx(flows.fair[q], rel=2.0**-31)
