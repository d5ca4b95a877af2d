"""Annealing cycles on a fixed number of logical workers.

Cycles alternate: anew from a random construction, with dispatching, then on the worker's best in
the order of its times. On large problems all work on the incumbent. Workers are merged in a fixed
order and their number does not depend on the machine, so a limit on iterations gives
the same plan on any number of threads.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from planner.mapf.anneal import anneal
from planner.mapf.baselines import unit_cost_paths
from planner.mapf.construct import by_chain, construct
from planner.mapf.dispatch import PULL, Numbers, State, fill_tail
from planner.mapf.follow import FOLLOW, scheduled
from planner.mapf.incumbent import Incumbent
from planner.mapf.moves import Rules, Use, Word
from planner.mapf.seats import Seats, exchange, partner, sit
from planner.mapf.tables import Floats, Ints, Tables

TOLLS = (0.0, 0.3, 1.0, 3.0)
"""Construction: seconds that a device costs per earlier visit, as shares of its F and B."""


@dataclass(frozen=True)
class SearchParams:
    """Settings of the search; temperatures are shares of the incumbent's makespan.

    Attributes
    ----------
    workers
        Logical workers, independent of the number of cores.
    work
        Moves of an iteration and worker, times operations, times microbatches.
    most_moves
        Moves of an iteration and worker, at most.
    first_cycle
        Iterations of the first annealing cycle; each later one is ``growth`` times as long.
    large
        From this many operations on, both workers work on the incumbent.
    rearrange
        Share of the moves that exchange two devices, where the arrangement is free.
    smooth
        Weight of the mean end of the microbatches beside the latest: a slope on plateaus.
    """

    workers: int = 2
    work: int = 8192 * 2025
    most_moves: int = 16384
    first_cycle: int = 8
    longest_cycle: int = 128
    growth: float = 2.0
    hot: float = 0.03
    warm: float = 0.006
    cold: float = 0.0006
    pulls: tuple[float, ...] = (0.1, 0.3, 0.02)
    large: int = 1000
    rearrange: float = 0.1
    smooth: float = 0.1


class Worker:
    """One state with its generator and its best."""

    def __init__(
        self,
        tables: Tables,
        rng: np.random.Generator,
        seats: Seats | None,
        params: SearchParams,
    ) -> None:
        self.tables = tables
        self.params = params
        self.rng = rng
        self.numbers, self.rules = Numbers.of(tables), Rules.of(tables)
        self.seats = seats or Seats.fixed(tables)
        self.free = seats is not None
        self.word: Word = rng.integers(0, 2**63, size=1, dtype=np.uint64)
        self.makespan = math.inf

    def begin(self, paths: Ints, pull: float, times: Floats | None, seat: Ints) -> None:
        """Begin a cycle with these paths: no nudges, or the times of a schedule to follow."""
        self.use = Use.of(self.tables, paths)
        self.now = State.of(self.tables, paths, times)
        if self.free:
            for role, device in enumerate(seat.tolist()):
                sit(self.seats, self.numbers, self.rules, self.now.seat, role, device)
        for b in range(len(paths)):
            fill_tail(self.numbers, self.now.paths[b], self.now.tail[b])
        self.trial, self.best = State.of(self.tables, paths), State.of(self.tables, paths)
        self.makespan, self.pull = math.inf, pull

    def shuffle(self) -> None:
        """Exchange devices at random, where the arrangement is free."""
        seat = self.now.seat
        for role in self.rng.integers(len(seat), size=4 * len(seat) if self.free else 0).tolist():
            if seat[role] == self.seats.vacant:
                continue
            other = partner(self.seats, self.rules, self.use, seat, role, self.word)
            if other >= 0 and seat[other] != self.seats.vacant:
                exchange(self.seats, self.numbers, self.rules, seat, role, other)
        for b, path in enumerate(self.now.paths):
            fill_tail(self.numbers, path, self.now.tail[b])

    def work(self, moves: int, hot: float, cold: float, jitter: float) -> None:
        """Some moves of the cycle."""
        self.makespan = anneal(
            self.numbers,
            self.rules,
            self.seats,
            self.use,
            self.now,
            self.trial,
            self.best,
            self.makespan,
            self.word,
            moves,
            hot,
            cold,
            self.pull,
            jitter,
            self.params.rearrange if self.free else 0.0,
            self.params.smooth,
        )


class Search:
    """A search that can be advanced one iteration at a time.

    Attributes
    ----------
    settled
        All cycles work on the incumbent: it has a structure that random starts do not find.
    seats
        Where the arrangement is free: what each device would bring to each stage.
    """

    def __init__(
        self,
        tables: Tables,
        incumbent: Incumbent,
        seed: int,
        params: SearchParams | None = None,
        seats: Seats | None = None,
    ) -> None:
        self.tables = tables
        self.incumbent = incumbent
        self.params = params or SearchParams()
        rngs = np.random.default_rng(seed).spawn(self.params.workers)
        self.workers = [Worker(tables, rng, seats, self.params) for rng in rngs]
        size = tables.microbatches * tables.steps
        share = self.params.work // (size * tables.microbatches)
        self.moves = min(self.params.most_moves, max(16, share))
        self.is_large = size >= self.params.large
        self.settled = False
        self._own_seat = incumbent.seat
        self._cycles = 0
        self._length = float(self.params.first_cycle)

    def run(self, until_s: float = math.inf, iterations: float = math.inf) -> None:
        """Cycles until the rule stops the run, or a given time or count has passed."""
        run = self.incumbent.run
        last = run.iterations + iterations
        with ThreadPoolExecutor(max_workers=len(self.workers)) as pool:
            while run.check() is None and run.elapsed_s < until_s and run.iterations < last:
                left = min(run.remaining_iterations, last - run.iterations)
                self._cycle(pool, round(min(self._length, left)), until_s)
                self._length = min(self._length * self.params.growth, self.params.longest_cycle)
                self._cycles += 1

    def _cycle(self, pool: ThreadPoolExecutor, length: int, until_s: float) -> None:
        params, incumbent = self.params, self.incumbent
        best = incumbent.makespan
        heats = []
        for k, worker in enumerate(self.workers):
            pull = params.pulls[(self._cycles + k) % len(params.pulls)]
            anew = not self.is_large and not self.settled and self._cycles % 2 == 0
            if anew:
                worker.begin(self._start(worker), pull, None, self._own_seat)
                if self._cycles % 3 != 0:
                    worker.shuffle()
            elif math.isinf(worker.makespan) or self.settled or self.is_large:
                worker.begin(incumbent.rows(), FOLLOW, incumbent.times(), incumbent.seat)
            else:
                last = worker.best
                worker.begin(last.paths, FOLLOW, last.begin, last.seat)
            spread = 2.0 ** worker.rng.uniform(-2.0, 2.0)
            heats.append((params.hot if anew else params.warm * spread) * best)
        if self.is_large:
            heats = [heat / 4 for heat in heats]
        cold = params.cold * best
        jitter = float(np.mean(self.tables.backward + self.tables.forward))
        for step in range(length):
            tasks = []
            for worker, hot in zip(self.workers, heats, strict=True):
                cool = min(cold, hot / 2)
                now = hot * (cool / hot) ** (step / length)
                then = hot * (cool / hot) ** ((step + 1) / length)
                tasks.append(pool.submit(worker.work, self.moves, now, then, jitter))
            for task in tasks:
                task.result()
            for worker in self.workers:
                found = worker.best
                incumbent.offer_times(found.paths, found.begin, worker.makespan, found.seat)
            if incumbent.run.update() is not None or incumbent.run.elapsed_s >= until_s:
                break

    def _start(self, worker: Worker) -> Ints:
        toll = float(worker.rng.choice(TOLLS)) * float(np.mean(self.tables.backward))
        return construct(self.tables, by_chain(self.tables, worker.rng), toll)


def first_plans(tables: Tables, incumbent: Incumbent) -> None:
    """Constructed paths, dispatched; at least one is valid, and no baseline is better."""
    unit = float(np.mean(tables.forward + tables.backward))
    order = by_chain(tables)
    for k in range(len(TOLLS) + 1):
        routed = k < len(TOLLS)
        paths = construct(tables, order, TOLLS[k] * unit) if routed else unit_cost_paths(tables)
        for pull in (PULL, 0.0):
            makespan, begin = scheduled(tables, paths, pull=pull)
            incumbent.offer_times(paths, begin, makespan)
        if incumbent.run.check() is not None and incumbent.plan is not None:
            break
