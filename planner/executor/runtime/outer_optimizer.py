"""Local SGD with an outer optimizer (DiLoCo-SWARM, Algorithm 3).

Inner steps: each device updates its own parameters with its own gradient, the mean over the samples
that passed it. Outer steps: the pseudo-gradient, old minus new parameters since the last one, is
averaged in the plan's rounds and applied by SGD with Nesterov momentum.

Pseudo-gradients are weighted by samples: the weight of a device is its share of its stage's samples
in the H steps. Equal shares give the paper's mean over devices. With unequal shares every sample
still counts once, as with averaged gradients: with plain SGD as inner optimizer, an outer rate of 1
and H = 1, this is data-parallel training.

In two-frequency averaging the devices of a group that averages gradients in every step act as one:
their gradient is the mean over all their samples, and so is the weight of their pseudo-gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from planner.training_plan.model import TrainingPlan, lockstep_devices
from planner.training_plan.schedule import Schedule

PARAMETER, MOMENTUM, MEAN = "outer/parameter/", "outer/momentum/", "outer/mean/"
SAMPLES, CHANGED = "outer/samples", "outer/changed"
"""Names in checkpoints."""


class PlannedWeights:
    """Weights by the planned number of microbatches of a device and its stage.

    In two-frequency averaging, of all devices with which it averages in every step.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._cycle, self._every = plan.cycle, plan.sync.every_steps
        j = plan.stage_of[rank]
        stage = plan.assignment.groups[j]
        done = [[sum(kind == "B" for kind, _ in ops) for ops in s.order] for s in plan.schedules]
        self._all = [len(s.paths) for s in plan.schedules]
        self._own = [sum(counts[d] for d in lockstep_devices(plan, rank)) for counts in done]
        self._stage = [sum(counts[d] for d in stage) for counts in done]

    @property
    def changed(self) -> int:
        """0: samples are not counted."""
        return 0

    def follow(self, plan: TrainingPlan, rank: int) -> None:
        """Does nothing: there is no other plan."""

    def begin(self, schedule: Schedule) -> None:
        """Start of a step."""

    def did(self) -> None:
        """A microbatch has passed the device."""

    def taken(self) -> None:
        """The step's update was applied."""

    def take_snapshot(self) -> None:
        """A pseudo-gradient will be averaged."""

    def outer_step_taken(self) -> None:
        """The outer step was applied."""

    def state(self) -> dict[str, Tensor]:
        """Empty: everything follows from the plan."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Does nothing."""

    def forget(self) -> None:
        """Does nothing."""

    def scale(self, step: int) -> float | None:
        """Factor from a sum over samples, divided by the batch, to the device's own mean."""
        k = self._cycle[step % len(self._cycle)]
        return self._all[k] / self._own[k] if self._own[k] else None

    def weight(self, step: int, samples: int | None = None) -> float:
        """The device's share of its stage's samples since the last outer step."""
        steps = range(step + 1 - self._every, step + 1)
        schedules = [self._cycle[t % len(self._cycle)] for t in steps]
        stage = sum(self._stage[k] for k in schedules)
        return sum(self._own[k] for k in schedules) / stage if stage else 0.0


