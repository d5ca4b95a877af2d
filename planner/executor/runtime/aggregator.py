"""A rank without a stage: it reduces its share of gradients, and does nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.executor.comm.p2p_schedule import Message
from planner.executor.runtime.stage_module import tied_numel, whole_parameters
from planner.executor.runtime.stage_runtime import ModelFreeRuntime
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule


class Aggregator(ModelFreeRuntime):
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

    def begin(self, step: int, schedule: Schedule) -> None:
        """Do nothing: there are no parameters."""

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Not called: it has no operations."""
        raise NotImplementedError(f"{kind}{microbatch} on a device that holds no stage")

    def buffer(self, message: Message) -> Tensor:
        """Not called: it has no operations."""
        raise NotImplementedError(f"a message to device {message.destination}, which has no stage")

    @property
    def tied_numel(self) -> int:
        """0: only devices with a stage average tied parameters."""
        return 0

    def update(self, norm: float | None) -> None:
        """Do nothing: there are no parameters."""
