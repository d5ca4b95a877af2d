"""Search over layouts by estimated step time."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from planner.planning.cost import BY_TIME, ObjectiveFunction
from planner.planning.device_classes import DeviceClasses, Floats, Ints
from planner.planning.layer_split import Filled, evenly_filled, orders_of
from planner.planning.layout import Layout
from planner.planning.layout_kernel import (
    ClassLinks,
    LayoutScratch,
    LayoutState,
    ModelArrays,
    anneal,
    estimate,
    mutate,
)
from planner.search.stop import StopRun
from planner.workload.costs import stage_costs
from planner.workload.working_memory import WorkingMemory
from planner.workload.workload import Workload

MOST_STAGES, MORE_STAGES = 24, 8
"""That are tried one number after the other, and how many where so few stages do not fit."""
CHUNK = 2000
"""Trials between two looks at the stopping rule."""
TRIALS_PER_EFFORT = 180_000.0
"""Trials with up to eight places in a unit of effort; more places cost more."""
ALL, FIXED = 0.15, 0.15
"""Shares of the trials for all numbers of stages, and for the best of them; then these may
change."""
BEST, LAST = 4, 3
"""How many numbers of stages get the second share, and how many layouts the last begins from, new
starts aside."""
PIECE = 30_000
"""Trials of the last share between one start and the next: which places make a stage is soon
settled, and often wrongly."""
MOST_ORDERS = 1000
"""Sets of devices of different memory among which the best order is looked for."""
MOST_FEW, LEAST_FEW, FEW_PLACES = 32, 4, 2048
"""Starts of a few places that are compared, fewer where chains are long: so many places in all."""


class InitialLayout(enum.Enum):
    """Where a search for a number of stages begins, and how freely it wanders."""

    NEAR = "stages of near places"
    FEW = "the same of a few places that are near each other: the best of some"
    DEALT = "each place's devices dealt out to all stages"
    KEPT = "the same, hardly left"
    FOUND = "one found or new, whose number of stages may change"


PARTS = {
    InitialLayout.NEAR: 1.0,
    InitialLayout.DEALT: 1.0,
    InitialLayout.KEPT: 1.0,
    InitialLayout.FEW: 0.3,
}
"""Of the trials for a number of stages."""
HEAT = {
    InitialLayout.NEAR: (0.2, 0.003),
    InitialLayout.FEW: (0.05, 0.0005),
    InitialLayout.DEALT: (0.2, 0.003),
    InitialLayout.KEPT: (1e-4, 1e-6),
    InitialLayout.FOUND: (0.05, 0.0005),
}
"""Temperatures at begin and end, relative to the estimate."""


@dataclass(frozen=True)
class ScoredLayout:
    """A layout and its estimated step, in seconds or dollars."""

    value: float
    layout: Layout


@dataclass(frozen=True)
class Constraints:
    """What layouts must have.

    Attributes
    ----------
    stages
        Their number; None: any.
    layers
        Of every stage; None: any.
    recompute
        Stages that recompute, the others do not; None: any.
    in_flight
        Microbatches that a device may hold; None: what memory holds.
    equal
        Whether shares of what is averaged are equal.
    every, delayed, two_frequency
        Average every this many steps; overlap averaging with the next step; average within
        regions in every step as well.
    """

    stages: int | None = None
    layers: tuple[tuple[int, int], ...] | None = None
    recompute: Sequence[int] | Literal["all", "none"] | None = None
    in_flight: int | None = None
    equal: bool = False
    every: int = 1
    delayed: bool = False
    two_frequency: bool = False
    merit: ObjectiveFunction = BY_TIME


def model_of(workload: Workload, given: Constraints, most: int) -> ModelArrays:
    """A workload as the compiled search reads it."""
    recompute = np.full(most, given.recompute == "all")
    if given.recompute is not None and not isinstance(given.recompute, str):
        recompute[list(given.recompute)] = True
    count = len(workload.layers)
    upto = [stage_costs(workload, 0, stop) for stop in range(1, count + 1)]
    whole = stage_costs(workload, 0, count, with_head=True)
    working = WorkingMemory.of(workload)
    samples = workload.microbatch_samples
    parameters = np.cumsum(
        [workload.stem.parameters, *(layer.parameters for layer in workload.layers)]
    ).astype(float)
    parameters[0] = 0.0
    return ModelArrays(
        np.array([0.0, *(costs.forward_flops for costs in upto)]),
        parameters,
        np.cumsum([0.0, *(layer.saved_bytes * samples for layer in workload.layers)])
        + workload.stem.saved_bytes * samples * (np.arange(count + 1) > 0),
        np.array([layer.output_bytes * samples for layer in workload.layers]),
        np.array([workload.held_bytes(k) * samples for k in range(count)]),
        whole.head_flops,
        float(workload.head.parameters),
        float(workload.stem.parameters),
        float(workload.tied_parameters),
        workload.architecture is not None,
        working.layer,
        working.embedding,
        working.head,
        working.messages,
        working.rounded_bytes,
        workload.gradient_bytes_per_parameter,
        workload.state_bytes_per_parameter,
        1.0,
        workload.batch_samples / samples,
        float(given.every),
        given.delayed,
        given.two_frequency,
        given.merit.by_cost,
        given.merit.wait_usd_per_s,
        math.inf if given.in_flight is None else float(given.in_flight),
        given.layers is None,
        given.recompute is None,
        recompute,
    )


class LayoutSearch:
    """Annealing of layouts; keeps the best of every number of stages.

    Parameters
    ----------
    places, workload
        Where and what to train.
    wire_ratio
        Bytes of gradients on the wire over those of the workload.
    seed
        Of every random choice.
    given
        What layouts must have.

    Attributes
    ----------
    found
        By number of stages and where it was begun, the best layout so far.
    """

    def __init__(
        self,
        places: DeviceClasses,
        workload: Workload,
        wire_ratio: float = 1.0,
        seed: int = 0,
        given: Constraints | None = None,
    ) -> None:
        self.given = given or Constraints()
        self.workload, self.layers = workload, len(workload.layers)
        self.most = min(self.layers, int(places.size.sum()))
        model = model_of(workload, self.given, self.most)
        self.places = places
        self.model = model._replace(
            gradient_bytes=model.gradient_bytes * wire_ratio, wire_ratio=wire_ratio
        )
        order = np.argsort(places.there_and_back_s.ravel(), kind="stable").astype(np.int64)
        self.links = ClassLinks(
            places.size,
            places.there_and_back_s,
            places.bandwidth,
            places.slower,
            places.capacity,
            places.flops,
            places.memory_bytes,
            places.sums,
            places.site,
            places.line,
            places.region,
            order // len(places),
            order % len(places),
            np.argsort(order).reshape(places.slower.shape),
            self.given.equal,
            places.usd_per_s,
            places.usd_per_byte,
        )
        self.found: dict[tuple[int, InitialLayout], ScoredLayout] = {}
        self._numpy = np.random.default_rng(seed)
        self._random = self._numpy.integers(0, 1 << 63, 1).astype(np.uint64)
        self._tried, self._best = self._empty(), self._empty()
        width = (self.most, len(places))
        self._scratch = LayoutScratch(
            np.zeros(width),
            np.zeros((2, len(places))),
            np.zeros(len(places)),
            np.zeros(self.most),
            np.zeros(self.most),
            np.zeros(self.most),
            np.zeros(self.most),
            np.zeros(self.most),
            np.zeros((self.most, len(places.line))),
            np.zeros(len(places.line)),
            np.zeros(len(places.line)),
            np.zeros(len(places), dtype=np.int64),
            np.zeros(len(places)),
            np.zeros(len(places) ** 2, dtype=np.int64),
            np.zeros(len(places), dtype=np.int64),
            np.zeros(len(places), dtype=np.int64),
            np.zeros(len(places)),
        )

    @property
    def trials_per_effort(self) -> float:
        """How many trials make a unit of effort."""
        return float(TRIALS_PER_EFFORT * min(1.0, 8 / len(self.places)) ** 0.25)

    @cached_property
    def numbers(self) -> list[int]:
        """Of stages that are tried: the least, or, where memory holds none, the least it does."""
        if self.given.stages is not None:
            return [self.given.stages]
        few = list(range(1, min(self.most, MOST_STAGES) + 1))
        if any(self.tightest(stages)[0].share <= 1.0 for stages in reversed(few)):
            return few
        more = range(len(few) + 1, self.most + 1)
        least = next((stages for stages in more if self.tightest(stages)[0].share <= 1.0), None)
        if least is None:
            return few
        return sorted({round(s) for s in np.linspace(least, self.most, MORE_STAGES)})

    def ranked(self, first: InitialLayout | None = None) -> list[ScoredLayout]:
        """The best of every number of stages and start, fastest first, each once."""
        order = sorted(self.found.items(), key=lambda item: item[1].value)
        ahead = [one for (_, start), one in order if start is first][:1]
        return list(dict.fromkeys([*ahead, *(one for _, one in order)]))

    def run(self, run: StopRun, trials: float) -> None:
        """Search until so many trials are spent, or the rule says stop."""
        numbers = self.numbers
        with run.interruptible():
            self._fixed(run, numbers, ALL * trials)
            numbers = list(dict.fromkeys(len(one.layout.layers) for one in self.ranked()))
            self._fixed(run, numbers[:BEST], FIXED * trials)
            # new starts have as many stages as the better half
            numbers = numbers[: (len(numbers) + 1) // 2]
            left = (1 - ALL - FIXED) * trials
            pieces = max(2 * LAST, round(left / PIECE)) if numbers else 0
            for k in range(pieces):
                if run.check() is not None:
                    return
                if k % 2:
                    stages = numbers[int(self._numpy.integers(len(numbers)))]
                    dealt = bool(self._numpy.integers(2))
                    state = self._start(
                        stages, InitialLayout.DEALT if dealt else InitialLayout.NEAR
                    )
                else:
                    known = self.ranked()[:LAST]
                    state = self._state(known[k // 2 % len(known)].layout)
                self._anneal(run, state, max(1, int(left / pieces)), InitialLayout.FOUND)

    def _fixed(self, run: StopRun, numbers: Sequence[int], trials: float) -> None:
        """The same share for each number of stages; of each start its part."""
        each = trials / max(1.0, len(numbers) * sum(PARTS.values()))
        for stages in numbers:
            for start, part in PARTS.items():
                if run.check() is not None and self.found:
                    return
                self._anneal(run, self._start(stages, start), max(1, int(part * each)), start)

    def trials_in(self, seconds: float) -> float:
        """About how many trials take so long on this machine, compiling left aside."""
        state = self._start(self.given.stages or min(4, self.most))
        self._round(state, self._value(state), 1, *HEAT[InitialLayout.NEAR], True)
        began = time.perf_counter()
        self._round(state, self._value(state), CHUNK, *HEAT[InitialLayout.NEAR], True)
        return CHUNK * seconds / max(time.perf_counter() - began, 1e-9)

    def near(self, layout: Layout, trials: int) -> list[ScoredLayout]:
        """Layouts up to three changes away, with the least estimates first."""
        found: dict[Layout, float] = {}
        for _ in range(trials):
            state = self._state(layout)
            changes = 1 + int(self._numpy.integers(3))
            if not all(self._change(state) for _ in range(changes)):
                continue
            value = self._estimate(state)
            if value < math.inf:
                found[self._layout(state)] = value
        found.pop(layout, None)
        return sorted((ScoredLayout(s, one) for one, s in found.items()), key=lambda one: one.value)

    def _change(self, state: LayoutState) -> bool:
        fixed = self.given.stages is not None
        return bool(mutate(self.model, self.links, state, self._scratch, self._random, fixed))

    def _estimate(self, state: LayoutState) -> float:
        """In full, however much it is."""
        return float(estimate(self.model, self.links, state, self._scratch, math.inf))

    def estimated(self, layout: Layout) -> ScoredLayout:
        """A layout with its estimate, infinite where memory does not hold it.

        Which stages recompute is chosen anew.
        """
        state = self._state(layout)
        value = self._estimate(state)
        return ScoredLayout(value, self._layout(state))

    def with_better_layers(self, layout: Layout) -> ScoredLayout:
        """Shift single layers between stages for as long as that lowers the estimate."""
        best, improved = self.estimated(layout), self.given.layers is None
        while improved:
            tried = [self.estimated(one) for one in _shifted(best.layout)]
            least = min(tried, key=lambda one: one.value, default=best)
            improved = least.value < best.value
            best = least if improved else best
        return best

    def _anneal(self, run: StopRun, state: LayoutState, trials: int, start: InitialLayout) -> None:
        """From warm to cold in chunks, so that the stopping rule is heard in between."""
        warm, cold = HEAT[start]
        value = self._value(state)
        chunks = max(1, math.ceil(trials / CHUNK))
        for k in range(chunks):
            begin, end = (warm * (cold / warm) ** (part / chunks) for part in (k, k + 1))
            count = min(CHUNK, trials - k * CHUNK)
            fixed = start is not InitialLayout.FOUND or self.given.stages is not None
            self._round(state, value, count, begin, end, fixed)
            if run.update(count) is not None:
                break
        self._keep(start, self._best, float(value[1]))

    def _round(
        self, state: LayoutState, value: Floats, count: int, warm: float, cold: float, fixed: bool
    ) -> None:
        anneal(
            self.model,
            self.links,
            state,
            self._tried,
            self._best,
            self._scratch,
            self._random,
            value,
            count,
            warm,
            cold,
            fixed,
        )

    def _value(self, state: LayoutState) -> Floats:
        """The estimate of a state, which is the best so far."""
        value = self._estimate(state)
        for name in LayoutState._fields:
            getattr(self._best, name)[:] = getattr(state, name)
        # where memory does not hold the start, anything that it holds is better
        return np.full(2, value if value < math.inf else 1e300)

    def _keep(self, start: InitialLayout, state: LayoutState, value: float) -> None:
        stages = int(state.stages[0])
        known = self.found.get((stages, start))
        if value >= 1e300 or (known is not None and value >= known.value):
            return
        # which stages recompute is what the estimate chose last; ask again
        again = self._estimate(state)
        self.found[stages, start] = ScoredLayout(again, self._layout(state))

    @staticmethod
    def _layout(state: LayoutState) -> Layout:
        stages = int(state.stages[0])
        return Layout.of(
            state.counts[:stages].tolist(),
            state.cuts[: stages + 1].tolist(),
            state.recompute[:stages].tolist(),
        )

    def _empty(self) -> LayoutState:
        most = self.most
        return LayoutState(
            np.zeros(1, dtype=np.int64),
            np.zeros((most, len(self.places)), dtype=np.int64),
            np.zeros(most + 1, dtype=np.int64),
            np.zeros(most, dtype=np.bool_),
        )

    def _start(self, stages: int, start: InitialLayout = InitialLayout.NEAR) -> LayoutState:
        """All devices along a chain of near places, cut into stages of equal size.

        Or dealt: given out to the stages one by one, so that each place has a pipeline, as ranks
        that are numbered place by place do. Where that cannot be, such as for lack of memory,
        places with little memory, and those that do not aggregate, are left out one by one; then
        the devices with the most memory are filled evenly.
        """
        if start is InitialLayout.FEW:
            return self._few(stages)
        chain, dealt = self._chain(), start is not InitialLayout.NEAR
        if self.given.merit.by_cost:
            # a few places may do it for less
            chain = self._some(chain, stages)
        worth = np.lexsort((-self.places.memory_bytes, ~self.places.sums))
        first = None
        for kept in range(len(worth), 0, -1):
            left = chain[np.isin(chain, worth[:kept])]
            if first is not None and self.places.size[left].sum() < stages:
                break
            state = self._spread(left, stages, dealt)
            first = first or state
            if self._estimate(state) < math.inf:
                return state
        return self._filled(stages)

    def _filled(self, stages: int) -> LayoutState:
        """The stages of `tightest`; whoever has none is left out."""
        filled, places = self.tightest(stages)
        state = self._empty()
        state.stages[0] = stages
        state.counts[range(stages), places] = 1
        state.cuts[1 : stages + 1] = [stop for _, stop in filled.layers]
        return state

    def tightest(self, stages: int) -> tuple[Filled, list[int]]:
        """The devices with the most memory, one a stage, all filled to the same share.

        Along a chain of near places; where these do not hold the model so, in the best order, or
        where there are too many with the two largest at the ends, for embedding and head. Where
        layers are fixed, the largest needs on the largest devices.

        Returns
        -------
        tuple[Filled, list[int]]
            Stages and the place of each one's device.
        """
        chain = self._chain(int(np.argmax(self.places.memory_bytes)))
        along = np.repeat(chain, self.places.size[chain])
        largest = np.argsort(-self.places.memory_bytes[along], kind="stable")[:stages]
        near = along[np.sort(largest)].tolist()
        again = self.model.recompute[:stages].tolist()
        kinds = [(False, True) if self.model.recompute_free else (one,) for one in again]

        memory, layers = self.places.memory_bytes, self.given.layers

        def filled(places: list[int], any_order: bool = False) -> Filled:
            each = memory[places].tolist()
            return evenly_filled(self.workload, each, kinds, layers, any_order=any_order)

        if layers is not None:
            needs = [one.need_bytes(1) for one in filled(near).costs(self.workload)]
            by_need = np.empty(stages, dtype=np.int64)
            by_need[np.argsort(needs, kind="stable")[::-1]] = along[largest]
            return filled(by_need.tolist()), by_need.tolist()
        found = [(filled(near), near)]
        if found[0][0].share > 1 and orders_of(memory[near]) <= MOST_ORDERS:
            better = filled(near, any_order=True)
            left = list(near)
            order = []
            for have in better.memory:
                order.append(next(c for c in left if memory[c] == have))
                left.remove(order[-1])
            found.append((better, order))
        elif found[0][0].share > 1:
            first, *others = along[largest].tolist()
            ends = [first, *sorted(others[1:], key=near.index), *others[:1]]
            found.append((filled(ends), ends))
        return min(found, key=lambda one: one[0].share)

    def _few(self, stages: int) -> LayoutState:
        """The best of some starts of places that are near each other."""
        count = max(LEAST_FEW, min(MOST_FEW, FEW_PLACES // len(self.places)))
        some = (self._some(self._chain(), stages) for _ in range(count))
        tried = [self._spread(chain, stages, dealt=False) for chain in some]
        return min(tried, key=self._estimate)

    def _some(self, chain: Ints, stages: int) -> Ints:
        """The first places of a chain, any number that has a device for each stage."""
        enough = int(np.searchsorted(self.places.size[chain].cumsum(), stages)) + 1
        return chain[: int(self._numpy.integers(enough, len(chain) + 1))]

    def _spread(self, chain: Ints, stages: int, dealt: bool) -> LayoutState:
        state = self._empty()
        state.stages[0] = stages
        devices = np.repeat(chain, self.places.size[chain])
        for k, c in enumerate(devices.tolist()):
            j = k % stages if dealt else k * stages // len(devices)
            state.counts[j, c] += 1
        ends = [round(self.layers * j / stages) for j in range(stages + 1)]
        if self.given.layers is not None:
            ends = [0, *(stop for _, stop in self.given.layers)]
        state.cuts[: stages + 1] = ends
        return state

    def _chain(self, first: int | None = None) -> Ints:
        """Places from one on, by default a random one, each time to the nearest that is left."""
        away = 2 * self.model.output_bytes.max() / self.places.slower
        away = away + self.places.there_and_back_s
        left = list(range(len(self.places)))
        begin = int(self._numpy.integers(len(left))) if first is None else first
        chain = [left.pop(begin)]
        while left:
            chain.append(left.pop(int(np.argmin(away[chain[-1], left]))))
        return np.array(chain, dtype=np.int64)

    def _state(self, layout: Layout) -> LayoutState:
        state = self._empty()
        stages = len(layout.layers)
        state.stages[0] = stages
        state.counts[:stages] = layout.counts
        state.cuts[: stages + 1] = [0, *(stop for _, stop in layout.layers)]
        state.recompute[:stages] = layout.recompute
        return state


def _shifted(layout: Layout) -> Iterator[Layout]:
    """Those in which one run of neighbouring ends of stages lies a layer earlier or later."""
    ends = [stop for _, stop in layout.layers]
    for first in range(len(ends) - 1):
        for last in range(first, len(ends) - 1):
            for step in (-1, 1):
                moved = [end + step * (first <= k <= last) for k, end in enumerate(ends)]
                parts = tuple(pairwise([0, *moved]))
                if all(start < stop for start, stop in parts):
                    yield replace(layout, layers=parts)
