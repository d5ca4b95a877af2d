"""Simulated annealing cycles on a fixed number of logical workers.

Cycles alternate between a restart from a random construction with list scheduling, and the worker's
best solution with the order of its times. On large problems all workers improve the incumbent.
Workers are merged in a fixed order and their number does not depend on the machine, so a limit on
iterations gives the same plan on any number of threads.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from planner.mapf.anneal import AnnealingState, CycleParams, MoveShares, anneal
from planner.mapf.arrays import PathArrays
from planner.mapf.baselines import unit_cost_paths
from planner.mapf.construction import construct, construction_order
from planner.mapf.device_exchange import (
    DeviceStageData,
    ExchangeContext,
    exchange_devices,
    exchange_partner,
    put_device,
)
from planner.mapf.fixed_order import FOLLOW_TIMES, schedule_paths
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.list_scheduling import DEFAULT_TAIL_WEIGHT, ScheduleData, ScheduleState, fill_tail
from planner.mapf.moves import PathCounts, PathRules
from planner.mapf.stage_spans import StageAveragingSpans
from planner.search.arrays import Floats, Ints, Words


@dataclass(frozen=True)
class PathSearchParams:
    """Settings of the search; temperatures are shares of the incumbent's makespan.

    Attributes
    ----------
    workers
        Logical workers, independent of the number of cores.
    move_budget
        Moves per iteration and worker, times operations, times microbatches.
    max_moves
        Maximum number of moves per iteration and worker.
    first_cycle
        Iterations of the first annealing cycle; each later one is ``growth`` times as long.
    max_cycle
        Maximum number of iterations of an annealing cycle.
    t_restart, t_improve, t_end
        First temperature of a cycle after a restart and of one on a known schedule; last one.
    tail_weights
        Weights of the tail in list scheduling, used in turn.
    large_operations
        From this many operations on, all workers improve the incumbent.
    device_exchange_share
        Share of the moves that exchange two devices, where the arrangement is free.
    mean_weight
        Weight of the mean completion time in the objective, which gives plateaus a slope.
    critical_share
        Share of the moves that change a step on the critical path.
    shares
        Probabilities of the moves, see `MoveShares`.
    visit_costs
        Construction: cost of a device per earlier visit, as shares of the mean B.
    """

    workers: int = 2
    move_budget: int = 8192 * 2025
    max_moves: int = 16384
    first_cycle: int = 8
    max_cycle: int = 128
    growth: float = 2.0
    t_restart: float = 0.03
    t_improve: float = 0.006
    t_end: float = 0.0006
    tail_weights: tuple[float, ...] = (0.1, 0.3, 0.02)
    large_operations: int = 1000
    device_exchange_share: float = 0.1
    mean_weight: float = 0.1
    critical_share: float = 0.6
    shares: MoveShares = field(default_factory=MoveShares)
    visit_costs: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)


class SearchWorker:
    """A logical worker: an annealing state with its random generator."""

    def __init__(
        self,
        arrays: PathArrays,
        rng: np.random.Generator,
        devices: DeviceStageData | None,
        params: PathSearchParams,
        averaging: StageAveragingSpans | None = None,
    ) -> None:
        self.arrays = arrays
        self.params = params
        self.rng = rng
        device_data = devices or DeviceStageData.fixed(arrays)
        rounds = averaging or StageAveragingSpans.none()
        self.context = ExchangeContext(
            ScheduleData.of(arrays), PathRules.of(arrays), device_data, rounds
        )
        self.is_arrangement_free = devices is not None
        self.rng_state: Words = rng.integers(0, 2**63, size=1, dtype=np.uint64)
        self.makespan = math.inf

    def start_cycle(
        self, paths: Ints, tail_weight: float, times: Floats | None, device_of: Ints
    ) -> None:
        """Start a cycle from given paths, with zero offsets or the times of a schedule."""
        current = ScheduleState.of(self.arrays, paths, times)
        if self.is_arrangement_free:
            for role, device in enumerate(device_of.tolist()):
                put_device(self.context, current.device_of, role, device)
        for b in range(len(paths)):
            fill_tail(self.context.data, current.paths[b], current.tail[b])
        candidate, best = ScheduleState.of(self.arrays, paths), ScheduleState.of(self.arrays, paths)
        counts = PathCounts.of(self.arrays, paths)
        self.annealing = AnnealingState(
            self.context, counts, current, candidate, best, self.rng_state
        )
        self.makespan, self.tail_weight = math.inf, tail_weight

    @property
    def best(self) -> ScheduleState:
        """The best state of the cycle."""
        return self.annealing.best

    def shuffle(self) -> None:
        """Exchange random devices, if the arrangement is free."""
        context, current = self.context, self.annealing.current
        device_of, vacant = current.device_of, context.devices.vacant
        tries = 4 * len(device_of) if self.is_arrangement_free else 0
        for role in self.rng.integers(len(device_of), size=tries).tolist():
            if device_of[role] == vacant:
                continue
            other = exchange_partner(
                context, self.annealing.counts, device_of, role, self.rng_state
            )
            if other >= 0 and device_of[other] != vacant:
                exchange_devices(context, device_of, role, other)
        for b, path in enumerate(current.paths):
            fill_tail(context.data, path, current.tail[b])

    def run_moves(self, moves: int, t_start: float, t_end: float, jitter: float) -> None:
        """Run a part of the cycle, cooling from ``t_start`` to ``t_end`` seconds."""
        params = self.params
        device_exchange_share = params.device_exchange_share if self.is_arrangement_free else 0.0
        cycle = CycleParams(
            moves,
            t_start,
            t_end,
            self.tail_weight,
            jitter,
            device_exchange_share,
            params.mean_weight,
            params.critical_share,
            params.shares,
        )
        self.makespan = anneal(self.annealing, cycle, self.makespan)


class PathSearch:
    """Simulated annealing that can be advanced one iteration at a time.

    Attributes
    ----------
    intensify
        No restarts: all cycles improve the incumbent.
    devices
        Data of each device on each stage, if the arrangement is free.
    averaging
        Duration of a stage's averaging, if it is part of the objective.
    """

    def __init__(
        self,
        arrays: PathArrays,
        incumbent: PathIncumbent,
        seed: int,
        params: PathSearchParams | None = None,
        devices: DeviceStageData | None = None,
        averaging: StageAveragingSpans | None = None,
    ) -> None:
        self.arrays = arrays
        self.incumbent = incumbent
        self.params = params or PathSearchParams()
        rngs = np.random.default_rng(seed).spawn(self.params.workers)
        self.workers = [SearchWorker(arrays, rng, devices, self.params, averaging) for rng in rngs]
        size = arrays.microbatches * arrays.steps
        share = self.params.move_budget // (size * arrays.microbatches)
        self.moves = min(self.params.max_moves, max(16, share))
        self.is_large = size >= self.params.large_operations
        self.intensify = False
        self._first_devices = incumbent.device_of
        self._cycles = 0
        self._length = float(self.params.first_cycle)

    def run(self, until_s: float = math.inf, iterations: float = math.inf) -> None:
        """Run cycles until the run stops, or until a given time or number of iterations."""
        run = self.incumbent.run
        last = run.iterations + iterations
        with ThreadPoolExecutor(max_workers=len(self.workers)) as pool:
            while run.check() is None and run.elapsed_s < until_s and run.iterations < last:
                iterations_left = min(run.remaining_iterations, last - run.iterations)
                self._cycle(pool, math.ceil(min(self._length, iterations_left)), until_s)
                self._length = min(self._length * self.params.growth, self.params.max_cycle)
                self._cycles += 1

    def _cycle(self, pool: ThreadPoolExecutor, length: int, until_s: float) -> None:
        params, incumbent = self.params, self.incumbent
        best = incumbent.objective
        temperatures = []
        for k, worker in enumerate(self.workers):
            tail_weight = params.tail_weights[(self._cycles + k) % len(params.tail_weights)]
            restart = not self.is_large and not self.intensify and self._cycles % 2 == 0
            if restart:
                worker.start_cycle(self._start(worker), tail_weight, None, self._first_devices)
                if self._cycles % 3 != 0:
                    worker.shuffle()
            elif math.isinf(worker.makespan) or self.intensify or self.is_large:
                worker.start_cycle(
                    incumbent.paths, FOLLOW_TIMES, incumbent.starts, incumbent.device_of
                )
            else:
                last = worker.best
                worker.start_cycle(last.paths, FOLLOW_TIMES, last.begin, last.device_of)
            temperature_factor = 2.0 ** worker.rng.uniform(-2.0, 2.0)
            temperatures.append(
                (params.t_restart if restart else params.t_improve * temperature_factor) * best
            )
        if self.is_large:
            temperatures = [temperature / 4 for temperature in temperatures]
        t_end = params.t_end * best
        jitter = float(np.mean(self.arrays.backward + self.arrays.forward))
        for step in range(length):
            tasks = []
            for worker, t_start in zip(self.workers, temperatures, strict=True):
                t_end_of_cycle = min(t_end, t_start / 2)
                t_step_start = t_start * (t_end_of_cycle / t_start) ** (step / length)
                t_step_end = t_start * (t_end_of_cycle / t_start) ** ((step + 1) / length)
                tasks.append(
                    pool.submit(worker.run_moves, self.moves, t_step_start, t_step_end, jitter)
                )
            for task in tasks:
                task.result()
            for worker in self.workers:
                best_state = worker.best
                incumbent.offer_schedule(
                    best_state.paths, best_state.begin, worker.makespan, best_state.device_of
                )
            if incumbent.run.update() is not None or incumbent.run.elapsed_s >= until_s:
                break

    def _start(self, worker: SearchWorker) -> Ints:
        visit_cost = float(worker.rng.choice(self.params.visit_costs)) * float(
            np.mean(self.arrays.backward)
        )
        return construct(self.arrays, construction_order(self.arrays, worker.rng), visit_cost)


def initial_plans(arrays: PathArrays, incumbent: PathIncumbent) -> None:
    """Offer constructed paths, list scheduled; at least one is valid, and no baseline is better."""
    unit = float(np.mean(arrays.forward + arrays.backward))
    order = construction_order(arrays)
    for visit_cost in (*PathSearchParams().visit_costs, None):
        paths = (
            unit_cost_paths(arrays)
            if visit_cost is None
            else construct(arrays, order, visit_cost * unit)
        )
        for tail_weight in (DEFAULT_TAIL_WEIGHT, 0.0):
            makespan, begin = schedule_paths(arrays, paths, tail_weight=tail_weight)
            incumbent.offer_schedule(paths, begin, makespan)
        if incumbent.run.check() is not None and incumbent.plan is not None:
            break
