"""Search over placements made by a rule: simulates those that a bound does not exclude."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.planning.evaluation import straight_plan, straight_step_s
from planner.planning.layer_split import balanced_split, is_uniform
from planner.planning.placed_bound import placed_bound_s
from planner.planning.request import OperationOrder, PlanningProblem
from planner.planning.shape import Shape, memory_room, shape_of
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.search.interrupts import INTERRUPTS
from planner.training_plan.model import TrainingPlan

MOST_EVENTS = 1_000_000
"""Operations and messages of all steps that are priced; so many take 15 to 50 s of a core."""

MOST_REFUSED = 50
"""Placements of a rule that memory may turn out not to hold before it is given up."""

ORDERS = (OperationOrder.EAGER_1F1B, OperationOrder.ONE_F_ONE_B)
"""Ours, and the one that trainers ship."""

ROUNDING = 1e-9
"""Relative; a bound excludes a step only beyond it."""


@dataclass(frozen=True)
class BaselinePlan:
    """The decisions of a plan that a rule made, and its step.

    Attributes
    ----------
    microbatch_samples
        Samples that travel together.
    balanced
        Whether layers follow unlike devices, or are unlike; otherwise they are cut evenly.
    recompute
        Whether stages recompute activations: as asked, or all where memory is short.
    start
        The placement that they were made of.
    """

    devices: int
    stages: int
    pipelines: int
    microbatch_samples: int
    order: str
    balanced: bool
    recompute: bool
    step_s: float
    start: BaselinePlacement = field(compare=False, repr=False)

    def decisions(self) -> dict[str, Any]:
        """Shape, order and step, JSON-ready."""
        names = (one.name for one in fields(self) if one.name != "start")
        return {name: getattr(self, name) for name in names}

    def plan(self) -> TrainingPlan:
        """The whole plan, for the devices that take part."""
        shape, assignment, _ = self.start.fitted()
        return straight_plan(self.start.problem, shape, assignment)


@dataclass(frozen=True)
class SearchCounts:
    """What became of the plans that a rule allows.

    Attributes
    ----------
    excluded
        Not priced: no order of theirs beats the best.
    refused
        By memory or for another reason; with recomputation counts by itself.
    left_out
        Not priced, because that was work enough; one of them may be better.
    """

    priced: int = 0
    excluded: int = 0
    refused: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class BaselinePlacement:
    """A placement to price.

    Attributes
    ----------
    name
        The best is sought among those of the same name.
    problem
        Whose request fixes stages and order.
    grid
        ``int[pipelines, stages]``.
    """

    name: str
    problem: PlanningProblem
    grid: NDArray[np.int64]

    def fitted(self) -> tuple[Shape, AssignmentPlan, float]:
        """Layers and bound.

        Returns
        -------
        tuple[Shape, AssignmentPlan, float]
            The shape with its layers, who holds which stage, and what no order beats in seconds.
        """
        problem, shape = self.problem, shape_of(self.problem)
        assignment = AssignmentPlan.of_grid(self.grid)
        cluster, workload = problem.cluster, problem.workload
        if not is_uniform(cluster, workload):
            layers = balanced_split(
                cluster, workload, assignment.groups, shape.head_stage, shape.recompute
            )
            shape = shape.with_layers(layers)
        memory_room(cluster, workload, shape, assignment.groups)
        return shape, assignment, placed_bound_s(problem, shape, assignment)

    def is_short(self, shape: Shape, assignment: AssignmentPlan) -> bool:
        """Whether memory holds fewer microbatches of a pipeline than there are."""
        problem = self.problem
        room = memory_room(problem.cluster, problem.workload, shape, assignment.groups)
        return min(room.values()) < -(-shape.microbatches // shape.starts)

    @property
    def recomputes(self) -> bool:
        """Whether all stages recompute their activations."""
        return self.problem.request.recompute == "all"

    def recomputing(self) -> BaselinePlacement:
        """The same with recomputation in all stages."""
        request = self.problem.request.replace(recompute="all")
        return replace(self, problem=replace(self.problem, request=request))


@dataclass(frozen=True)
class SearchOutcomes:
    """The best of each name, and what became of all.

    Attributes
    ----------
    starts
        By name, what the best was made of.
    refusal
        Why the one with the most stages and smallest microbatches was refused, which needs least
        memory; empty if none was.
    """

    best: dict[str, BaselinePlan]
    starts: dict[str, BaselinePlacement]
    tally: SearchCounts
    refusal: str


def search_baselines(
    starts: Iterable[BaselinePlacement],
    most_events: int = MOST_EVENTS,
    over: Callable[[], bool] = lambda: False,
) -> SearchOutcomes:
    """Price placements in the order of their bounds, until nothing better can be left.

    Where memory does not hold all microbatches of a pipeline at once, recomputation in all stages
    is tried too. The first of each name is priced whatever the work.
    """
    return _Search(most_events, over).run(starts)


class _Search:
    def __init__(self, most_events: int, over: Callable[[], bool]) -> None:
        self.left, self.over = most_events, over
        self.best: dict[str, BaselinePlan] = {}
        self.starts: dict[str, BaselinePlacement] = {}
        self.refusals: list[tuple[tuple[int, int, bool], str]] = []
        self.priced = self.excluded = self.left_out = 0
        self.queue: list[tuple[float, int, BaselinePlacement, Shape, AssignmentPlan]] = []
        self.queued = 0

    def run(self, starts: Iterable[BaselinePlacement]) -> SearchOutcomes:
        """All of them, or what a command has found when it is told to end."""
        try:
            self._all(starts)
        except KeyboardInterrupt:
            if not self.best or not INTERRUPTS.requested or INTERRUPTS.forced:
                raise
            INTERRUPTS.finishing = True
        tally = SearchCounts(self.priced, self.excluded, len(self.refusals), self.left_out)
        _, refusal = max(self.refusals, key=lambda one: one[0], default=(None, ""))
        return SearchOutcomes(self.best, self.starts, tally, refusal)

    def _all(self, starts: Iterable[BaselinePlacement]) -> None:
        for start in starts:
            if self.queue and self.over():
                self.left_out += 1
            else:
                self._offer(start)
        while self.queue:
            bound, _, start, shape, assignment = heapq.heappop(self.queue)
            known = self.best.get(start.name)
            if known is not None and bound * (1 - ROUNDING) >= known.step_s:
                self.excluded += 1
            elif known is not None and (_events(shape) > self.left or self.over()):
                self.left_out += 1
            else:
                self._price(start, shape, assignment)

    def _refuse(self, start: BaselinePlacement, error: ProblemError) -> None:
        stages, small = start.grid.shape[1], -start.problem.workload.microbatch_samples
        self.refusals.append(((stages, small, start.recomputes), str(error)))

    def _offer(self, start: BaselinePlacement) -> None:
        try:
            shape, assignment, bound = start.fitted()
        except ProblemError as error:
            self._refuse(start, error)
            if not start.recomputes:
                self._offer(start.recomputing())
            return
        heapq.heappush(self.queue, (bound, self.queued, start, shape, assignment))
        self.queued += 1
        if not start.recomputes and start.is_short(shape, assignment):
            self._offer(start.recomputing())

    def _price(self, start: BaselinePlacement, shape: Shape, assignment: AssignmentPlan) -> None:
        problem = start.problem
        try:
            step_s = straight_step_s(problem, shape, assignment)
        except ProblemError as error:
            self._refuse(start, error)
            return
        self.priced += 1
        self.left -= _events(shape)
        known = self.best.get(start.name)
        if known is None or step_s < known.step_s:
            self.starts[start.name] = start
            self.best[start.name] = BaselinePlan(
                devices=len(problem.cluster),
                stages=shape.stages,
                pipelines=shape.starts,
                microbatch_samples=problem.workload.microbatch_samples,
                order=str(problem.request.schedule),
                balanced=not is_uniform(problem.cluster, problem.workload),
                recompute=any(shape.recompute),
                step_s=step_s,
                start=start,
            )


def _events(shape: Shape) -> int:
    """Operations F and B of a step, and its messages."""
    return shape.microbatches * (4 * shape.stages - 2)
