"""Replays a trace of peers under a rebalancing policy (SWARM, 4.4 and I).

Between two events the pipeline is as fast as its slowest stage. What the paper does not specify is
configurable: the stage that a new peer enters, which peer leaves, and whether a move takes time.
With the same seed, peers leave the same stages under every policy.
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
    RebalancePolicy,
    StageMove,
    SwarmState,
    optimal_counts,
    optimal_rates,
)
from planner.swarm.traces import HOUR_S, Trace


class Enter(enum.StrEnum):
    """Stage that a new peer enters: the slowest, as in 3.2, or a random one."""

    SLOWEST = "slowest"
    RANDOM = "random"


class Leave(enum.StrEnum):
    """Peer that leaves: of a uniformly drawn stage, as in Appendix I, or uniform over peers."""

    STAGE = "stage"
    PEER = "peer"


@dataclass(frozen=True)
class ReplayConfig:
    """Configuration of a replay.

    Attributes
    ----------
    trace
        Joins and departures of peers.
    work
        ``float[S]``: seconds per microbatch on a peer of speed 1.
    speed
        ``float[K]``: speed of the trace's kinds.
    download_s
        Download time of a stage's state for a peer that moves or enters.
    state_bytes
        Bytes of that state.
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
class ReplayResult:
    """Result of a replay.

    Attributes
    ----------
    time_s, rate, best
        ``[E]``: from each of these times on, microbatches per second, and those of the optimal
        allocation (with several kinds of peers: of a perfectly even one).
    moves, joins
        Numbers of downloads by moved peers, and by entering ones.
    move_log
        Times and moves.
    """

    time_s: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    end_s: float = 0.0
    moves: int = 0
    joins: int = 0
    state_bytes: float = 0.0
    move_log: list[tuple[float, StageMove]] = field(default_factory=list)

    @property
    def moved_bytes(self) -> float:
        """Bytes downloaded by moved peers."""
        return self.moves * self.state_bytes

    def done(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Microbatches in an interval, and those of the optimal allocation."""
        times = np.array([*self.time_s, self.end_s])
        seconds = np.clip(times[1:], begin_s, end_s) - np.clip(times[:-1], begin_s, end_s)
        return float(seconds @ np.array(self.rate)), float(seconds @ np.array(self.best))

    def share(self, begin_s: float = 0.0, end_s: float = math.inf) -> float:
        """Microbatches as a share of those of the optimal allocation."""
        done, best = self.done(begin_s, min(end_s, self.end_s))
        return done / best

    @property
    def row(self) -> tuple[float, float, float]:
        """Row of Table 5: share overall, in the first and in the last hour."""
        return self.share(), self.share(0, HOUR_S), self.share(self.end_s - HOUR_S)


@dataclass(frozen=True)
class RandomDraws:
    """Initial allocation and random draws of a replay, for reproduction.

    Attributes
    ----------
    serving
        ``int[S, K]``: initial peers.
    leaves
        ``float[B, 2]`` in [0, 1): draws of stage and peer for every departure.
    enters
        ``int[A]``: stage of every peer that enters a random stage.
    """

    serving: Ints
    leaves: Floats
    enters: Ints


def replay(
    config: ReplayConfig, policy: RebalancePolicy, seed: int = 0, draws: RandomDraws | None = None
) -> ReplayResult:
    """Replay a trace under a policy."""
    return _Simulation(config, policy, seed, draws).run()


class _Simulation:
    """State of a replay; counts in Python's integers, rates in an array."""

    def __init__(
        self, config: ReplayConfig, policy: RebalancePolicy, seed: int, draws: RandomDraws | None
    ) -> None:
        self.config, self.policy, self.draws = config, policy, draws
        s, k = len(config.work), len(config.speed)
        if draws is not None:
            self.leaves: Iterator[Sequence[float]] = iter(draws.leaves.tolist())
            self.enters: Iterator[int] = iter(draws.enters.tolist())
        else:
            # departures must not depend on the policy
            leaving, entering = (np.random.default_rng([seed, k]) for k in (0, 1))
            self.leaves = (leaving.random(2).tolist() for _ in count())
            self.enters = (int(entering.integers(s)) for _ in count())
        self.stages, self.kinds = s, k
        self.serving: Ints = np.zeros((s, k), dtype=np.int64)
        self.loading: Ints = np.zeros((s, k), dtype=np.int64)
        self.ready: list[list[list[float]]] = [[[] for _ in range(k)] for _ in range(s)]
        self.downloads: list[tuple[float, int, int]] = []
        self.rate: Floats = np.zeros(s)
        self.rates_after_loading: Floats = np.zeros(s)
        self.total = config.trace.start.copy()
        self.optimal: NDArray[np.float64] | None = None
        if k == 1:
            most = int(config.trace.counts().max())
            self.optimal = optimal_rates(config.work, most) * config.speed[0]
        self.result = ReplayResult(end_s=config.trace.end_s, state_bytes=config.state_bytes)

    def run(self) -> ReplayResult:
        """Run from the first event to the end of the trace."""
        self._begin()
        trace = self.config.trace
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
                self._finish_download(*heapq.heappop(self.downloads))
            elif event and now == event_s:
                self._apply_event(now, event[1], event[2])
                event = next(events, None)
                if self.policy.every_s == 0:
                    self._decide(now)
            else:
                self._decide(now)
                decide_s += self.policy.every_s
            self._record(now)

    def _begin(self) -> None:
        """Initial allocation: as even as possible, the fastest kind first."""
        config = self.config
        if self.draws is not None:
            self.serving = self.draws.serving.copy()
        elif self.kinds == 1:
            self.serving[:, 0] = optimal_counts(config.work, int(config.trace.start[0]))
        else:
            rate = np.zeros(self.stages)
            for k in np.argsort(-config.speed, kind="stable").tolist():
                for _ in range(int(config.trace.start[k])):
                    s = int(np.argmin(rate))
                    self.serving[s, k] += 1
                    rate[s] += config.speed[k] / config.work[s]
        for s in range(self.stages):
            self._update_rates(s)
        self._record(0.0)

    def _update_rates(self, s: int) -> None:
        speed, work = self.config.speed, self.config.work[s]
        self.rate[s] = self.serving[s] @ speed / work
        self.rates_after_loading[s] = (self.serving[s] + self.loading[s]) @ speed / work

    def _record(self, now: float) -> None:
        if self.optimal is not None:
            best = float(self.optimal[self.total[0]])
        else:
            best = float(self.total @ self.config.speed / self.config.work.sum())
        result, rate = self.result, float(self.rate.min())
        if result.time_s and result.time_s[-1] == now:
            result.rate[-1], result.best[-1] = rate, best
            return
        result.time_s.append(now)
        result.rate.append(rate)
        result.best.append(best)

    def _decide(self, now: float) -> None:
        config = self.config
        stages = SwarmState(self.serving.copy(), self.loading.copy(), config.work, config.speed)
        for move in self.policy.moves(stages):
            self.serving[move.source, move.kind] -= move.number
            self._update_rates(move.source)
            for _ in range(move.number):
                self._start_download(now, move.target, move.kind)
            self.result.moves += move.number
            self.result.move_log.append((now, move))

    def _start_download(self, now: float, s: int, k: int) -> None:
        if self.config.download_s == 0:
            self.serving[s, k] += 1
        else:
            self.loading[s, k] += 1
            self.ready[s][k].append(now + self.config.download_s)
            heapq.heappush(self.downloads, (now + self.config.download_s, s, k))
        self._update_rates(s)

    def _finish_download(self, time: float, s: int, k: int) -> None:
        # a peer that has left meanwhile is no longer in the list
        if time in self.ready[s][k]:
            self.ready[s][k].remove(time)
            self.loading[s, k] -= 1
            self.serving[s, k] += 1
            self._update_rates(s)

    def _apply_event(self, now: float, k: int, change: int) -> None:
        self.total[k] += change
        for _ in range(change):
            if self.config.enter is Enter.SLOWEST:
                s = int(np.argmin(self.rates_after_loading))
            else:
                s = next(self.enters)
            self._start_download(now, s, k)
            self.result.joins += 1
        for _ in range(-change):
            self._remove_peer(k)

    def _remove_peer(self, k: int) -> None:
        """Remove one peer of a kind."""
        stage_draw, peer_draw = next(self.leaves)
        present = self.serving[:, k] + self.loading[:, k]
        if self.config.leave is Leave.STAGE:
            s = int(stage_draw * self.stages)
            while present[s] == 0:
                s = (s + 1) % self.stages
        else:
            s = int(
                np.searchsorted(np.cumsum(present), int(stage_draw * present.sum()), side="right")
            )
        number = int(peer_draw * present[s])
        if number < self.serving[s, k]:
            self.serving[s, k] -= 1
        else:
            self.ready[s][k].pop(number - int(self.serving[s, k]))
            self.loading[s, k] -= 1
        self._update_rates(s)
