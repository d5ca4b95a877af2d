"""Averaging interval and outer optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.training_plan import coercion
from planner.training_plan.choices import OuterStep
from planner.training_plan.error import PlanError
from planner.utils.validate import choice, count, instance_of, real

MAX_EVERY = 1_000_000
"""Largest averaging interval in steps."""


@dataclass(frozen=True)
class OuterOptimizer:
    """DiLoCo's outer optimizer; defaults as in DiLoCo-SWARM's Table 3.

    Attributes
    ----------
    optimizer
        An `OuterStep` or its value.
    learning_rate
        Applied to the mean change of the parameters.
    momentum
        ``>= 0``.

    References
    ----------
    M. Senghaas et al., "DiLoCo-SWARM" (2025), after A. Douillard et al., "DiLoCo" (2023).
    """

    optimizer: OuterStep = OuterStep.NESTEROV
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        # normalise numbers, so that equal plans have equal hashes
        kind = choice(OuterStep, "outer optimizer", self.optimizer, error=PlanError)
        object.__setattr__(self, "optimizer", kind)
        for name in ("learning_rate", "momentum"):
            number = real(f"outer {name}", getattr(self, name), 0, error=PlanError)
            object.__setattr__(self, name, number)
        if self.learning_rate == 0:
            raise PlanError("outer learning_rate is 0; give a number above 0")
        if self.momentum >= 1:
            raise PlanError(
                f"outer momentum is {self.momentum:g}; it must be below 1, or steps grow for ever"
            )


@dataclass(frozen=True)
class Sync:
    """Averaging every ``every_steps`` steps: of gradients or, above 1, of changes of parameters.

    With H > 1 each device takes an optimizer step of its own in every step, with the mean gradient
    of the samples that passed it (none if no sample did), and keeps its optimizer state. Devices of
    a group that averages `within` act as one, with the mean gradient over all their samples, and
    stay equal. After H steps the pseudo-gradients, old minus new parameters, are averaged in the
    plan's rounds, weighted by the device's share of its stage's samples in these steps (equal
    weights give the paper's mean). The outer optimizer applies the mean to the old parameters,
    identically on all devices of the stage.

    Attributes
    ----------
    every_steps
        H, at least 1.
    outer
        Outer optimizer. None: with H > 1 training continues from the mean of the parameters (a rate
        of 1, no momentum); with H = 1 there is no outer step.
    delayed
        Whether averaging overlaps with the following step, at whose end the outer step is applied.
        With y a device's parameters when averaging starts, z those after the following inner step
        and x the result of the outer step, the device continues from x + (z - y); z - y counts as a
        change of the next H steps.

    References
    ----------
    M. Senghaas et al., "DiLoCo-SWARM" (2025), Algorithm 3.
    """

    every_steps: int = 1
    outer: OuterOptimizer | None = None
    delayed: bool = False

    def __post_init__(self) -> None:
        interval = count("every_steps", self.every_steps, most=MAX_EVERY, error=PlanError)
        object.__setattr__(self, "every_steps", interval)
        if self.outer is not None:
            instance_of(OuterOptimizer, self.outer, "outer", error=PlanError)
        object.__setattr__(self, "delayed", coercion.flag("delayed", self.delayed))
        if self.delayed and not self.local_steps:
            raise PlanError(
                "sync.delayed: averages changes of parameters a step later, found gradients "
                "averaged every step; give every_steps above 1, or outer"
            )

    @property
    def local_steps(self) -> bool:
        """Whether devices take optimizer steps of their own between averagings."""
        return self.every_steps > 1 or self.outer is not None

    def due(self, step: int) -> bool:
        """Whether devices average after a step."""
        return (step + 1) % self.every_steps == 0

    def has_pending_outer_step(self, steps: int) -> bool:
        """Whether the last of ``steps`` steps started an averaging that overlaps with the next
        step."""
        return self.delayed and steps > 0 and self.due(steps - 1)

    def mean_s(self, local_step_s: float, averaging_step_s: float, num_averaging: int = 1) -> float:
        """Mean seconds of a step over H steps."""
        h = self.every_steps
        return ((h - num_averaging) * local_step_s + num_averaging * averaging_step_s) / h

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; ``delayed`` only if true."""
        data = asdict(self)
        if not self.delayed:
            del data["delayed"]
        return data
