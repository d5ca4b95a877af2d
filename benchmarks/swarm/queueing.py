"""Queueing simulation of trainers and peers: the timing of stochastic wiring.

A trainer keeps a fixed number of microbatches in flight. Each goes forward through one peer of
every stage, chosen by the trainer's router when the previous output has arrived, and back through
the same peers. A peer runs one operation at a time, backward before forward, first come first
served. If a request times out because its peer has failed, the peer is banned and the request goes
to another peer of the stage.

Optimizer steps are not simulated: microbatches follow one another without averaging.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.swarm.transfers import EventQueue, Transfers
from planner.simulator.resources import LinkResources
from planner.swarm.routing import EPSILON, SMOOTHING, Entry, NoPeer, Router

Floats = NDArray[np.float64]
WAITS = 10
"""A trainer without a peer asks so often between two announcements."""


class Chooser(Protocol):
    """What a trainer asks; `planner.swarm.routing.Router` is one."""

    def choose(self, stage: int) -> int:
        """A peer of the stage."""

    def report(self, peer: int, seconds: float) -> None:
        """It has answered after so long."""

    def ban(self, peer: int) -> None:
        """It has not."""

    def announce(self, peer: int, stages: Sequence[int], estimate_s: float | None = None) -> None:
        """It is there."""


class FixedPath:
    """A straight pipeline: always the same peers, which are waited for whatever happens.

    Parameters
    ----------
    path
        A device a stage.
    """

    def __init__(self, path: Sequence[int]) -> None:
        self._path = tuple(path)

    def choose(self, stage: int) -> int:
        """The path's."""
        return self._path[stage]

    def report(self, peer: int, seconds: float) -> None:
        """Nothing is learnt."""

    def ban(self, peer: int) -> None:
        """There is no other."""

    def announce(self, peer: int, stages: Sequence[int], estimate_s: float | None = None) -> None:
        """Nobody else is taken."""


@dataclass(frozen=True)
class Change:
    """Something happens to a peer.

    Attributes
    ----------
    factor
        Its times are so many times its first ones from then on; infinite: it dies.
    """

    time_s: float
    peer: int
    factor: float


@dataclass(frozen=True)
class Scenario:
    """Peers and trainers.

    Attributes
    ----------
    links
        Of N devices (`planner.simulator.resources.LinkResources`).
    stage
        Of every device, 0 to S - 1.
    forward_s, backward_s
        ``float[N]``: seconds a microbatch, recomputation included.
    activation_bytes
        Of a microbatch between two stages, and of its gradient.
    homes
        The device on which each trainer runs.
    in_flight
        Microbatches that each trainer has on their way.
    relayed
        Whether outputs go back to the trainer, which sends them on (Algorithm 1 word for word), or
        from peer to peer, with a word to the trainer (3.2).
    jitter_s
        See `benchmarks.swarm.transfers.Transfers`.
    timeout_s
        After which a request counts as failed.
    announce_s
        How often peers announce themselves.
    by_holder
        Whether the router of the device that has the output chooses, so that choices see where
        messages leave from, or that of the microbatch's trainer. With it every device has one.
    told_work
        Whether routers hear how long peers worked on a request, as these say, or after which time
        they answered, as in Algorithm 1.
    late
        Devices that begin dead; a change makes them join.
    room
        How many microbatches each device holds at most between F and B: it begins no F beyond
        that. Empty: as many as come.
    """

    links: LinkResources
    stage: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    activation_bytes: float
    homes: tuple[int, ...]
    in_flight: int
    relayed: bool = False
    jitter_s: float = 0.0
    timeout_s: float = math.inf
    announce_s: float = math.inf
    by_holder: bool = False
    told_work: bool = False
    late: tuple[int, ...] = ()
    room: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.links)
        if {len(self.stage), len(self.forward_s), len(self.backward_s)} != {n}:
            raise ValueError(f"stage, forward_s and backward_s must have {n} entries, one a device")
        if set(self.stage) != set(range(self.stages)):
            raise ValueError(
                f"stages must be 0 to S - 1, found {sorted(set(self.stage))}; renumber"
            )
        if self.in_flight < 1 or not self.homes or not self.activation_bytes > 0:
            raise ValueError(
                "a scene has a trainer, a microbatch in flight and bytes; give 1 or more"
            )

    @property
    def stages(self) -> int:
        """S."""
        return max(self.stage) + 1

    @property
    def choosers(self) -> int:
        """How many routers there are."""
        return len(self.stage) if self.by_holder else len(self.homes)