class CountedWeights:
    """Weights by counted microbatches, where the plan does not determine them.

    With stochastic routing through every stage the total is known. After devices were lost, the
    others are asked for their counts, since those of lost devices do not count. In two-frequency
    averaging, the counts of the devices that act as one are added, also if one of them is lost
    later: its gradients are in the parameters.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._cycle, self._every = plan.cycle, plan.sync.every_steps
        self._all = [len(s.paths) for s in plan.schedules]
        # counts of this step, of committed steps, and of the pending pseudo-gradient
        self._step = self._since = self._changed = 0
        self.follow(plan, rank)

    @property
    def changed(self) -> int:
        """Microbatches of the pseudo-gradient that is averaged, or was last."""
        return self._changed

    def follow(self, plan: TrainingPlan, rank: int) -> None:
        """Continue with the plan of the remaining devices."""
        self._beside = set(lockstep_devices(plan, rank)) - {rank}

    def begin(self, schedule: Schedule) -> None:
        """Start of a step, in which the others follow the schedule."""
        self._step = sum(kind == "B" for d in self._beside for kind, _ in schedule.order[d])

    def did(self) -> None:
        """Count a microbatch of the device."""
        self._step += 1

    def taken(self) -> None:
        """The step's update was applied: it will not be repeated."""
        self._since += self._step
        self._step = 0

    def take_snapshot(self) -> None:
        """Attribute the counts so far to the pseudo-gradient, and restart counting."""
        self._changed += self._since
        self._since = 0

    def outer_step_taken(self) -> None:
        """The outer step was applied."""
        self._changed = 0

    def scale(self, step: int) -> float | None:
        """See `PlannedWeights`; of the last step."""
        return self._paths(step) / self._step if self._step else None

    def weight(self, step: int, samples: int | None = None) -> float:
        """See `PlannedWeights`, of the pseudo-gradient.

        Without ``samples`` every microbatch passed every stage.
        """
        if samples is None:
            steps = range(step + 1 - self._every, step + 1)
            samples = sum(self._paths(t) for t in steps)
        return self._changed / samples if samples else 0.0

    def state(self) -> dict[str, Tensor]:
        """Samples since the last pseudo-gradient, and of one whose outer step is pending."""
        counts = {SAMPLES: self._since} | ({CHANGED: self._changed} if self._changed else {})
        return {name: torch.tensor(float(count)) for name, count in counts.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`; plans with fixed paths have none."""
        self._since, self._changed = (
            round(float(state[name])) if name in state else 0 for name in (SAMPLES, CHANGED)
        )

    def forget(self) -> None:
        """Discard the counts."""
        self._since = self._changed = 0

    def _paths(self, step: int) -> int:
        return self._all[self._cycle[step % len(self._cycle)]]


class OuterSGD:
    """The outer optimizer of one device, identical on all devices of its stage.

    ``m <- momentum m + g``, ``old <- old - rate (g + momentum m)``, as torch.optim.SGD with
    ``nesterov=True``, on one vector of all parameters. If delayed, what the device did since its
    pseudo-gradient was taken is added to the result.

    Parameters
    ----------
    plan
        With an averaging interval above 1, or an outer optimizer.
    parameters
        By name, on their device; updated in place.
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
        """Its persistent tensors."""
        vectors = (self._old, self._momentum, self._left)
        return [vector for vector in vectors if vector is not None]

    def pseudo_gradient(self, into: Tensor, weight: float) -> None:
        """Write ``weight (old - new)`` into ``float32[values]``; if delayed, new is the snapshot of
        `take_snapshot`."""
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
        """Apply the outer step with the weighted mean ``float32[values]``, which is overwritten."""
        if self._momentum is not None:
            self._momentum.mul_(self._factor).add_(mean)
            mean.add_(self._momentum, alpha=self._factor)
        self._old.add_(mean, alpha=-self._rate)
        with torch.no_grad():
            if self._left is None:
                for name, old in self.global_parameters().items():
                    self._parameters[name].copy_(old)
                return
            torch.sub(self._old, self._left, out=mean)
            for name, moved in self.named(mean).items():
                self._parameters[name].add_(moved)

    def global_parameters(self) -> dict[str, Tensor]:
        """Views of the parameters after the last outer step, by name."""
        return self.named(self._old)

    def state(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        tensors = {PARAMETER + name: tensor for name, tensor in self.global_parameters().items()}
        if self._momentum is not None:
            named = self.named(self._momentum)
            tensors |= {MOMENTUM + name: tensor for name, tensor in named.items()}
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        # with a pending outer step, nothing was done since the snapshot
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Take a snapshot of the parameters, if the outer step is delayed."""
        if self._left is not None:
            with torch.no_grad():
                for name, left in self.named(self._left).items():
                    left.copy_(self._parameters[name])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector of all parameters, by name."""
        parts = zip(self._parameters.items(), self._split(vector), strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in parts}

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, [p.numel() for p in self._parameters.values()])
