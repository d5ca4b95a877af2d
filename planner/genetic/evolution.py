"""The paper's hybrid genetic algorithm (DT-FM, section 3.4), with DEAP.

A chromosome is a balanced partition: the group of every device. Each generation makes one
offspring: Kang and Moon's crossover with repair, a mutation, then local search; the offspring
replaces the worst member of the population if it is better. An individual costs eq. 1 with exact
matchings, and with the best order of groups if the order is free and there are at most 16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from deap import base, tools

from planner.genetic.data import AssignmentData
from planner.genetic.local_search import LocalSearch, circular_swap_pass, greedy_swap_pass
from planner.genetic.matched_assignment import cost_of
from planner.genetic.stage_order import reorder_stages
from planner.search.arrays import Ints
from planner.search.incumbent import Incumbent


@dataclass(frozen=True)
class EvolutionParams:
    """Parameters of the genetic algorithm.

    Attributes
    ----------
    population
        Population size; the public code uses 100.
    local_search
        The local search of an offspring; NONE leaves it as it is.
    mutation
        Probability that an offspring gets one random swap before the local search.
    cuts
        Cut points of the crossover.
    """

    population: int = 100
    local_search: LocalSearch = LocalSearch.CIRCULAR_SWAPS
    mutation: float = 0.2
    cuts: int = 5


class _Fitness(base.Fitness):  # type: ignore[misc]
    weights = (-1.0,)


class _Individual(list[int]):
    """A chromosome with DEAP's fitness."""

    def __init__(self, genes: Ints) -> None:
        super().__init__(int(g) for g in genes)
        self.fitness = _Fitness()


class Evolution:
    """Genetic algorithm with local search; one offspring per iteration.

    Parameters
    ----------
    incumbent
        Receives every better assignment (slots) and its cost in seconds; its stopping criterion
        ends the loop, and its seed is used.

    Attributes
    ----------
    trace
        ``(iteration, cost)`` of each improvement.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), section 3.4; S.-J. Kang and B.-R. Moon, "A hybrid genetic algorithm for multiway
    graph partitioning" (2000).
    """

    def __init__(
        self,
        data: AssignmentData,
        incumbent: Incumbent[Ints],
        params: EvolutionParams | None = None,
    ) -> None:
        self.data = data
        self.incumbent = incumbent
        self.params = params or EvolutionParams()
        self.rng = np.random.default_rng(incumbent.seed)
        self.trace: list[tuple[int, float]] = []
        self.toolbox = base.Toolbox()
        self.toolbox.register("individual", self._random)
        self.toolbox.register("mate", self._crossover)
        self.toolbox.register("mutate", self._mutate)
        self.toolbox.register("improve", self._improve)
        self.toolbox.register("evaluate", self._evaluate)

    def run(self) -> None:
        """Produce one offspring per iteration until the run stops."""
        # DEAP's operators draw from the module `random`
        with _seeded_random(int(self.rng.integers(2**63))):
            self._evolve()

    def _evolve(self) -> None:
        run, toolbox = self.incumbent.run, self.toolbox
        population: list[_Individual] = []
        while len(population) < self.params.population:
            individual = toolbox.individual()
            individual.fitness.values = toolbox.evaluate(individual)
            population.append(individual)
            if run.update() is not None:
                return
        while run.check() is None:
            child = toolbox.mate(*tools.selRandom(population, 2))
            toolbox.mutate(child)
            toolbox.improve(child)
            child.fitness.values = toolbox.evaluate(child)
            (worst,) = tools.selWorst(population, 1)
            if child.fitness > worst.fitness and child not in population:
                population[population.index(worst)] = child
            run.update()

    def _random(self) -> _Individual:
        return _Individual(self.rng.permutation(self.data.stage_of_slot))

    def _evaluate(self, genes: _Individual) -> tuple[float]:
        slots = reorder_stages(self.data, np.argsort(np.array(genes), kind="stable"))
        cost = cost_of(self.data, slots)
        if self.incumbent.offer(cost, slots):
            self.trace.append((self.incumbent.run.iterations + 1, cost))
        return (cost,)

    def _crossover(self, parent: _Individual, other_parent: _Individual) -> _Individual:
        """Kang and Moon: align the parents' labels, cut at several points, repair the balance."""
        from scipy.optimize import linear_sum_assignment

        first, second = np.array(parent, dtype=int), np.array(other_parent, dtype=int)
        sizes, n = self.data.sizes, len(first)
        groups = len(sizes)
        overlap = np.zeros((groups, groups))
        np.add.at(overlap, (second, first), 1.0)
        # labels are aligned between groups of the same size only
        overlap[sizes[:, None] != sizes[None, :]] = -n
        aligned = linear_sum_assignment(-overlap)[1][second]
        count = min(n - 1, self.params.cuts)
        cuts = np.sort(self.rng.choice(np.arange(1, n), size=count, replace=False))
        from_second = np.searchsorted(cuts, np.arange(n), side="right") % 2 == 1
        return _Individual(self._repair(np.where(from_second, aligned, first)))

    def _repair(self, child: Ints) -> Ints:
        """Move random devices from groups that are too large to those that are too small."""
        sizes = self.data.sizes
        counts = np.bincount(child, minlength=len(sizes))
        surplus = [
            int(d)
            for g in np.flatnonzero(counts > sizes)
            for d in self.rng.choice(
                np.flatnonzero(child == g), size=counts[g] - sizes[g], replace=False
            )
        ]
        places = np.repeat(np.arange(len(sizes)), np.maximum(sizes - counts, 0))
        child[surplus] = self.rng.permutation(places)
        return child

    def _mutate(self, genes: _Individual) -> None:
        if self.rng.random() < self.params.mutation:
            d, e = (int(k) for k in self.rng.integers(len(genes), size=2))
            genes[d], genes[e] = genes[e], genes[d]

    def _improve(self, genes: _Individual) -> None:
        if self.params.local_search is LocalSearch.NONE:
            return
        pp_cost, group_of = self.data.pp_cost[0], np.array(genes)
        order = self.rng.permutation(len(self.data.sizes))
        if self.params.local_search is LocalSearch.CIRCULAR_SWAPS:
            circular_swap_pass(pp_cost, group_of, self.data.sizes, order)
        else:
            greedy_swap_pass(pp_cost, group_of, order)
        genes[:] = group_of.tolist()


@contextmanager
def _seeded_random(seed: int) -> Iterator[None]:
    """Seed the module `random`, and restore the caller's state afterwards."""
    outside = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(outside)
