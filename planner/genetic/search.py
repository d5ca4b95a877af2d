"""The default heuristic: annealing cycles on a fixed number of logical workers.

Every worker anneals its own arrangement. Between cycles the best arrangement is put into its best
stage order (eq. 4 with the exact matchings of eq. 3). Workers are merged in a fixed order and their
number does not depend on the machine, so a limit on iterations gives the same plan on any number of
threads.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.genetic.anneal import anneal, exact_cost
from planner.genetic.order import best_order
from planner.genetic.tables import Ints, Tables
from planner.stop import StopRun


@dataclass(frozen=True)
class SearchParams:
    """Settings of the search; temperatures are shares of the incumbent's cost.

    Attributes
    ----------
    workers
        Logical workers, independent of the number of cores.
    moves
        Moves per worker and iteration.
    first_cycle
        Iterations of the first annealing cycle; each later one is ``growth`` times as long.
    """

    workers: int = 2
    moves: int = 32768
    first_cycle: int = 8
    growth: float = 2.0
    hot: float = 0.01
    cold: float = 0.001
    smooth: float = 0.1


class _Worker:
    """One arrangement with its generator and its best groups."""

    def __init__(self, tables: Tables, rng: np.random.Generator) -> None:
        n = len(tables.stage)
        self.tables = tables
        self.rng = rng
        self.word: NDArray[np.uint64] = rng.integers(0, 2**63, size=1, dtype=np.uint64)
        self.device_at: Ints = np.empty(n, dtype=np.int64)
        self.after: Ints = np.full(n, -1, dtype=np.int64)
        self.before: Ints = np.full(n, -1, dtype=np.int64)
        self.best: Ints = np.empty(n, dtype=np.int64)
        self.best_cost = math.inf

    def begin(self, start: Ints) -> None:
        """Begin a cycle from an arrangement."""
        self.device_at[:] = start
        self.best[:] = start
        self.best_cost = exact_cost(self.tables, self.device_at, self.after, self.before)

    def work(self, moves: int, hot: float, cold: float, smooth: float) -> None:
        self.best_cost = anneal(
            self.tables,
            self.device_at,
            self.after,
            self.before,
            self.best,
            self.best_cost,
            self.word,
            moves,
            hot,
            cold,
            smooth,
            smooth,
        )


class Search:
    """A search that can be advanced one iteration at a time.

    Attributes
    ----------
    best, best_cost
        Best slots so far and their exact cost.
    """

    def __init__(self, tables: Tables, seed: int, params: SearchParams | None = None) -> None:
        self.tables = tables
        self.params = params or SearchParams()
        rngs = np.random.default_rng(seed).spawn(self.params.workers)
        self.workers = [_Worker(tables, rng) for rng in rngs]
        n = len(tables.stage)
        self.best: Ints = np.arange(n)
        self.best_cost = math.inf
        self._offer(np.arange(n))

    def offer(self, slots: Ints) -> bool:
        """Consider an arrangement from elsewhere; True if it is the best so far."""
        return self._offer(slots)

    def run(
        self, run: StopRun, until_s: float = math.inf, iterations: float = math.inf
    ) -> None:
        """Annealing cycles until the rule stops the run, or a given time or count has passed."""
        length = float(self.params.first_cycle)
        last = run.iterations + iterations
        with ThreadPoolExecutor(max_workers=len(self.workers)) as pool:
            while run.check() is None and run.elapsed_s < until_s and run.iterations < last:
                started, done = run.elapsed_s, run.iterations
                left = min(run.remaining_iterations, last - done)
                self._cycle(pool, run, round(min(length, left)), until_s)
                rate = (run.iterations - done) / max(run.elapsed_s - started, 1e-9)
                left = min(left - (run.iterations - done), _times(until_s - run.elapsed_s, rate))
                left = min(left, _times(run.remaining_s, rate))
                length *= self.params.growth
                # stretch a cycle to what is left rather than begin one that cannot finish
                if left < 1.5 * length:
                    length = max(1.0, left)

    def _cycle(self, pool: ThreadPoolExecutor, run: StopRun, length: int, until_s: float) -> None:
        params = self.params
        for worker in self.workers:
            worker.begin(worker.rng.permutation(len(self.best)))
        hot, cold = params.hot * self.best_cost, params.cold * self.best_cost
        for step in range(length):
            warm = hot * (cold / hot) ** (step / length)
            cool = hot * (cold / hot) ** ((step + 1) / length)
            tasks = [pool.submit(w.work, params.moves, warm, cool, params.smooth) for w in self.workers]
            for task in tasks:
                task.result()
            for worker in self.workers:
                if worker.best_cost < self.best_cost and self._offer(worker.best):
                    run.improve(self.best_cost)
            if run.update() is not None or run.elapsed_s >= until_s:
                break
        for worker in self.workers:
            if self._offer(best_order(self.tables, worker.best)):
                run.improve(self.best_cost)

    def _offer(self, slots: Ints) -> bool:
        cost = exact_cost(self.tables, slots, np.empty_like(slots), np.empty_like(slots))
        if cost < self.best_cost:
            self.best, self.best_cost = slots.copy(), float(cost)
            return True
        return False


def _times(seconds: float, rate: float) -> float:
    return seconds * rate if math.isfinite(seconds) else math.inf
