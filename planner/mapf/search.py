"""Annealing cycles on a fixed number of logical workers.

Cycles alternate: anew from a random construction, with dispatching, then on the worker's best in
the order of its times. On large problems all work on the incumbent. Workers are merged in a fixed
order and their number does not depend on the machine, so a limit on iterations gives
the same plan on any number of threads.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from planner.mapf.anneal import Cycle, MoveShares, Walk, anneal
from planner.mapf.arrays import PathArrays
from planner.mapf.baselines import unit_cost_paths
from planner.mapf.construct import by_chain, construct
from planner.mapf.device_exchange import (
    DeviceNumbers,
    ExchangeContext,
    exchange_devices,
    exchange_partner,
    put_device,
)
from planner.mapf.dispatch import PULL, DispatchState, Numbers, fill_tail
from planner.mapf.fixed_order import FOLLOW, scheduled
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.moves import PathRules, Use
from planner.mapf.stage_spans import StageAveragingSpans
from planner.search.arrays import Floats, Ints, Words


@dataclass(frozen=True)
class PathSearchParams:
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
    critical
        Share of the moves that begin at a step of a longest chain of waiting.
    shares
        Of the moves, see `MoveShares`.
    tolls
        Construction: seconds that a device costs per earlier visit, as shares of its F and B.
    hot, warm, cold
        First temperature of a cycle that begins anew and of one on a known schedule; the last.
    pulls
        Weights of the rest of the chain when steps are dispatched, in turn.
    longest_cycle
        Iterations of an annealing cycle, at most.
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
    critical: float = 0.6
    shares: MoveShares = field(default_factory=MoveShares)
    tolls: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)


class SearchWorker:
    """One state with its generator and its best."""

    def __init__(
        self,
        arrays: PathArrays,
        rng: np.random.Generator,
        devices: DeviceNumbers | None,
        params: PathSearchParams,
        averaging: StageAveragingSpans | None = None,
    ) -> None:
        self.arrays = arrays
        self.params = params
        self.rng = rng
        numbers = devices or DeviceNumbers.fixed(arrays)
        rounds = averaging or StageAveragingSpans.none()
        self.setting = ExchangeContext(Numbers.of(arrays), PathRules.of(arrays), numbers, rounds)
        self.free = devices is not None
        self.word: Words = rng.integers(0, 2**63, size=1, dtype=np.uint64)
        self.makespan = math.inf

    def begin(self, paths: Ints, pull: float, times: Floats | None, device_of: Ints) -> None:
        """Begin a cycle with these paths: no nudges, or the times of a schedule to follow."""
        now = DispatchState.of(self.arrays, paths, times)
        if self.free:
            for role, device in enumerate(device_of.tolist()):
                put_device(self.setting, now.device_of, role, device)
        for b in range(len(paths)):
            fill_tail(self.setting.num, now.paths[b], now.tail[b])
        trial, best = DispatchState.of(self.arrays, paths), DispatchState.of(self.arrays, paths)
        use = Use.of(self.arrays, paths)
        self.walk = Walk(self.setting, use, now, trial, best, self.word)
        self.makespan, self.pull = math.inf, pull

    @property
    def best(self) -> DispatchState:
        """The best state of the cycle."""
        return self.walk.best

    def shuffle(self) -> None:
        """Exchange devices at random, where the arrangement is free."""
        setting, now = self.setting, self.walk.now
        device_of, vacant = now.device_of, setting.devices.vacant
        tries = 4 * len(device_of) if self.free else 0
        for role in self.rng.integers(len(device_of), size=tries).tolist():
            if device_of[role] == vacant:
                continue
            other = exchange_partner(setting, self.walk.use, device_of, role, self.word)
            if other >= 0 and device_of[other] != vacant:
                exchange_devices(setting, device_of, role, other)
        for b, path in enumerate(now.paths):
            fill_tail(setting.num, path, now.tail[b])

    def work(self, moves: int, hot: float, cold: float, jitter: float) -> None:
        """Some moves of the cycle, from ``hot`` to ``cold`` seconds."""
        params = self.params
        rearrange = params.rearrange if self.free else 0.0
        cycle = Cycle(
            moves,
            hot,
            cold,
            self.pull,
            jitter,
            rearrange,
            params.smooth,
            params.critical,
            params.shares,
        )
        self.makespan = anneal(self.walk, cycle, self.makespan)


class PathSearch:
    """A search that can be advanced one iteration at a time.

    Attributes
    ----------
    settled
        All cycles work on the incumbent: it has a structure that random starts do not find.
    devices
        Where the arrangement is free: what each device would bring to each stage.
    averaging
        Where it counts: what a stage's round takes.
    """

    def __init__(
        self,
        arrays: PathArrays,
        incumbent: PathIncumbent,
        seed: int,
        params: PathSearchParams | None = None,
        devices: DeviceNumbers | None = None,
        averaging: StageAveragingSpans | None = None,
    ) -> None:
        self.arrays = arrays
        self.incumbent = incumbent
        self.params = params or PathSearchParams()
        rngs = np.random.default_rng(seed).spawn(self.params.workers)
        self.workers = [SearchWorker(arrays, rng, devices, self.params, averaging) for rng in rngs]
        size = arrays.microbatches * arrays.steps
        share = self.params.work // (size * arrays.microbatches)
        self.moves = min(self.params.most_moves, max(16, share))
        self.is_large = size >= self.params.large
        self.settled = False
        self._first_devices = incumbent.device_of
        self._cycles = 0
        self._length = float(self.params.first_cycle)

    def run(self, until_s: float = math.inf, iterations: float = math.inf) -> None:
        """Cycles until the rule stops the run, or a given time or count has passed."""
        run = self.incumbent.run
        last = run.iterations + iterations
        with ThreadPoolExecutor(max_workers=len(self.workers)) as pool:
            while run.check() is None and run.elapsed_s < until_s and run.iterations < last:
                left = min(run.remaining_iterations, last - run.iterations)
                self._cycle(pool, math.ceil(min(self._length, left)), until_s)
                self._length = min(self._length * self.params.growth, self.params.longest_cycle)
                self._cycles += 1

    def _cycle(self, pool: ThreadPoolExecutor, length: int, until_s: float) -> None:
        params, incumbent = self.params, self.incumbent
        best = incumbent.objective
        heats = []
        for k, worker in enumerate(self.workers):
            pull = params.pulls[(self._cycles + k) % len(params.pulls)]
            anew = not self.is_large and not self.settled and self._cycles % 2 == 0
            if anew:
                worker.begin(self._start(worker), pull, None, self._first_devices)
                if self._cycles % 3 != 0:
                    worker.shuffle()
            elif math.isinf(worker.makespan) or self.settled or self.is_large:
                worker.begin(incumbent.rows, FOLLOW, incumbent.times, incumbent.device_of)
            else:
                last = worker.best
                worker.begin(last.paths, FOLLOW, last.begin, last.device_of)
            spread = 2.0 ** worker.rng.uniform(-2.0, 2.0)
            heats.append((params.hot if anew else params.warm * spread) * best)
        if self.is_large:
            heats = [heat / 4 for heat in heats]
        cold = params.cold * best
        jitter = float(np.mean(self.arrays.backward + self.arrays.forward))
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
                incumbent.offer_times(found.paths, found.begin, worker.makespan, found.device_of)
            if incumbent.run.update() is not None or incumbent.run.elapsed_s >= until_s:
                break

    def _start(self, worker: SearchWorker) -> Ints:
        toll = float(worker.rng.choice(self.params.tolls)) * float(np.mean(self.arrays.backward))
        return construct(self.arrays, by_chain(self.arrays, worker.rng), toll)


def first_plans(
    arrays: PathArrays, incumbent: PathIncumbent, params: PathSearchParams | None = None
) -> None:
    """Constructed paths, dispatched; at least one is valid, and no baseline is better."""
    unit = float(np.mean(arrays.forward + arrays.backward))
    order = by_chain(arrays)
    for toll in (*(params or PathSearchParams()).tolls, None):
        paths = unit_cost_paths(arrays) if toll is None else construct(arrays, order, toll * unit)
        for pull in (PULL, 0.0):
            makespan, begin = scheduled(arrays, paths, pull=pull)
            incumbent.offer_times(paths, begin, makespan)
        if incumbent.run.check() is not None and incumbent.plan is not None:
            break
