"""Replays a trace of peers under a rebalancing policy (SWARM, 4.4 and I).

Between two events the pipeline goes as fast as its slowest stage. What is unspecified in the paper
is a choice here: where a new peer enters, which peer a leaving one is, and whether a move takes
time. The same seed takes the same stages from every policy.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from planner.problems.error import ProblemError
from planner.swarm.rebalancing import (
    Floats,
    Ints,
    Policy,
    StageMove,
    StageRates,
    optimal_counts,
    optimal_rates,
)
from planner.swarm.traces import HOUR_S, Trace


class Enter(enum.StrEnum):
    """Where a new peer enters: at the slowest stage, as 3.2 has it, or anywhere."""

    SLOWEST = "slowest"
    RANDOM = "random"


class Leave(enum.StrEnum):
    """Who leaves: a peer of a stage drawn evenly, as Appendix I has it, or any peer."""

    STAGE = "stage"
    PEER = "peer"


@dataclass(frozen=True)
class ReplayConfig:
    """What is played.

    Attributes
    ----------
    trace
        Who comes and goes.
    work
        ``float[S]``: seconds of a microbatch on a peer of speed 1.
    speed
        ``float[K]``: of the trace's kinds.
    download_s
        How long a peer that moves or enters downloads its stage's state.
    state_bytes
        How much that is.
    """

    trace: Trace
    work: Floats
    speed: Floats
    download_s: float = 0.0
    state_bytes: float = 0.0
    enter: Enter = Enter.SLOWEST
    leave: Leave = Leave.STAGE

    def __post_init__(self) -> None:
        if not (np.all(self.work > 0) and np.all(self.speed > 0) and self.download_s >= 0):
            raise ProblemError("work and speed must be above 0, download_s no less; correct them")
        if len(self.speed) != len(self.trace.kinds):
            raise ProblemError(
                f"{len(self.speed)} speeds for {len(self.trace.kinds)} kinds of peers; "
                "give one each"
            )
        if self.trace.start.sum() < len(self.work):
            raise ProblemError(
                f"{self.trace.start.sum()} peers cannot hold {len(self.work)} stages; "
                "give fewer stages"
            )


@dataclass
class Replayed:
    """What a policy made of a trace.

    Attributes
    ----------
    time_s, rate, best
        ``[E]``: from each of these times on, microbatches a second, and those of the best
        allocation (of peers of several kinds: of a perfectly even one).
    moves, joins
        Peers that downloaded state because they were moved, and because they entered.
    made
        When which peers were moved.
    """

    time_s: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    end_s: float = 0.0
    moves: int = 0
    joins: int = 0
    state_bytes: float = 0.0
    made: list[tuple[float, StageMove]] = field(default_factory=list)

    @property
    def moved_bytes(self) -> float:
        """Downloaded by those that were moved."""
        return self.moves * self.state_bytes

    def done(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Microbatches in some time, and those of the best allocation."""
        times = np.array([*self.time_s, self.end_s])
        seconds = np.clip(times[1:], begin_s, end_s) - np.clip(times[:-1], begin_s, end_s)
        return float(seconds @ np.array(self.rate)), float(seconds @ np.array(self.best))

    def share(self, begin_s: float = 0.0, end_s: float = math.inf) -> float:
        """The part of the best allocation's microbatches."""
        done, best = self.done(begin_s, min(end_s, self.end_s))
        return done / best

    @property
    def row(self) -> tuple[float, float, float]:
        """Table 5's: overall, the first and the last hour."""
        return self.share(), self.share(0, HOUR_S), self.share(self.end_s - HOUR_S)


@dataclass(frozen=True)
class RandomDraws:
    """Where peers begin, and what is otherwise drawn while a trace is played.

    Attributes
    ----------
    serving
        ``int[S, K]``: peers at first.
    leaves
        ``float[B, 2]`` in [0, 1): of everyone who leaves, which stage and which peer.
    enters
        ``int[A]``: of everyone who enters at random, which stage.
    """

    serving: Ints
    leaves: Floats
    enters: Ints


def replay(
    setting: ReplayConfig, policy: Policy, seed: int = 0, drawn: RandomDraws | None = None
) -> Replayed:
    """Play a trace."""
    return _Simulation(setting, policy, seed, drawn).run()


