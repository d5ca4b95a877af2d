"""What this machine can carry, and how much a plan must shrink for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.emulate.fair_rates import fair_rates
from planner.emulate.links import EmulatedLinks
from planner.emulate.namespaces import EmulationError
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan

CARRIED_BYTES_PER_S = 200e6
"""What the switch and the ranks at its two ends carry on two cores, as long as it is not for long:
the most that all messages can get at the same time is rarely what they do get."""
RANK_BYTES = 250e6
"""A Python process with torch loaded, less what all of them share."""
USABLE = 0.7
"""Of the memory that is available now."""
COPIES = 3
"""Of a rank's gradients: the vector, and contributions and messages on their way."""


@dataclass(frozen=True)
class HostNeed:
    """What a plan asks of the machine, in the plan's own bytes.

    Attributes
    ----------
    rate_bytes_per_s
        What its messages can get from the network at the same time.
    fixed_bytes, shrinking_bytes
        Memory of the processes, and of what shrinks with the messages.
    """

    rate_bytes_per_s: float
    fixed_bytes: float
    shrinking_bytes: float

    def least_shrink(self, speed: float, available_bytes: float) -> float:
        """The least divisor of bytes, rounded up to two digits."""
        room = USABLE * available_bytes - self.fixed_bytes
        if room <= 0:
            raise EmulationError(
                f"the ranks need {self.fixed_bytes / 1e9:.1f} GB before any message, this machine "
                f"has {available_bytes / 1e9:.1f} GB available and {USABLE:.0%} of it may be used; "
                "emulate a plan with fewer devices"
            )
        least = max(
            1.0,
            self.rate_bytes_per_s * speed / CARRIED_BYTES_PER_S,
            self.shrinking_bytes / room,
        )
        step = 10.0 ** (math.floor(math.log10(least)) - 1)
        return math.ceil(least / step * (1 - 1e-12)) * step if least > 1 else 1.0


def need_of(plan: TrainingPlan, links: EmulatedLinks) -> HostNeed:
    """What a plan needs on a network."""
    n = len(plan.cluster)
    pairs = np.array(sorted(i * n + j for i, j in used_pairs(plan)), dtype=np.int64)
    rate = np.zeros(n * n)
    space = np.zeros(len(links.capacity))
    fair_rates(links, pairs, space, space.astype(np.int64), rate)
    w = plan.workload
    gradients = w.gradient_bytes(plan.stage_layers, plan.head_stage)
    vectors = sum(gradients[plan.averaged_stage(d)] for d in range(n))
    outputs = [w.stage(*layers).output_bytes * w.microbatch_samples for layers in plan.stage_layers]
    held = max(outputs) * max(sum(s.most_live()) for s in plan.schedules)
    return HostNeed(float(rate.sum()), n * RANK_BYTES, COPIES * vectors + held)


def used_pairs(plan: TrainingPlan) -> set[tuple[int, int]]:
    """Ordered pairs of devices that send something."""
    found: set[tuple[int, int]] = set()
    if plan.wiring is Wiring.STOCHASTIC:
        stages = plan.assignment.groups
        ends = [(stages[-1], stages[0])] if plan.head_stage == 0 else []
        for here, there in [*pairwise(stages), *ends]:
            found |= {pair for i in here for j in there for pair in ((i, j), (j, i)) if i != j}
    for k in set(plan.cycle):
        schedule = plan.schedules[k]
        for b in range(len(schedule.paths)):
            devices = [device for _, device in schedule.chain(b)]
            found |= {(a, b) for a, b in pairwise(devices) if a != b}
    for rounds in plan.averaging:
        for groups in rounds:
            for group in groups:
                found |= {(i, j) for i in group.members for j in group.members if i != j}
    return found
