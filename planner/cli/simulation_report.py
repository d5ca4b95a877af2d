"""What the simulator says of a plan beside its times: fullest link and assumed limits."""

from __future__ import annotations

from typing import Any

from planner.network.cluster import Cluster
from planner.simulator.resources import assumed_limits, tight_limits
from planner.simulator.simulator import steps_by_averaging_s
from planner.simulator.timeline import Timeline
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import Sync
from planner.workload.boundary_codec import BoundaryCodec

ASKED_INSTEAD = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Numbers of steps between averagings that a plan is priced with too."""
MOST_INSTEAD = 4


def sync_data(plan: TrainingPlan) -> dict[str, Any]:
    """How often a plan averages, and what its steps would take with other numbers; JSON-ready."""
    every, outer = plan.sync.every_steps, plan.sync.outer
    alone_s, averages_s = steps_by_averaging_s(plan)
    other = [h for h in ASKED_INSTEAD if h < every][-MOST_INSTEAD:]
    words = None
    if outer is not None:
        words = f"{outer.optimizer} (rate {outer.learning_rate:g}, momentum {outer.momentum:g})"
    return {
        "every_steps": every,
        "within_regions": plan.two_frequency,
        "outer": words,
        "step_alone_s": alone_s,
        "step_that_averages_s": averages_s,
        "instead": {str(h): Sync(h).mean_s(alone_s, averages_s) for h in other},
    }


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


def learning_notes(plan: TrainingPlan) -> list[str]:
    """Each decision that changes what is learned, and who has measured by how much."""
    found = []
    if plan.codec is not Codec.NONE:
        found.append(f"gradients {plan.codec}")
    boundary = plan.workload.boundary_codec
    if boundary is not BoundaryCodec.NONE:
        found.append(f"boundaries {boundary}")
    notes = [f"{what[:1].upper()}{what[1:]}: {MEASURED[what]}." for what in found]
    if plan.sync.every_steps > 1:
        notes.append(f"Averaging every {plan.sync.every_steps} steps: {MEASURED['sync']}.")
    if plan.two_frequency:
        notes.append(f"Gradients within regions: {MEASURED['within']}.")
    return notes


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


def timeline_data(timeline: Timeline, cluster: Cluster) -> dict[str, Any]:
    """The fullest link of a simulated step, and what is assumed of links; JSON-ready."""
    fullest = None
    if timeline.loads:
        fullest = {"name": timeline.loads[0].name, "busy_s": float(timeline.loads[0].busy_s)}
    return {
        "fullest_link": fullest,
        "assumed_limits": assumed_limits(cluster),
        "tight_limits": tight_limits(cluster),
    }


def timeline_lines(
    timeline: Timeline, cluster: Cluster, data: dict[str, Any], every: int
) -> list[str]:
    """Lines about a simulated step; ``data`` gets the same. One step in ``every`` averages."""
    data |= timeline_data(timeline, cluster)
    lines = []
    if fullest := data["fullest_link"]:
        step = "a step" if every == 1 else "a step that averages"
        busy, name = fullest["busy_s"], fullest["name"]
        lines.append(f"{'fullest link':<24}{busy:10.4f} s of messages {step}: {name}")
    return lines + [data[key] for key in ("assumed_limits", "tight_limits") if data[key]]
