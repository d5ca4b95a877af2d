"""A rank's part of the model whose optimizer state is shared with the other devices of its stage.

Each device has all weights in the format of compute, but fp32 parameters and moments only of those
parts of the stage's vector that it spreads in averaging (ZeRO, stage 1). It updates them with the
reduced gradients and writes the parameters in their place, which are then spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.executor.comm.comm_plan import owned_ranges
from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig, state_tensors
from planner.executor.runtime.optimizer_segments import MASTER, segment_key, segment_of
from planner.training_plan.model import TrainingPlan
from planner.training_plan.shares import Range


class _Segment(NamedTuple):
    """A part of a parameter that a device updates.

    Attributes
    ----------
    start
        Its first element in the flattened parameter.
    range
        Its place in the stage's vector.
    value
        fp32 values, of two dimensions if it is part of a matrix: norms have no weight decay.
    """

    name: str
    start: int
    range: Range
    value: nn.Parameter


class OptimizerShard:
    """The parts of a stage's optimizer state that one device holds.

    Parameters
    ----------
    named
        Parameters in the order of the stage's vector.
    ranges
        Parts of that vector.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        ranges: Sequence[Range],
        config: OptimizerConfig,
    ) -> None:
        self.segments = [segment for part in ranges for segment in _segments(named, part)]
        # a share may be empty, which optimizers of PyTorch refuse
        values = [segment.value for segment in self.segments]
        self.optimizer = config.make(values or [nn.Parameter(torch.empty(0))])

    def step(self, gradients: GradientBuffer) -> None:
        """Take an optimizer step with the reduced gradients."""
        for segment in self.segments:
            part = gradients.device_tensor[slice(*segment.range)]
            if gradients.current is not gradients.device_tensor:
                part.copy_(gradients.current[slice(*segment.range)])
            segment.value.grad = part.view_as(segment.value)
        self.optimizer.step()
        for segment in self.segments:
            segment.value.grad = None

    def write(self, vector: Tensor) -> None:
        """Write the parameters into the vector."""
        for segment in self.segments:
            vector[slice(*segment.range)].copy_(segment.value.detach().reshape(-1))

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and moments."""
        return [*(segment.value for segment in self.segments), *state_tensors(self.optimizer)]

    def state_dict(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        tensors = {}
        for name, start, _, value in self.segments:
            tensors[segment_key(MASTER, name, start)] = value.detach().reshape(-1)
            for field, state in self.optimizer.state[value].items():
                tensors[segment_key(field, name, start)] = torch.as_tensor(state).reshape(-1)
        return tensors

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore parameters and moments, also from the state of whole parameters."""
        kinds = {key.rpartition("/")[0].rpartition("/")[2] for key in state_dict}
        fields = [field for field in ("step", "exp_avg", "exp_avg_sq") if field in kinds]
        for name, start, _, value in self.segments:
            part = slice(start, start + value.numel())
            with torch.no_grad():
                value.copy_(segment_of(state_dict, MASTER, name, part).view_as(value))
            state: dict[str, Any] = {}
            for field in fields:
                found = segment_of(state_dict, field, name, part).to(value.device, copy=True)
                state[field] = found.reshape(()) if field == "step" else found.view_as(value)
            self.optimizer.state[value] = state


def _segments(named: Sequence[tuple[str, nn.Parameter]], part: Range) -> Iterator[_Segment]:
    """Parts of parameters in a part of the vector."""
    offset = 0
    for name, parameter in named:
        begin = max(part[0], offset)
        end = min(part[1], offset + parameter.numel())
        if begin < end:
            values = parameter.detach().reshape(-1)[begin - offset : end - offset].clone()
            value = nn.Parameter(values.view(1, -1) if parameter.dim() > 1 else values)
            yield _Segment(name, begin - offset, (begin, end), value)
        offset += parameter.numel()


class ShardedModelStage(ModelStage):
    """Trains one rank's part of the model, and updates its share of the parameters."""

    def _make_optimizer(self, plan: TrainingPlan, rank: int) -> torch.optim.Optimizer:
        numel = len(self.module.gradients)
        owned = owned_ranges(plan, rank, numel, self.module.tied_numel).values()
        named = self.module.named_in_averaging_order()
        self._shard = OptimizerShard(named, list(owned), self.optimizer_config)
        return self._shard.optimizer

    @property
    def _state_tensors(self) -> list[Tensor]:
        # parameters that are only rounded share the memory of their gradients
        weights = {w.untyped_storage().data_ptr(): w for w in self.module.weights}
        weights.pop(self.module.gradients.untyped_storage().data_ptr(), None)
        return [*weights.values(), *self._shard.tensors]

    def update(self, norm: float | None = None) -> None:
        """Take an optimizer step with the reduced gradients, and put parameters in their place."""
        super().update(norm)
        self.write_parameters()

    def write_parameters(self) -> None:
        """Write its share of the fp32 parameters into `gradients`."""
        self._shard.write(self.gradients.current)

    def _apply_gradients(self, scale: float | None) -> None:
        self.optimizer_config.set_lr(self.optimizer, self._step)
        self._shard.step(self.gradients)

    def receive_parameters(self) -> None:
        """Use the parameters that have been spread."""
        self.gradients.to_device()
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                if parameter.data_ptr() != parameter.grad.data_ptr():
                    parameter.copy_(parameter.grad)
        self._after_update()

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters, and the optimizer state of this device; after a step."""
        tensors = {f"parameter/{name}": p for name, p in self.module.named_parameters()}
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return tensors | self._shard.state_dict() | scaler

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`, or that of a device with all optimizer state."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state_dict[f"parameter/{name}"])
        self._shard.load_state_dict(state_dict)
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict)
        self.module.cast_weights()
