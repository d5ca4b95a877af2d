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


class StageRuntime:
    """Compute of one rank: of a real model, or simulated.

    Without overrides: a vector to average, and neither a model nor an optimizer.

    Attributes
    ----------
    backend
        Backend of the device.
    tied_numel
        Number of leading values of `gradients` that are tied to another stage's.
    """

    backend: DeviceBackend = HOST
    tied_numel: int = 0
    _vector: Tensor

    def begin(self, step: int, schedule: Schedule) -> None:
        """Begin a step: zero the gradients, and drop what is left of the previous one."""

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Issue F, H or B, and return its output."""
        raise NotImplementedError(f"{kind}{microbatch} on a device that holds no stage")

    def buffer(self, message: Message) -> Tensor:
        """Memory for a message to this rank."""
        raise NotImplementedError(f"a message to device {message.destination}, which has no stage")

    @cached_property
    def gradients(self) -> GradientBuffer:
        """The step's gradients, averaged in place."""
        return GradientBuffer(self._vector)

    def unscale(self) -> None:
        """Divide the step's gradients by the loss scale, if there is one."""

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without loss scaling."""
        return None

    def update(self, norm: float | None) -> None:
        """Take an optimizer step; with loss scaling, skip it unless the global norm is finite.

        In local SGD with this device's own gradients, in two-frequency averaging with the group's.
        """

    def receive_parameters(self) -> None:
        """Use the parameters in `gradients`, if devices update only their share and spread it."""

    def pseudo_gradient_microbatches(self) -> int:
        """Number of microbatches behind the pseudo-gradient of this device, or of its group."""
        return 0

    def take_snapshot(self) -> None:
        """Snapshot the parameters: `pseudo_gradient` is the change since the last outer step."""

    def pseudo_gradient(self, microbatches: int | None = None) -> Tensor:
        """``float32`` vector on the CPU, averaged in place: the weighted pseudo-gradient.

        From the last outer step to `take_snapshot`; only in local SGD. Calls before `outer_step`
        return the same.
        """
        return self._vector

    def outer_step(self) -> None:
        """Apply the outer step with the averaged `pseudo_gradient`."""

    def loss(self) -> float | None:
        """Sum of the losses of the step's microbatches whose head ran here; None if there were
        none."""
        return None


class Simulation(Protocol):
    """Simulated compute of a whole run, instead of a model."""

    @property
    def time_scale(self) -> TimeScale:
        """Scale of its times and bytes."""

    def make_runtime(self, plan: TrainingPlan, rank: int) -> StageRuntime:
        """Create the compute of a rank."""

    def make_barrier(self, plan: TrainingPlan, ranks: RankGroup) -> Callable[[str], None]:
        """Create a barrier after which all ranks start at the same time."""
