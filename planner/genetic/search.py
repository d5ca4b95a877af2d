"""The default heuristic: parallel tempering over compiled annealing moves.

Replicas anneal at fixed temperatures, from cold to hot, and neighbours exchange their temperatures
by the Metropolis rule, so that a good arrangement found hot cools down while a stuck one warms up.
There is no schedule to plan: the search may be stopped at any time. Replicas are logical: their
number does not depend on the machine, and they are merged in a fixed order, so a limit on
iterations gives the same plan on any number of threads.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.genetic.anneal import Stint, anneal
from planner.genetic.arrangement import Arrangement, cost_of, current_cost, exact_cost
from planner.genetic.order import best_order
from planner.genetic.tables import Tables
from planner.search.arrays import Ints
from planner.search.incumbent import Incumbent


@dataclass(frozen=True)
class AssignmentSearchParams:
    """Settings of the search; temperatures are shares of the best cost.

    Attributes
    ----------
    replicas
        Number of temperatures, geometrically spaced from ``cold`` to ``hot``.
    moves_per_device
        Moves of a replica per iteration and device.
    descent
        Iterations at the start over which all temperatures fall from ``start`` times their own, and
        the share of the means in the objective from ``smooth`` to ``smooth_end``.
    stretch
        Share of a time limit that the descent fills if it is longer; 0: the descent stays as it is.
        A limit on iterations leaves the descent alone.
    paced
        Iterations after which the speed is known well enough to plan that.
    polish
        Iterations between two exact reorderings of the best arrangement.
    tails, reversals
        Which moves are drawn; see `planner.genetic.anneal.Stint`.
    """

    replicas: int = 16
    moves_per_device: int = 100
    cold: float = 0.0007
    hot: float = 0.006
    descent: int = 200
    start: float = 8.0
    smooth: float = 0.2
    smooth_end: float = 0.0
    stretch: float = 0.0
    paced: int = 10
    polish: int = 200
    tails: float = 0.35
    reversals: float = 0.03

    @classmethod
    def for_problem(cls, devices: int, stages: int) -> AssignmentSearchParams:
        """Tuned on 56, 256 and 1024 devices in 8 stages.

        In large groups a move changes a mean by about 1 / |C_j| of a link, so temperatures fall
        with the size of the groups, and a plan that is not helped by its means has few ways out.
        """
        if devices <= 128:
            return cls()
        cold = 0.0007 * min(1.0, 7 * stages / devices) ** 1.25
        return cls(
            replicas=4 if devices <= 400 else 2,
            cold=cold,
            hot=(5 if devices <= 400 else 2) * cold,
            descent=200,
            start=10.0,
            smooth=0.3,
            smooth_end=0.03,
            stretch=0.6,
        )


class _Replica:
    """One arrangement with its generator and the best groups it has seen."""

    def __init__(self, tables: Tables, rng: np.random.Generator) -> None:
        n = len(tables.stage)
        self.tables = tables
        self.word: NDArray[np.uint64] = rng.integers(0, 2**63, size=1, dtype=np.uint64)
        self.arrangement = Arrangement.of(rng.permutation(n))
        self.best: Ints = self.arrangement.device_at.copy()
        self.best_cost = float(exact_cost(tables, self.arrangement))
        self.cost = self.best_cost

    def work(self, stint: Stint) -> None:
        """Anneal; ``cost`` is then that of the arrangement with its own matchings."""
        self.best_cost = anneal(
            self.tables, self.arrangement, self.best, self.best_cost, self.word, stint
        )
        self.cost = float(current_cost(self.tables, self.arrangement))


class AssignmentSearch:
    """A search that can be advanced, interrupted and advanced again.

    Parameters
    ----------
    incumbent
        Takes every better arrangement (slots, see `planner.genetic.arrangement`) and its cost of
        eq. 1 in seconds; it begins with the devices in the order in which they are listed. Its
        stopping rule ends the search, its seed is the search's.

    References
    ----------
    C. J. Geyer, "Markov chain Monte Carlo maximum likelihood" (1991): replica exchange.
    """

    def __init__(
        self,
        tables: Tables,
        incumbent: Incumbent[Ints],
        params: AssignmentSearchParams | None = None,
    ) -> None:
        self.tables = tables
        self.incumbent = incumbent
        self.params = params or AssignmentSearchParams.for_problem(
            len(tables.stage), len(tables.sizes)
        )
        self.descent = self.params.descent
        self.rng = np.random.default_rng(incumbent.seed)
        self.done = 0
        self.replicas: list[_Replica] = []
        self.offer(np.arange(len(tables.stage)))

    @property
    def best(self) -> Ints:
        """The incumbent's slots."""
        assert self.incumbent.plan is not None
        return self.incumbent.plan

    def offer(self, slots: Ints) -> bool:
        """Consider an arrangement; True if it is the best so far."""
        return self.incumbent.offer(cost_of(self.tables, slots), slots.copy)

    def run(self, *, until_s: float = math.inf, iterations: float = math.inf) -> None:
        """Search until the rule stops the run, or a given time or count has passed."""
        run = self.incumbent.run
        if not self.replicas:
            rngs = self.rng.spawn(self.params.replicas)
            self.replicas = [_Replica(self.tables, rng) for rng in rngs]
        last = run.iterations + iterations
        with ThreadPoolExecutor(max_workers=min(len(self.replicas), os.cpu_count() or 1)) as pool:
            while run.check() is None and run.elapsed_s < until_s and run.iterations < last:
                self._iterate(pool)
                if self.done == self.params.paced and run.paced_by_time:
                    rate = self.done / run.elapsed_s
                    wanted = self.params.stretch * rate * run.remaining_s
                    self.descent = max(self.descent, round(wanted))
                if run.update() is not None:
                    break

    def _iterate(self, pool: ThreadPoolExecutor) -> None:
        params = self.params
        scale = self.incumbent.objective * params.cold
        ratio = (params.hot / params.cold) ** (1 / max(1, params.replicas - 1))
        ladder = [scale * ratio**k for k in range(params.replicas)]
        tasks = [
            pool.submit(replica.work, self._stint(temperature))
            for replica, temperature in zip(self.replicas, ladder, strict=True)
        ]
        for task in tasks:
            task.result()
        for replica in self.replicas:
            if replica.best_cost < self.incumbent.objective:
                self.offer(replica.best)
        self._exchange(ladder)
        self.done += 1
        if self.done % params.polish == 0 or self.done == self.descent:
            self.offer(best_order(self.tables, self.best))

    def _stint(self, temperature: float) -> Stint:
        """The next stretch of a replica whose place on the ladder has this temperature."""
        params = self.params
        now, then = self._warmth(self.done), self._warmth(self.done + 1)
        left = max(0.0, 1 - self.done / max(1, self.descent))
        return Stint(
            moves=params.moves_per_device * len(self.best),
            hot=now * temperature,
            cold=then * temperature,
            smooth=params.smooth_end + (params.smooth - params.smooth_end) * left,
            tails=params.tails,
            reversals=params.reversals,
        )

    def _warmth(self, iteration: int) -> float:
        """Factor on all temperatures: falls to 1 during the descent."""
        left = max(0.0, 1 - iteration / max(1, self.descent))
        return float(self.params.start**left)

    def _exchange(self, ladder: list[float]) -> None:
        """Replica exchange between neighbouring temperatures, even and odd pairs in turn."""
        for k in range(self.done % 2, len(ladder) - 1, 2):
            cold, hot = self.replicas[k], self.replicas[k + 1]
            gain = (cold.cost - hot.cost) * (1 / ladder[k] - 1 / ladder[k + 1])
            if math.log(1.0 - self.rng.random()) < gain:
                self.replicas[k], self.replicas[k + 1] = hot, cold
