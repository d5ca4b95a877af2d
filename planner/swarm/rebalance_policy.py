"""Rebalancing decisions for a running plan from measured times.

Applies the policies of trace replays. Every device is a peer of its own kind; its speed is the
stage's work per microbatch at 1 FLOP/s, divided by the measured time per microbatch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import RebalancePolicy, SwarmPolicy, SwarmState
from planner.training_plan.migration import Migration
from planner.training_plan.model import TrainingPlan
from planner.workload.costs import stage_costs

HYSTERESIS = 0.05
"""Minimum relative gain of a move, given the precision of measured times."""


class RebalanceRule(enum.StrEnum):
    """The device that gains most for the rest of the run, or SWARM's Algorithm 2."""

    PLANNED = "planned"
    SWARM = "swarm"


@dataclass(frozen=True)
class RebalanceDecision:
    """A move and its expected effect.

    Attributes
    ----------
    before, after
        Microbatches per second of the slowest stage, from measured times.
    """

    move: Migration
    before: float
    after: float

    def said(self, why_not: str) -> str:
        """A message for the log; ``why_not`` is the reason if the move is not made."""
        move = self.move
        goes = "stays instead of going" if why_not else "goes"
        return (
            f"after {move.after} steps device {move.device!r} {goes} to stage {move.stage} "
            f"({self.after:.4g} instead of {self.before:.4g} microbatches a second, as devices "
            "were seen to work)" + (f": {why_not}" if why_not else "")
        )


def swarm_state(plan: TrainingPlan, seconds: Mapping[int, float]) -> SwarmState:
    """State of the swarm, with speeds from measured seconds per microbatch."""
    times, groups = plan.compute_times, plan.assignment.groups
    work = []
    for s, layers in enumerate(plan.stage_layers):
        with_head, recomputed = s == plan.head_stage, plan.recompute[s]
        costs = stage_costs(plan.workload, *layers, with_head=with_head, recomputed=recomputed)
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
    slowdowns = [seconds[d] / planned[d] for d in planned if d in seconds and planned[d] > 0]
    factor = median(slowdowns) if slowdowns else 1.0
    for s, group in enumerate(groups):
        for d in group:
            serving[s, d] = 1
            speed[d] = work[s] / max(seconds.get(d, planned[d] * factor), 1e-12)
    return SwarmState(serving, np.zeros_like(serving), np.array(work), speed)


def decide(
    plan: TrainingPlan,
    seconds: Mapping[int, float],
    done: int,
    left_s: float,
    rule: RebalanceRule,
    stay: frozenset[int] = frozenset(),
) -> RebalanceDecision | None:
    """The move to make now, or None if no move is worthwhile."""
    stages = swarm_state(plan, seconds)
    policy: RebalancePolicy = SwarmPolicy(0.0)
    if rule is RebalanceRule.PLANNED:
        # all devices wait while the state is transferred
        download_share = _download_s(plan) / left_s if left_s > 0 else 1.0
        policy = PlannedMoves(
            every_s=0.0,
            horizon_s=max(left_s, 0.0),
            hysteresis=HYSTERESIS + download_share,
            one_at_a_time=True,
        )
        # devices that are moving count in their new stage, and are not moved again
        must_stay = np.isin(np.arange(len(plan.cluster)), list(stay))
        stages = replace(
            stages, serving=stages.serving * ~must_stay, loading=stages.serving * must_stay
        )
    if not (moves := policy.moves(stages)):
        return None
    source, target, device, _ = moves[0]
    after = stages.serving + stages.loading
    after[source, device] -= 1
    after[target, device] += 1
    rate = float((after @ stages.speed / stages.work).min())
    name = plan.cluster.network.ids[device]
    return RebalanceDecision(
        Migration(name, target, done), float(stages.rates_after_loading.min()), rate
    )


def _download_s(plan: TrainingPlan) -> float:
    """Download time of the largest stage's state at the mean bandwidth."""
    w, network = plan.workload, plan.cluster.network
    state = max(w.stage(*layers).parameters for layers in plan.stage_layers)
    between = ~np.eye(len(network), dtype=bool)
    rate = float(np.mean(network.bandwidth_bytes_per_s[between])) if len(network) > 1 else np.inf
    return float(state * w.state_bytes_per_parameter / rate)
