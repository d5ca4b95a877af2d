"""Plans whose microbatches skip stages: placements and layers are tried in the simulator.

SkipPipe places stages for full pipelines (3.2) and then searches paths; that is the first trial.
Then other layers are tried, and a placement that is searched jointly with paths and averaging. Each
trial gets paths with a little effort and is simulated with averaging and full iterations; the best
one's paths get the remaining effort.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from planner.matching.stages import match_stages
from planner.planning.evaluation import compute_times, evaluated
from planner.planning.partial_paths.layers import splits, visited_share
from planner.planning.partial_paths.schedules import (
    arranged_problem,
    partial_path_schedules,
    paths_certificate,
)
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Layers, Shape, assignment_problem, memory_room, sent_bytes
from planner.planning.straight.placement import evaluate_placement, place_stages
from planner.planning.straight.schedules import eagerly_ordered
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan, PathPlan
from planner.problems.path_method import PathMethod
from planner.search.certificate import Certificate
from planner.search.result import Result
from planner.search.stop import MaxIterations, SearchRun, StoppingCriterion
from planner.simulator.resources import LinkResources
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.compute_times import ComputeTimes

PLACEMENT_SHARE, FIRST_PATHS_SHARE, LAYERS_SHARE, JOINT_SHARE = 0.25, 0.4, 0.05, 0.05
"""Shares of the limit: placement for full pipelines, its paths with the initial layers, trials of
other layers, and a joint placement, which gets as much for trials. The others, with little effort,
must beat the first with much."""
MIN_FULL_SHARE = 0.25
"""Smallest share of the limit for paths that full paths get."""

Groups = tuple[tuple[int, ...], ...]


class PlannedShape(NamedTuple):
    """A simulated plan of one shape, the certificates of its parts, and how it was found.

    Attributes
    ----------
    plan, shape
        With the chosen layers.
    certificates
        Of assignment and, with partial paths, of paths.
    method, reason
        How it was found, and why the search ended.
    """

    plan: TrainingPlan
    shape: Shape
    certificates: dict[str, Certificate]
    method: str
    reason: str


class _Trial(NamedTuple):
    """A plan, its solved paths, and its step time scaled to the layers of an even split."""

    plan: TrainingPlan
    shape: Shape
    solved: list[Result[PathPlan]]
    scaled_step_s: float


def partial_path_plan(
    problem: PlanningProblem, shape: Shape, stop: StoppingCriterion, run: SearchRun
) -> PlannedShape:
    """The best plan that was tried."""
    return _Search(problem, shape, stop, run).result()


class _Search:
    """Plans that were tried, and the best one."""

    def __init__(
        self, problem: PlanningProblem, shape: Shape, stop: StoppingCriterion, run: SearchRun
    ) -> None:
        self.problem, self.shape, self.stop, self.run = problem, shape, stop, run
        self.interrupted = False
        self.simulation_s = 0.0  # that the simulator took last; a limit in seconds leaves it
        self.best: _Trial | None = None
        self.refused: ProblemError | None = None
        self.tried: dict[tuple[Groups, Layers], _Trial] = {}

    def result(self) -> PlannedShape:
        """All trials, then the best one's paths with the remaining limit."""
        placement = place_stages(self.problem, self.shape, self.stop.portion(PLACEMENT_SHARE))
        self.interrupted = placement.certificate.stop_reason == "interrupted"
        groups = placement.assignment.groups
        self._try(groups, self.shape.layers, FIRST_PATHS_SHARE)
        self._try_layers(groups)
        if self.best is not None and self.problem.request.path_method == PathMethod.AUTO:
            other = self._joint(self.best)
            if other is not None:
                self._try_layers(other)
        if self.best is not None:
            self._improve_paths(
                self.best, 1 - PLACEMENT_SHARE - FIRST_PATHS_SHARE - JOINT_SHARE - 2 * LAYERS_SHARE
            )
        if self.best is None:
            raise self.refused or ProblemError("no placement of these devices has paths")
        best = self.best
        certificate = placement.certificate
        same = best.plan.assignment.groups == groups and best.shape.layers == self.shape.layers
        if not same:
            reason = certificate.stop_reason
            certificate = evaluate_placement(self.problem, best.shape, best.plan.assignment, reason)
        paths = paths_certificate(self.problem, best.plan, best.solved, self.run)
        return PlannedShape(
            best.plan,
            best.shape,
            {"assignment": certificate, "paths": paths},
            f"{certificate.method}, paths {paths.method}",
            "paths: interrupted" if self.interrupted else f"paths: {paths.stop_reason}",
        )

    def _try_layers(self, groups: Groups) -> None:
        """Try every promising split of the layers on these devices."""
        candidates = splits(self.problem, self.shape, groups)
        if self.best is not None:
            candidates = list(dict.fromkeys([self.best.shape.layers, *candidates]))
        for layers in candidates:
            self._try(groups, layers, LAYERS_SHARE / len(candidates))

    def _joint(self, best: _Trial) -> Groups | None:
        """Stages searched jointly with paths and averaging, or None."""
        from planner.mapf.arrange import arrange_paths

        if self.interrupted or self.run.check() is not None:
            return None
        groups = best.plan.assignment.groups
        subproblem = arranged_problem(self.problem, best.shape)
        result = arrange_paths(
            subproblem, self.stop.portion(JOINT_SHARE), self.problem.seed, groups
        )
        self.interrupted |= result.stop_reason == "interrupted"
        return None if result.plan is None else result.plan.groups

    @property
    def is_over(self) -> bool:
        """Whether the result will do: no other could be simulated in time."""
        late = self.run.check() is not None or self.run.remaining_s < self.simulation_s
        return self.best is not None and (self.interrupted or late)

    def _try(self, groups: Groups, layers: Layers, share: float) -> None:
        """Build a plan with this share of the limit for its paths; keep it if it is better."""
        if self.is_over or (groups, layers) in self.tried:
            return
        shape = self.shape.with_layers(layers)
        try:
            planned = self._evaluated(shape, self._assignment(shape, groups), share, [])
            self.tried[groups, layers] = self._offer(shape, *planned)
        except ProblemError as error:
            self.refused = self.refused or error

    def _improve_paths(self, trial: _Trial, share: float) -> None:
        """Improve a trial's paths with this share of the limit."""
        if not self.is_over:
            assignment = trial.plan.assignment
            self._offer(trial.shape, *self._evaluated(trial.shape, assignment, share, trial.solved))

    def _offer(self, shape: Shape, plan: TrainingPlan, solved: list[Result[PathPlan]]) -> _Trial:
        # scale by the layers visited: skipping more layers must not count as faster
        even = visited_share(self.problem, self.shape)
        credit = min(1.0, visited_share(self.problem, shape) / even)
        trial = _Trial(plan, shape, solved, plan.predicted.step_s / credit)
        if self.best is None or trial.scaled_step_s < self.best.scaled_step_s:
            self.best = trial
            self.run.notify_incumbent(trial.scaled_step_s, plan)
        return trial

    def _assignment(self, shape: Shape, groups: Groups) -> AssignmentPlan:
        """With a grid if stages are equal, as eq. 1 has it."""
        if len(set(map(len, groups))) > 1:
            return AssignmentPlan.of_groups(groups)
        subproblem = assignment_problem(self.problem.cluster, self.problem.workload, shape)
        return match_stages(subproblem, groups)

    def _evaluated(
        self,
        shape: Shape,
        assignment: AssignmentPlan,
        share: float,
        before: Sequence[Result[PathPlan]],
    ) -> tuple[TrainingPlan, list[Result[PathPlan]]]:
        """Paths in the solver's order, or in the order in which simulated devices serve them."""
        problem = self.problem
        times = compute_times(problem, shape, assignment)

        def next_stop(solved: Sequence[Result[PathPlan]]) -> StoppingCriterion:
            self.interrupted |= any(result.stop_reason == "interrupted" for result in solved)
            if self.interrupted:
                return MaxIterations(0)  # its first paths will do
            part = share * (MIN_FULL_SHARE if solved else 1 - MIN_FULL_SHARE)
            left_s = max(0.0, self.run.remaining_s - self.simulation_s)
            return self.stop.portion(part, min(part * self.stop.seconds(), left_s))

        schedules, solved = partial_path_schedules(
            problem, shape, assignment, times, next_stop, before
        )
        began = time.perf_counter()
        plan = evaluated(problem, shape, assignment, times, schedules)
        self.simulation_s = time.perf_counter() - began
        in_time = self.run.check() is None and self.run.remaining_s > self.simulation_s
        if problem.request.path_method == PathMethod.AUTO and in_time:
            served = self._served_eagerly(shape, assignment, times, schedules)
            other = evaluated(problem, shape, assignment, times, served)
            plan = min(plan, other, key=lambda plan: plan.predicted.step_s)
        return plan, solved

    def _served_eagerly(
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
        return tuple(eagerly_ordered(schedule, times, sent, links, room) for schedule in schedules)
