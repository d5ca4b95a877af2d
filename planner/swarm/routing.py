"""Stochastic wiring (SWARM, 3.2, Algorithm 1): which peer gets a trainer's next microbatch.

Plain Python without imports of this package, so that whatever runs microbatches may use it as it
is. It has no clock: seconds are passed in, and the same calls give the same choices.

Interleaved weighted round robin: every peer has a priority, the seconds of all requests that it was
given. The lowest is next, and rises by the peer's estimate, an exponential average of its response
times. A peer that answers twice as fast is chosen twice as often.

Two things differ from the algorithm's text. It lets a new or returning peer enter at priority
epsilon, so that this peer gets every microbatch until it has caught up with all that others ever
did; here it enters at the lowest priority in use. And its estimate begins at epsilon, which has the
same effect until enough answers are in; here it begins at the mean of its stage, or at what the
caller knows, and a guess is replaced by the first answer. ``Entry.EPSILON`` is the text's way.
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
"""Seconds of a peer of which nothing is known, where its stage has no other."""


class NoPeer(LookupError):
    """No peer of a stage may be chosen: all have left or are banned."""


class Entry(enum.StrEnum):
    """Where a new or returning peer enters: at its stage's level, or as the text has it."""

    LEVEL = "level"
    EPSILON = "epsilon"


@dataclass
class _State:
    """What a trainer knows of a peer."""

    stages: tuple[int, ...]
    number: int
    priority: float
    estimate_s: float
    guessed: bool
    banned: bool = False


class Router(Generic[Peer]):
    """One trainer's estimates and choices.

    Parameters
    ----------
    stages
        N of the pipeline, numbered from 0.
    smoothing
        gamma, from 0 (estimates stay what they were given: a fixed weighted round robin) to 1 (the
        last answer counts alone).
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
        self._known: dict[Peer, _State] = {}
        self._peers: list[dict[Peer, None]] = [{} for _ in range(stages)]
        # (priority, number of the peer, peer); what is out of date is dropped where it is met
        self._queues: list[list[tuple[float, int, Peer]]] = [[] for _ in range(stages)]
        self._level = [0.0] * stages
        self._announced = 0

    def announce(self, peer: Peer, stages: Iterable[int], estimate_s: float | None = None) -> None:
        """Add or update a peer and the stages it serves; also its sign of life."""
        served = tuple(sorted(set(stages)))
        for stage in served or (-1,):
            self._check(stage)
        known = self._known.get(peer)
        if known is not None and known.stages != served:
            self.leave(peer)
            known = None
        if known is not None and not known.banned:
            return
        if self._entry is Entry.EPSILON:
            priority, estimate, guessed = self._epsilon_s, self._epsilon_s, False
        else:
            # of several stages the fullest: in none of them does it get more than its part
            priority = max(self._lowest(stage) for stage in served)
            if known is not None:
                estimate, guessed = known.estimate_s, known.guessed
            elif estimate_s is not None:
                estimate, guessed = _seconds("estimate_s", estimate_s), False
            else:
                estimate, guessed = self._usual_s(served), True
        if known is None:
            self._announced += 1
            known = _State(served, self._announced, priority, estimate, guessed)
            self._known[peer] = known
            for stage in served:
                self._peers[stage][peer] = None
        else:
            known.priority, known.estimate_s, known.guessed = priority, estimate, guessed
            known.banned = False
        self._queue(peer, known)

    def choose(self, stage: int) -> Peer:
        """The peer of lowest priority for the next microbatch; ties go to the first announced."""
        self._check(stage)
        if not self._clean(stage):
            raise NoPeer(f"no peer of stage {stage} may be chosen; announce one")
        peer = self._queues[stage][0][2]
        known = self._known[peer]
        self._level[stage] = known.priority
        known.priority += known.estimate_s
        self._queue(peer, known)
        return peer

    def report(self, peer: Peer, seconds: float) -> None:
        """A peer has answered after so long; nothing happens for a peer that has left."""
        seconds = _seconds("a response time", seconds)
        known = self._known.get(peer)
        if known is None:
            return
        if known.guessed and self._smoothing > 0:
            known.estimate_s, known.guessed = seconds, False
        else:
            known.estimate_s += self._smoothing * (seconds - known.estimate_s)

    def ban(self, peer: Peer) -> None:
        """A peer failed or did not answer: it is not chosen until it announces itself again."""
        if peer in self._known:
            self._known[peer].banned = True

    def leave(self, peer: Peer) -> None:
        """A peer is gone for good; what is known of it is forgotten."""
        known = self._known.pop(peer, None)
        for stage in () if known is None else known.stages:
            del self._peers[stage][peer]

    def estimates_s(self, stage: int) -> dict[Peer, float]:
        """Response times that the choice goes by, of those that may be chosen.

        Returns
        -------
        dict[Peer, float]
            In the order in which they were announced.
        """
        self._check(stage)
        return {p: self._known[p].estimate_s for p in self._peers[stage] if self._may_choose(p)}

    def shares(self, stage: int) -> dict[Peer, float]:
        """Parts of the stage's microbatches that its peers get while estimates stay as they are.

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

    def _may_choose(self, peer: Peer) -> bool:
        return not self._known[peer].banned

    def _queue(self, peer: Peer, known: _State) -> None:
        for stage in known.stages:
            heapq.heappush(self._queues[stage], (known.priority, known.number, peer))

    def _clean(self, stage: int) -> bool:
        """Drop what is out of date from the queue's head; whether a peer is left."""
        queue = self._queues[stage]
        while queue:
            priority, number, peer = queue[0]
            known = self._known.get(peer)
            if known and (known.number, known.priority, known.banned) == (number, priority, False):
                return True
            heapq.heappop(queue)
        return False

    def _lowest(self, stage: int) -> float:
        """The lowest priority in use; the last one that was, where nobody may be chosen."""
        return self._queues[stage][0][0] if self._clean(stage) else self._level[stage]

    def _usual_s(self, stages: tuple[int, ...]) -> float:
        """Mean estimate over the peers of some stages."""
        found = [s for stage in stages for s in self.estimates_s(stage).values()]
        return math.fsum(found) / len(found) if found else self._epsilon_s


def starting_estimates_s(parts: Mapping[Peer, float], usual_s: float) -> dict[Peer, float]:
    """Estimates with which peers begin at given parts of a stage's microbatches.

    Returns
    -------
    dict[Peer, float]
        Inverse to ``parts``; a peer with the mean part has ``usual_s``.
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
    """The router of one of many numbered peers, which begins with given parts."""
    router: Router[int] = Router(stages, smoothing=smoothing)
    for stage, (parts, usual_s) in begin.items():
        estimates = starting_estimates_s(parts, usual_s)
        for peer in sorted(estimates, key=lambda peer: (peer < own, peer)):
            router.announce(peer, [stage], estimates[peer])
    return router


def _seconds(what: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be a finite number above 0, found {value}; measure it again")
    return float(value)