class _Simulation:
    """State of a replay; counts in Python's integers, rates in an array."""

    def __init__(
        self, setting: ReplayConfig, policy: Policy, seed: int, drawn: RandomDraws | None
    ) -> None:
        self.setting, self.policy, self.drawn = setting, policy, drawn
        s, k = len(setting.work), len(setting.speed)
        if drawn is not None:
            self.leaves: Iterator[Sequence[float]] = iter(drawn.leaves.tolist())
            self.enters: Iterator[int] = iter(drawn.enters.tolist())
        else:
            # who leaves must not depend on what a policy did before
            leaving, entering = (np.random.default_rng([seed, k]) for k in (0, 1))
            self.leaves = (leaving.random(2).tolist() for _ in count())
            self.enters = (int(entering.integers(s)) for _ in count())
        self.stages, self.kinds = s, k
        self.serving: Ints = np.zeros((s, k), dtype=np.int64)
        self.loading: Ints = np.zeros((s, k), dtype=np.int64)
        self.ready: list[list[list[float]]] = [[[] for _ in range(k)] for _ in range(s)]
        self.downloads: list[tuple[float, int, int]] = []
        self.rate: Floats = np.zeros(s)
        self.coming: Floats = np.zeros(s)
        self.total = setting.trace.start.copy()
        self.optimal: NDArray[np.float64] | None = None
        if k == 1:
            most = int(setting.trace.counts().max())
            self.optimal = optimal_rates(setting.work, most) * setting.speed[0]
        self.result = Replayed(end_s=setting.trace.end_s, state_bytes=setting.state_bytes)

    def run(self) -> Replayed:
        """From the first event to the end."""
        self._begin()
        trace = self.setting.trace
        events = zip(trace.time_s.tolist(), trace.kind.tolist(), trace.change.tolist(), strict=True)
        event = next(events, None)
        decide_s = self.policy.every_s or math.inf
        while True:
            event_s = event[0] if event else math.inf
            ready_s = self.downloads[0][0] if self.downloads else math.inf
            now = min(event_s, ready_s, decide_s)
            if now > trace.end_s or math.isinf(now):
                return self.result
            if now == ready_s:
                self._served(*heapq.heappop(self.downloads))
            elif event and now == event_s:
                self._change(now, event[1], event[2])
                event = next(events, None)
                if self.policy.every_s == 0:
                    self._decide(now)
            else:
                self._decide(now)
                decide_s += self.policy.every_s
            self._note(now)

    def _begin(self) -> None:
        """Peers as evenly spread as can be, the slowest kind first so that the rest evens out."""
        setting = self.setting
        if self.drawn is not None:
            self.serving = self.drawn.serving.copy()
        elif self.kinds == 1:
            self.serving[:, 0] = optimal_counts(setting.work, int(setting.trace.start[0]))
        else:
            rate = np.zeros(self.stages)
            for k in np.argsort(-setting.speed, kind="stable").tolist():
                for _ in range(int(setting.trace.start[k])):
                    s = int(np.argmin(rate))
                    self.serving[s, k] += 1
                    rate[s] += setting.speed[k] / setting.work[s]
        for s in range(self.stages):
            self._renew(s)
        self._note(0.0)

    def _renew(self, s: int) -> None:
        speed, work = self.setting.speed, self.setting.work[s]
        self.rate[s] = self.serving[s] @ speed / work
        self.coming[s] = (self.serving[s] + self.loading[s]) @ speed / work

    def _note(self, now: float) -> None:
        if self.optimal is not None:
            best = float(self.optimal[self.total[0]])
        else:
            best = float(self.total @ self.setting.speed / self.setting.work.sum())
        result, rate = self.result, float(self.rate.min())
        if result.time_s and result.time_s[-1] == now:
            result.rate[-1], result.best[-1] = rate, best
            return
        result.time_s.append(now)
        result.rate.append(rate)
        result.best.append(best)

    def _decide(self, now: float) -> None:
        setting = self.setting
        stages = StageRates(self.serving.copy(), self.loading.copy(), setting.work, setting.speed)
        for move in self.policy.moves(stages):
            self.serving[move.source, move.kind] -= move.number
            self._renew(move.source)
            for _ in range(move.number):
                self._load(now, move.target, move.kind)
            self.result.moves += move.number
            self.result.made.append((now, move))

    def _load(self, now: float, s: int, k: int) -> None:
        if self.setting.download_s == 0:
            self.serving[s, k] += 1
        else:
            self.loading[s, k] += 1
            self.ready[s][k].append(now + self.setting.download_s)
            heapq.heappush(self.downloads, (now + self.setting.download_s, s, k))
        self._renew(s)

    def _served(self, time: float, s: int, k: int) -> None:
        # one that left meanwhile is no longer on the list
        if time in self.ready[s][k]:
            self.ready[s][k].remove(time)
            self.loading[s, k] -= 1
            self.serving[s, k] += 1
            self._renew(s)

    def _change(self, now: float, k: int, change: int) -> None:
        self.total[k] += change
        for _ in range(change):
            if self.setting.enter is Enter.SLOWEST:
                s = int(np.argmin(self.coming))
            else:
                s = next(self.enters)
            self._load(now, s, k)
            self.result.joins += 1
        for _ in range(-change):
            self._remove(k)

    def _remove(self, k: int) -> None:
        """One peer of a kind leaves."""
        draw, which = next(self.leaves)
        there = self.serving[:, k] + self.loading[:, k]
        if self.setting.leave is Leave.STAGE:
            s = int(draw * self.stages)
            while there[s] == 0:
                s = (s + 1) % self.stages
        else:
            s = int(np.searchsorted(np.cumsum(there), int(draw * there.sum()), side="right"))
        number = int(which * there[s])
        if number < self.serving[s, k]:
            self.serving[s, k] -= 1
        else:
            self.ready[s][k].pop(number - int(self.serving[s, k]))
            self.loading[s, k] -= 1
        self._renew(s)
