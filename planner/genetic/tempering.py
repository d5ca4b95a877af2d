"""The default heuristic: parallel tempering over compiled annealing moves.

Replicas sample at their own temperatures, and neighbours exchange temperatures by the Metropolis
criterion, so that a good hot assignment cools down while a stuck one warms up. In an initial
cooling phase all temperatures fall to these values; afterwards they are fixed, so that the search
may be stopped at any time. The number of replicas does not depend on the machine, and they are
merged in a fixed order, so a limit on iterations gives the same plan on any number of threads.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.genetic.anneal import AnnealParams, anneal
from planner.genetic.data import AssignmentData
from planner.genetic.matched_assignment import MatchedAssignment, cost_of, exact_cost, matched_cost
from planner.genetic.stage_order import reorder_stages
from planner.search.arrays import Ints
from planner.search.incumbent import Incumbent


@dataclass(frozen=True)
class TemperingParams:
    """Parameters of the search; temperatures are shares of the best cost.

    Attributes
    ----------
    replicas
        Number of temperatures, geometrically spaced from ``t_min`` to ``t_max``.
    moves_per_device
        Moves of a replica per iteration and device.
    cooling_iterations, cooling_factor
        Over the first iterations all temperatures fall from ``cooling_factor`` times their final
        value.
    mean_weight, mean_weight_end
        Weight of the means in the objective at the start and end of the cooling phase.
    cooling_share
        Under a time limit, the cooling phase is extended to this share of the limit.
    pacing_iterations
        Iterations after which the speed is measured for that.
    reorder_interval
        Iterations between two exact reorderings of the best assignment's stages.
    tail_share, reversal_share
        Shares of the moves; see `planner.genetic.anneal.AnnealParams`.
    """

    replicas: int = 16
    moves_per_device: int = 100
    t_min: float = 0.0007
    t_max: float = 0.006
    cooling_iterations: int = 200
    cooling_factor: float = 8.0
    mean_weight: float = 0.2
    mean_weight_end: float = 0.0
    cooling_share: float = 0.0
    pacing_iterations: int = 10
    reorder_interval: int = 200
    tail_share: float = 0.35
    reversal_share: float = 0.03

    @classmethod
    def for_problem(cls, devices: int, stages: int) -> TemperingParams:
        """Tuned on 56, 256 and 1024 devices in 8 stages.

        In large groups a move changes a mean by about 1 / |C_j| of a link's cost, so temperatures
        decrease with the size of the groups, and the weight of the means is kept above zero.
        """
        if devices <= 128:
            return cls()
        t_min = 0.0007 * min(1.0, 7 * stages / devices) ** 1.25
        return cls(
            replicas=4 if devices <= 400 else 2,
            t_min=t_min,
            t_max=(5 if devices <= 400 else 2) * t_min,
            cooling_iterations=200,
            cooling_factor=10.0,
            mean_weight=0.3,
            mean_weight_end=0.03,
            cooling_share=0.6,
        )


class _Replica:
    """An assignment with its random generator and its best slots."""

    def __init__(self, data: AssignmentData, rng: np.random.Generator) -> None:
        n = len(data.stage_of_slot)
        self.data = data
        self.rng_state: NDArray[np.uint64] = rng.integers(0, 2**63, size=1, dtype=np.uint64)
        self.assignment = MatchedAssignment.of(rng.permutation(n))
        self.best: Ints = self.assignment.device_at.copy()
        self.best_cost = float(exact_cost(data, self.assignment))
        self.cost = self.best_cost

    def anneal(self, params: AnnealParams) -> None:
        """Anneal, and set ``cost`` to that of the assignment with its own matchings."""
        self.best_cost = anneal(
            self.data, self.assignment, self.best, self.best_cost, self.rng_state, params
        )
        self.cost = float(matched_cost(self.data, self.assignment))


class ParallelTempering:
    """Parallel tempering that can be advanced in several calls.

    Parameters
    ----------
    incumbent
        Receives the slots of every better assignment (`planner.genetic.matched_assignment`) and its
        cost by eq. 1 in seconds; the first one has the devices in their given order. Its stopping
        criterion ends the search, and its seed is used.

    References
    ----------
    C. J. Geyer, "Markov chain Monte Carlo maximum likelihood" (1991): replica exchange.
    """

    def __init__(
        self,
        data: AssignmentData,
        incumbent: Incumbent[Ints],
    ) -> None:
        self.data = data
        self.incumbent = incumbent
        self.params = TemperingParams.for_problem(len(data.stage_of_slot), len(data.sizes))
        self.cooling_iterations = self.params.cooling_iterations
        self.rng = np.random.default_rng(incumbent.seed)
        self.iterations = 0
        self.replicas: list[_Replica] = []
        self.offer(np.arange(len(data.stage_of_slot)))

    @property
    def best(self) -> Ints:
        """The incumbent's slots."""
        assert self.incumbent.plan is not None
        return self.incumbent.plan

    def offer(self, slots: Ints) -> bool:
        """Offer an assignment; True if it is the best so far."""
        return self.incumbent.offer(cost_of(self.data, slots), slots.copy)

    def run(self, *, until_s: float = math.inf, iterations: float = math.inf) -> None:
        """Search until the run stops, or until a given time or number of iterations."""
        run = self.incumbent.run
        if not self.replicas:
            rngs = self.rng.spawn(self.params.replicas)
            self.replicas = [_Replica(self.data, rng) for rng in rngs]
        last = run.iterations + iterations
        with ThreadPoolExecutor(max_workers=min(len(self.replicas), os.cpu_count() or 1)) as pool:
            while run.check() is None and run.elapsed_s < until_s and run.iterations < last:
                self._iterate(pool)
                if self.iterations == self.params.pacing_iterations and run.paced_by_time:
                    rate = self.iterations / run.elapsed_s
                    cooling_iterations = self.params.cooling_share * rate * run.remaining_s
                    self.cooling_iterations = max(
                        self.cooling_iterations, round(cooling_iterations)
                    )
                if run.update() is not None:
                    break

    def _iterate(self, pool: ThreadPoolExecutor) -> None:
        params = self.params
        scale = self.incumbent.objective * params.t_min
        ratio = (params.t_max / params.t_min) ** (1 / max(1, params.replicas - 1))
        temperatures = [scale * ratio**k for k in range(params.replicas)]
        tasks = [
            pool.submit(replica.anneal, self._anneal_params(temperature))
            for replica, temperature in zip(self.replicas, temperatures, strict=True)
        ]
        for task in tasks:
            task.result()
        for replica in self.replicas:
            if replica.best_cost < self.incumbent.objective:
                self.offer(replica.best)
        self._swap_replicas(temperatures)
        self.iterations += 1
        if (
            self.iterations % params.reorder_interval == 0
            or self.iterations == self.cooling_iterations
        ):
            self.offer(reorder_stages(self.data, self.best))

    def _anneal_params(self, temperature: float) -> AnnealParams:
        """Parameters of the next iteration of a replica with this temperature."""
        params = self.params
        start_factor, end_factor = (
            self._temperature_factor(self.iterations),
            self._temperature_factor(self.iterations + 1),
        )
        cooling_left = max(0.0, 1 - self.iterations / max(1, self.cooling_iterations))
        return AnnealParams(
            moves=params.moves_per_device * len(self.best),
            t_start=start_factor * temperature,
            t_end=end_factor * temperature,
            mean_weight=params.mean_weight_end
            + (params.mean_weight - params.mean_weight_end) * cooling_left,
            tail_share=params.tail_share,
            reversal_share=params.reversal_share,
        )

    def _temperature_factor(self, iteration: int) -> float:
        """Factor on all temperatures, decreasing to 1 during the cooling phase."""
        cooling_left = max(0.0, 1 - iteration / max(1, self.cooling_iterations))
        return float(self.params.cooling_factor**cooling_left)

    def _swap_replicas(self, temperatures: list[float]) -> None:
        """Exchange replicas of neighbouring temperatures, alternating even and odd pairs.

        During cooling replicas are hotter than ``temperatures``, which are those after it. The
        criterion is then stricter than Metropolis's and sorts replicas nearly by cost. That is
        intended: a cooling replica is in no equilibrium that exact exchanges could preserve.
        """
        for k in range(self.iterations % 2, len(temperatures) - 1, 2):
            cold, hot = self.replicas[k], self.replicas[k + 1]
            exponent = (cold.cost - hot.cost) * (1 / temperatures[k] - 1 / temperatures[k + 1])
            if math.log(1.0 - self.rng.random()) < exponent:
                self.replicas[k], self.replicas[k + 1] = hot, cold
