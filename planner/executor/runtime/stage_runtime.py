"""What a rank computes, apart from who sends what to whom when."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from planner.executor.runtime.device_backend import DeviceBackend
from planner.executor.runtime.p2p_schedule import Message
from planner.training_plan.schedule import Schedule


class Operations(Protocol):
    """F, H and B of one rank."""

    @property
    def side(self) -> DeviceBackend:
        """Where it computes."""

    def operate(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Begin F, H or B and return what goes on to the next operation."""


class StageRuntime(Operations, Protocol):
    """The work of one rank: of a real model, or imposed, which only takes its time."""

    def begin(self, step: int, schedule: Schedule) -> None:
        """A step begins."""

    def buffer(self, message: Message, *, own: bool = False) -> Tensor:
        """Memory for a message to this rank."""

    def gradients(self, *, here: bool | None = None) -> Tensor:
        """``float32`` vector of the step's gradients, to be averaged in place."""

    @property
    def tied_values(self) -> int:
        """Leading values of `gradients` that another stage has too, averaged over both."""

    def update(self) -> None:
        """Take the optimizer step with what `gradients` gave.

        Where devices update by themselves: with this device's own, or on two clocks with the sum.
        """

    def samples(self) -> int:
        """Microbatches of this device, or of all that are as one, in `change`; where counted."""

    def leave(self) -> None:
        """What this device did since the last outer step is what `change` gives from now on."""

    def change(self, samples: int | None = None) -> Tensor:
        """``float32`` vector on the CPU to be summed in place: how far this device's update went.

        From the last outer step to `leave`, with its weight; only where devices update by
        themselves. Asked again before `outer_step`, the same.
        """

    def outer_step(self) -> None:
        """Take the outer step with what `change` gave."""

    def loss(self) -> float | None:
        """The summed loss of the step's microbatches whose head was here; None if it was not."""
