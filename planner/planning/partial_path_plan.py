"""A plan whose microbatches skip stages: arrangements and layers are tried in the simulator.

SkipPipe arranges for full pipelines first (3.2) and searches paths then; that is the first trial.
Other layers are tried on it, then an arrangement that is searched together with paths and
averaging. Each trial gets paths with a little effort and is priced as a plan, averaging and full
iterations included; the best one's paths get what is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from planner.planning.evaluation import compute_times, evaluated
from planner.planning.heterogeneous_assignment import match_stages
from planner.planning.partial_path_layers import splits, visited_share
from planner.planning.partial_path_schedules import (
    arranged_problem,
    partial_path_schedules,
    paths_certificate,
)
from planner.planning.placement import evaluate_placement, place_stages
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Layers, Shape, assignment_problem, memory_room, sent_bytes
from planner.planning.straight import eagerly_ordered
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan, PathPlan
from planner.problems.path_method import PathMethod
from planner.search.certificate import Certificate
from planner.search.result import Result
from planner.search.stop import MaxIterations, StoppingCriterion, StopRun
from planner.simulator.resources import LinkResources
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.compute_times import ComputeTimes

ARRANGING, FIRST, TRYING, TOGETHER = 0.25, 0.4, 0.05, 0.05
"""Shares of the limit: the arrangement for full pipelines, its paths with the layers as they are,
trials of other layers, and an arrangement together with paths, which has as much for trials. With
little effort the others must be better than the first with much."""
FULL = 0.25
"""Of the limit for paths, the share of the full ones, at least."""

Groups = tuple[tuple[int, ...], ...]


class PartialPathPlan(NamedTuple):
    """A priced plan and what its parts say of themselves.

    Attributes
    ----------
    plan, shape
        With the layers that were chosen.
    certificates
        Of assignment and paths.
    method, reason
        How it was found, and why the search ended.
    """

    plan: TrainingPlan
    shape: Shape
    certificates: dict[str, Certificate]
    method: str
    reason: str


class _Trial(NamedTuple):
    """A plan, the path solver's results in it, and its step for as many layers as even ones."""

    plan: TrainingPlan
    shape: Shape
    solved: list[Result[PathPlan]]
    merit_s: float


def partial_path_plan(
    problem: PlanningProblem, shape: Shape, stop: StoppingCriterion, run: StopRun
) -> PartialPathPlan:
    """The best plan that was tried."""
    return _Search(problem, shape, stop, run).result()


