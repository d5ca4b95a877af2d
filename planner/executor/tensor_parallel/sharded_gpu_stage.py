"""A worker's stage whose optimizer state is shared with the other devices of the stage.

The GPUs of the worker own equal parts of the device's share of the stage's vector, whichever GPU
has these parameters: gradients and updated parameters pass through the exchanged vector anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.executor.comm.comm_plan import owned_ranges
from planner.executor.comm.group_roles import chunk_ranges
from planner.executor.runtime.optimizer_segments import MASTER, MOMENTS, fields_in, segments_of
from planner.executor.runtime.sharded_model_stage import OptimizerShard, ShardedModelStage
from planner.executor.tensor_parallel.gpu_stage import (
    OWNED,
    PARAMETER,
    GpuStage,
    LeaderStage,
)
from planner.training_plan.model import TrainingPlan


class ShardedGpuStage(ShardedModelStage, GpuStage):
    """One GPU's part of a stage, and of the worker's share of its optimizer state."""

    def _make_optimizer(self, plan: TrainingPlan, rank: int) -> torch.optim.Optimizer:
        self._write(self.module.named_parameters())
        self.group.barrier()
        owned = owned_ranges(plan, rank, len(self.exchanged), self.module.tied_numel).values()
        self._owned = segments_of(self._whole, owned)
        # of several pieces the last one has an element if any has: the leader's
        own = [chunk_ranges(part, self.group.size)[-1 - self.group.index] for part in owned]
        self.shard = OptimizerShard(self._whole, own, self.optimizer_config, self.device)
        # before anything else is written there
        self.group.barrier()
        return self.shard.optimizer

    def update_part(self, scale: float, averaged: bool) -> None:
        """Update this GPU's part of the share with the reduced gradients."""
        self.optimizer_config.set_lr(self.optimizer, self._step)
        # this GPU's gradients have been collected
        self.shard.step(self.exchanged, self.module.gradients)

    def write_state(self, field: str) -> None:
        """Write weights, or a field of the share, into the exchanged vector."""
        if field == PARAMETER:
            super().write_state(field)
            return
        self.shard.write(self.exchanged, _field_of_share(field))
        self.group.barrier()

    def read_state(self, field: str, optimizer_steps: int) -> None:
        """Read weights, or a field of the share, from the exchanged vector."""
        if field == PARAMETER:
            super().read_state(field, optimizer_steps)
            return
        self.shard.read(self.exchanged, _field_of_share(field), optimizer_steps)
        self.group.barrier()


class ShardedLeaderStage(ShardedGpuStage, LeaderStage):
    """As `LeaderStage`, with a share of the optimizer state in place of all of it."""

    def _apply_gradients(self, scale: float | None) -> None:
        self._worker_gradients.to_host()
        self._all("update_part", 1.0, True)

    def write_parameters(self) -> None:
        """Write the worker's share of the fp32 parameters into `gradients`."""
        self._worker_gradients.to_host()
        self._gather(OWNED)

    def receive_parameters(self) -> None:
        """Use the parameters that have been spread, on all GPUs."""
        self._spread(PARAMETER)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of all parameters and of the worker's share, as of a device with one GPU."""
        self._gather(PARAMETER)
        tensors = {f"{PARAMETER}/{name}": whole.clone() for name, whole in self._whole.items()}
        # every GPU has taken as many steps; a part of the share that is not empty has the first
        state: Mapping[str, Any] = next(iter(self.optimizer.state.values()), {})
        for field in (OWNED, *(field for field in MOMENTS if field in state)):
            self._gather(field)
            for segment in self._owned:
                part = self.exchanged[slice(*segment.range)]
                tensors[segment.key(_field_of_share(field))] = part.clone()
        if "step" in state:
            step = torch.as_tensor(state["step"]).cpu().reshape(-1)
            tensors |= {segment.key("step"): step.clone() for segment in self._owned}
        return tensors | self.joining_state()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`, or that of a device with all optimizer state."""
        for name, whole in self._whole.items():
            whole.copy_(state_dict[f"{PARAMETER}/{name}"])
        self._spread(PARAMETER)
        fields, steps = fields_in(state_dict), 0
        if "step" in fields and self._owned:
            steps = int(self._owned[0].find(state_dict, "step"))
        for field in (OWNED, *(field for field in MOMENTS if field in fields)):
            for segment in self._owned:
                part = segment.find(state_dict, _field_of_share(field))
                self.exchanged[slice(*segment.range)].copy_(part)
            self._spread(field, steps)
        self.load_joining_state(state_dict)

    def _spread_loaded(self) -> None:
        super()._spread_loaded()
        self._spread(OWNED)


def _field_of_share(field: str) -> str:
    """A field of the state as `OptimizerShard` and checkpoints call it."""
    return MASTER if field == OWNED else field
