"""Exchanges of devices that shorten the simulated step of straight pipelines.

Eq. 1 of DT-FM leaves out how pipelines fill and how messages overlap with computation, so that its
optimum need not be the fastest placement, and several may be optimal.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planner.planning.evaluation import straight_plan, straight_step_s
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.search.stop import INTERRUPTED, StoppingCriterion
from planner.training_plan.model import TrainingPlan

MAX_PLACES = 256
"""Pairs of more places are drawn, with repetitions."""
STEPS_PER_EFFORT = 330_000.0
"""Operations that are simulated per unit of effort."""
STEPS_PER_SIMULATION = 330
"""What setting up a simulation takes, in simulated operations."""


def exchange_devices(
    problem: PlanningProblem, shape: Shape, plan: TrainingPlan, stop: StoppingCriterion
) -> tuple[TrainingPlan, bool]:
    """Exchange two devices as long as that shortens the step; stages and layers stay.

    Exchanges are tried in random order, until none shortens the step or the limit is reached. The
    pipelines need not be bottleneck matchings of the stages afterwards (eq. 3). The second result
    is whether Ctrl-C ended it.
    """
    first = best = plan.assignment.grid
    if best is None:
        return plan, False
    run, best_s = stop.start(STEPS_PER_EFFORT), plan.predicted.step_s
    # a limit on iterations counts exchanges, one on effort what they take
    operations = STEPS_PER_SIMULATION + 2 * shape.stages * shape.microbatches
    counted = operations if math.isfinite(run.remaining_effort) else 1
    class_of = DeviceClasses.of(problem.cluster).class_of
    pairs = _pairs(best.size, np.random.default_rng(problem.seed))
    tried, k = 0, 0
    with run.interruptible():
        while tried < len(pairs) and run.check() is None:
            pair = pairs[k % len(pairs)]
            tried, k = tried + 1, k + 1
            one, other = best.flat[pair]
            if class_of[one] == class_of[other]:
                continue
            run.update(counted)
            grid = best.copy()
            grid.flat[pair] = other, one
            seconds = _step_s(problem, shape, AssignmentPlan.of_grid(grid))
            if seconds < best_s * (1 - 1e-9):
                best_s, best, tried = seconds, grid, 0
                run.record_objective(seconds)
    interrupted = run.reason == INTERRUPTED
    if best is first:
        return plan, interrupted
    return straight_plan(problem, shape, AssignmentPlan.of_grid(best)), interrupted


def _pairs(places: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``int[.., 2]``: pairs of places in random order, some of them if there are many."""
    if places > MAX_PLACES:
        return rng.integers(places, size=(MAX_PLACES**2, 2))
    return rng.permutation(np.stack(np.triu_indices(places, 1), axis=1))


def _step_s(problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan) -> float:
    """Seconds of a step, infinite if a stage does not fit."""
    try:
        return straight_step_s(problem, shape, assignment)
    except ProblemError:
        return math.inf
