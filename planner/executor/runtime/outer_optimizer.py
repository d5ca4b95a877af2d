"""Devices that update by themselves, and every H steps agree (DiLoCo-SWARM, Algorithm 3).

Inner steps: each device updates its own parameters with its own gradient, the mean over the samples
that went through it. Outer steps: the change of the parameters since the last one, old minus new,
is averaged in the plan's rounds and taken for a gradient by SGD with Nesterov's momentum.

Changes are weighted by samples: a device's weight is its part of the samples that went through its
stage in the H steps. With equal parts that is the paper's mean over devices. With others every
sample still counts once, as it does where gradients are averaged: with plain SGD inside, an outer
rate of 1 and H = 1, this is data parallel training.

On two clocks the devices of a group that averages gradients in every step are as one: their
gradient is the mean over the samples of all, their change, the same on each, counts by these.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from planner.training_plan.model import TrainingPlan, as_one
from planner.training_plan.schedule import Schedule

PARAMETER, MOMENTUM, MEAN = "outer/parameter/", "outer/momentum/", "outer/mean/"
SAMPLES, CHANGED = "outer/samples", "outer/changed"
"""Names in checkpoints."""


class PlannedWeights:
    """How many microbatches go through a device, and through its stage; all from the plan.

    On two clocks, through all devices with which it averages in every step.

    Parameters
    ----------
    rank
        A device with a stage.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._cycle, self._every = plan.cycle, plan.sync.every_steps
        j = plan.stage_of[rank]
        stage = plan.assignment.groups[j]
        done = [[sum(kind == "B" for kind, _ in ops) for ops in s.order] for s in plan.schedules]
        self._all = [len(s.paths) for s in plan.schedules]
        self._own = [sum(counts[d] for d in as_one(plan, rank)) for counts in done]
        self._stage = [sum(counts[d] for d in stage) for counts in done]

    @property
    def changed(self) -> int:
        """None: nobody counts."""
        return 0

    def follow(self, plan: TrainingPlan, rank: int) -> None:
        """There is no other plan."""

    def begin(self, schedule: Schedule) -> None:
        """A step begins."""

    def did(self) -> None:
        """A microbatch has gone through the device; how many do is known."""

    def taken(self) -> None:
        """The step's update was taken."""

    def leave(self) -> None:
        """A change is to be averaged."""

    def agreed(self) -> None:
        """The outer step was taken."""

    def state(self) -> dict[str, Tensor]:
        """Nothing: the plan says it all."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take."""

    def forget(self) -> None:
        """Nothing was counted."""

    def scale(self, step: int) -> float | None:
        """What turns a sum over samples, divided by the batch, into the device's own mean."""
        k = self._cycle[step % len(self._cycle)]
        return self._all[k] / self._own[k] if self._own[k] else None

    def weight(self, step: int, samples: int | None = None) -> float:
        """The device's part of its stage's samples since the last outer step."""
        steps = range(step + 1 - self._every, step + 1)
        schedules = [self._cycle[t % len(self._cycle)] for t in steps]
        stage = sum(self._stage[k] for k in schedules)
        return sum(self._own[k] for k in schedules) / stage if stage else 0.0


