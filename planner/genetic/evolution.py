"""The paper's hybrid genetic algorithm (DT-FM, section 3.4), its loop run by DEAP.

A chromosome is a balanced partition: the group of every device. Each generation makes one
offspring: Kang and Moon's crossover with repair, a mutation, then local search; the offspring
replaces the worst member of the population if it is better. An individual costs eq. 1 with exact
matchings and the exact order of groups.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.genetic.anneal import exact_cost
from planner.genetic.local_search import Gain, improve_circular, improve_pairs
from planner.genetic.order import best_order
from planner.genetic.tables import Ints, Tables
from planner.search.stop import StopRun

CUTS = 5
"""Cut points of the crossover."""


@dataclass(frozen=True)
class EvolutionParams:
    """Settings of the genetic algorithm.

    Attributes
    ----------
    population
        Members; the public code uses 100.
    gain
        The local search's gain; ``NONE`` leaves offspring as repaired.
    circular
        Chains of swaps instead of single ones.
    mutation
        Probability that an offspring gets one random swap before the local search.
    """

    population: int = 100
    gain: Gain = Gain.PAPER
    circular: bool = True
    mutation: float = 0.2


class Evolution:
    """The loop.

    Attributes
    ----------
    best, best_cost
        Best slots so far and their cost.
    trace
        ``(iteration, cost)`` of each improvement.
    """

    def __init__(self, tables: Tables, seed: int, params: EvolutionParams | None = None) -> None:
        self.tables = tables
        self.params = params or EvolutionParams()
        self.rng = np.random.default_rng(seed)
        self.best: Ints = np.arange(len(tables.stage))
        self.best_cost = math.inf
        self.trace: list[tuple[int, float]] = []

    def run(self, run: StopRun) -> None:
        """One offspring per iteration until the rule stops the run."""
        from deap import base, tools

        class Fitness(base.Fitness):  # type: ignore[misc]
            weights = (-1.0,)

        class Member(list[int]):
            """A chromosome with DEAP's fitness."""

            def __init__(self, genes: Ints) -> None:
                super().__init__(int(g) for g in genes)
                self.fitness = Fitness()

        toolbox = base.Toolbox()
        toolbox.register("individual", lambda: Member(self.rng.permutation(self.tables.stage)))
        toolbox.register("population", tools.initRepeat, list, toolbox.individual)
        toolbox.register("evaluate", self._evaluate)
        toolbox.register(
            "mate",
            lambda a, b: Member(self._crossover(np.array(a, dtype=int), np.array(b, dtype=int))),
        )
        toolbox.register("mutate", self._mutate)
        toolbox.register("improve", self._improve)
        # DEAP's operators draw from the module `random`; keep the caller's state apart
        outside = random.getstate()
        random.seed(int(self.rng.integers(2**63)))
        try:
            self._evolve(toolbox, run)
        finally:
            random.setstate(outside)

    def _evolve(self, toolbox: Any, run: StopRun) -> None:
        from deap import tools

        members: list[Any] = []
        while len(members) < self.params.population:
            member = toolbox.individual()
            member.fitness.values = toolbox.evaluate(member, run)
            members.append(member)
            if run.update() is not None:
                return
        while run.check() is None:
            child = toolbox.mate(*tools.selRandom(members, 2))
            toolbox.mutate(child)
            toolbox.improve(child)
            child.fitness.values = toolbox.evaluate(child, run)
            (worst,) = tools.selWorst(members, 1)
            if child.fitness > worst.fitness and child not in members:
                members[members.index(worst)] = child
            run.update()

    def _evaluate(self, genes: list[int], run: StopRun) -> tuple[float]:
        slots = best_order(self.tables, np.argsort(np.array(genes), kind="stable"))
        cost = float(exact_cost(self.tables, slots, np.empty_like(slots), np.empty_like(slots)))
        if cost < self.best_cost:
            self.best, self.best_cost = slots, cost
            self.trace.append((run.iterations + 1, cost))
            run.improve(cost)
        return (cost,)

    def _crossover(self, first: Ints, second: Ints) -> Ints:
        """Kang and Moon: align the parents' labels, cut at several points, repair the balance."""
        from scipy.optimize import linear_sum_assignment

        sizes, n = self.tables.sizes, len(first)
        groups = len(sizes)
        overlap = np.zeros((groups, groups))
        np.add.at(overlap, (second, first), 1.0)
        # a label may only pass to a group of the same size
        overlap[sizes[:, None] != sizes[None, :]] = -n
        aligned = linear_sum_assignment(-overlap)[1][second]
        cuts = np.sort(self.rng.choice(np.arange(1, n), size=min(n - 1, CUTS), replace=False))
        from_second = np.searchsorted(cuts, np.arange(n), side="right") % 2 == 1
        child: Ints = np.where(from_second, aligned, first)
        return self._repair(child)

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

    def _mutate(self, genes: list[int]) -> None:
        if self.rng.random() < self.params.mutation:
            d, e = (int(k) for k in self.rng.integers(len(genes), size=2))
            genes[d], genes[e] = genes[e], genes[d]

    def _improve(self, genes: list[int]) -> None:
        if self.params.gain is Gain.NONE:
            return
        group_of = np.array(genes)
        improve = improve_circular if self.params.circular else improve_pairs
        order = self.rng.permutation(len(self.tables.sizes))
        paper = self.params.gain is Gain.PAPER
        improve(self.tables.hop[0], group_of, self.tables.sizes, order, paper)
        genes[:] = group_of.tolist()
