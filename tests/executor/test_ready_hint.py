"""Word of being ready that is sent ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.executor.comm.ready_hint import ReadyHint

Told = list[tuple[int, float]]


def step(ready_hint: ReadyHint, ends: list[float], ready: float, schedule: int = 0) -> Told:
    """Operations that end then; whom it told when."""
    notified: Told = []
    ready_hint.begin(schedule)
    for end in ends:
        ready_hint.operation_ended(end, lambda rank, end=end: notified.append((rank, end)))  # type: ignore[misc]
    ready_hint.ready(ready)
    assert ready_hint.notified == {rank for rank, _ in notified}
    return notified


def test_word_goes_by_the_step_before() -> None:
    """A second and a half, and a quarter, before it was ready; the first step knows nothing."""
    ready_hint = ReadyHint({1: 1.5, 2: 0.25})
    assert step(ready_hint, [1.0, 2.0, 3.0, 3.9], 4.0) == []
    # 3.0, 2.0, 1.0 and 0.1 s before: the nearest to 1.5 s of both that are as far is the first
    assert step(ready_hint, [11.0, 12.0, 13.0, 13.9], 14.0) == [(1, 12.0)]
    # another schedule has its own history, and this one keeps its own
    assert step(ready_hint, [21.0, 22.0], 25.0, schedule=1) == []
    assert step(ready_hint, [31.0, 32.0, 33.0, 33.9], 34.0) == [(1, 32.0)]
    # the step before ended sooner after the third
    assert step(ReadyHint({2: 0.25}), [], 1.0) == []


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1.0),
)
def test_no_operation_is_nearer(gaps: list[float], notify_ahead_s: float, rest: float) -> None:
    """Of a step like the one before, unless being ready itself is nearer than any."""
    ends = [sum(gaps[: k + 1]) for k in range(len(gaps))]
    ready_hint = ReadyHint({7: notify_ahead_s})
    assert step(ready_hint, ends, ends[-1] + rest) == []
    notified = step(ready_hint, ends, ends[-1] + rest)
    off = {end: abs(ends[-1] + rest - end - notify_ahead_s) for end in ends}
    if notified:
        ((rank, when),) = notified
        assert rank == 7 and off[when] <= min(off.values()) + 1e-9
    else:
        assert off[ends[-1]] == pytest.approx(min(off.values()))
