"""Initial layouts of the search, which fit in memory where any found one does."""

from __future__ import annotations

import enum
import math

import numpy as np

from planner.planning.joint.device_classes import Ints
from planner.planning.joint.layout import Outline
from planner.planning.joint.layout_arrays import LayoutState
from planner.planning.joint.layout_problem import LayoutProblem, head_of
from planner.planning.layer_split import Filled, evenly_filled, orders_of
from planner.training_plan.choices import Head

MAX_ORDERS = 1000
"""Largest number of orders of different memory sizes that are searched exhaustively."""
MAX_SUBSETS, MIN_SUBSETS, MAX_SUBSET_CLASSES = 32, 4, 2048
"""Random subsets that are compared; fewer if chains are long, up to this many classes in all."""


class InitialLayout(enum.Enum):
    """Initial solution of a search with a given number of stages, and its temperature."""

    NEARBY = "stages of nearby classes"
    NEARBY_SUBSET = "the same on the best of several subsets of nearby classes"
    SPREAD = "the devices of each class spread over all stages"
    NEARBY_COLD = "stages of nearby classes, at a low temperature"
    SPREAD_COLD = "the devices of each class spread over all stages, at a low temperature"
    RESTART = "a found or new layout whose number of stages may change"
    FIXED_RESTART = "a found or new layout whose number of stages stays"