@dataclass
class Log:
    """What happened, in the order in which it did.

    Attributes
    ----------
    forward
        ``(seconds, device)`` of every forward pass that was done.
    finished_s
        When each microbatch came back to its trainer.
    failed
        ``(seconds, device)`` of every request that ran out of time.
    busy_s
        Seconds that each device worked.
    max_in_flight
        The most microbatches that each device had between their forward and backward pass.
    """

    forward: list[tuple[float, int]] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    failed: list[tuple[float, int]] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    max_in_flight: list[int] = field(default_factory=list)

    def per_s(self, after: int) -> float:
        """Microbatches a second, without the first ``after``."""
        ends = self.finished_s[after:]
        return (len(ends) - 1) / (ends[-1] - ends[0])

    def counts(self, devices: int, begin_s: float = 0.0, end_s: float = math.inf) -> Floats:
        """Forward passes of every device in some time.

        Returns
        -------
        ndarray
            ``float[N]``.
        """
        found = np.zeros(devices)
        for time, device in self.forward:
            if begin_s <= time < end_s:
                found[device] += 1
        return found


@dataclass
class _Microbatch:
    """One on its way.

    Attributes
    ----------
    path
        Peers that did, or are to do, its stages.
    place, back
        The stage that it is asked for, and in which direction it goes.
    at
        The device that has what the next one needs.
    attempt, asked_s, chooser
        Which request this is, when it was made, and whose choice its peer was.
    """

    trainer: int
    at: int
    path: list[int] = field(default_factory=list)
    place: int = 0
    back: bool = False
    attempt: int = 0
    asked_s: float = 0.0
    chooser: int = 0


def routers(
    scene: Scenario,
    *,
    smoothing: float = SMOOTHING,
    epsilon_s: float = EPSILON,
    entry: Entry = Entry.LEVEL,
    estimates_s: Mapping[int, float] | None = None,
) -> list[Chooser]:
    """The routers of a scene, which know those who are there."""
    found: list[Chooser] = []
    for number in range(scene.choosers):
        router: Router[int] = Router(
            scene.stages, smoothing=smoothing, epsilon_s=epsilon_s, entry=entry
        )
        # of alike peers each trainer begins with another one
        n = len(scene.stage)
        for d in ((number + k) % n for k in range(n)):
            if d not in scene.late:
                router.announce(d, [scene.stage[d]], (estimates_s or {}).get(d))
        found.append(router)
    return found


def simulate_queues(
    scene: Scenario,
    choosers: Sequence[Chooser],
    microbatches: int,
    *,
    changes: Sequence[Change] = (),
    seed: int = 0,
    until_s: float = math.inf,
    drain: bool = False,
) -> Log:
    """Let trainers and peers work."""
    if len(choosers) != scene.choosers:
        raise ValueError(
            f"the scene needs {scene.choosers} choosers, found {len(choosers)}; see routers()"
        )
    return _Play(scene, choosers, microbatches, seed, drain).run(changes, until_s)


