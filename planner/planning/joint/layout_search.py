"""Simulated annealing over layouts, with restarts, on their estimated step time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.planning.joint.device_classes import DeviceClasses, Floats
from planner.planning.joint.initial_layouts import InitialLayout, InitialLayouts
from planner.planning.joint.layout import Layout, Outline
from planner.planning.joint.layout_anneal import anneal, random_move
from planner.planning.joint.layout_arrays import LayoutState
from planner.planning.joint.layout_problem import Constraints, LayoutProblem
from planner.search.stop import SearchRun
from planner.search.worker_pool import WorkerPool, stop_requested
from planner.training_plan.choices import Head
from planner.workload.workload import Workload

MAX_STAGES, MORE_STAGES = 24, 8
"""Numbers of stages tried from 1 up; samples of larger numbers, if memory fits none of these."""
CHUNK = 2000
"""Moves between two checks of the stopping criterion: about ten milliseconds."""
MOVES_PER_EFFORT = 360_000.0
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
        self.problem = LayoutProblem(classes, workload, wire_ratio, constraints)
        self.initial = InitialLayouts(self.problem)
        self.optima: dict[Layout, tuple[float, InitialLayout]] = {}
        # seeds of runs; within one, the others are seeded again
        self._seeds = np.random.default_rng(seed)
        self._reseed(seed)
        self._candidate, self._best = self.problem.empty_state(), self.problem.empty_state()

    @cached_property
    def stage_counts(self) -> list[int]:
        """Numbers of stages to try: small ones, or larger ones if none of these fits in memory."""
        if self.problem.constraints.stages is not None:
            return [self.problem.constraints.stages]
        small_counts = list(range(1, min(self.problem.max_stages, MAX_STAGES) + 1))
        if any(self.initial.tightest(stages)[0].share <= 1.0 for stages in reversed(small_counts)):
            return small_counts
        larger = range(len(small_counts) + 1, self.problem.max_stages + 1)
        fewest = next(
            (stages for stages in larger if self.initial.tightest(stages)[0].share <= 1.0), None
        )
        if fewest is None:
            return small_counts
        return sorted({round(s) for s in np.linspace(fewest, self.problem.max_stages, MORE_STAGES)})

    @cached_property
    def outlines(self) -> list[Outline]:
        """Numbers of stages to try, with every place of the head."""
        heads = self.problem.constraints.heads
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
        for head in (
            self.problem.constraints.heads if first and self.problem.model.head_free else ()
        ):
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
                for head in self.problem.constraints.heads
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
        state = (
            self.problem.state_of(start) if isinstance(start, Layout) else self.initial.make(*start)
        )
        t_start, t_end = TEMPERATURES[kind]
        fixed_stages = (
            kind is not InitialLayout.RESTART or self.problem.constraints.stages is not None
        )
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
        final_value = self.problem.estimate(self._best)
        return ScoredLayout(final_value, self.problem.layout_of(self._best)), done

    def _reseed(self, seed: int) -> None:
        self._rng = self.initial.rng = np.random.default_rng(seed)
        self._rng_state = self._rng.integers(0, SEEDS, 1).astype(np.uint64)

    def moves_in(self, seconds: float) -> float:
        """Approximate number of moves in a time on this machine, without compilation."""
        stages = self.problem.constraints.stages or min(4, self.problem.max_stages)
        state = self.initial.make((stages, self.problem.constraints.heads[0]))
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
            state = self.problem.state_of(layout)
            changes = 1 + int(self._rng.integers(3))
            if not all(self._random_move(state) for _ in range(changes)):
                continue
            value = self.problem.estimate(state)
            if value < math.inf and value <= max_value:
                values[self.problem.layout_of(state)] = value
        values.pop(layout, None)
        return sorted((ScoredLayout(s, x) for x, s in values.items()), key=lambda x: x.value)

    def _random_move(self, state: LayoutState) -> bool:
        fixed_stages = self.problem.constraints.stages is not None
        return bool(
            random_move(
                self.problem.model,
                self.problem.class_arrays,
                state,
                self.problem.scratch,
                self._rng_state,
                fixed_stages,
            )
        )

    def scored(self, layout: Layout) -> ScoredLayout:
        """The layout with its estimate, infinite if memory is too small.

        The estimate chooses again which layers are recomputed.
        """
        state = self.problem.state_of(layout)
        value = self.problem.estimate(state)
        return ScoredLayout(value, self.problem.layout_of(state))

    def with_better_layers(self, layout: Layout) -> ScoredLayout:
        """Shift single layers between stages as long as that lowers the estimate."""
        best, improved = self.scored(layout), self.problem.constraints.layers is None
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
            self.problem.model,
            self.problem.class_arrays,
            state,
            self._candidate,
            self._best,
            self.problem.scratch,
            self._rng_state,
            value,
            count,
            t_start,
            t_end,
            fixed_stages,
        )

    def _reset_best(self, state: LayoutState) -> Floats:
        """Make a state the best so far; its estimate, as state and as best."""
        value = self.problem.estimate(state)
        for name in LayoutState._fields:
            getattr(self._best, name)[:] = getattr(state, name)
        # if the start does not fit in memory, any layout that fits is better
        return np.full(2, value if value < math.inf else 1e300)


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
