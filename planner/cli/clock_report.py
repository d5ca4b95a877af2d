"""What the clock says of a plan beside its times: the fullest link, and limits that it assumes."""

from __future__ import annotations

from typing import Any

from planner.clock.links import assumed_limits, tight_limits
from planner.clock.simulator import simulate, unlike_steps_s
from planner.clock.timeline import Timeline
from planner.network.cluster import Cluster
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import Sync
from planner.workload.boundary_codec import BoundaryCodec

ASKED_INSTEAD = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Numbers of steps between averagings that a plan is priced with too."""
MOST_INSTEAD = 4


def sync_lines(plan: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """How often it averages, and what its steps would take with other numbers.

    ``data`` gets the same.
    """
    every, outer = plan.sync.every_steps, plan.sync.outer
    if every == 1:
        return []
    alone_s, averages_s = unlike_steps_s(plan)
    other = [h for h in ASKED_INSTEAD if h < every][-MOST_INSTEAD:]
    instead = {h: Sync(h).mean_s(alone_s, averages_s) for h in other}
    data["sync"] = {
        "every_steps": every,
        "step_alone_s": alone_s,
        "step_that_averages_s": averages_s,
        "instead": {str(h): seconds for h, seconds in instead.items()},
    }
    step = "" if outer is None else f", then {outer.optimizer}: rate {outer.learning_rate:g}"
    step += "" if outer is None else f", momentum {outer.momentum:g}"
    between, without = (" between regions", "averaging within regions")
    if not plan.two_clocks:
        between, without = ("", "without averaging")
    return [
        f"{'':24}averages{between} every {every} steps{step}",
        f"{'':24}{alone_s:10.4f} s {without}, {averages_s:.4f} s with; every "
        + ", ".join(f"{h} {seconds:.4f} s" for h, seconds in instead.items()),
    ]


MEASURED: dict[str, str] = {
    "gradients int8": "INTELLECT-1 (2024) averaged so; no loss published by itself",
    "boundaries int8": "SWARM, Table 7: as good as without, within what is significant",
    "boundaries fp16": "rounds what fp32 workloads send; no loss published by itself",
    "boundaries bf16": "as workloads in bf16 send them",
    "boundaries int4": "untested: no measurement of what it costs is known",
    "sync": "DiLoCo-SWARM, Table 2: perplexity 27.95 with 10, 30.15 with 50, 31.27 with 200",
    "within": "DiLoCo with a worker a region instead of a device; no loss published by itself",
}
"""What is known of decisions that change what is learned."""


def learning_lines(plan: TrainingPlan) -> list[str]:
    """Each decision that changes what is learned, and who has measured by how much."""
    found = []
    if plan.codec is not Codec.NONE:
        found.append(f"gradients {plan.codec}")
    boundary = plan.workload.boundary_codec
    if boundary is not BoundaryCodec.NONE:
        found.append(f"boundaries {boundary}")
    lines = [f"{'':24}{what}: {MEASURED[what]}" for what in found]
    if plan.sync.every_steps > 1:
        lines.append(f"{'':24}averaging every {plan.sync.every_steps} steps: {MEASURED['sync']}")
    if plan.two_clocks:
        lines.append(f"{'':24}gradients within regions: {MEASURED['within']}")
    return lines


def priced_alone_lines(plan: TrainingPlan) -> list[str]:
    """What a plan leaves out that training needs."""
    if not plan.must_average_tied or plan.averages_tied:
        return []
    remedy = "--head first or one stage" if plan.sync.local_steps else "plan again to have it"
    return [
        "priced alone: head and embedding share a matrix and are on two stages that do not average "
        f"it, which no training takes; for that, {remedy}"
    ]


def cost_lines(plan: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """Dollars of a step, where devices have prices; ``data`` gets the same."""
    cost = plan.cost
    data["cost"] = None if cost is None else cost.to_dict()
    if cost is None:
        return []
    tokens = cost.usd_per_billion_tokens
    of_tokens = "" if tokens is None else f"; {tokens:.0f} $ for a billion tokens"
    return [
        f"{'cost of a step':<24}{cost.step_usd:10.4f} $ = {cost.devices_usd:.4f} devices + "
        f"{cost.messages_usd:.4f} for {cost.paid_bytes / 1e9:.3g} GB between regions{of_tokens}"
    ]


def clock_lines(plan: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """Lines about a plan on its own cluster; ``data`` gets the same."""
    return timeline_lines(simulate(plan), plan.cluster, data, plan.sync.every_steps)


def timeline_lines(
    timeline: Timeline, cluster: Cluster, data: dict[str, Any], every: int
) -> list[str]:
    """Lines about a simulated step; ``data`` gets the same. One step in ``every`` averages."""
    lines = []
    data["fullest_link"] = None
    if timeline.loads:
        fullest = timeline.loads[0]
        busy = float(fullest.busy_s)
        data["fullest_link"] = {"name": fullest.name, "busy_s": busy}
        step = "a step" if every == 1 else "a step that averages"
        lines.append(f"{'fullest link':<24}{busy:10.4f} s of messages {step}: {fullest.name}")
    data["assumed_limits"] = assumed_limits(cluster)
    if data["assumed_limits"]:
        lines.append(data["assumed_limits"])
    data["tight_limits"] = tight_limits(cluster)
    if data["tight_limits"]:
        lines.append(data["tight_limits"])
    return lines