class _Play:
    """State of a simulation."""

    def __init__(
        self,
        scene: Scenario,
        choosers: Sequence[Chooser],
        microbatches: int,
        seed: int,
        drain: bool,
    ) -> None:
        self.scene, self.choosers, self.wanted = scene, choosers, microbatches
        self.left = microbatches if drain else math.inf  # to begin
        self.agenda = EventQueue()
        rng = np.random.default_rng(seed)
        self.transfers = Transfers(scene.links, self.agenda, scene.jitter_s, rng)
        n = len(scene.stage)
        self.log = Log(busy_s=[0.0] * n, max_in_flight=[0] * n)
        self.held = [0] * n
        self.alive = [d not in scene.late for d in range(n)]
        self.life = [0] * n  # what a device began before it died is lost
        self.factor = [1.0] * n
        self.busy = [False] * n
        self.queues: list[tuple[deque[Any], deque[Any]]] = [(deque(), deque()) for _ in range(n)]

    def run(self, changes: Sequence[Change], until_s: float) -> Log:
        for change in changes:
            self.agenda.at(change.time_s, self._change, change)
        if math.isfinite(self.scene.announce_s):
            for d in range(len(self.alive)):
                # not all at the same moment
                first = self.scene.announce_s * (d + 1) / len(self.alive)
                self.agenda.at(first, self._announce, d, True)
        for _ in range(self.scene.in_flight):
            for k in range(len(self.scene.homes)):
                self._new(k)
        self.agenda.run(until_s, lambda: len(self.log.finished_s) >= self.wanted)
        return self.log

    def _new(self, trainer: int) -> None:
        if self.left > 0:
            self.left -= 1
            self._ask(_Microbatch(trainer, self.scene.homes[trainer]), None)

    def _ask(self, m: _Microbatch, peer: int | None) -> None:
        """Send a microbatch on: back to ``peer``, or to the one that its trainer chooses."""
        inputs = 1
        if peer is None:
            m.chooser = m.at if self.scene.by_holder else m.trainer
            try:
                peer = self.choosers[m.chooser].choose(m.place)
            except NoPeer:
                if math.isinf(self.scene.announce_s):
                    raise
                # until somebody announces itself
                again_s = self.agenda.now_s + self.scene.announce_s / WAITS
                self.agenda.at(again_s, self._ask, m, None)
                return
            m.path[m.place :] = [peer, *m.path[m.place + 1 :]]
            # who did not do the forward pass needs its input beside the gradient
            inputs = 2 if m.back else 1
        self._request(m, peer)
        size = inputs * self.scene.activation_bytes
        self.transfers.send(m.at, peer, size, self._join, m, m.attempt, peer)

    def _request(self, m: _Microbatch, peer: int) -> None:
        """Another request begins, with its time limit."""
        m.attempt += 1
        m.asked_s = self.agenda.now_s
        if math.isfinite(self.scene.timeout_s):
            late_s = self.agenda.now_s + self.scene.timeout_s
            self.agenda.at(late_s, self._late, m, m.attempt, peer)

    def _late(self, m: _Microbatch, attempt: int, peer: int) -> None:
        """A request has run out of time."""
        if m.attempt != attempt:
            return
        self.log.failed.append((self.agenda.now_s, peer))
        self.choosers[m.chooser].ban(peer)
        if not self.alive[m.at]:
            m.at = self.scene.homes[m.trainer]
        self._ask(m, None)

    def _join(self, m: _Microbatch, attempt: int, peer: int) -> None:
        """A request is in its peer's queue."""
        if self.alive[peer]:
            self.queues[peer][0 if m.back else 1].append((m, attempt))
            self._work(peer)

    def _work(self, peer: int) -> None:
        backward, forward = self.queues[peer]
        if self.busy[peer] or not (backward or forward):
            return
        room = self.scene.room
        if room and not backward and self.held[peer] >= room[peer]:
            return
        times = self.scene.backward_s if backward else self.scene.forward_s
        m, attempt = (backward or forward).popleft()
        seconds = float(times[peer]) * self.factor[peer]
        self.busy[peer] = True
        self.log.busy_s[peer] += seconds
        end_s = self.agenda.now_s + seconds
        self.agenda.at(end_s, self._done, m, attempt, peer, self.life[peer])

    def _done(self, m: _Microbatch, attempt: int, peer: int, life: int) -> None:
        """A peer has done a request."""
        if self.life[peer] != life:
            return
        self.busy[peer] = False
        if m.attempt == attempt:
            m.attempt += 1
            if not m.back:
                self.log.forward.append((self.agenda.now_s, peer))
            self.held[peer] += -1 if m.back else 1
            self.log.max_in_flight[peer] = max(self.log.max_in_flight[peer], self.held[peer])
            home, last = self.scene.homes[m.trainer], self.scene.stages - 1
            if m.back and m.place == 0:
                # what is left is a word to the trainer
                there_s = self.agenda.now_s + self.transfers.latency_s(peer, home)
                self.agenda.at(there_s, self._finished, m)
            elif not m.back and m.place == last:
                self._answered(m, peer, self.agenda.now_s + self.transfers.latency_s(peer, home))
                m.back, m.at = True, peer
                # the loss is where the output is
                self._request(m, peer)
                self._join(m, m.attempt, peer)
            elif self.scene.relayed:
                size = self.scene.activation_bytes
                self.transfers.send(peer, home, size, self._returned, m, peer, home)
            else:
                there_s = self.agenda.now_s + self.transfers.latency_s(peer, m.at)
                self._answered(m, peer, there_s)
                self._go_on(m, peer)
        self._work(peer)

    def _answered(self, m: _Microbatch, peer: int, time_s: float) -> None:
        """The trainer hears at a time that its request was done."""
        if not m.back:
            router = self.choosers[m.chooser]
            seconds = time_s - m.asked_s
            if self.scene.told_work:
                seconds = float(self.scene.forward_s[peer]) * self.factor[peer]
            self.agenda.at(time_s, router.report, peer, seconds)

    def _returned(self, m: _Microbatch, peer: int, home: int) -> None:
        self._answered(m, peer, self.agenda.now_s)
        self._go_on(m, home)

    def _go_on(self, m: _Microbatch, at: int) -> None:
        m.at = at
        m.place += -1 if m.back else 1
        self._ask(m, m.path[m.place] if m.back else None)

    def _finished(self, m: _Microbatch) -> None:
        self.log.finished_s.append(self.agenda.now_s)
        self._new(m.trainer)

    def _change(self, change: Change) -> None:
        d = change.peer
        if math.isinf(change.factor):
            self.alive[d], self.busy[d] = False, False
            self.life[d] += 1
            self.queues[d] = (deque(), deque())
            self.held[d] = 0
            return
        self.factor[d] = change.factor
        if not self.alive[d]:
            self.alive[d] = True
            self._announce(d, False)

    def _announce(self, d: int, repeats: bool) -> None:
        if self.alive[d]:
            for chooser in self.choosers:
                chooser.announce(d, [self.scene.stage[d]])
        if repeats:
            later_s = self.agenda.now_s + self.scene.announce_s
            self.agenda.at(later_s, self._announce, d, True)
