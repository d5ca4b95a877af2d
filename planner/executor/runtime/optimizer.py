"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from planner.utils.refusal import Refusal
from planner.utils.validate import choice, count, real

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class OptimizerKind(enum.StrEnum):
    """AdamW as in DiLoCo-SWARM's Table 3, or plain SGD."""

    ADAMW = "adamw"
    SGD = "sgd"


class LRSchedule(enum.StrEnum):
    """Learning rate after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


SETTINGS_OF: dict[str, tuple[enum.StrEnum, tuple[str, ...]]] = {
    "schedule": (LRSchedule.COSINE, ("schedule_steps", "min_lr_ratio")),
    "optimizer": (OptimizerKind.ADAMW, ("weight_decay", "beta1", "beta2", "eps")),
}
"""Fields of `OptimizerConfig` that have an effect with one value of another field alone."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer settings that losses depend on; a resumed run must have the same.

    Attributes
    ----------
    optimizer, schedule
        An `OptimizerKind` and a `LRSchedule`, or their values.
    learning_rate
        Highest learning rate.
    warmup
        Steps of linear warm-up.
    schedule_steps
        ``schedule=cosine``: steps until the lowest rate, including warm-up; 0 otherwise.
    min_lr_ratio
        ``schedule=cosine``: lowest rate over highest.
    weight_decay
        AdamW's, of matrices and embeddings; norms and biases have none.
    """

    learning_rate: float = 1e-3
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    schedule: LRSchedule = LRSchedule.CONSTANT
    warmup: int = 0
    schedule_steps: int = 0
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(
            self, "optimizer", choice(OptimizerKind, "optimizer", self.optimizer, error=Refusal)
        )
        set_field(self, "schedule", choice(LRSchedule, "schedule", self.schedule, error=Refusal))
        for name in ("learning_rate", "min_lr_ratio", "weight_decay", "beta1", "beta2", "eps"):
            set_field(self, name, real(name, getattr(self, name), 0, error=Refusal))
        for name in ("warmup", "schedule_steps"):
            set_field(self, name, count(name, getattr(self, name), 0, error=Refusal))
        for name in ("min_lr_ratio", "beta1", "beta2"):
            value, may_be_one = getattr(self, name), name == "min_lr_ratio"
            if value > 1 or (value == 1 and not may_be_one):
                raise Refusal(
                    f"{name} is {value:g}; it must be {'at most' if may_be_one else 'below'} 1"
                )
        is_cosine = self.schedule is LRSchedule.COSINE
        if is_cosine and self.schedule_steps <= self.warmup:
            raise Refusal(
                f"schedule_steps is {self.schedule_steps} and warmup {self.warmup}; a cosine needs "
                "more steps than its warm-up takes"
            )
        # settings without effect do not count when a run is resumed
        for option, (value, names) in SETTINGS_OF.items():
            for name in names if getattr(self, option) != value else ():
                set_field(self, name, getattr(type(self), name))

    def lr_at(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule is LRSchedule.CONSTANT:
            return self.learning_rate
        progress = min((step - self.warmup) / (self.schedule_steps - self.warmup), 1.0)
        cosine_factor = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine_factor)

    def make(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Create the optimizer of some parameters; `set_lr` sets its rate."""
        import torch  # not needed to validate settings

        rate = self.lr_at(0)
        if self.optimizer is OptimizerKind.SGD:
            return torch.optim.SGD(parameters, lr=rate)
        matrices = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": group_parameters, "weight_decay": decay}
            for group_parameters, decay in ((matrices, self.weight_decay), (others, 0.0))
            if group_parameters
        ]
        # fused: one kernel reads and writes every value once
        return torch.optim.AdamW(
            groups, lr=rate, betas=(self.beta1, self.beta2), eps=self.eps, fused=True
        )

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of a step."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr_at(step)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, by name of the options."""
        return asdict(self)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Moments and step counts of an optimizer."""
    import torch  # not needed to validate settings

    return [torch.as_tensor(v) for state in optimizer.state.values() for v in state.values()]
