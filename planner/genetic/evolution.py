"""The paper's hybrid genetic algorithm (DT-FM, section 3.4), its loop run by DEAP.

A chromosome is a balanced partition: the group of every device. Each generation makes one
offspring: Kang and Moon's crossover with repair, a mutation, then local search; the offspring
replaces the worst member of the population if it is better. An individual costs eq. 1 with exact
matchings and the exact order of groups.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from deap import base, tools

from planner.genetic.arrangement import cost_of
from planner.genetic.local_search import Gain, improve_circular, improve_pairs
from planner.genetic.order import best_order
from planner.genetic.tables import Tables
from planner.search.arrays import Ints
from planner.search.incumbent import Incumbent


@dataclass(frozen=True)
class EvolutionParams:
    """Settings of the genetic algorithm.

    Attributes
    ----------
    population
        Members; the public code uses 100.
    gain
        The local search of an offspring.
    mutation
        Probability that an offspring gets one random swap before the local search.
    cuts
        Cut points of the crossover.
    """

    population: int = 100
    gain: Gain = Gain.PAPER
    mutation: float = 0.2
    cuts: int = 5


class _Fitness(base.Fitness):  # type: ignore[misc]
    weights = (-1.0,)


class _Member(list[int]):
    """A chromosome with DEAP's fitness."""

    def __init__(self, genes: Ints) -> None:
        super().__init__(int(g) for g in genes)
        self.fitness = _Fitness()


class Evolution:
    """The loop.

    Parameters
    ----------
    incumbent
        Takes every better arrangement (slots) and its cost in seconds; its stopping rule ends the
        loop, its seed is the loop's.

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
        self, tables: Tables, incumbent: Incumbent[Ints], params: EvolutionParams | None = None
    ) -> None:
        self.tables = tables
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
        """One offspring per iteration until the rule stops the run."""
        # DEAP's operators draw from the module `random`
        with _own_random(int(self.rng.integers(2**63))):
            self._evolve()

    def _evolve(self) -> None:
        run, toolbox = self.incumbent.run, self.toolbox
        members: list[_Member] = []
        while len(members) < self.params.population:
            member = toolbox.individual()
            member.fitness.values = toolbox.evaluate(member)
            members.append(member)
            if run.update() is not None:
                return
        while run.check() is None:
            child = toolbox.mate(*tools.selRandom(members, 2))
            toolbox.mutate(child)
            toolbox.improve(child)
            child.fitness.values = toolbox.evaluate(child)
            (worst,) = tools.selWorst(members, 1)
            if child.fitness > worst.fitness and child not in members:
                members[members.index(worst)] = child
            run.update()

    def _random(self) -> _Member:
        return _Member(self.rng.permutation(self.tables.stage))

    def _evaluate(self, genes: _Member) -> tuple[float]:
        slots = best_order(self.tables, np.argsort(np.array(genes), kind="stable"))
        cost = cost_of(self.tables, slots)
        if self.incumbent.offer(cost, slots):
            self.trace.append((self.incumbent.run.iterations + 1, cost))
        return (cost,)

    def _crossover(self, one: _Member, other: _Member) -> _Member:
        """Kang and Moon: align the parents' labels, cut at several points, repair the balance."""
        from scipy.optimize import linear_sum_assignment

        first, second = np.array(one, dtype=int), np.array(other, dtype=int)
        sizes, n = self.tables.sizes, len(first)
        groups = len(sizes)
        overlap = np.zeros((groups, groups))
        np.add.at(overlap, (second, first), 1.0)
        # a label may only pass to a group of the same size
        overlap[sizes[:, None] != sizes[None, :]] = -n
        aligned = linear_sum_assignment(-overlap)[1][second]
        count = min(n - 1, self.params.cuts)
        cuts = np.sort(self.rng.choice(np.arange(1, n), size=count, replace=False))
        from_second = np.searchsorted(cuts, np.arange(n), side="right") % 2 == 1
        return _Member(self._repair(np.where(from_second, aligned, first)))

    def _repair(self, child: Ints) -> Ints:
        """Random devices of groups that are too large fill those that are too small."""
        sizes = self.tables.sizes
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

    def _mutate(self, genes: _Member) -> None:
        if self.rng.random() < self.params.mutation:
            d, e = (int(k) for k in self.rng.integers(len(genes), size=2))
            genes[d], genes[e] = genes[e], genes[d]

    def _improve(self, genes: _Member) -> None:
        if self.params.gain is Gain.NONE:
            return
        hop, group_of = self.tables.hop[0], np.array(genes)
        order = self.rng.permutation(len(self.tables.sizes))
        if self.params.gain is Gain.PAPER:
            improve_circular(hop, group_of, self.tables.sizes, order)
        else:
            improve_pairs(hop, group_of, order)
        genes[:] = group_of.tolist()


@contextmanager
def _own_random(seed: int) -> Iterator[None]:
    """Seed the module `random`; the caller's state comes back."""
    outside = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(outside)
