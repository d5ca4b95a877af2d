"""How often gradients are averaged, and the outer optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.training_plan import coercion
from planner.training_plan.choices import OuterStep
from planner.training_plan.error import PlanError
from planner.utils.validate import choice, count, instance_of, real

MOST_EVERY = 1_000_000
"""Steps between two averagings."""


@dataclass(frozen=True)
class OuterOptimizer:
    """DiLoCo's outer step; the defaults are those of DiLoCo-SWARM's Table 3.

    Attributes
    ----------
    optimizer
        What takes the step; a string is turned into an `OuterStep`.
    learning_rate
        Of the outer step, on the mean change of the parameters.
    momentum
        Of the outer step, ``>= 0``.

    References
    ----------
    M. Senghaas et al., "DiLoCo-SWARM" (2025), after A. Douillard et al., "DiLoCo" (2023).
    """

    optimizer: OuterStep = OuterStep.NESTEROV
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        # one form of every number, so that equal plans have equal hashes
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
    """Average every ``every_steps`` steps: gradients, or where that is above 1 devices' changes.

    Where H > 1 each device updates by itself in every step, with the mean gradient of the samples
    that went through it; it takes no step where none did, and keeps the state of its optimizer for
    itself. Devices of a group that averages `within` do so as one: with the mean gradient of the
    samples that went through any of them, so that they stay equal. After every H steps the changes
    of the parameters, old minus new, are averaged in the plan's rounds. A device's weight is its
    part of the samples that went through its stage in these H steps (equal parts: the paper's
    mean). The outer optimizer goes on from the old parameters with that mean for a gradient, alike
    on all devices of the stage.

    Attributes
    ----------
    every_steps
        H, at least 1.
    outer
        What takes the outer step. None: H > 1 goes on from the mean of the parameters (a rate of 1,
        no momentum). With H = 1 every step is an inner and an outer one.
    delayed
        Whether changes are averaged while the step after the H-th computes, and the outer step is
        taken at that one's end. With y a device's parameters when averaging began, z those after
        the next inner step and x the outer step's: it goes on from x + (z - y), what all agree on
        and its own step since then, which counts as a change of the next H steps.

    References
    ----------
    M. Senghaas et al., "DiLoCo-SWARM" (2025), Algorithm 3.
    """

    every_steps: int = 1
    outer: OuterOptimizer | None = None
    delayed: bool = False

    def __post_init__(self) -> None:
        every = count("every_steps", self.every_steps, most=MOST_EVERY, error=PlanError)
        object.__setattr__(self, "every_steps", every)
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
        """Whether devices update by themselves, and average their changes."""
        return self.every_steps > 1 or self.outer is not None

    def due(self, step: int) -> bool:
        """Whether devices average after a step."""
        return (step + 1) % self.every_steps == 0

    def begun(self, steps: int) -> bool:
        """Whether the last of so many steps has begun an outer step that the next one ends."""
        return self.delayed and steps > 0 and self.due(steps - 1)

    def mean_s(self, alone_s: float, averages_s: float, averaging: int = 1) -> float:
        """Seconds of a step in the mean over H steps."""
        h = self.every_steps
        return ((h - averaging) * alone_s + averaging * averages_s) / h

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; what says nothing is left out: not delayed."""
        data = asdict(self)
        if not self.delayed:
            del data["delayed"]
        return data
