"""A rank without a stage: it reduces its share of gradients, and does nothing else."""

from __future__ import annotations

import torch

from planner.executor.runtime.stage_module import tied_numel, whole_parameters
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.training_plan.model import TrainingPlan


class Aggregator(StageRuntime):
    """A vector for the gradients of its stage, and no operations."""

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        stage = plan.averages_for[rank]
        numel = sum(parameter.numel() for parameter in whole_parameters(plan, stage).values())
        # a matrix that two stages share is averaged by their devices alone
        self._vector = torch.zeros(numel - tied_numel(plan, stage))

    @property
    def held_bytes(self) -> int:
        """Bytes of the vector."""
        return self._vector.nbytes
