"""Simulated annealing over layouts, with restarts, on their estimated step time."""

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

from planner.planning.cost import STEP_TIME, PlanObjective
from planner.planning.joint.device_classes import DeviceClasses, Floats, Ints
from planner.planning.joint.layout import Layout, Outline
from planner.planning.joint.layout_anneal import anneal, random_move
from planner.planning.joint.layout_arrays import (
    ClassArrays,
    LayoutScratch,
    LayoutState,
    ModelArrays,
)
from planner.planning.joint.layout_estimate import estimate
from planner.planning.layer_split import Filled, evenly_filled, orders_of
from planner.search.stop import SearchRun
from planner.search.worker_pool import WorkerPool, stop_requested
from planner.training_plan.choices import Head
from planner.workload.costs import stage_costs
from planner.workload.working_memory import WorkingMemory
from planner.workload.workload import Workload

MAX_STAGES, MORE_STAGES = 24, 8
"""Numbers of stages tried from 1 up; samples of larger numbers, if memory fits none of these."""
MAX_IDLE_DEVICES = 1024
"""Devices that a stage may have, however few microbatches there are. With more devices than
microbatches some are idle; the search leaves them out in the end, and needs them as a detour."""
MAX_PAIRS = 1e8
"""Pairs of devices of neighbouring stages, of which a candidate needs three arrays."""
CHUNK = 2000
"""Moves between two checks of the stopping criterion: about ten milliseconds."""
MOVES_PER_EFFORT = 180_000.0
"""Moves per unit of effort."""
ALL_COUNTS_SHARE, BEST_COUNTS_SHARE = 0.15, 0.15
"""Shares of the moves for all numbers of stages, and for the best numbers. Restarts get the other
moves; there the number of stages may change."""
BEST_COUNTS, RESTARTS = 4, 3
"""Numbers of stages that get the second share, and best layouts from which restarts begin."""
RESTART_MOVES = 30_000
"""Moves of a restart: which classes form a stage settles quickly, and often in a local optimum."""
DESCENTS_SHARE, DESCENT_MOVES = 1 / 3, 5_000
"""Share of the moves for descents with given numbers of stages, and moves of a descent."""
MIN_RESTARTS = 5
"""Minimum number of restarts with each of these numbers."""
SEEDS = 1 << 63
"""Seeds are below this."""
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


MOVE_SHARES = {
    InitialLayout.NEARBY: 1.0,
    InitialLayout.SPREAD: 1.0,
    InitialLayout.SPREAD_COLD: 1.0,
    InitialLayout.NEARBY_SUBSET: 0.3,
}
"""Relative shares of the moves for a number of stages."""
TEMPERATURES = {
    InitialLayout.NEARBY: (0.2, 0.003),
    InitialLayout.NEARBY_SUBSET: (0.05, 0.0005),
    InitialLayout.SPREAD: (0.2, 0.003),
    InitialLayout.NEARBY_COLD: (1e-4, 1e-6),
    InitialLayout.SPREAD_COLD: (1e-4, 1e-6),
    InitialLayout.RESTART: (0.05, 0.0005),
    InitialLayout.FIXED_RESTART: (0.05, 0.0005),
}
"""First and last temperature, relative to the estimate."""


Start = Layout | tuple[Outline, InitialLayout]
"""A layout, or the outline and the kind of a new one."""
AnnealingRun = tuple[Start, InitialLayout, int]
"""Start, kind and moves of a run."""


@dataclass(frozen=True)
class ScoredLayout:
    """A layout with its estimated step, in seconds or dollars."""

    value: float
    layout: Layout


@dataclass(frozen=True)
class Constraints:
    """What the request fixes of layouts.

    Attributes
    ----------
    stages, layers
        Number of stages, and their layers; None if free.
    recompute
        Stages that recompute, all others do not; None if free.
    in_flight
        Limit on microbatches in flight per device; None for what memory holds.
    equal
        Whether all devices must reduce equal shares.
    every_steps, delayed, two_frequency
        Average every this many steps; overlap averaging with the next step; average within
        regions in every step as well.
    objective
        What to minimise.
    optimizer_copies
        Devices of a stage that have each part of its optimizer state, at least.
    heads
        Ends of the pipeline that may run head and loss.
    """

    stages: int | None = None
    layers: tuple[tuple[int, int], ...] | None = None
    recompute: Sequence[int] | Literal["all", "none"] | None = None
    in_flight: int | None = None
    equal: bool = False
    every_steps: int = 1
    delayed: bool = False
    two_frequency: bool = False
    objective: PlanObjective = STEP_TIME
    optimizer_copies: int = 1
    heads: tuple[Head, ...] = (Head.LAST,)


