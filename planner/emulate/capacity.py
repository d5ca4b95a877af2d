"""Capacity of this machine for an emulation, and how much a plan must be scaled down."""

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
"""Throughput of the switch and the ranks on two cores, in bytes per second.

A plan's peak rate may be slightly higher, since its messages rarely all reach their fair rate at
the same time.
"""
RANK_BYTES = 250e6
"""Memory of a Python process with PyTorch loaded, without pages shared by all ranks."""
USABLE = 0.7
"""Fraction of the available memory that may be used."""
COPIES = 3
"""Copies of a rank's gradients in memory: the vector, contributions, and messages in flight."""


@dataclass(frozen=True)
class HostNeed:
    """Resources that an emulated plan needs, in the plan's own bytes.

    Attributes
    ----------
    rate_bytes_per_s
        Highest total rate of its messages.
    fixed_bytes, shrinking_bytes
        Memory of the processes, and memory that scales with the messages.
    """

    rate_bytes_per_s: float
    fixed_bytes: float
    shrinking_bytes: float

    def least_shrink(self, speed: float, available_bytes: float) -> float:
        """Return the smallest feasible divisor of bytes, rounded up to two digits."""
        room = USABLE * available_bytes - self.fixed_bytes
        if room <= 0:
            raise EmulationError(
                f"the ranks need {self.fixed_bytes / 1e9:.1f} GB without messages, found "
                f"{available_bytes / 1e9:.1f} GB available, of which {USABLE:.0%} may be used; "
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
    """Return the resources that a plan needs on a network."""
    n = len(plan.cluster)
    pairs = np.array(sorted(i * n + j for i, j in used_pairs(plan)), dtype=np.int64)
    rate = np.zeros(n * n)
    space = np.zeros(len(links.capacity))
    fair_rates(links, pairs, space, space.astype(np.int64), rate)
    w = plan.workload
    gradients = w.gradient_bytes(plan.stage_layers, plan.head_stage)
    vectors = sum(gradients[plan.averaged_stage(d)] for d in range(n))
    outputs = [w.stage(*layers).output_bytes * w.microbatch_samples for layers in plan.stage_layers]
    stored = max(outputs) * max(sum(s.most_live()) for s in plan.schedules)
    return HostNeed(float(rate.sum()), n * RANK_BYTES, COPIES * vectors + stored)


def used_pairs(plan: TrainingPlan) -> set[tuple[int, int]]:
    """Return the ordered pairs of devices that exchange messages."""
    pairs: set[tuple[int, int]] = set()
    if plan.wiring is Wiring.STOCHASTIC:
        stages = plan.assignment.groups
        ends = [(stages[-1], stages[0])] if plan.head_stage == 0 else []
        for stage, next_stage in [*pairwise(stages), *ends]:
            pairs |= {
                pair for i in stage for j in next_stage for pair in ((i, j), (j, i)) if i != j
            }
    for k in set(plan.cycle):
        schedule = plan.schedules[k]
        for b in range(len(schedule.paths)):
            devices = [device for _, device in schedule.chain(b)]
            pairs |= {(a, b) for a, b in pairwise(devices) if a != b}
    for rounds in plan.averaging:
        for groups in rounds:
            for group in groups:
                pairs |= {(i, j) for i in group.members for j in group.members if i != j}
    return pairs
