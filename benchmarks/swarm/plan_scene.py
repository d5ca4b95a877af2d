"""Simulate routers on the devices of a plan, and compare their flow with the plan's.

A plan made with ``--wiring flow`` states which fraction of microbatches visits each device. Routers
without initial weights find fractions of their own; they may also start from the plan's weights, or
keep them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.swarm.queueing import Scenario
from planner.problems.error import ProblemError
from planner.simulator.program import message_bytes
from planner.simulator.resources import LinkResources
from planner.swarm.routing import Router, begun_router, starting_estimates_s
from planner.training_plan.initial_routes import initial_routes
from planner.training_plan.model import TrainingPlan


@dataclass(frozen=True)
class PlanScenario:
    """A plan's devices, and what it makes of them.

    Attributes
    ----------
    scene
        Trainers are on the first stage's devices, and have together as many microbatches on their
        way as these hold in the plan.
    parts
        Of all microbatches, through each device.
    estimates_s
        With which routers begin at these parts.
    """

    scene: Scenario
    parts: dict[int, float]
    estimates_s: dict[int, float]


def plan_scenario(
    plan: TrainingPlan, *, schedule: int = 0, by_holder: bool = True, limit_memory: bool = False
) -> PlanScenario:
    """Peers as fast as the plan's devices, over its links."""
    n, stage_of, chosen = len(plan.cluster), plan.stage_of, plan.schedules[schedule]
    stages = len(plan.stage_layers)
    if len(stage_of) < n:
        raise ProblemError("a device of the plan holds no stage; take a plan without helpers")
    if any([stage_of[d] for d in path] != list(range(stages)) for path in chosen.paths):
        raise ProblemError("a path skips or swaps stages; take a plan whose paths visit all")
    times, last = plan.compute_times, stages - 1
    forward, backward, head = (
        np.array(column) + times.operation_s
        for column in (times.forward_s, times.backward_s, times.head_s)
    )
    is_last = np.array([stage_of[d] == last for d in range(n)])
    counts = np.bincount([d for path in chosen.paths for d in path], minlength=n)
    parts = {d: float(counts[d]) / len(chosen.paths) for d in range(n)}
    homes = plan.assignment.groups[0]
    live = chosen.most_live()
    scene = Scenario(
        LinkResources.of(plan.cluster),
        tuple(stage_of[d] for d in range(n)),
        forward,
        backward + np.where(is_last, head, 0.0),
        float(message_bytes(plan, plan.workload)[list(homes)].max()),
        homes,
        max(1, round(sum(live[d] for d in homes) / len(homes))),
        by_holder=by_holder,
        room=tuple(live) if limit_memory else (),
    )
    estimates: dict[int, float] = {}
    for group in plan.assignment.groups:
        used = {d: parts[d] for d in group if parts[d] > 0}
        estimates |= starting_estimates_s(used, float(forward[list(group)].mean()))
    return PlanScenario(scene, parts, estimates)


def plan_routers(plan: TrainingPlan) -> list[Router[int]]:
    """A router a device, as the executor begins with them: pair by pair at the plan's parts."""
    stages, smoothing = len(plan.assignment.groups), plan.routing.smoothing
    found = []
    for own in range(len(plan.cluster)):
        begin = {stage: (b.parts, b.usual_s) for stage, b in initial_routes(plan, own).items()}
        found.append(begun_router(stages, smoothing, own, begin))
    return found
