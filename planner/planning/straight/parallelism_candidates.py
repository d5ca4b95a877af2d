"""ShapeRow numbers of stages, pipelines and microbatch sizes (DT-FM, 10.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.planning.problem import PlanningProblem
from planner.search.result import Result
from planner.training_plan.alternative import Alternative
from planner.training_plan.model import TrainingPlan
from planner.utils.text import counted
from planner.workload.workload import Workload

NO_SHAPE = "no number of stages divides devices and layers"
"""Message if there are no `candidates`."""


@dataclass(frozen=True)
class ShapeRow:
    """A combination of stages, pipelines and microbatch size that was tried.

    Attributes
    ----------
    stages, pipelines
        Number of stages and pipelines.
    microbatch_samples
        Samples per microbatch.
    step_s
        Predicted step time in seconds; None if it was refused.
    bound_s
        Lower bound for every placement of this shape.
    refused
        Why it was refused, for instance for lack of memory.
    """

    stages: int
    pipelines: int
    microbatch_samples: int
    step_s: float | None
    bound_s: float | None
    refused: str = ""

    @classmethod
    def of(cls, problem: PlanningProblem, result: Result[TrainingPlan]) -> ShapeRow:
        """A shape with its planned step."""
        return replace(cls.refusal(problem, ""), step_s=result.objective, bound_s=result.bound)

    @classmethod
    def refusal(cls, problem: PlanningProblem, why: str) -> ShapeRow:
        """A shape that was refused."""
        stages = problem.request.stages
        assert isinstance(stages, int)
        samples = problem.workload.microbatch_samples
        return cls(stages, len(problem.cluster) // stages, samples, None, None, why)

    @property
    def why(self) -> str:
        """The reason for the refusal, without the remedy."""
        return self.refused.split(";")[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Stages, pipelines and samples of a microbatch."""
        return self.stages, self.pipelines, self.microbatch_samples

    def rank(self) -> tuple[bool, float, int, int]:
        """Sort key: fastest first, refused ones last."""
        return self.step_s is None, self.step_s or 0.0, self.stages, self.microbatch_samples


def runners_up(plan: TrainingPlan, table: Sequence[ShapeRow]) -> tuple[Alternative, ...]:
    """Shapes that were tried and not chosen."""
    groups = plan.assignment.groups
    taken = _shape(len(groups), len(groups[0]), plan.workload.microbatch_samples)
    shapes = [(candidate, _shape(*candidate.shape)) for candidate in table]
    return tuple(
        Alternative(taken, shape, candidate.step_s, why=candidate.why)
        for candidate, shape in shapes
        if shape != taken
    )


def _shape(stages: int, pipelines: int, samples: int) -> str:
    return (
        f"{counted(stages, 'stage')} x {counted(pipelines, 'pipeline')}, microbatches of {samples}"
    )


def candidates(problem: PlanningProblem) -> list[PlanningProblem]:
    """The problem with every number of stages and microbatch size that divides devices and batch.

    Microbatches have the requested size, or the workload's size times a power of two, as long as
    every pipeline gets one.
    """
    n, workload = len(problem.cluster), problem.workload
    fixed, batch = problem.request.microbatch_samples is not None, workload.batch_samples
    problems = []
    # one workload for each size, which caches its costs
    workloads: dict[int, Workload] = {}
    for stages in range(1, min(n, len(workload.layers)) + 1):
        if n % stages:
            continue
        size = workload.microbatch_samples
        while batch % size == 0 and batch // size >= n // stages:
            if size not in workloads:
                workloads[size] = workload.replace(microbatch_samples=size)
            problems.append(
                replace(
                    problem,
                    workload=workloads[size],
                    request=problem.request.replace(stages=stages),
                )
            )
            if fixed:
                break
            size *= 2
    return problems