def model_of(workload: Workload, constraints: Constraints, max_stages: int) -> ModelArrays:
    """The workload in the form of the compiled search."""
    count = len(workload.layers)
    recompute = np.full(max_stages, count if constraints.recompute == "all" else 0)
    if constraints.recompute is not None and not isinstance(constraints.recompute, str):
        recompute[list(constraints.recompute)] = count
    min_devices = workload.optimizer_shards * constraints.optimizer_copies
    prefix_costs = [stage_costs(workload, 0, stop) for stop in range(1, count + 1)]
    all_layers = stage_costs(workload, 0, count, with_head=True)
    working = WorkingMemory.of_workload(workload)
    samples = workload.microbatch_samples
    parameters = np.cumsum(
        [workload.stem.parameters, *(layer.parameters for layer in workload.layers)]
    ).astype(float)
    parameters[0] = 0.0
    state_bytes, rounded_bytes = workload.state_bytes_per_parameter, working.rounded_bytes
    if (shards := workload.optimizer_shards) > 1:
        # all that is not rounded is used in fp32, what is rounded only as such
        in_fp32 = workload.precision.parameters.bytes
        state_bytes -= (1 - 1 / shards) * workload.precision.optimizer_bytes - in_fp32
        rounded_bytes -= in_fp32 if rounded_bytes else 0.0
    return ModelArrays(
        flops=np.array([0.0, *(costs.forward_flops for costs in prefix_costs)]),
        parameters=parameters,
        saved_bytes=np.cumsum([0.0, *(layer.saved_bytes * samples for layer in workload.layers)])
        + workload.stem.saved_bytes * samples * (np.arange(count + 1) > 0),
        output_bytes=np.array([layer.output_bytes * samples for layer in workload.layers]),
        held_bytes=np.array([workload.held_bytes(k) * samples for k in range(count)]),
        head_flops=all_layers.head_flops,
        head_parameters=float(workload.head.parameters),
        stem_parameters=float(workload.stem.parameters),
        tied_parameters=float(workload.tied_parameters),
        saves_output=workload.architecture is not None,
        layer_bytes=working.layer,
        embedding_bytes=working.embedding,
        head_bytes=working.head,
        message_bytes=working.messages,
        rounded_bytes=rounded_bytes,
        gradient_bytes=workload.gradient_bytes_per_parameter,
        state_bytes=state_bytes,
        wire_ratio=1.0,
        microbatches=workload.batch_samples / samples,
        every_steps=float(constraints.every_steps),
        delayed=constraints.delayed,
        two_frequency=constraints.two_frequency,
        by_cost=constraints.objective.by_cost,
        wait_usd_per_s=constraints.objective.wait_usd_per_s,
        max_in_flight=math.inf if constraints.in_flight is None else float(constraints.in_flight),
        min_devices=min_devices,
        max_devices=np.maximum(
            np.minimum(
                max(workload.batch_samples // samples, MAX_IDLE_DEVICES),
                np.sqrt(MAX_PAIRS / np.maximum(np.arange(max_stages + 1) - 1, 1)).astype(np.int64),
            ),
            min_devices,
        ),
        layers_free=constraints.layers is None,
        recompute_free=constraints.recompute is None,
        head_free=len(constraints.heads) > 1,
        recompute=recompute,
    )


class LayoutSearch:
    """Simulated annealing of layouts; keeps the best one of every run.

    Parameters
    ----------
    classes, workload
        Devices and model.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    seed
        Of the random generators.
    constraints
        What the request fixes.

    Attributes
    ----------
    optima
        Best layouts of all runs, with their estimates and kinds of initial layout.
    """

    def __init__(
        self,
        classes: DeviceClasses,
        workload: Workload,
        wire_ratio: float = 1.0,
        seed: int = 0,
        constraints: Constraints | None = None,
    ) -> None:
        self.constraints = constraints or Constraints()
        self.workload, self.layers = workload, len(workload.layers)
        least = workload.optimizer_shards * self.constraints.optimizer_copies
        most_groups = int(classes.size.sum()) // least
        self.max_stages = max(min(self.layers, most_groups), 1)
        model = model_of(workload, self.constraints, self.max_stages)
        self.classes = classes
        self.model = model._replace(
            gradient_bytes=model.gradient_bytes * wire_ratio, wire_ratio=wire_ratio
        )
        order = np.argsort(classes.rtt_s.ravel(), kind="stable").astype(np.int64)
        self.class_arrays = ClassArrays(
            size=classes.size,
            rtt_s=classes.rtt_s,
            bandwidth=classes.bandwidth,
            pair_bandwidth=classes.pair_bandwidth,
            capacity=classes.capacity,
            flops_per_s=classes.flops_per_s,
            memory_bytes=classes.memory_bytes,
            can_aggregate=classes.can_aggregate,
            sites=classes.sites,
            inside=(
                classes.sites[None] == np.arange(len(classes.site_bandwidth))[:, None, None]
            ).any(axis=2),
            site_bandwidth=classes.site_bandwidth,
            region=classes.region,
            pair_source=order // len(classes),
            pair_target=order % len(classes),
            pair_rank=np.argsort(order).reshape(classes.pair_bandwidth.shape),
            equal_shares=self.constraints.equal,
            usd_per_s=classes.usd_per_s,
            usd_per_byte=classes.usd_per_byte,
        )
        self.optima: dict[Layout, tuple[float, InitialLayout]] = {}
        self._filled_by_memory: dict[tuple[tuple[float, ...], Head, bool], Filled] = {}
        # seeds of runs; within one, `_rng` and `_rng_state` are seeded again
        self._seeds = np.random.default_rng(seed)
        self._reseed(seed)
        self._candidate, self._best = self._empty_state(), self._empty_state()
        self._scratch = LayoutScratch.of(self.max_stages, len(classes), len(classes.site_bandwidth))

    @cached_property
    def stage_counts(self) -> list[int]:
        """Numbers of stages to try: small ones, or larger ones if none of these fits in memory."""
        if self.constraints.stages is not None:
            return [self.constraints.stages]
        small_counts = list(range(1, min(self.max_stages, MAX_STAGES) + 1))
        if any(self.tightest(stages)[0].share <= 1.0 for stages in reversed(small_counts)):
            return small_counts
        larger = range(len(small_counts) + 1, self.max_stages + 1)
        fewest = next((stages for stages in larger if self.tightest(stages)[0].share <= 1.0), None)
        if fewest is None:
            return small_counts
        return sorted({round(s) for s in np.linspace(fewest, self.max_stages, MORE_STAGES)})

    @cached_property
    def outlines(self) -> list[Outline]:
        """Numbers of stages to try, with every place of the head."""
        heads = self.constraints.heads
        return [
            (stages, head)
            for stages in self.stage_counts
            for head in (heads if stages > 1 else (Head.LAST,))
        ]

    def ranked(self, first: InitialLayout | None = None) -> list[ScoredLayout]:
        """Best layouts, fastest first.

        With ``first``, before them the best one of that kind and, if the place of the head is open,
        the best with each.
        """
        order = sorted(self.optima.items(), key=lambda item: item[1][0])
        first_ones = [layout for layout, (_, start) in order if start is first][:1]
        for head in self.constraints.heads if first and self.model.head_free else ():
            first_ones += [layout for layout, _ in order if layout.head is head][:1]
        layouts = dict.fromkeys([*first_ones, *(layout for layout, _ in order)])
        return [ScoredLayout(self.optima[layout][0], layout) for layout in layouts]

    def best_by_outline(self, *, partial: bool = True) -> dict[Outline, ScoredLayout]:
        """The best layout of each outline, fastest first.

        ``partial``: also those with stages that recompute some of their layers.
        """
        best: dict[Outline, ScoredLayout] = {}
        for scored in self.ranked():
            if partial or not scored.layout.recomputes_partially:
                best.setdefault(scored.layout.outline, scored)
        return best

    def search(self, run: SearchRun, moves: float, pool: WorkerPool | None = None) -> None:
        """Search until the moves are spent or the stopping criterion is met."""
        pool, outlines = pool or WorkerPool(1), self.outlines
        with run.interruptible():
            self._search_outlines(run, outlines, ALL_COUNTS_SHARE * moves, pool)
            outlines = list(self.best_by_outline())
            self._search_outlines(run, outlines[:BEST_COUNTS], BEST_COUNTS_SHARE * moves, pool)
            # restart with outlines from the better half
            outlines = outlines[: (len(outlines) + 1) // 2]
            restart_moves = (1 - ALL_COUNTS_SHARE - BEST_COUNTS_SHARE) * moves
            restarts = max(2 * RESTARTS, round(restart_moves / RESTART_MOVES)) if outlines else 0
            layouts = [scored.layout for scored in self.ranked()]
            # the best with the head at each end; both are the same with one stage
            known = [
                layout
                for head in self.constraints.heads
                for layout in [x for x in layouts if len(x.layers) == 1 or x.head is head][
                    :RESTARTS
                ]
            ]
            moves_each = max(1, int(restart_moves / max(1, restarts)))
            starts: list[Start] = []
            for k in range(restarts):
                outline = outlines[int(self._seeds.integers(len(outlines)))]
                is_spread = bool(self._seeds.integers(2))
                new = outline, InitialLayout.SPREAD if is_spread else InitialLayout.NEARBY
                starts.append(new if k % 2 else known[k // 2 % len(known)])
            runs = [(start, InitialLayout.RESTART, moves_each) for start in starts]
            self._anneal_all(run, runs, pool)

    def search_fixed(
        self, run: SearchRun, outlines: Sequence[Outline], moves: float, pool: WorkerPool
    ) -> None:
        """Divide the moves equally among outlines, which stay as they are.

        Some of them are for descents: short runs that accept improvements only, which find the best
        layouts where classes are many. The others are for restarts.
        """
        moves_each = moves / max(1, len(outlines))
        descent_moves, restart_moves = (
            DESCENTS_SHARE * moves_each,
            (1 - DESCENTS_SHARE) * moves_each,
        )
        with run.interruptible():
            descents = max(2, round(descent_moves / DESCENT_MOVES))
            count = max(1, int(descent_moves / descents))
            cold = [InitialLayout.SPREAD_COLD, InitialLayout.NEARBY_COLD] * descents
            new_runs = [
                ((outline, kind), kind, count) for kind in cold[:descents] for outline in outlines
            ]
            self._anneal_all(run, new_runs, pool)
            restarts = max(MIN_RESTARTS, round(restart_moves / RESTART_MOVES))
            count = max(1, int(restart_moves / restarts))
            kinds_of_best = [self.best_by_outline(), self.best_by_outline(partial=False)]
            runs: list[AnnealingRun] = []
            for k in range(restarts):
                for outline in outlines:
                    is_nearby = bool(self._seeds.integers(2))
                    new = outline, InitialLayout.NEARBY if is_nearby else InitialLayout.SPREAD
                    best = kinds_of_best[k // 2 % 2]
                    start = best[outline].layout if outline in best and k % 2 == 0 else new
                    runs.append((start, InitialLayout.FIXED_RESTART, count))
            self._anneal_all(run, runs, pool)

    def _search_outlines(
        self, run: SearchRun, outlines: Sequence[Outline], moves: float, pool: WorkerPool
    ) -> None:
        """Divide the moves equally among outlines, by weight among initial layouts."""
        moves_each = moves / max(1.0, len(outlines) * sum(MOVE_SHARES.values()))
        runs = [
            ((outline, kind), kind, max(1, int(share * moves_each)))
            for outline in outlines
            for kind, share in MOVE_SHARES.items()
        ]
        self._anneal_all(run, runs, pool)

    def _anneal_all(
        self,
        run: SearchRun,
        runs: Sequence[AnnealingRun],
        pool: WorkerPool,
    ) -> None:
        """Record the best layout of every run, until the stopping criterion is met."""
        if run.check() is not None and self.optima:
            return
        seeds = self._seeds.integers(0, SEEDS, len(runs)).tolist()
        ends_s = time.time() + run.remaining_s
        tasks = [(*annealed, seed, ends_s) for annealed, seed in zip(runs, seeds, strict=True)]
        for (_, kind, _), (scored, moves) in zip(runs, pool.map(self.annealed, tasks), strict=True):
            if scored is not None:
                self.optima.setdefault(scored.layout, (scored.value, kind))
            if run.update(moves) is not None and self.optima:
                return

    def annealed(
        self,
        start: Start,
        kind: InitialLayout,
        moves: int,
        seed: int,
        ends_s: float,
    ) -> tuple[ScoredLayout | None, int]:
        """The best layout of a run of annealing, if one fits in memory, and its moves.

        Parameters
        ----------
        start
            A layout, or the outline and the kind of a new one.
        kind
            Determines the temperatures, and whether the outline may change.
        ends_s
            Unix time at which to end early.
        """
        self._reseed(seed)
        state = self._state_of(start) if isinstance(start, Layout) else self._initial_state(*start)
        t_start, t_end = TEMPERATURES[kind]
        fixed_stages = kind is not InitialLayout.RESTART or self.constraints.stages is not None
        value = self._reset_best(state)
        chunks, done = max(1, math.ceil(moves / CHUNK)), 0
        for k in range(chunks):
            first, last = (t_start * (t_end / t_start) ** (part / chunks) for part in (k, k + 1))
            count = min(CHUNK, moves - done)
            self._anneal_chunk(state, value, count, first, last, fixed_stages)
            done += count
            if stop_requested() or time.time() >= ends_s:
                break
        if value[1] >= 1e300:
            return None, done
        # recomputed layers belong to the last estimate; estimate again
        final_value = self._estimate(self._best)
        return ScoredLayout(final_value, self._layout_of(self._best)), done

    def _reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._rng_state = self._rng.integers(0, SEEDS, 1).astype(np.uint64)

    def moves_in(self, seconds: float) -> float:
        """Approximate number of moves in a time on this machine, without compilation."""
        stages = self.constraints.stages or min(4, self.max_stages)
        state = self._initial_state((stages, self.constraints.heads[0]))
        temperatures = TEMPERATURES[InitialLayout.NEARBY]
        self._anneal_chunk(state, self._reset_best(state), 1, *temperatures, True)
        began = time.perf_counter()
        self._anneal_chunk(state, self._reset_best(state), CHUNK, *temperatures, True)
        return CHUNK * seconds / max(time.perf_counter() - began, 1e-9)

    def neighbours(
        self, layout: Layout, samples: int, max_value: float, seed: int
    ) -> list[ScoredLayout]:
        """Some layouts up to three moves away, lowest estimates first, none above ``max_value``."""
        self._reseed(seed)
        values: dict[Layout, float] = {}
        for _ in range(samples):
            state = self._state_of(layout)
            changes = 1 + int(self._rng.integers(3))
            if not all(self._random_move(state) for _ in range(changes)):
                continue
            value = self._estimate(state)
            if value < math.inf and value <= max_value:
                values[self._layout_of(state)] = value
        values.pop(layout, None)
        return sorted((ScoredLayout(s, x) for x, s in values.items()), key=lambda x: x.value)

    def _random_move(self, state: LayoutState) -> bool:
        fixed_stages = self.constraints.stages is not None
        return bool(
            random_move(
                self.model, self.class_arrays, state, self._scratch, self._rng_state, fixed_stages
            )
        )

    def _estimate(self, state: LayoutState) -> float:
        """The estimate, computed in full."""
        return float(estimate(self.model, self.class_arrays, state, self._scratch, math.inf))

    def scored(self, layout: Layout) -> ScoredLayout:
        """The layout with its estimate, infinite if memory is too small.

        The estimate chooses again which layers are recomputed.
        """
        state = self._state_of(layout)
        value = self._estimate(state)
        return ScoredLayout(value, self._layout_of(state))

    def with_better_layers(self, layout: Layout) -> ScoredLayout:
        """Shift single layers between stages as long as that lowers the estimate."""
        best, improved = self.scored(layout), self.constraints.layers is None
        while improved:
            tried = [self.scored(shifted) for shifted in _with_shifted_layers(best.layout)]
            least = min(tried, key=lambda scored: scored.value, default=best)
            improved = least.value < best.value
            best = least if improved else best
        return best

    def _anneal_chunk(
        self,
        state: LayoutState,
        value: Floats,
        count: int,
        t_start: float,
        t_end: float,
        fixed_stages: bool,
    ) -> None:
        anneal(
            self.model,
            self.class_arrays,
            state,
            self._candidate,
            self._best,
            self._scratch,
            self._rng_state,
            value,
            count,
            t_start,
            t_end,
            fixed_stages,
        )

    def _reset_best(self, state: LayoutState) -> Floats:
        """Make a state the best so far; its estimate, as state and as best."""
        value = self._estimate(state)
        for name in LayoutState._fields:
            getattr(self._best, name)[:] = getattr(state, name)
        # if the start does not fit in memory, any layout that fits is better
        return np.full(2, value if value < math.inf else 1e300)

    @staticmethod
    def _layout_of(state: LayoutState) -> Layout:
        stages = int(state.stages[0])
        return Layout.of(
            state.counts[:stages].tolist(),
            state.cuts[: stages + 1].tolist(),
            state.recompute[:stages].tolist(),
            _head_of(state),
        )

    def _empty_state(self) -> LayoutState:
        most = self.max_stages
        return LayoutState(
            stages=np.zeros(1, dtype=np.int64),
            counts=np.zeros((most, len(self.classes)), dtype=np.int64),
            cuts=np.zeros(most + 1, dtype=np.int64),
            recompute=np.zeros(most, dtype=np.int64),
            head_first=np.zeros(1, dtype=np.int64),
        )

    def _initial_state(
        self, outline: Outline, kind: InitialLayout = InitialLayout.NEARBY
    ) -> LayoutState:
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
        if self.constraints.objective.by_cost:
            # a few classes may be cheaper
            chain = self._subset(chain, stages)
        by_worth = np.lexsort((-self.classes.memory_bytes, ~self.classes.can_aggregate))
        first_state = None
        for num_largest in range(len(by_worth), 0, -1):
            usable_chain = chain[np.isin(chain, by_worth[:num_largest])]
            if first_state is not None and self.classes.size[usable_chain].sum() < stages:
                break
            state = self._cut_chain(usable_chain, outline, spread)
            first_state = first_state or state
            if self._estimate(state) < math.inf:
                return state
        if self._rng.integers(2):
            state = self._best_subset(outline)
            if self._estimate(state) < math.inf:
                return state
        return self._fill_memory(outline)

    def _refill(self, state: LayoutState) -> None:
        """Give each stage layers in proportion to its memory, if the model fits that way."""
        if self.constraints.layers is not None:
            return
        stages = int(state.stages[0])
        smallest = [
            float(self.classes.memory_bytes[np.flatnonzero(row)].min())
            for row in state.counts[:stages]
        ]
        filled = self._filled(tuple(smallest), _head_of(state))
        if filled.share <= 1.0:
            state.cuts[1 : stages + 1] = [stop for _, stop in filled.layers]

    def _fill_memory(self, outline: Outline) -> LayoutState:
        """The stages of `tightest`; all other devices are left out."""
        filled, groups = self._tightest(*outline)
        state = self._new_state(outline)
        stages = outline[0]
        for j, classes in enumerate(groups):
            np.add.at(state.counts[j], classes, 1)
        state.cuts[1 : stages + 1] = [stop for _, stop in filled.layers]
        return state

    def _filled(self, memory: tuple[float, ...], head: Head, *, any_order: bool = False) -> Filled:
        """Stages on devices of these sizes, all filled to the same fraction."""
        key = memory, head, any_order
        if key not in self._filled_by_memory:
            recomputed: list[int | None] = self.model.recompute[: len(memory)].tolist()
            if self.model.recompute_free:
                recomputed = [None] * len(memory)
            self._filled_by_memory[key] = evenly_filled(
                self.workload,
                memory,
                recomputed,
                self.constraints.layers,
                head=head,
                any_order=any_order,
            )
        return self._filled_by_memory[key]

    def tightest(self, stages: int) -> tuple[Filled, list[list[int]]]:
        """As `_tightest`, with the head on the end that needs less memory."""
        options = [self._tightest(stages, head) for head in self.constraints.heads]
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
        chain = self._nearest_chain(int(np.argmax(self.classes.memory_bytes)))
        chained_devices = np.repeat(chain, self.classes.size[chain])
        each, memory = int(self.model.min_devices), self.classes.memory_bytes
        by_memory = np.argsort(-memory[chained_devices], kind="stable")[: stages * each]
        positions = by_memory.reshape(stages, each)
        largest: list[list[int]] = chained_devices[positions].tolist()
        in_chain_order = [largest[k] for k in np.argsort(positions[:, 0])]

        def sizes(groups: list[list[int]]) -> tuple[float, ...]:
            return tuple(float(memory[classes].min()) for classes in groups)

        def filled(groups: list[list[int]], any_order: bool = False) -> Filled:
            return self._filled(sizes(groups), head, any_order=any_order)

        if self.constraints.layers is not None:
            needs = [costs.need_bytes(1) for costs in filled(in_chain_order).costs(self.workload)]
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
        count = max(MIN_SUBSETS, min(MAX_SUBSETS, MAX_SUBSET_CLASSES // len(self.classes)))
        subsets = (self._subset(self._nearest_chain(), outline[0]) for _ in range(count))
        states = [self._cut_chain(chain, outline, spread=False) for chain in subsets]
        for state in states:
            if self._estimate(state) == math.inf:
                self._refill(state)
        return min(states, key=self._estimate)

    def _subset(self, chain: Ints, stages: int) -> Ints:
        """A random number of classes from the front of a chain, with a device for every stage."""
        fewest_classes = int(np.searchsorted(self.classes.size[chain].cumsum(), stages)) + 1
        return chain[: int(self._rng.integers(fewest_classes, len(chain) + 1))]

    def _cut_chain(self, chain: Ints, outline: Outline, spread: bool) -> LayoutState:
        state, stages = self._new_state(outline), outline[0]
        devices = np.repeat(chain, self.classes.size[chain])
        devices = devices[: stages * self.model.max_devices[stages]]
        place = np.arange(len(devices))
        stage = place % stages if spread else place * stages // len(devices)
        np.add.at(state.counts, (stage, devices), 1)
        ends = [round(self.layers * j / stages) for j in range(stages + 1)]
        if self.constraints.layers is not None:
            ends = [0, *(stop for _, stop in self.constraints.layers)]
        state.cuts[: stages + 1] = ends
        return state

    def _nearest_chain(self, first: int | None = None) -> Ints:
        """Nearest-neighbour chain of all classes from ``first``, by default a random one."""
        distance_s = 2 * self.model.output_bytes.max() / self.classes.pair_bandwidth
        distance_s = distance_s + self.classes.rtt_s
        remaining = list(range(len(self.classes)))
        start = int(self._rng.integers(len(remaining))) if first is None else first
        chain = [remaining.pop(start)]
        while remaining:
            chain.append(remaining.pop(int(np.argmin(distance_s[chain[-1], remaining]))))
        return np.array(chain, dtype=np.int64)

    def _new_state(self, outline: Outline) -> LayoutState:
        state, (stages, head) = self._empty_state(), outline
        # a single stage may be split later
        head = head if stages > 1 else self.constraints.heads[0]
        state.stages[0], state.head_first[0] = stages, head is Head.FIRST
        return state

    def _state_of(self, layout: Layout) -> LayoutState:
        state, stages = self._new_state(layout.outline), len(layout.layers)
        state.counts[:stages] = layout.counts
        state.cuts[: stages + 1] = [0, *(stop for _, stop in layout.layers)]
        state.recompute[:stages] = layout.recompute
        return state


def _head_of(state: LayoutState) -> Head:
    return Head.FIRST if state.head_first[0] else Head.LAST


def _with_shifted_layers(layout: Layout) -> Iterator[Layout]:
    """Layouts in which a run of consecutive stage boundaries is shifted by one layer."""
    ends = [stop for _, stop in layout.layers]
    for first in range(len(ends) - 1):
        for last in range(first, len(ends) - 1):
            for step in (-1, 1):
                moved = [end + step * (first <= k <= last) for k, end in enumerate(ends)]
                parts = tuple(pairwise([0, *moved]))
                if all(start < stop for start, stop in parts):
                    yield replace(layout, layers=parts)
