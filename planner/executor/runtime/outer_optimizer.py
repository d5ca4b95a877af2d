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
COMMITTED_MICROBATCHES, PSEUDO_GRADIENT_MICROBATCHES = "outer/samples", "outer/changed"
"""Names in checkpoints; the last two are counts of microbatches, whatever they are called."""


class PlannedSampleShares:
    """Shares of samples from the planned number of microbatches of a device and its stage.

    In two-frequency averaging, the devices that average gradients in every step count as one.

    Nothing is counted: the methods that count do nothing.

    Attributes
    ----------
    pseudo_gradient_microbatches
        Microbatches of the pseudo-gradient that is averaged, or was last, where they are counted.
    """

    pseudo_gradient_microbatches = 0

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._cycle, self._interval = plan.cycle, plan.sync.every_steps
        stage = plan.assignment.groups[plan.stage_of[rank]]
        backward_counts = [
            [sum(kind == "B" for kind, _ in ops) for ops in s.order] for s in plan.schedules
        ]
        self._microbatches = [len(s.paths) for s in plan.schedules]
        self._own_microbatches = [
            sum(counts[d] for d in lockstep_devices(plan, rank)) for counts in backward_counts
        ]
        self._stage_microbatches = [sum(counts[d] for d in stage) for counts in backward_counts]

    def gradient_scale(self, step: int) -> float | None:
        """Factor from a sum over samples, divided by the batch, to the device's own mean."""
        schedule_id = self._cycle[step % len(self._cycle)]
        own = self._own_microbatches[schedule_id]
        return self._microbatches[schedule_id] / own if own else None

    def pseudo_gradient_weight(self, step: int, microbatches: int | None = None) -> float:
        """The device's share of its stage's microbatches since the last outer step."""
        steps = range(step + 1 - self._interval, step + 1)
        schedule_ids = [self._cycle[t % len(self._cycle)] for t in steps]
        own = sum(self._own_microbatches[schedule_id] for schedule_id in schedule_ids)
        stage = sum(self._stage_microbatches[schedule_id] for schedule_id in schedule_ids)
        return own / stage if stage else 0.0

    def set_plan(self, plan: TrainingPlan, rank: int) -> None:
        """Continue with the plan of the remaining devices."""

    def begin(self, schedule: Schedule) -> None:
        """Start a step."""

    def count_microbatch(self) -> None:
        """Count a microbatch of the device."""

    def commit_step(self) -> None:
        """Add the counts of the step, whose update is applied and not repeated."""

    def take_snapshot(self) -> None:
        """Attribute the counts so far to the pseudo-gradient, and restart counting."""

    def commit_outer_step(self) -> None:
        """The outer step was applied."""

    def reset_counts(self) -> None:
        """Discard the counts."""

    def state_dict(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""


class CountedSampleShares(PlannedSampleShares):
    """Shares of samples from counted microbatches, if the plan does not determine them.

    With stochastic routing through every stage the total is known. In elastic runs the remaining
    devices exchange their counts, since those of lost devices do not count. In two-frequency
    averaging, the counts of devices that average gradients in every step are added, also if one of
    them is lost later: its gradients are in the parameters.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        super().__init__(plan, rank)
        # microbatches of this step, and of committed ones after the last pseudo-gradient
        self._step_microbatch_count = self._committed_microbatches = (
            self.pseudo_gradient_microbatches
        ) = 0
        self.set_plan(plan, rank)

    def set_plan(self, plan: TrainingPlan, rank: int) -> None:
        """Continue with the plan of the remaining devices."""
        self._lockstep = set(lockstep_devices(plan, rank)) - {rank}

    def begin(self, schedule: Schedule) -> None:
        """Start a step, in which lockstep devices follow the schedule."""
        self._step_microbatch_count = sum(
            kind == "B" for d in self._lockstep for kind, _ in schedule.order[d]
        )

    def count_microbatch(self) -> None:
        """Count a microbatch of the device."""
        self._step_microbatch_count += 1

    def commit_step(self) -> None:
        """Add the counts of the step, whose update is applied and not repeated."""
        self._committed_microbatches += self._step_microbatch_count
        self._step_microbatch_count = 0

    def take_snapshot(self) -> None:
        """Attribute the counts so far to the pseudo-gradient, and restart counting."""
        self.pseudo_gradient_microbatches += self._committed_microbatches
        self._committed_microbatches = 0

    def commit_outer_step(self) -> None:
        """The outer step was applied."""
        self.pseudo_gradient_microbatches = 0

    def gradient_scale(self, step: int) -> float | None:
        """See `PlannedSampleShares`; of the last step."""
        return (
            self._step_microbatches(step) / self._step_microbatch_count
            if self._step_microbatch_count
            else None
        )

    def pseudo_gradient_weight(self, step: int, microbatches: int | None = None) -> float:
        """See `PlannedSampleShares`, of the pseudo-gradient.

        Without ``microbatches`` every microbatch passed every stage.
        """
        if microbatches is None:
            steps = range(step + 1 - self._interval, step + 1)
            microbatches = sum(self._step_microbatches(t) for t in steps)
        return self.pseudo_gradient_microbatches / microbatches if microbatches else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Microbatches since the last pseudo-gradient, and of one whose outer step is pending."""
        counts = {COMMITTED_MICROBATCHES: self._committed_microbatches}
        if self.pseudo_gradient_microbatches:
            counts[PSEUDO_GRADIENT_MICROBATCHES] = self.pseudo_gradient_microbatches
        return {name: torch.tensor(float(count)) for name, count in counts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`; plans with fixed paths have none."""
        self._committed_microbatches, self.pseudo_gradient_microbatches = (
            round(float(state_dict[name])) if name in state_dict else 0
            for name in (COMMITTED_MICROBATCHES, PSEUDO_GRADIENT_MICROBATCHES)
        )

    def reset_counts(self) -> None:
        """Discard the counts."""
        self._committed_microbatches = self.pseudo_gradient_microbatches = 0

    def _step_microbatches(self, step: int) -> int:
        return self._microbatches[self._cycle[step % len(self._cycle)]]


class OuterSGD:
    """The outer optimizer of one device, identical on all devices of its stage.

    ``m <- momentum m + g``, ``old <- old - rate (g + momentum m)``, as torch.optim.SGD with
    ``nesterov=True``, on one vector of all parameters. If delayed, the local
    updates since the snapshot for the pseudo-gradient are added to the result.

    Parameters
    ----------
    plan
        With an averaging interval above 1, or an outer optimizer.
    parameters
        By name, on their device; updated in place.
    """

    def __init__(self, plan: TrainingPlan, parameters: Mapping[str, nn.Parameter]) -> None:
        outer = plan.sync.outer
        self._learning_rate = 1.0 if outer is None else outer.learning_rate
        self._momentum_factor = 0.0 if outer is None else outer.momentum
        self._parameters = dict(parameters)
        self._global = torch.cat([p.detach().reshape(-1) for p in self._parameters.values()])
        self._momentum = torch.zeros_like(self._global) if self._momentum_factor else None
        self._snapshot = self._global.clone() if plan.sync.delayed else None

    @property
    def tensors(self) -> list[Tensor]:
        """Its persistent tensors."""
        vectors = (self._global, self._momentum, self._snapshot)
        return [vector for vector in vectors if vector is not None]

    def pseudo_gradient(self, out: Tensor, pseudo_gradient_weight: float) -> None:
        """Write ``weight (old - new)`` into ``float32[numel]``; if delayed, new is the snapshot of
        `take_snapshot`."""
        with torch.no_grad():
            if self._snapshot is not None:
                torch.sub(self._global, self._snapshot, out=out)
            else:
                parts = zip(
                    self._parameters.values(),
                    self._split(out),
                    self._split(self._global),
                    strict=True,
                )
                for parameter, part, global_parameter in parts:
                    torch.sub(global_parameter, parameter.reshape(-1), out=part)
            out.mul_(pseudo_gradient_weight)

    def step(self, mean: Tensor) -> None:
        """Apply the outer step with the weighted mean ``float32[numel]``, which is overwritten."""
        if self._momentum is not None:
            self._momentum.mul_(self._momentum_factor).add_(mean)
            mean.add_(self._momentum, alpha=self._momentum_factor)
        self._global.add_(mean, alpha=-self._learning_rate)
        with torch.no_grad():
            if self._snapshot is None:
                for name, global_parameter in self.global_parameters().items():
                    self._parameters[name].copy_(global_parameter)
                return
            torch.sub(self._global, self._snapshot, out=mean)
            for name, change in self.named(mean).items():
                self._parameters[name].add_(change)

    def global_parameters(self) -> dict[str, Tensor]:
        """Views of the parameters after the last outer step, by name."""
        return self.named(self._global)

    def state_dict(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        tensors = {PARAMETER + name: tensor for name, tensor in self.global_parameters().items()}
        if self._momentum is not None:
            named = self.named(self._momentum)
            tensors |= {MOMENTUM + name: tensor for name, tensor in named.items()}
        return tensors

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state_dict[name])
        # with a pending outer step, nothing was done since the snapshot
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Take a snapshot of the parameters, if the outer step is delayed."""
        if self._snapshot is not None:
            with torch.no_grad():
                for name, snapshot in self.named(self._snapshot).items():
                    snapshot.copy_(self._parameters[name])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector of all parameters, by name."""
        parts = zip(self._parameters.items(), self._split(vector), strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in parts}

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, [p.numel() for p in self._parameters.values()])
