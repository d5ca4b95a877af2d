"""Interface of the computation of one rank, which communication does not depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from torch import Tensor

from planner.executor.comm.device_backend import HOST, DeviceBackend
from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.comm.p2p_schedule import Message
from planner.executor.comm.time_scale import TimeScale
from planner.executor.rendezvous.rank_group import RankGroup
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule


class Operations(Protocol):
    """F, H and B of one rank."""

    @property
    def backend(self) -> DeviceBackend:
        """Backend of the device."""

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Issue F, H or B, and return its output."""


class StageRuntime(Operations, Protocol):
    """Compute of one rank: of a real model, or simulated."""

    def begin(self, step: int, schedule: Schedule) -> None:
        """Begin a step: zero the gradients, and drop what is left of the previous one."""

    def buffer(self, message: Message) -> Tensor:
        """Memory for a message to this rank."""

    @property
    def gradients(self) -> GradientBuffer:
        """The step's gradients, averaged in place."""

    @property
    def tied_numel(self) -> int:
        """Number of leading values of `gradients` that are tied to another stage's."""

    def unscale(self) -> None:
        """Divide the step's gradients by the loss scale, if there is one."""

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without loss scaling."""

    def update(self, norm: float | None) -> None:
        """Take an optimizer step; with loss scaling, skip it unless the global norm is finite.

        In local SGD with this device's own gradients, in two-frequency averaging with the group's.
        """

    def receive_parameters(self) -> None:
        """Use the parameters in `gradients`, if devices update only their share and spread it."""

    def pseudo_gradient_microbatches(self) -> int:
        """Number of microbatches behind the pseudo-gradient of this device, or of its group."""

    def take_snapshot(self) -> None:
        """Snapshot the parameters: `pseudo_gradient` is the change since the last outer step."""

    def pseudo_gradient(self, microbatches: int | None = None) -> Tensor:
        """``float32`` vector on the CPU, averaged in place: the weighted pseudo-gradient.

        From the last outer step to `take_snapshot`; only in local SGD. Calls before `outer_step`
        return the same.
        """

    def outer_step(self) -> None:
        """Apply the outer step with the averaged `pseudo_gradient`."""

    def loss(self) -> float | None:
        """Sum of the losses of the step's microbatches whose head ran here; None if there were
        none."""


class Simulation(Protocol):
    """Simulated compute of a whole run, instead of a model."""

    @property
    def time_scale(self) -> TimeScale:
        """Scale of its times and bytes."""

    def make_runtime(self, plan: TrainingPlan, rank: int) -> StageRuntime:
        """Create the compute of a rank."""

    def make_barrier(self, plan: TrainingPlan, ranks: RankGroup) -> Callable[[str], None]:
        """Create a barrier after which all ranks start at the same time."""


class ModelFreeRuntime:
    """Base of stage runtimes without a model: a vector to average, and no optimizer."""

    backend: DeviceBackend = HOST
    loss_scale: float | None = None
    _vector: Tensor

    @cached_property
    def gradients(self) -> GradientBuffer:
        """The vector; its content is ignored."""
        return GradientBuffer(self._vector)

    def unscale(self) -> None:
        """Do nothing: there is no loss scale."""

    def receive_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    def pseudo_gradient_microbatches(self) -> int:
        """Return 0: microbatches are not counted."""
        return 0

    def take_snapshot(self) -> None:
        """Do nothing: there are no parameters."""

    def pseudo_gradient(self, microbatches: int | None = None) -> Tensor:
        """Return the vector of `gradients`."""
        return self._vector

    def outer_step(self) -> None:
        """Do nothing: in the plan an outer step takes no time."""

    def loss(self) -> float | None:
        """Return None: without a model there is no loss."""
        return None
