"""Evaluates placements made by a rule, except those that a bound excludes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.planning.evaluation import straight_plan, straight_step_s
from planner.planning.layer_split import balanced_split, is_uniform
from planner.planning.problem import PlanningProblem
from planner.planning.request import OperationOrder
from planner.planning.shape import Shape, memory_room, shape_of
from planner.planning.straight.placement_bound import placement_bound_s
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.search.interrupts import INTERRUPTS
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan

MAX_EVENTS = 1_000_000
"""Operations and messages simulated at most; they take 15 to 50 s of one core."""

MAX_REFUSED = 50
"""Placements of a rule that may exceed memory before it is given up."""

ORDERS = (OperationOrder.EAGER_1F1B, OperationOrder.ONE_F_ONE_B)
"""Eager 1F1B, and the order of common trainers."""

ROUNDING = 1e-9
"""Relative tolerance when a bound excludes a placement."""


@dataclass(frozen=True)
class BaselinePlan:
    """The decisions of a plan made by a rule, and its step.

    Attributes
    ----------
    devices, stages, pipelines
        Numbers of devices, stages and pipelines.
    microbatch_samples
        Samples per microbatch.
    order
        Order of operations.
    balanced
        Whether layers are split by the speed of devices; otherwise they are split evenly.
    recompute
        Whether stages recompute activations.
    head
        The stage that runs the head.
    step_s
        Predicted step in seconds.
    start
        The placement.
    """

    devices: int
    stages: int
    pipelines: int
    microbatch_samples: int
    order: str
    balanced: bool
    recompute: bool
    head: Head
    step_s: float
    start: BaselineCandidate = field(compare=False, repr=False)

    def decisions(self) -> dict[str, Any]:
        """Shape, order and step, JSON-ready."""
        names = (field.name for field in fields(self) if field.name != "start")
        return {name: getattr(self, name) for name in names}

    def plan(self) -> TrainingPlan:
        """The plan, on the devices used."""
        shape, assignment, _ = self.start.fitted()
        return straight_plan(self.start.problem, shape, assignment)


@dataclass(frozen=True)
class SearchCounts:
    """Number of candidates by outcome.

    Attributes
    ----------
    simulated
        Simulated.
    excluded
        Excluded by a bound.
    refused
        Refused for lack of memory or another reason; recomputation counts separately.
    left_out
        Not simulated, because the limit was reached.
    """

    simulated: int = 0
    excluded: int = 0
    refused: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class BaselineCandidate:
    """A placement to evaluate.

    Attributes
    ----------
    name
        The best is kept for each name.
    problem
        The request fixes stages and order.
    grid
        ``int[pipelines, stages]``.
    """

    name: str
    problem: PlanningProblem
    grid: NDArray[np.int64]

    def fitted(self) -> tuple[Shape, AssignmentPlan, float]:
        """The placement with its layers, and a bound on its step.

        Returns
        -------
        tuple[Shape, AssignmentPlan, float]
            The shape with its layers, the assignment, and a lower bound in seconds for every order.
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
        return shape, assignment, placement_bound_s(problem, shape, assignment)

    def is_short(self, shape: Shape, assignment: AssignmentPlan) -> bool:
        """Whether memory does not hold all microbatches of a pipeline."""
        problem = self.problem
        room = memory_room(problem.cluster, problem.workload, shape, assignment.groups)
        return min(room.values()) < -(-shape.microbatches // shape.pipelines)

    @property
    def recomputes(self) -> bool:
        """Whether all stages recompute their activations."""
        return self.problem.request.recompute == "all"

    def recomputing(self) -> BaselineCandidate:
        """The candidate with recomputation in all stages."""
        request = self.problem.request.replace(recompute="all")
        return replace(self, problem=replace(self.problem, request=request))


@dataclass(frozen=True)
class SearchOutcomes:
    """The best plan of each name, and counts.

    Attributes
    ----------
    starts
        By name, the candidate of the best plan.
    refusal
        Why the candidate with the most stages and smallest microbatches, which needs least memory,
        was refused; empty if none was.
    """

    best: dict[str, BaselinePlan]
    starts: dict[str, BaselineCandidate]
    tally: SearchCounts
    refusal: str


def search_baselines(
    starts: Iterable[BaselineCandidate],
    most_events: int = MAX_EVENTS,
    is_over: Callable[[], bool] = lambda: False,
) -> SearchOutcomes:
    """Simulate candidates in order of their bounds, until none can be better.

    Where memory does not hold all microbatches of a pipeline, recomputation in all stages is tried
    too. The first candidate of each name is simulated regardless of the limit.
    """
    return _Search(most_events, is_over).run(starts)


class _Search:
    def __init__(self, most_events: int, is_over: Callable[[], bool]) -> None:
        self.left, self.is_over = most_events, is_over
        self.best: dict[str, BaselinePlan] = {}
        self.starts: dict[str, BaselineCandidate] = {}
        self.refusals: list[tuple[tuple[int, int, bool], str]] = []
        self.simulated = self.excluded = self.left_out = 0
        self.queue: list[tuple[float, int, BaselineCandidate, Shape, AssignmentPlan]] = []
        self.queued = 0

    def run(self, starts: Iterable[BaselineCandidate]) -> SearchOutcomes:
        """Evaluate all candidates; after an interruption, return what was found."""
        try:
            self._all(starts)
        except KeyboardInterrupt:
            if not self.best or not INTERRUPTS.requested or INTERRUPTS.forced:
                raise
            INTERRUPTS.finishing = True
        tally = SearchCounts(self.simulated, self.excluded, len(self.refusals), self.left_out)
        _, refusal = max(self.refusals, key=lambda item: item[0], default=(None, ""))
        return SearchOutcomes(self.best, self.starts, tally, refusal)

    def _all(self, starts: Iterable[BaselineCandidate]) -> None:
        for start in starts:
            if self.queue and self.is_over():
                self.left_out += 1
            else:
                self._offer(start)
        while self.queue:
            bound, _, start, shape, assignment = heapq.heappop(self.queue)
            known = self.best.get(start.name)
            if known is not None and bound * (1 - ROUNDING) >= known.step_s:
                self.excluded += 1
            elif known is not None and (_events(shape) > self.left or self.is_over()):
                self.left_out += 1
            else:
                self._simulate(start, shape, assignment)

    def _refuse(self, start: BaselineCandidate, error: ProblemError) -> None:
        stages, small = start.grid.shape[1], -start.problem.workload.microbatch_samples
        self.refusals.append(((stages, small, start.recomputes), str(error)))

    def _offer(self, start: BaselineCandidate) -> None:
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

    def _simulate(self, start: BaselineCandidate, shape: Shape, assignment: AssignmentPlan) -> None:
        problem = start.problem
        try:
            step_s = straight_step_s(problem, shape, assignment)
        except ProblemError as error:
            self._refuse(start, error)
            return
        self.simulated += 1
        self.left -= _events(shape)
        known = self.best.get(start.name)
        if known is None or step_s < known.step_s:
            self.starts[start.name] = start
            self.best[start.name] = BaselinePlan(
                devices=len(problem.cluster),
                stages=shape.stages,
                pipelines=shape.pipelines,
                microbatch_samples=problem.workload.microbatch_samples,
                order=str(problem.request.schedule),
                balanced=not is_uniform(problem.cluster, problem.workload),
                recompute=any(shape.recompute),
                head=shape.head,
                step_s=step_s,
                start=start,
            )


def _events(shape: Shape) -> int:
    """Operations F and B of a step, and its messages."""
    return shape.microbatches * (4 * shape.stages - 2)
