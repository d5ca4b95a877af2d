"""Stochastic wiring (SWARM, 3.2, Algorithm 1): routing of a trainer's microbatches to peers.

Plain Python without imports of this package, so that any runtime can use it. It has no clock:
response times are passed in, and the same calls give the same choices.

Interleaved weighted round robin: the priority of a peer is the estimated time of all requests that
it was given. The peer of lowest priority is next, and its priority increases by its estimate, an
exponential moving average of its response times. A peer that is twice as fast is chosen twice as
often.

There are two differences to the paper. In the paper a new or returning peer enters at priority
epsilon, so that it gets every microbatch until it has caught up with the others; here it enters at
the lowest priority in use. Its estimate starts at epsilon in the paper, with the same effect; here
it starts at the mean of its stage, or at a given value, and a guess is replaced by the first
response time. ``Entry.EPSILON`` selects the paper's behaviour.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)
SMOOTHING = 0.1
"""The paper's (4.3)."""
EPSILON = 1e-3
"""Estimate in seconds for a peer without measurements, if its stage has no other peer."""


class NoPeer(LookupError):
    """No peer of a stage is available: all have left or are banned."""


class Entry(enum.StrEnum):
    """Priority of a new or returning peer: the lowest in use, or epsilon as in the paper."""

    LEVEL = "level"
    EPSILON = "epsilon"


@dataclass
class _PeerState:
    """Priority and estimate of a peer."""

    stages: tuple[int, ...]
    number: int
    priority: float
    estimate_s: float
    is_guess: bool
    banned: bool = False