class _Search:
    """Plans that were tried, the best of them first."""

    def __init__(
        self, problem: PlanningProblem, shape: Shape, stop: StoppingCriterion, run: StopRun
    ) -> None:
        self.problem, self.shape, self.stop, self.run = problem, shape, stop, run
        self.interrupted = False
        self.pricing_s = 0.0  # that the simulator took last; a limit in seconds leaves it
        self.best: _Trial | None = None
        self.refused: ProblemError | None = None
        self.tried: dict[tuple[Groups, Layers], _Trial] = {}

    def result(self) -> PartialPathPlan:
        """All trials, then the best one's paths with what is left."""
        arranged = place_stages(self.problem, self.shape, self.stop.portion(ARRANGING))
        self.interrupted = arranged.certificate.stop_reason == "interrupted"
        groups = arranged.assignment.groups
        self._try(groups, self.shape.layers, FIRST)
        self._try_layers(groups)
        if self.best is not None and self.problem.request.path_method == PathMethod.AUTO:
            other = self._joint(self.best)
            if other is not None:
                self._try_layers(other)
        if self.best is not None:
            self._go_on(self.best, 1 - ARRANGING - FIRST - TOGETHER - 2 * TRYING)
        if self.best is None:
            raise self.refused or ProblemError("no placement of these devices has paths")
        best = self.best
        certificate = arranged.certificate
        same = best.plan.assignment.groups == groups and best.shape.layers == self.shape.layers
        if not same:
            reason = certificate.stop_reason
            certificate = evaluate_placement(self.problem, best.shape, best.plan.assignment, reason)
        paths = paths_certificate(self.problem, best.plan, best.solved, self.run)
        return PartialPathPlan(
            best.plan,
            best.shape,
            {"assignment": certificate, "paths": paths},
            f"{certificate.method}, paths {paths.method}",
            "paths: interrupted" if self.interrupted else f"paths: {paths.stop_reason}",
        )

    def _try_layers(self, groups: Groups) -> None:
        """Every cut of the layers that is worth a try on these devices."""
        several = splits(self.problem, self.shape, groups)
        if self.best is not None:
            several = list(dict.fromkeys([self.best.shape.layers, *several]))
        for layers in several:
            self._try(groups, layers, TRYING / len(several))

    def _joint(self, best: _Trial) -> Groups | None:
        """Devices of every stage, searched with paths, averaging in the cost; or None."""
        from planner.mapf.arrange import arrange_paths

        if self.interrupted or self.run.check() is not None:
            return None
        groups = best.plan.assignment.groups
        subproblem = arranged_problem(self.problem, best.shape)
        found = arrange_paths(subproblem, self.stop.portion(TOGETHER), self.problem.seed, groups)
        self.interrupted |= found.stop_reason == "interrupted"
        return None if found.plan is None else found.plan.groups

    @property
    def over(self) -> bool:
        """Whether what is there will do; another would not be priced in time."""
        late = self.run.check() is not None or self.run.remaining_s < self.pricing_s
        return self.best is not None and (self.interrupted or late)

    def _try(self, groups: Groups, layers: Layers, share: float) -> None:
        """Price a plan with this share of the limit for its paths; keep it if it is better."""
        if self.over or (groups, layers) in self.tried:
            return
        shape = self.shape.with_layers(layers)
        try:
            found = self._priced(shape, self._assigned(shape, groups), share, [])
            self.tried[groups, layers] = self._offer(shape, *found)
        except ProblemError as error:
            self.refused = self.refused or error

    def _go_on(self, trial: _Trial, share: float) -> None:
        """A trial's paths with this share of the limit more."""
        if not self.over:
            assignment = trial.plan.assignment
            self._offer(trial.shape, *self._priced(trial.shape, assignment, share, trial.solved))

    def _offer(self, shape: Shape, plan: TrainingPlan, solved: list[Result[PathPlan]]) -> _Trial:
        # layers that are skipped more often must pay for it: no credit for less training
        even = visited_share(self.problem, self.shape)
        credit = min(1.0, visited_share(self.problem, shape) / even)
        trial = _Trial(plan, shape, solved, plan.predicted.step_s / credit)
        if self.best is None or trial.merit_s < self.best.merit_s:
            self.best = trial
            self.run.found(trial.merit_s, plan)
        return trial

    def _assigned(self, shape: Shape, groups: Groups) -> AssignmentPlan:
        """With a grid where stages are equal, as eq. 1 has it."""
        if len(set(map(len, groups))) > 1:
            return AssignmentPlan.of_groups(groups)
        subproblem = assignment_problem(self.problem.cluster, self.problem.workload, shape)
        return match_stages(subproblem, groups)

    def _priced(
        self,
        shape: Shape,
        assignment: AssignmentPlan,
        share: float,
        before: Sequence[Result[PathPlan]],
    ) -> tuple[TrainingPlan, list[Result[PathPlan]]]:
        """Paths, in the solver's order or in that of devices that serve them in the simulator."""
        problem = self.problem
        times = compute_times(problem, shape, assignment)

        def next_stop(found: Sequence[Result[PathPlan]]) -> StoppingCriterion:
            self.interrupted |= any(one.stop_reason == "interrupted" for one in found)
            if self.interrupted:
                return MaxIterations(0)  # its first paths will do
            part = share * (FULL if found else 1 - FULL)
            left_s = max(0.0, self.run.remaining_s - self.pricing_s)
            return self.stop.portion(part, min(part * self.stop.seconds(), left_s))

        schedules, solved = partial_path_schedules(
            problem, shape, assignment, times, next_stop, before
        )
        began = time.perf_counter()
        made = evaluated(problem, shape, assignment, times, schedules)
        self.pricing_s = time.perf_counter() - began
        in_time = self.run.check() is None and self.run.remaining_s > self.pricing_s
        if problem.request.path_method == PathMethod.AUTO and in_time:
            served = self._served(shape, assignment, times, schedules)
            other = evaluated(problem, shape, assignment, times, served)
            made = min(made, other, key=lambda plan: plan.predicted.step_s)
        return made, solved

    def _served(
        self,
        shape: Shape,
        assignment: AssignmentPlan,
        times: ComputeTimes,
        schedules: Sequence[Schedule],
    ) -> tuple[Schedule, ...]:
        """The same paths, B before H before F as they come in the simulator."""
        problem, groups = self.problem, assignment.groups
        cluster, workload = problem.cluster, problem.workload
        room = memory_room(cluster, workload, shape, groups, problem.request.in_flight)
        sent = sent_bytes(shape.costs(workload), groups, len(cluster))
        links = LinkResources.of(cluster)
        return tuple(eagerly_ordered(one, times, sent, links, room) for one in schedules)
