"""Peers that move between stages: SWARM's Algorithm 2, the best allocation, and none.

A stage's speed is the sum over its peers' speeds over its work; the pipeline goes as fast as its
slowest stage. Where queues are not simulated, a stage's load is the reverse, work over speed: in
the long run that is what requests pile up by.
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
    """So many peers of a kind go from one stage to another."""

    source: int
    target: int
    kind: int
    number: int


@dataclass(frozen=True)
class StageRates:
    """Who is where.

    Attributes
    ----------
    serving
        ``int[S, K]``: peers of every kind that serve each stage.
    loading
        ``int[S, K]``: that download its state and will serve it.
    work
        ``float[S]``: of a microbatch, in seconds of a peer of speed 1.
    speed
        ``float[K]``: of the kinds.
    """

    serving: Ints
    loading: Ints
    work: Floats
    speed: Floats

    @property
    def rates(self) -> Floats:
        """``float[S]``: microbatches a second that every stage does."""
        return np.asarray((self.serving @ self.speed) / self.work)

    @property
    def coming_rates(self) -> Floats:
        """``float[S]``: once those who load are there."""
        return np.asarray(((self.serving + self.loading) @ self.speed) / self.work)


class Policy(Protocol):
    """Who moves, asked from time to time."""

    @property
    def every_s(self) -> float:
        """Seconds between two decisions; 0: after every event, infinite: never."""

    def moves(self, stages: StageRates) -> list[StageMove]:
        """What is to be done now."""


@dataclass(frozen=True)
class NoMoves:
    """Peers stay where they entered."""

    every_s: float = float("inf")

    def moves(self, stages: StageRates) -> list[StageMove]:
        """None."""
        return []


@dataclass(frozen=True)
class OneAtATime:
    """Algorithm 2: every T seconds one peer goes from the least to the most loaded stage.

    Word for word, with one thing added: the last peer of a stage stays. As in the text, peers that
    are loading are not seen, and it moves whenever two loads differ. The peer with the shortest
    queue goes; under stochastic wiring queues of a stage are alike, so it is one of the first kind
    there.
    """

    every_s: float

    def moves(self, stages: StageRates) -> list[StageMove]:
        """One or none."""
        rates = stages.rates
        # the strict comparisons of lines 12 and 15 keep the first of equals
        most, least = int(np.argmin(rates)), int(np.argmax(rates))
        here = stages.serving[least]
        if rates[most] == rates[least] or here.sum() < 2:
            return []
        return [StageMove(least, most, int(np.flatnonzero(here)[0]), 1)]


def optimal_counts(work: Floats, peers: int) -> Ints:
    """The allocation of equal peers with the fastest slowest stage.

    Parameters
    ----------
    work
        ``float[S]``.

    Returns
    -------
    ndarray
        ``int[S]``: one more goes to the stage that is slowest, as long as there are any.
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
    """The fastest pipeline of so many equal peers of speed 1, for every number up to a limit.

    Parameters
    ----------
    work
        ``float[S]``.

    Returns
    -------
    ndarray
        ``float[N + 1]``: microbatches a second, 0 where a stage would be empty.
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
