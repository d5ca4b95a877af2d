"""The simulator's prediction in the form that is compared."""

from __future__ import annotations

from dataclasses import dataclass

from planner.simulator.host_prediction import executable_workload
from planner.simulator.simulator import simulate_cycle
from planner.simulator.timeline import Timeline
from planner.training_plan.model import Predicted, TrainingPlan
from planner.workload.calibration import Calibration


@dataclass(frozen=True)
class Prediction:
    """A plan in the simulator.

    Attributes
    ----------
    parts
        Pipeline, averaging and step.
    timelines
        A step from rest of every schedule.
    """

    parts: Predicted
    timelines: tuple[Timeline, ...]


def predict(plan: TrainingPlan) -> Prediction:
    """The plan on its own cluster and workload."""
    return Prediction(*simulate_cycle(plan))


def predict_here(plan: TrainingPlan, calibration: Calibration) -> Prediction:
    """The plan on its own network, computed by all ranks on this machine's processors."""
    workload, ids = executable_workload(plan), plan.cluster.network.ids
    times = calibration.compute_times(
        ids,
        workload,
        plan.assignment.groups,
        plan.stage_layers,
        plan.recompute,
        plan.head_stage,
    )
    here = plan.replace(compute_times=times, workload=workload)
    return Prediction(*simulate_cycle(here, cores=calibration.at_once))
