"""The event queue compared with a sorted list: same events in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.simulator.event_queue import pop, push, reschedule
from planner.simulator.state import EventQueue

pytestmark = pytest.mark.interpreted

SLOTS = 4
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, np.inf])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), TIMES),
        st.tuples(st.just("reschedule"), TIMES, st.integers(0, SLOTS - 1)),
        st.tuples(st.just("pop")),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
def test_events_are_ordered_by_time_then_push(actions: list[tuple[Any, ...]]) -> None:
    """An event that is rescheduled counts as pushed again."""
    queue = EventQueue.of(len(actions) + SLOTS, SLOTS)
    expected: list[tuple[float, int, int, int]] = []
    for number, (action, *rest) in enumerate(actions):
        if action == "push":
            push(queue, rest[0], number)
            expected.append((float(rest[0]), number, number, -1))
        elif action == "reschedule":
            time, slot = float(rest[0]), int(rest[1])
            reschedule(queue, slot, time, number)
            expected = [one for one in expected if one[3] != slot]
            expected.append((time, number, number, slot))
        elif expected:
            expected.sort()
            assert queue.time[0] == expected[0][0]
            assert pop(queue) == expected.pop(0)[2]
        assert queue.size[0] == len(expected)
    expected.sort()
    assert [int(pop(queue)) for _ in expected] == [one[2] for one in expected]