class CountedWeights:
    """The same where no plan says what a device does: its microbatches are counted as it does them.

    Where all are routed through every stage nobody need be asked how many others had. Where
    devices are lost others are asked, since those that were lost do not count. On two clocks what
    those have done with whom a device is as one counts as its own, also when they are lost later:
    their gradients are in its parameters.

    Parameters
    ----------
    plan
        With stochastic wiring, or of a run that goes on without devices.
    rank
        A device with a stage.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._cycle, self._every = plan.cycle, plan.sync.every_steps
        self._all = [len(s.paths) for s in plan.schedules]
        # of this step, of those whose update was taken since, of a change to be averaged
        self._step = self._since = self._changed = 0
        self.follow(plan, rank)

    @property
    def changed(self) -> int:
        """Microbatches of the change that is averaged, or was last."""
        return self._changed

    def follow(self, plan: TrainingPlan, rank: int) -> None:
        """The plan of those who are there from now on."""
        self._beside = set(as_one(plan, rank)) - {rank}

    def begin(self, schedule: Schedule) -> None:
        """A step begins, in which others do what the schedule says."""
        self._step = sum(kind == "B" for d in self._beside for kind, _ in schedule.order[d])

    def did(self) -> None:
        """A microbatch has gone through the device."""
        self._step += 1

    def taken(self) -> None:
        """The step's update was taken: it is not done again."""
        self._since += self._step
        self._step = 0

    def leave(self) -> None:
        """All that was taken until now is in the change, and counting begins anew."""
        self._changed += self._since
        self._since = 0

    def agreed(self) -> None:
        """The outer step was taken, with what was done before its change."""
        self._changed = 0

    def scale(self, step: int) -> float | None:
        """See `PlannedWeights`; of the step that was done last."""
        return self._paths(step) / self._step if self._step else None

    def weight(self, step: int, samples: int | None = None) -> float:
        """See `PlannedWeights`, of the change.

        Without `samples` every microbatch has gone through every stage.
        """
        if samples is None:
            steps = range(step + 1 - self._every, step + 1)
            samples = sum(self._paths(t) for t in steps)
        return self._changed / samples if samples else 0.0

    def state(self) -> dict[str, Tensor]:
        """Samples since the last change, and of one whose outer step is to come."""
        counts = {SAMPLES: self._since} | ({CHANGED: self._changed} if self._changed else {})
        return {name: torch.tensor(float(count)) for name, count in counts.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave; other plans, and those of fixed paths, count none."""
        self._since, self._changed = (
            round(float(state[name])) if name in state else 0 for name in (SAMPLES, CHANGED)
        )

    def forget(self) -> None:
        """Nothing was done by this device."""
        self._since = self._changed = 0

    def _paths(self, step: int) -> int:
        return self._all[self._cycle[step % len(self._cycle)]]


class OuterSGD:
    """The outer optimizer of one device, the same on all that hold its stage.

    ``m <- momentum m + g``, ``old <- old - rate (g + momentum m)``: what torch.optim.SGD does with
    ``nesterov=True``, on vectors of all parameters. Delayed, what the device has done since its
    changes were taken is added to the outcome.

    Parameters
    ----------
    plan
        With steps between averagings, or an outer optimizer.
    parameters
        By name, on their device; read and written.
    """

    def __init__(self, plan: TrainingPlan, parameters: Mapping[str, nn.Parameter]) -> None:
        outer = plan.sync.outer
        self._rate = 1.0 if outer is None else outer.learning_rate
        self._factor = 0.0 if outer is None else outer.momentum
        self._parameters = dict(parameters)
        self._old = torch.cat([p.detach().reshape(-1) for p in self._parameters.values()])
        self._momentum = torch.zeros_like(self._old) if self._factor else None
        self._left = self._old.clone() if plan.sync.delayed else None

    @property
    def kept(self) -> list[Tensor]:
        """What lives as long as this."""
        vectors = (self._old, self._momentum, self._left)
        return [vector for vector in vectors if vector is not None]

    def change(self, into: Tensor, weight: float) -> None:
        """Write ``weight (old - new)``; delayed, new is what `leave` remembers.

        Parameters
        ----------
        into
            ``float32[values]``.
        """
        with torch.no_grad():
            if self._left is not None:
                torch.sub(self._old, self._left, out=into)
            else:
                parts = zip(
                    self._parameters.values(),
                    self._split(into),
                    self._split(self._old),
                    strict=True,
                )
                for parameter, part, old in parts:
                    torch.sub(old, parameter.reshape(-1), out=part)
            into.mul_(weight)

    def step(self, mean: Tensor) -> None:
        """Take the outer step, and go on from there.

        Parameters
        ----------
        mean
            ``float32[values]``, the weighted mean of all changes; written over.
        """
        if self._momentum is not None:
            self._momentum.mul_(self._factor).add_(mean)
            mean.add_(self._momentum, alpha=self._factor)
        self._old.add_(mean, alpha=-self._rate)
        with torch.no_grad():
            if self._left is None:
                for name, old in self.agreed().items():
                    self._parameters[name].copy_(old)
                return
            torch.sub(self._old, self._left, out=mean)
            for name, moved in self.named(mean).items():
                self._parameters[name].add_(moved)

    def agreed(self) -> dict[str, Tensor]:
        """Parameters after the last outer step, by name; views."""
        return self.named(self._old)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        found = {PARAMETER + name: tensor for name, tensor in self.agreed().items()}
        if self._momentum is not None:
            named = self.named(self._momentum)
            found |= {MOMENTUM + name: tensor for name, tensor in named.items()}
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        # where an outer step is to come, nothing was done since changes were taken
        self.leave()

    def leave(self) -> None:
        """Remember parameters as they are, if the outer step is to come later than others."""
        if self._left is not None:
            with torch.no_grad():
                for name, left in self.named(self._left).items():
                    left.copy_(self._parameters[name])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector of all parameters, by their names."""
        parts = zip(self._parameters.items(), self._split(vector), strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in parts}

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, [p.numel() for p in self._parameters.values()])
