"""Initial weights of stochastic routers, from the plan's paths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from planner.training_plan.choices import RouterFeedback
from planner.training_plan.model import TrainingPlan

UNUSED = 0.5
"""Weight, in microbatches, of a peer on none of the paths: less than any other, but not 0."""


@dataclass(frozen=True)
class InitialRoutes:
    """Initial weights of a device's router for one stage.

    Attributes
    ----------
    parts
        By peer, number of the device's microbatches that go there in the plan.
    usual_s
        Expected seconds of a request, as the router measures them.
    """

    parts: dict[int, float]
    usual_s: float


def initial_routes(plan: TrainingPlan, device: int) -> dict[int, InitialRoutes]:
    """Initial weights by stage to which a device routes: the next one, and the first for trainers.

    Returns
    -------
    dict[int, InitialRoutes]
        Peers on none of the device's paths have weight `UNUSED`; without smoothing they are left
        out.
    """
    (schedule,) = plan.schedules
    groups, stage = plan.assignment.groups, plan.stage_of[device]
    routes = {}
    if stage == 0:
        first_visits = Counter(path[0] for path in schedule.paths if path[0] == device)
        routes[0] = _initial_routes(plan, device, 0, first_visits, 0.0)
    if stage + 1 < len(groups):
        pairs = (pair for path in schedule.paths for pair in pairwise(path))
        next_visits = Counter(target for source, target in pairs if source == device)
        w = plan.workload
        size = w.stage(*plan.stage_layers[stage]).output_bytes * w.microbatch_samples
        routes[stage + 1] = _initial_routes(plan, device, stage + 1, next_visits, size)
    return routes


def _initial_routes(
    plan: TrainingPlan, device: int, stage: int, counts: Counter[int], size: float
) -> InitialRoutes:
    group, network = plan.assignment.groups[stage], plan.cluster.network
    tried = UNUSED if plan.routing.smoothing > 0 else 0.0
    parts = {d: float(counts[d]) or tried for d in group}
    usual_s = sum(plan.compute_times.forward_s[d] for d in group) / len(group)
    if plan.routing.told is RouterFeedback.ANSWER:
        latency = network.latency_table
        for d, count in counts.items():
            if d != device:
                round_trip_s = latency[device, d] + latency[d, device]
                seconds = float(round_trip_s) + size / float(network.bandwidth_table[device, d])
                usual_s += seconds * count / counts.total()
    return InitialRoutes({d: weight for d, weight in parts.items() if weight}, max(usual_s, 1e-9))
