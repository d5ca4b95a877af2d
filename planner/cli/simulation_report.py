"""Simulation results other than times: busiest link, assumed limits, cost, effects on training."""

from __future__ import annotations

from typing import Any

from planner.network.cluster import Cluster
from planner.network.limit_notes import assumed_limits, long_latency, tight_limits
from planner.simulator.simulator import steps_by_averaging_s
from planner.simulator.timeline import Timeline
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import Sync
from planner.utils.text import dollars
from planner.workload.boundary_codec import BoundaryCodec

INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Averaging intervals, in steps, that the plan is also evaluated with."""
MAX_INTERVALS = 4


def sync_data(plan: TrainingPlan) -> dict[str, Any]:
    """Return a plan's averaging interval, and its step time with shorter intervals; JSON-ready."""
    interval, outer = plan.sync.every_steps, plan.sync.outer
    alone_s, averages_s = steps_by_averaging_s(plan)
    other = [h for h in INTERVALS if h < interval][-MAX_INTERVALS:]
    optimizer = None
    if outer is not None:
        optimizer = f"{outer.optimizer} (rate {outer.learning_rate:g}, momentum {outer.momentum:g})"
    return {
        "every_steps": interval,
        "within_regions": plan.two_frequency,
        "outer": optimizer,
        "step_alone_s": alone_s,
        "step_that_averages_s": averages_s,
        "instead": {str(h): Sync(h).mean_s(alone_s, averages_s) for h in other},
    }


MEASURED: dict[str, str] = {
    "gradients int8": "used by INTELLECT-1 (2024); its effect on the loss was not published",
    "boundaries int8": "SWARM, Table 7: no significant difference",
    "boundaries fp16": "rounds the messages of fp32 workloads; its effect on the loss was not "
    "published",
    "boundaries bf16": "the format that bf16 workloads send anyway",
    "boundaries int4": "no published measurement of its effect is known",
    "sync": "DiLoCo-SWARM, Table 2: perplexity 27.95 with 10, 30.15 with 50, 31.27 with 200",
    "within": "DiLoCo with one worker per region instead of per device; its effect on the loss "
    "was not published",
}
"""Published effects of decisions that change training."""


def learning_notes(plan: TrainingPlan) -> list[str]:
    """Return one sentence for each decision that changes training, with its published effect."""
    effects = []
    if plan.codec is not Codec.NONE:
        effects.append(f"gradients {plan.codec}")
    boundary = plan.workload.boundary_codec
    if boundary is not BoundaryCodec.NONE:
        effects.append(f"boundaries {boundary}")
    notes = [f"{effect[:1].upper()}{effect[1:]}: {MEASURED[effect]}." for effect in effects]
    if plan.workload.precision.scales_loss:
        notes.append(
            "Training uses fp16 with dynamic loss scaling: a step that overflows is skipped."
        )
    if plan.sync.every_steps > 1:
        notes.append(f"Averaging every {plan.sync.every_steps} steps: {MEASURED['sync']}.")
    if plan.two_frequency:
        notes.append(f"Gradients within regions: {MEASURED['within']}.")
    return notes


def unmodelled_lines(plan: TrainingPlan) -> list[str]:
    """Describe what training needs and the plan does not model."""
    if not plan.must_average_tied or plan.averages_tied:
        return []
    remedy = "use --head first or one stage" if plan.sync.local_steps else "make the plan again"
    return [
        "not modelled: head and embedding share a matrix on two stages, and this plan does not "
        f"average it, which training needs; {remedy}"
    ]


def cost_lines(plan: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """Format a step's cost if devices have prices, and add it to ``data``."""
    cost = plan.cost
    data["cost"] = None if cost is None else cost.to_dict()
    if cost is None:
        return []
    tokens = cost.usd_per_billion_tokens
    of_tokens = "" if tokens is None else f"; {dollars(tokens)} $ per billion tokens"
    return [
        f"{'cost of a step':<24}{dollars(cost.step_usd):>10} $ = {dollars(cost.devices_usd)} "
        f"devices + {dollars(cost.messages_usd)} for {cost.paid_bytes / 1e9:.3g} GB of traffic"
        f"{of_tokens}"
    ]


def timeline_data(timeline: Timeline, cluster: Cluster) -> dict[str, Any]:
    """Return the busiest link and device of a simulated step, and assumed limits; JSON-ready."""
    fullest = None
    if timeline.loads:
        fullest = {"name": timeline.loads[0].name, "busy_s": float(timeline.loads[0].busy_s)}
    computing_s = timeline.computing_s()
    busiest = max(range(len(computing_s)), key=computing_s.__getitem__)
    return {
        "fullest_link": fullest,
        "busiest_device": {"name": timeline.ids[busiest], "busy_s": computing_s[busiest]},
        "assumed_limits": assumed_limits(cluster),
        "tight_limits": tight_limits(cluster),
        "long_latency": long_latency(cluster),
    }


def timeline_lines(
    timeline: Timeline, cluster: Cluster, data: dict[str, Any], interval: int
) -> list[str]:
    """Format `timeline_data` and add it to ``data``; one step in ``every`` averages."""
    data |= timeline_data(timeline, cluster)
    lines = []
    if fullest := data["fullest_link"]:
        step = "a step" if interval == 1 else "a step that averages"
        busy, name = fullest["busy_s"], fullest["name"]
        lines.append(f"{'busiest link':<24}{busy:10.4f} s of messages {step}: {name}")
    busiest = data["busiest_device"]
    busy, name = busiest["busy_s"], busiest["name"]
    lines.append(f"{'busiest device':<24}{busy:10.4f} s of computation a step: {name}")
    hints = ("assumed_limits", "tight_limits", "long_latency")
    return lines + [data[key] for key in hints if data[key]]
