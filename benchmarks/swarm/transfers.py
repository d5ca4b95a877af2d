"""Messages between devices while routers choose paths: the simulator's links, event by event.

The rules are those of docs/explanation/step-time-model.md: messages of an ordered pair leave one
after the other, at rates that are max-min fair among the pairs that send, and arrive one latency
later. The compiled event loop of the simulator needs all paths in advance and cannot call a router
between two operations, so this is a separate loop on the same table of links.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.simulator.resources import NONE, LinkResources

ROUNDING = 1e-9
"""Relative, of rates that are compared."""
Act = Callable[..., None]


def shared_by(links: LinkResources, source: int, destination: int) -> tuple[int, ...]:
    """Resources that a pair shares with others."""
    row = links.shared(np.array([source]), np.array([destination]))[0]
    return tuple(r for r in row.tolist() if r != NONE)


class EventQueue:
    """What happens when; at the same moment, in the order in which it was put down."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time_s: float, act: Act, *args: Any) -> None:
        """Call ``act(*args)`` at a time, now at the earliest."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, act, args))

    def run(self, until_s: float, enough: Callable[[], bool]) -> None:
        """Go on until a time, or until there is enough, or nothing is left to happen."""
        while self._heap and self._heap[0][0] <= until_s and not enough():
            self.now_s, _, act, args = heapq.heappop(self._heap)
            act(*args)


class Transfers:
    """Queues of ordered pairs and the rates of what is first in them.

    Parameters
    ----------
    agenda
        Where arrivals are put down.
    jitter_s
        Latencies are drawn from up to so much less to so much more, each message by itself.
    """

    def __init__(
        self,
        links: LinkResources,
        agenda: EventQueue,
        jitter_s: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._links, self._agenda = links, agenda
        self._jitter_s, self._rng = jitter_s, rng or np.random.default_rng(0)
        self._queues: dict[tuple[int, int], deque[tuple[float, Act, tuple[Any, ...]]]] = {}
        # of the pairs that send: bytes to go at a time, the rate from then, and which forecast
        self._going: dict[tuple[int, int], list[float]] = {}
        self._uses: dict[tuple[int, int], tuple[int, ...]] = {}
        self._capacity = links.capacity_bytes_per_s.tolist()

    def send(self, source: int, destination: int, size: float, act: Act, *args: Any) -> None:
        """Hand a message over; ``act(*args)`` is called when it is there, at once on one device."""
        if source == destination:
            self._agenda.at(self._agenda.now_s, act, *args)
            return
        pair = (source, destination)
        queue = self._queues.setdefault(pair, deque())
        queue.append((size, act, args))
        if len(queue) == 1:
            self._uses.setdefault(pair, shared_by(self._links, source, destination))
            self._going[pair] = [size, 0.0, self._agenda.now_s, 0.0]
            self._share()

    def latency_s(self, source: int, destination: int) -> float:
        """The latency of one message, drawn where there is jitter."""
        mean = float(self._links.latency_s[source, destination]) if source != destination else 0.0
        if self._jitter_s == 0.0 or source == destination:
            return mean
        return max(0.0, mean + self._rng.uniform(-self._jitter_s, self._jitter_s))

    def _left(self, pair: tuple[int, int], ready_hint: float) -> None:
        """The first message of a pair has left, unless its rate has changed since."""
        going = self._going.get(pair)
        if going is None or going[3] != ready_hint:
            return
        queue = self._queues[pair]
        _, act, args = queue.popleft()
        self._agenda.at(self._agenda.now_s + self.latency_s(*pair), act, *args)
        if queue:
            # the pair continues at its rate: nothing changes for others
            going[:] = [queue[0][0], going[1], self._agenda.now_s, ready_hint + 1]
            self._ready_hint(pair, going)
        else:
            del self._going[pair]
            self._share()

    def _ready_hint(self, pair: tuple[int, int], going: list[float]) -> None:
        self._agenda.at(going[2] + going[0] / going[1], self._left, pair, going[3])

    def _share(self) -> None:
        """Max-min fair rates of all pairs that send: they rise together until something is full."""
        now, bandwidth = self._agenda.now_s, self._links.bandwidth_bytes_per_s
        rising = {pair: float(bandwidth[pair]) for pair in self._going}
        room: dict[int, float] = {}
        load: dict[int, int] = {}
        for pair in rising:
            for r in self._uses[pair]:
                room[r] = self._capacity[r]
                load[r] = load.get(r, 0) + 1
        while rising:
            level = min(rising.values())
            for r, users in load.items():
                if users > 0:
                    level = min(level, room[r] / users)
            upto = level * (1 + ROUNDING)
            full = {r for r, users in load.items() if users > 0 and room[r] <= upto * users}
            done = [p for p, most in rising.items() if most <= upto or full & set(self._uses[p])]
            for pair in done:
                rate = min(level, rising.pop(pair))
                for r in self._uses[pair]:
                    room[r] -= rate
                    load[r] -= 1
                going = self._going[pair]
                if not math.isclose(going[1], rate, rel_tol=ROUNDING):
                    rest = max(0.0, going[0] - going[1] * (now - going[2]))
                    going[:] = [rest, rate, now, going[3] + 1]
                    self._ready_hint(pair, going)
