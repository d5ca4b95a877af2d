"""What the clock says of a plan, in the form in which it is compared."""

from __future__ import annotations

from dataclasses import dataclass

from planner.clock.simulator import simulate_cycle
from planner.clock.timeline import Timeline
from planner.training_plan.model import Predicted, TrainingPlan


@dataclass(frozen=True)
class Prediction:
    """A plan on the clock.

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
    """The plan on its own cluster and workload.

    Parameters
    ----------
    plan
        What is priced.

    Returns
    -------
    Prediction
        Computed now, whatever the plan's file says.
    """
    return Prediction(*simulate_cycle(plan))
