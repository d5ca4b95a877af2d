"""A rank's part of the model whose optimizer state is shared with the other devices of its stage.

Each device has all weights in the format of compute, but fp32 parameters and moments only of those
parts of the stage's vector that it spreads in averaging (ZeRO, stage 1). It updates them with the
reduced gradients and writes the parameters in their place, which are then spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planner.executor.comm.comm_plan import owned_ranges
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig, state_tensors
from planner.executor.runtime.optimizer_segments import MASTER, Segment, fields_in, segments_of
from planner.training_plan.model import TrainingPlan
from planner.training_plan.shares import Range


class OptimizerShard:
    """The parts of a stage's optimizer state that one device holds.

    Parameters
    ----------
    named
        Parameters in the order of the stage's vector.
    ranges
        Parts of that vector.
    device
        Where to hold them.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        ranges: Iterable[Range],
        config: OptimizerConfig,
        device: torch.device,
    ) -> None:
        self._segments = segments_of(named, ranges)
        self._values: list[nn.Parameter] = []
        for segment in self._segments:
            whole = named[segment.name].detach()
            value = whole.reshape(-1)[segment.part].to(device, copy=True)
            # two dimensions for a part of a matrix: norms have no weight decay
            self._values.append(nn.Parameter(value.view(1, -1) if whole.dim() > 1 else value))
        # a share may be empty, which optimizers of PyTorch refuse
        self.optimizer = config.make(self._values or [nn.Parameter(torch.empty(0))])

    @property
    def ranges(self) -> list[Range]:
        """Its parts of the stage's vector."""
        return [segment.range for segment in self._segments]

    def step(self, gradients: Tensor, scratch: Tensor) -> None:
        """Take an optimizer step with the reduced gradients.

        Parameters
        ----------
        scratch
            Vector on the device, at least as long as the share, if the gradients are elsewhere.
        """
        offset = 0
        for segment, value in self._pairs():
            part = gradients[slice(*segment.range)]
            if part.device != value.device:
                part = scratch[offset : offset + value.numel()].copy_(part)
                offset += value.numel()
            value.grad = part.view_as(value)
        self.optimizer.step()
        for value in self._values:
            value.grad = None

    def write(self, vector: Tensor, field: str = MASTER) -> None:
        """Write the parameters, or a field of their state, into the stage's vector."""
        for segment, value in self._pairs():
            held = value.detach() if field == MASTER else self.optimizer.state[value][field]
            vector[slice(*segment.range)].copy_(held.reshape(-1))

    def read(self, vector: Tensor, field: str, optimizer_steps: int) -> None:
        """Read the parameters, or a field of their state, from the stage's vector."""
        for segment, value in self._pairs():
            part = vector[slice(*segment.range)].view_as(value)
            if field == MASTER:
                value.data.copy_(part)
            else:
                state = self.optimizer.state[value]
                state[field] = part.to(value.device, copy=True)
                state["step"] = torch.tensor(float(optimizer_steps), device=value.device)

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and moments."""
        return [*self._values, *state_tensors(self.optimizer)]

    def state_dict(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        tensors = {}
        for segment, value in self._pairs():
            tensors[segment.key(MASTER)] = value.detach().reshape(-1)
            for field, state in self.optimizer.state[value].items():
                tensors[segment.key(field)] = torch.as_tensor(state).reshape(-1)
        return tensors

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore parameters and moments, also from the state of whole parameters."""
        fields = fields_in(state_dict)
        for segment, value in self._pairs():
            with torch.no_grad():
                value.copy_(segment.find(state_dict, MASTER).view_as(value))
            state: dict[str, Any] = {}
            for field in fields:
                found = segment.find(state_dict, field).to(value.device, copy=True)
                state[field] = found.reshape(()) if field == "step" else found.view_as(value)
            self.optimizer.state[value] = state

    def _pairs(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        return zip(self._segments, self._values, strict=True)


class ShardedModelStage(ModelStage):
    """Trains one rank's part of the model, and updates its share of the parameters."""

    def _make_optimizer(self, plan: TrainingPlan, rank: int) -> torch.optim.Optimizer:
        self.shard = self.make_shard(plan, rank)
        return self.shard.optimizer

    def make_shard(self, plan: TrainingPlan, rank: int) -> OptimizerShard:
        """The share of a rank, with the current parameters and no moments."""
        numel = len(self.module.gradients)
        owned = owned_ranges(plan, rank, numel, self.module.tied_numel).values()
        named = dict(self.module.named_in_averaging_order())
        return OptimizerShard(named, owned, self.optimizer_config, self.device)

    def use_shard(self, shard: OptimizerShard) -> None:
        """Update another share from now on."""
        self.shard, self.optimizer = shard, shard.optimizer

    @property
    def _state_tensors(self) -> list[Tensor]:
        # parameters that are only rounded share the memory of their gradients
        weights = {w.untyped_storage().data_ptr(): w for w in self.module.weights}
        weights.pop(self.module.gradients.untyped_storage().data_ptr(), None)
        return [*weights.values(), *self.shard.tensors]

    def update(self, norm: float | None = None) -> None:
        """Take an optimizer step with the reduced gradients, and put parameters in their place."""
        super().update(norm)
        self.write_parameters()

    def write_parameters(self) -> None:
        """Write its share of the fp32 parameters into `gradients`."""
        self.shard.write(self.gradients.current)

    def _apply_gradients(self, scale: float | None) -> None:
        self.optimizer_config.set_lr(self.optimizer, self._step)
        gradients = self.gradients.for_update(self.shard.ranges)
        self.shard.step(gradients, gradients)

    def receive_parameters(self) -> None:
        """Use the parameters that have been spread."""
        self.gradients.to_device()
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                if parameter.data_ptr() != parameter.grad.data_ptr():
                    parameter.copy_(parameter.grad)
        self._after_update()

    def joining_state(self) -> dict[str, Tensor]:
        """The loss scaler's; a joining device receives parameters and its share otherwise."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_joining_state(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `joining_state`."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters, and the optimizer state of this device; after a step."""
        tensors = {f"parameter/{name}": p for name, p in self.module.named_parameters()}
        return tensors | self.shard.state_dict() | self.joining_state()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`, or that of a device with all optimizer state."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state_dict[f"parameter/{name}"])
        self.shard.load_state_dict(state_dict)
        self.load_joining_state(state_dict)
        self.module.cast_weights()
