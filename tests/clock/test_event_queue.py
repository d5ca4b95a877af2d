"""The event queue beside a sorted list: same events, same order, forecasts in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.clock.event_queue import announce, forecast, take
from planner.clock.state import EventQueue

pytestmark = pytest.mark.interpreted

SLOTS = 4
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, np.inf])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("announce"), TIMES),
        st.tuples(st.just("forecast"), TIMES, st.integers(0, SLOTS - 1)),
        st.tuples(st.just("take")),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
def test_events_come_by_time_then_as_announced(actions: list[tuple[Any, ...]]) -> None:
    """A forecast that changes counts as announced anew."""
    queue = EventQueue.of(len(actions) + SLOTS, SLOTS)
    expected: list[tuple[float, int, int, int]] = []
    for number, (action, *rest) in enumerate(actions):
        if action == "announce":
            announce(queue, rest[0], number)
            expected.append((float(rest[0]), number, number, -1))
        elif action == "forecast":
            time, slot = float(rest[0]), int(rest[1])
            forecast(queue, slot, time, number)
            expected = [one for one in expected if one[3] != slot]
            expected.append((time, number, number, slot))
        elif expected:
            expected.sort()
            assert queue.time[0] == expected[0][0]
            assert take(queue) == expected.pop(0)[2]
        assert queue.size[0] == len(expected)
    expected.sort()
    assert [int(take(queue)) for _ in expected] == [one[2] for one in expected]
