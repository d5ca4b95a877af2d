"""A rank without a stage that updates its share of a stage's parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from planner.executor.comm.comm_plan import owned_ranges
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.sharded_model_stage import OptimizerShard
from planner.executor.runtime.stage_module import (
    LoadWeights,
    require_executable,
    tied_numel,
    whole_parameters,
)
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule


class ShardedAggregator(Aggregator):
    """The sums of a stage's gradients, and the optimizer state of some of its parameters.

    Parameters
    ----------
    load_weights
        As for `ModelStage`.
    """

    data = outer = None

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        optimizer_config: OptimizerConfig,
        load_weights: LoadWeights | None = None,
    ) -> None:
        super().__init__(plan, rank)
        stage = plan.averages_for[rank]
        # the initial parameters of the whole stage, of which its share is kept
        named = whole_parameters(plan, stage, torch.device("cpu"))
        if load_weights is not None:
            load_weights(require_executable(plan), *plan.stage_layers[stage], named)
        # a matrix that two stages share is averaged by their devices alone
        self.parameter_names = list(named)[tied_numel(plan, stage) > 0 :]
        self._shard = OptimizerShard(
            {name: named[name] for name in self.parameter_names},
            owned_ranges(plan, rank, len(self._vector), 0).values(),
            optimizer_config,
            self._vector.device,
        )
        self._optimizer_config, self._step = optimizer_config, 0
        self._scales_loss = plan.workload.precision.scales_loss

    @property
    def held_bytes(self) -> int:
        """Bytes of the vector and its share of the optimizer state."""
        return self._vector.nbytes + sum(tensor.nbytes for tensor in self._shard.tensors)

    def begin(self, step: int, schedule: Schedule) -> None:
        """Note the step, which the learning rate depends on."""
        self._step = step

    def update(self, norm: float | None) -> None:
        """Take an optimizer step, unless a gradient overflowed, and put parameters in its place."""
        if not self._scales_loss or (norm is not None and math.isfinite(norm)):
            self._optimizer_config.set_lr(self._shard.optimizer, self._step)
            self._shard.step(self._vector, self._vector)
        self.write_parameters()

    def write_parameters(self) -> None:
        """Write its share of the fp32 parameters into `gradients`."""
        self._shard.write(self.gradients.current)

    def state_dict(self) -> dict[str, Tensor]:
        """Its share of parameters and optimizer state."""
        return self._shard.state_dict()

    def host_state_dict(self) -> dict[str, Tensor]:
        """A copy of `state_dict`."""
        return {name: value.clone() for name, value in self.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore its share from its own state, or from that of the whole stage."""
        self._shard.load_state_dict(state_dict)
