"""Rebalancing of peers between stages: SWARM's Algorithm 2, the optimal allocation, no moves.

A stage's rate is the sum of its peers' speeds divided by its work; the pipeline is as fast as its
slowest stage. Since queues are not simulated, the load of a stage is taken as work over speed, by
which its queue grows in the long run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StageMove(NamedTuple):
    """A number of peers of a kind that move from one stage to another."""

    source: int
    target: int
    kind: int
    number: int


@dataclass(frozen=True)
class SwarmState:
    """Allocation of peers to stages.

    Attributes
    ----------
    serving
        ``int[S, K]``: peers of every kind that serve each stage.
    loading
        ``int[S, K]``: peers that download a stage's state and will serve it.
    work
        ``float[S]``: seconds per microbatch for a peer of speed 1.
    speed
        ``float[K]``: speed of every kind.
    """

    serving: Ints
    loading: Ints
    work: Floats
    speed: Floats

    @property
    def rates(self) -> Floats:
        """``float[S]``: microbatches per second of every stage."""
        return np.asarray((self.serving @ self.speed) / self.work)

    @property
    def rates_after_loading(self) -> Floats:
        """``float[S]``: rates once all loading peers serve."""
        return np.asarray(((self.serving + self.loading) @ self.speed) / self.work)


class RebalancePolicy(Protocol):
    """A rebalancing policy, called periodically."""

    @property
    def every_s(self) -> float:
        """Seconds between two decisions; 0 for after every event, infinite for never."""

    def moves(self, stages: SwarmState) -> list[StageMove]:
        """Moves to make now."""


@dataclass(frozen=True)
class NoMoves:
    """Policy without moves."""

    every_s: float = float("inf")

    def moves(self, stages: SwarmState) -> list[StageMove]:
        """No moves."""
        return []


@dataclass(frozen=True)
class SwarmPolicy:
    """Algorithm 2: every T seconds one peer moves from the least to the most loaded stage.

    Verbatim, except that the last peer of a stage stays. As in the paper, loading peers are
    ignored, and a peer moves whenever two loads differ. The paper moves the peer with the shortest
    queue; under stochastic wiring the queues of a stage are similar, so one of the first kind
    moves.
    """

    every_s: float

    def moves(self, stages: SwarmState) -> list[StageMove]:
        """At most one move."""
        rates = stages.rates
        # as by the strict comparisons of lines 12 and 15, ties go to the first stage
        most, least = int(np.argmin(rates)), int(np.argmax(rates))
        serving = stages.serving[least]
        if rates[most] == rates[least] or serving.sum() < 2:
            return []
        return [StageMove(least, most, int(np.flatnonzero(serving)[0]), 1)]


def optimal_counts(work: Floats, peers: int) -> Ints:
    """Allocation of equal peers that maximises the rate of the slowest stage.

    Parameters
    ----------
    work
        ``float[S]``.

    Returns
    -------
    ndarray
        ``int[S]``: peers are added greedily to the slowest stage.
    """
    counts = np.ones(len(work), dtype=np.int64)
    queue = [(1.0 / w, s) for s, w in enumerate(work.tolist())]
    heapq.heapify(queue)
    for _ in range(peers - len(work)):
        s = queue[0][1]
        counts[s] += 1
        heapq.heapreplace(queue, (counts[s] / work[s], s))
    return counts


def optimal_rates(work: Floats, peers: int) -> Floats:
    """Maximum pipeline rate of n equal peers of speed 1, for every n up to a limit.

    Parameters
    ----------
    work
        ``float[S]``.

    Returns
    -------
    ndarray
        ``float[N + 1]``: microbatches per second, 0 if a stage would be empty.
    """
    best = np.zeros(max(peers, len(work)) + 1)
    counts = np.ones(len(work), dtype=np.int64)
    queue = [(1.0 / w, s) for s, w in enumerate(work.tolist())]
    heapq.heapify(queue)
    for n in range(len(work), len(best)):
        best[n], s = queue[0]
        counts[s] += 1
        heapq.heapreplace(queue, (counts[s] / work[s], s))
    return best[: peers + 1]
