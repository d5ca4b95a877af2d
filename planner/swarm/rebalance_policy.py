"""Which device of a running plan goes to another stage, by what its devices were seen to take.

The policies are those that traces are played with. A device is a peer of a kind of its own: its
speed is what the plan's work of its stage takes at FLOP/s of 1, over what a microbatch took it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import OneAtATime, Policy, StageRates
from planner.training_plan.migration import Migration
from planner.training_plan.model import TrainingPlan
from planner.workload.costs import stage_costs

HYSTERESIS = 0.05
"""What a move must win at least: measured times are no better known."""


class RebalanceRule(enum.StrEnum):
    """Who moves: whoever wins most for the rest of the run, or SWARM's Algorithm 2."""

    PLANNED = "planned"
    SWARM = "swarm"


@dataclass(frozen=True)
class RebalanceDecision:
    """A move, and what it is for.

    Attributes
    ----------
    before, after
        Microbatches a second of the slowest stage, as devices were seen to work.
    """

    move: Migration
    before: float
    after: float

    def said(self, why_not: str) -> str:
        """For people."""
        move = self.move
        goes = "stays instead of going" if why_not else "goes"
        return (
            f"after {move.after} steps device {move.device!r} {goes} to stage {move.stage} "
            f"({self.after:.4g} instead of {self.before:.4g} microbatches a second, as devices "
            "were seen to work)" + (f": {why_not}" if why_not else "")
        )


def stages_of(plan: TrainingPlan, seconds: Mapping[int, float]) -> StageRates:
    """Who is where, and how fast."""
    times, groups = plan.compute_times, plan.assignment.groups
    work = []
    for s, layers in enumerate(plan.stage_layers):
        with_head, again = s == plan.head_stage, plan.recompute[s]
        costs = stage_costs(plan.workload, *layers, with_head=with_head, recompute=again)
        work.append(costs.busy_s(1.0))
    serving = np.zeros((len(groups), len(plan.cluster)), dtype=np.int64)
    speed = np.ones(len(plan.cluster))
    planned = {
        d: times.forward_s[d]
        + times.backward_s[d]
        + (times.head_s[d] if s == plan.head_stage else 0.0)
        for s, group in enumerate(groups)
        for d in group
    }
    late = [seconds[d] / planned[d] for d in planned if d in seconds and planned[d] > 0]
    factor = median(late) if late else 1.0
    for s, group in enumerate(groups):
        for d in group:
            serving[s, d] = 1
            speed[d] = work[s] / max(seconds.get(d, planned[d] * factor), 1e-12)
    return StageRates(serving, np.zeros_like(serving), np.array(work), speed)


def decide(
    plan: TrainingPlan,
    seconds: Mapping[int, float],
    done: int,
    left_s: float,
    rule: RebalanceRule,
    stay: frozenset[int] = frozenset(),
) -> RebalanceDecision | None:
    """The move to make now, if any is worth it."""
    stages = stages_of(plan, seconds)
    policy: Policy = OneAtATime(0.0)
    if rule is RebalanceRule.PLANNED:
        # everybody waits while state is on its way
        lost = _download_s(plan) / left_s if left_s > 0 else 1.0
        policy = PlannedMoves(
            every_s=0.0,
            horizon_s=max(left_s, 0.0),
            hysteresis=HYSTERESIS + lost,
            one_at_a_time=True,
        )
        # who is on its way to a stage counts there, and is not sent elsewhere
        fixed = np.isin(np.arange(len(plan.cluster)), list(stay))
        stages = replace(stages, serving=stages.serving * ~fixed, loading=stages.serving * fixed)
    if not (moves := policy.moves(stages)):
        return None
    source, target, device, _ = moves[0]
    after = stages.serving + stages.loading
    after[source, device] -= 1
    after[target, device] += 1
    rate = float((after @ stages.speed / stages.work).min())
    name = plan.cluster.network.ids[device]
    return RebalanceDecision(Migration(name, target, done), float(stages.coming_rates.min()), rate)


def _download_s(plan: TrainingPlan) -> float:
    """Of the largest stage's state, over a link as they are in the mean."""
    w, network = plan.workload, plan.cluster.network
    state = max(w.stage(*layers).parameters for layers in plan.stage_layers)
    between = ~np.eye(len(network), dtype=bool)
    rate = float(np.mean(network.bandwidth_bytes_per_s[between])) if len(network) > 1 else np.inf
    return float(state * w.state_bytes_per_parameter / rate)
