"""Packet queues: arrival times computed by hand, independent of when they are processed."""

from __future__ import annotations

import numpy as np
import pytest

from planner.emulate.links import EmulatedLinks
from planner.emulate.queues import (
    BUSY,
    FREE,
    TRAVELLING,
    Queues,
    advance,
    arrive,
    empty_queues,
    next_event,
    pop,
    settle,
)


def network() -> EmulatedLinks:
    """Devices 0, 1, 2; 10 bytes/s and 1 s a pair, uploads of 12 bytes/s."""
    rate = np.where(np.eye(3, dtype=bool), 0.0, 10.0).ravel()
    uses = np.full((9, 4), -1)
    uses[:, 0] = np.repeat(np.arange(3), 3)
    return EmulatedLinks(rate, np.ones(9), np.full(3, 12.0), uses, np.zeros(9))


def put(links: EmulatedLinks, q: Queues, pair: int, payload: float, now: float) -> int:
    """A packet comes; returns its slot."""
    q.numbers[FREE] -= 1
    slot = int(q.free[q.numbers[FREE]])
    advance(links, q, now)
    if arrive(links, q, slot, pair, payload, now):
        settle(links, q, now)
    return slot


def arrivals(q: Queues) -> list[tuple[int, float]]:
    """Slots on their way and when they arrive, in that order."""
    return [(slot := pop(q), float(q.due[slot])) for _ in range(q.numbers[TRAVELLING])]


def assert_arrive(q: Queues, expected: dict[int, float]) -> None:
    """These slots, in this order, at these times."""
    found = arrivals(q)
    assert [slot for slot, _ in found] == list(expected)
    assert [due for _, due in found] == pytest.approx(list(expected.values()))


def test_a_pair_serves_one_packet_after_the_other() -> None:
    """20 and 10 bytes at 10 bytes/s, plus a latency of one second."""
    links = network()
    q = empty_queues(links, 8, 8)
    first, second = put(links, q, 1, 20.0, 0.0), put(links, q, 1, 10.0, 0.5)
    assert next_event(q) == pytest.approx(2.0)
    advance(links, q, 100.0)
    assert_arrive(q, {first: 3.0, second: 4.0})


def test_two_pairs_share_an_upload_and_catch_up_when_one_is_done() -> None:
    """6 bytes/s each; after 1 s the first (6 bytes) is done, the other continues at 10."""
    links = network()
    q = empty_queues(links, 8, 8)
    first, second = put(links, q, 1, 6.0, 0.0), put(links, q, 2, 26.0, 0.0)
    advance(links, q, 100.0)
    assert_arrive(q, {first: 2.0, second: 4.0})


def test_late_processing_changes_nothing() -> None:
    """Processed once at the end, or many times in between."""
    found = []
    for moments in ([100.0], np.linspace(0.1, 100.0, 1000)):
        links = network()
        q = empty_queues(links, 16, 8)
        for k, size in enumerate((5.0, 17.0, 3.0, 40.0)):
            put(links, q, 1 + k % 2, size, 0.05 * k)
        for moment in moments:
            advance(links, q, float(moment))
        found.append(arrivals(q))
    assert [slot for slot, _ in found[0]] == [slot for slot, _ in found[1]]
    assert [due for _, due in found[0]] == pytest.approx([due for _, due in found[1]])


def test_acknowledgements_skip_the_queue() -> None:
    """A packet without payload is sent at once."""
    links = network()
    q = empty_queues(links, 8, 8)
    put(links, q, 1, 50.0, 0.0)
    told = put(links, q, 1, 0.0, 1.0)
    assert arrivals(q) == [(told, 2.0)]


def test_busy_times_are_recorded() -> None:
    """Start, end and bytes; a packet that follows immediately extends the entry."""
    links = network()
    q = empty_queues(links, 8, 8)
    put(links, q, 1, 10.0, 0.0)
    put(links, q, 1, 10.0, 0.5)
    put(links, q, 1, 5.0, 7.0)
    advance(links, q, 100.0)
    assert q.busy[: q.numbers[BUSY]] == pytest.approx(
        np.array([[1, 0.0, 2.0, 20.0], [1, 7.0, 7.5, 5.0]])
    )


def test_jitter_changes_latency_between_messages_and_keeps_order() -> None:
    """Packets of a message have the same latency, 1 s +- 0.5 s, and stay in order."""
    links = network()._replace(jitter=np.full(9, 0.5))
    q = empty_queues(links, 64, 64)
    dues = []
    # so far apart that none is held up by the one before
    for begin in np.arange(0.0, 60.0, 2.0):
        pair = [put(links, q, 1, 1.0, begin), put(links, q, 1, 1.0, begin)]
        advance(links, q, begin + 0.5)
        dues.append([float(q.due[slot]) - begin for slot in pair])
    firsts = np.array(dues)[:, 0] - 0.1
    assert firsts.min() > 0.5 - 1e-9 and firsts.max() < 1.5 + 1e-9 and np.ptp(firsts) > 0.5
    assert np.diff(np.array(dues), axis=1).ravel() == pytest.approx(0.1)
    q = empty_queues(links, 64, 64)
    for begin in np.arange(0.0, 6.0, 0.2):
        put(links, q, 1, 1.0, begin)
        advance(links, q, begin + 0.1)
    numbers, arrived = zip(*arrivals(q), strict=True)
    assert list(numbers) == sorted(numbers) and list(arrived) == sorted(arrived)