class Router(Generic[Peer]):
    """Router of one trainer.

    Parameters
    ----------
    stages
        Number of stages.
    smoothing
        gamma, from 0 (estimates are constant: a fixed weighted round robin) to 1 (only the last
        response time counts).
    epsilon_s
        The algorithm's initial priority and estimate.

    References
    ----------
    M. Ryabinin et al., "SWARM Parallelism" (2023), Algorithm 1.
    """

    def __init__(
        self,
        stages: int,
        *,
        smoothing: float = SMOOTHING,
        epsilon_s: float = EPSILON,
        entry: Entry = Entry.LEVEL,
    ) -> None:
        if stages < 1:
            raise ValueError(f"a pipeline has 1 stage or more, found {stages}; give their number")
        if not 0 <= smoothing <= 1:
            raise ValueError(
                f"smoothing must be from 0 to 1, found {smoothing}; the paper's is 0.1"
            )
        self._smoothing = smoothing
        self._epsilon_s = _seconds("epsilon_s", epsilon_s)
        self._entry = Entry(entry)
        self._states: dict[Peer, _PeerState] = {}
        self._peers: list[dict[Peer, None]] = [{} for _ in range(stages)]
        # (priority, number of the peer, peer); stale entries are dropped lazily
        self._queues: list[list[tuple[float, int, Peer]]] = [[] for _ in range(stages)]
        self._last_priority = [0.0] * stages
        self._announced = 0

    def announce(self, peer: Peer, stages: Iterable[int], estimate_s: float | None = None) -> None:
        """Add or update a peer and the stages it serves; also serves as its heartbeat."""
        stages_served = tuple(sorted(set(stages)))
        for stage in stages_served or (-1,):
            self._check(stage)
        state = self._states.get(peer)
        if state is not None and state.stages != stages_served:
            self.leave(peer)
            state = None
        if state is not None and not state.banned:
            return
        if self._entry is Entry.EPSILON:
            priority, estimate, is_guess = self._epsilon_s, self._epsilon_s, False
        else:
            # with several stages the highest priority, so that it is not overloaded in any of them
            priority = max(self._lowest(stage) for stage in stages_served)
            if state is not None:
                estimate, is_guess = state.estimate_s, state.is_guess
            elif estimate_s is not None:
                estimate, is_guess = _seconds("estimate_s", estimate_s), False
            else:
                estimate, is_guess = self._mean_estimate_s(stages_served), True
        if state is None:
            self._announced += 1
            state = _PeerState(stages_served, self._announced, priority, estimate, is_guess)
            self._states[peer] = state
            for stage in stages_served:
                self._peers[stage][peer] = None
        else:
            state.priority, state.estimate_s, state.is_guess = priority, estimate, is_guess
            state.banned = False
        self._enqueue(peer, state)

    def choose(self, stage: int) -> Peer:
        """Choose the peer of lowest priority; ties go to the first announced."""
        self._check(stage)
        if not self._drop_stale(stage):
            raise NoPeer(f"no peer of stage {stage} may be chosen; announce one")
        peer = self._queues[stage][0][2]
        state = self._states[peer]
        self._last_priority[stage] = state.priority
        state.priority += state.estimate_s
        self._enqueue(peer, state)
        return peer

    def report(self, peer: Peer, seconds: float) -> None:
        """Record a response time; ignored for a peer that has left."""
        seconds = _seconds("a response time", seconds)
        state = self._states.get(peer)
        if state is None:
            return
        if state.is_guess and self._smoothing > 0:
            state.estimate_s, state.is_guess = seconds, False
        else:
            state.estimate_s += self._smoothing * (seconds - state.estimate_s)

    def ban(self, peer: Peer) -> None:
        """Do not choose a peer until it announces itself again, after a failure or timeout."""
        if peer in self._states:
            self._states[peer].banned = True

    def leave(self, peer: Peer) -> None:
        """Remove a peer and its estimate."""
        state = self._states.pop(peer, None)
        for stage in () if state is None else state.stages:
            del self._peers[stage][peer]

    def estimates_s(self, stage: int) -> dict[Peer, float]:
        """Estimated response times of the available peers of a stage.

        Returns
        -------
        dict[Peer, float]
            In the order of announcement.
        """
        self._check(stage)
        return {p: self._states[p].estimate_s for p in self._peers[stage] if self._is_available(p)}

    def shares(self, stage: int) -> dict[Peer, float]:
        """Shares of the stage's microbatches for constant estimates.

        Returns
        -------
        dict[Peer, float]
            They sum to 1.
        """
        rates = {peer: 1 / s for peer, s in self.estimates_s(stage).items()}
        total = math.fsum(rates.values())
        return {peer: rate / total for peer, rate in rates.items()}

    def _check(self, stage: int) -> None:
        if not 0 <= stage < len(self._queues):
            raise ValueError(
                f"stages are 0 to {len(self._queues) - 1}, found {stage}; a peer serves one or more"
            )

    def _is_available(self, peer: Peer) -> bool:
        return not self._states[peer].banned

    def _enqueue(self, peer: Peer, state: _PeerState) -> None:
        for stage in state.stages:
            heapq.heappush(self._queues[stage], (state.priority, state.number, peer))

    def _drop_stale(self, stage: int) -> bool:
        """Drop stale entries from the queue's head; False if no peer is available."""
        queue = self._queues[stage]
        while queue:
            priority, number, peer = queue[0]
            state = self._states.get(peer)
            if state and (state.number, state.priority, state.banned) == (number, priority, False):
                return True
            heapq.heappop(queue)
        return False

    def _lowest(self, stage: int) -> float:
        """The lowest priority in use, or the last one if no peer is available."""
        return self._queues[stage][0][0] if self._drop_stale(stage) else self._last_priority[stage]

    def _mean_estimate_s(self, stages: tuple[int, ...]) -> float:
        """Mean estimate over the peers of some stages."""
        estimates = [s for stage in stages for s in self.estimates_s(stage).values()]
        return math.fsum(estimates) / len(estimates) if estimates else self._epsilon_s


def starting_estimates_s(parts: Mapping[Peer, float], usual_s: float) -> dict[Peer, float]:
    """Initial estimates for given shares of a stage's microbatches.

    Returns
    -------
    dict[Peer, float]
        Inversely proportional to ``parts``; a peer with the mean share has ``usual_s``.
    """
    usual_s = _seconds("usual_s", usual_s)
    mean = math.fsum(_seconds("a part", part) for part in parts.values()) / max(1, len(parts))
    return {peer: usual_s * mean / part for peer, part in parts.items()}


def begun_router(
    stages: int,
    smoothing: float,
    own: int,
    begin: Mapping[int, tuple[Mapping[int, float], float]],
) -> Router[int]:
    """A router with initial shares; ``own`` staggers the order of equal peers between trainers."""
    router: Router[int] = Router(stages, smoothing=smoothing)
    for stage, (parts, usual_s) in begin.items():
        estimates = starting_estimates_s(parts, usual_s)
        for peer in sorted(estimates, key=lambda peer: (peer < own, peer)):
            router.announce(peer, [stage], estimates[peer])
    return router


def _seconds(label: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"{label} must be a finite number above 0, found {value}; measure it again"
        )
    return float(value)