class InitialLayouts:
    """Initial layouts of a problem.

    Parameters
    ----------
    problem
        What layouts are for.

    Attributes
    ----------
    rng
        Random generator; the search replaces it for every run.
    """

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        self.rng = np.random.default_rng(0)
        self._filled_by_memory: dict[tuple[tuple[float, ...], Head, bool], Filled] = {}

    def make(self, outline: Outline, kind: InitialLayout = InitialLayout.NEARBY) -> LayoutState:
        """An initial layout that fits in memory.

        NEARBY cuts a chain of nearby devices into stages of equal size. SPREAD assigns the
        devices of each class to the stages in turn, so that each class forms pipelines, as
        consecutive ranks do. If memory is too small, classes with little memory and those that
        cannot aggregate are left out one by one; the last resort is a subset of nearby classes, or
        the devices with the most memory, filled evenly.
        """
        if kind is InitialLayout.NEARBY_SUBSET:
            return self._best_subset(outline)
        chain, stages = self._nearest_chain(), outline[0]
        spread = kind not in (InitialLayout.NEARBY, InitialLayout.NEARBY_COLD)
        if self.problem.constraints.objective.by_cost:
            # a few classes may be cheaper
            chain = self._subset(chain, stages)
        by_worth = np.lexsort(
            (-self.problem.classes.memory_bytes, ~self.problem.classes.can_aggregate)
        )
        first_state = None
        for num_largest in range(len(by_worth), 0, -1):
            usable_chain = chain[np.isin(chain, by_worth[:num_largest])]
            if first_state is not None and self.problem.classes.size[usable_chain].sum() < stages:
                break
            state = self._cut_chain(usable_chain, outline, spread)
            first_state = first_state or state
            if self.problem.estimate(state) < math.inf:
                return state
        if self.rng.integers(2):
            state = self._best_subset(outline)
            if self.problem.estimate(state) < math.inf:
                return state
        return self._fill_memory(outline)

    def _refill(self, state: LayoutState) -> None:
        """Give each stage layers in proportion to its memory, if the model fits that way."""
        if self.problem.constraints.layers is not None:
            return
        stages = int(state.stages[0])
        smallest = [
            float(self.problem.classes.memory_bytes[np.flatnonzero(row)].min())
            for row in state.counts[:stages]
        ]
        filled = self._filled(tuple(smallest), head_of(state))
        if filled.share <= 1.0:
            state.cuts[1 : stages + 1] = [stop for _, stop in filled.layers]

    def _fill_memory(self, outline: Outline) -> LayoutState:
        """The stages of `tightest`; all other devices are left out."""
        filled, groups = self._tightest(*outline)
        state = self.problem.new_state(outline)
        stages = outline[0]
        for j, classes in enumerate(groups):
            np.add.at(state.counts[j], classes, 1)
        state.cuts[1 : stages + 1] = [stop for _, stop in filled.layers]
        return state

    def _filled(self, memory: tuple[float, ...], head: Head, *, any_order: bool = False) -> Filled:
        """Stages on devices of these sizes, all filled to the same fraction."""
        key = memory, head, any_order
        if key not in self._filled_by_memory:
            recomputed: list[int | None] = self.problem.model.recompute[: len(memory)].tolist()
            if self.problem.model.recompute_free:
                recomputed = [None] * len(memory)
            self._filled_by_memory[key] = evenly_filled(
                self.problem.workload,
                memory,
                recomputed,
                self.problem.constraints.layers,
                head=head,
                any_order=any_order,
            )
        return self._filled_by_memory[key]

    def tightest(self, stages: int) -> tuple[Filled, list[list[int]]]:
        """As `_tightest`, with the head on the end that needs less memory."""
        options = [self._tightest(stages, head) for head in self.problem.constraints.heads]
        return min(options, key=lambda option: option[0].share)

    def _tightest(self, stages: int, head: Head) -> tuple[Filled, list[list[int]]]:
        """The devices with the most memory, as few per stage as may be, all evenly filled.

        In the order of a chain of nearby devices. If the model does not fit that way, in the best
        order or, if there are too many, with the two largest devices at the ends for embedding and
        head. If layers are fixed, the largest stages are on the largest devices.

        Returns
        -------
        tuple[Filled, list[list[int]]]
            Stages, with the memory of their smallest devices, and the device classes of each.
        """
        chain = self._nearest_chain(int(np.argmax(self.problem.classes.memory_bytes)))
        chained_devices = np.repeat(chain, self.problem.classes.size[chain])
        each, memory = int(self.problem.model.min_devices), self.problem.classes.memory_bytes
        by_memory = np.argsort(-memory[chained_devices], kind="stable")[: stages * each]
        positions = by_memory.reshape(stages, each)
        largest: list[list[int]] = chained_devices[positions].tolist()
        in_chain_order = [largest[k] for k in np.argsort(positions[:, 0])]

        def sizes(groups: list[list[int]]) -> tuple[float, ...]:
            return tuple(float(memory[classes].min()) for classes in groups)

        def filled(groups: list[list[int]], any_order: bool = False) -> Filled:
            return self._filled(sizes(groups), head, any_order=any_order)

        if self.problem.constraints.layers is not None:
            needs = [
                costs.need_bytes(1) for costs in filled(in_chain_order).costs(self.problem.workload)
            ]
            by_need = dict(
                zip(np.argsort(needs, kind="stable")[::-1].tolist(), largest, strict=True)
            )
            groups = [by_need[j] for j in range(stages)]
            return filled(groups), groups
        options = [(filled(in_chain_order), in_chain_order)]
        if options[0][0].share > 1 and orders_of(sizes(in_chain_order)) <= MAX_ORDERS:
            better = filled(in_chain_order, any_order=True)
            remaining = list(in_chain_order)
            order = []
            for have in better.memory:
                order.append(next(group for group in remaining if sizes([group])[0] == have))
                remaining.remove(order[-1])
            options.append((better, order))
        elif options[0][0].share > 1:
            first, *others = largest
            ends = [first, *sorted(others[1:], key=in_chain_order.index), *others[:1]]
            options.append((filled(ends), ends))
        return min(options, key=lambda option: option[0].share)

    def _best_subset(self, outline: Outline) -> LayoutState:
        """The best of several initial layouts on random subsets of nearby classes."""
        count = max(MIN_SUBSETS, min(MAX_SUBSETS, MAX_SUBSET_CLASSES // len(self.problem.classes)))
        subsets = (self._subset(self._nearest_chain(), outline[0]) for _ in range(count))
        states = [self._cut_chain(chain, outline, spread=False) for chain in subsets]
        for state in states:
            if self.problem.estimate(state) == math.inf:
                self._refill(state)
        return min(states, key=self.problem.estimate)

    def _subset(self, chain: Ints, stages: int) -> Ints:
        """A random number of classes from the front of a chain, with a device for every stage."""
        fewest_classes = int(np.searchsorted(self.problem.classes.size[chain].cumsum(), stages)) + 1
        return chain[: int(self.rng.integers(fewest_classes, len(chain) + 1))]

    def _cut_chain(self, chain: Ints, outline: Outline, spread: bool) -> LayoutState:
        state, stages = self.problem.new_state(outline), outline[0]
        devices = np.repeat(chain, self.problem.classes.size[chain])
        devices = devices[: stages * self.problem.model.max_devices[stages]]
        place = np.arange(len(devices))
        stage = place % stages if spread else place * stages // len(devices)
        np.add.at(state.counts, (stage, devices), 1)
        ends = [round(self.problem.layers * j / stages) for j in range(stages + 1)]
        if self.problem.constraints.layers is not None:
            ends = [0, *(stop for _, stop in self.problem.constraints.layers)]
        state.cuts[: stages + 1] = ends
        return state

    def _nearest_chain(self, first: int | None = None) -> Ints:
        """Nearest-neighbour chain of all classes from ``first``, by default a random one."""
        distance_s = 2 * self.problem.model.output_bytes.max() / self.problem.classes.pair_bandwidth
        distance_s = distance_s + self.problem.classes.rtt_s
        remaining = list(range(len(self.problem.classes)))
        start = int(self.rng.integers(len(remaining))) if first is None else first
        chain = [remaining.pop(start)]
        while remaining:
            chain.append(remaining.pop(int(np.argmin(distance_s[chain[-1], remaining]))))
        return np.array(chain, dtype=np.int64)
