"""Prediction of the simulator, in the form used for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from planner.simulator.host_prediction import executable_workload
from planner.simulator.simulator import simulate_cycle
from planner.simulator.timeline import Timeline
from planner.training_plan.model import Predicted, TrainingPlan
from planner.workload.calibration import Calibration


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a plan.

    Attributes
    ----------
    parts
        Pipeline, averaging and step times.
    timelines
        Timeline of a step on an idle system, for every schedule.
    """

    parts: Predicted
    timelines: tuple[Timeline, ...]


def predict(plan: TrainingPlan) -> Prediction:
    """Predict a plan on its own cluster."""
    return Prediction(*simulate_cycle(plan))


def predict_here(plan: TrainingPlan, calibration: Calibration) -> Prediction:
    """Predict a plan on its own network, with all ranks computing on this machine's CPUs."""
    workload, ids = executable_workload(plan), plan.cluster.network.ids
    times = calibration.compute_times(
        ids,
        workload,
        plan.assignment.groups,
        plan.stage_layers,
        plan.recompute,
        plan.head_stage,
    )
    local_plan = plan.replace(compute_times=times, workload=workload)
    return Prediction(*simulate_cycle(local_plan, cores=calibration.at_once))
