"""What the clock says of a plan beside its times: the fullest link, and limits that it assumes."""

from __future__ import annotations

from typing import Any

from planner.clock.links import assumed_limits
from planner.clock.simulator import simulate
from planner.clock.timeline import Timeline
from planner.network.cluster import Cluster
from planner.training_plan.model import TrainingPlan


def clock_lines(plan: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """Lines about a plan on its own cluster; ``data`` gets the same."""
    return timeline_lines(simulate(plan), plan.cluster, data)


def timeline_lines(timeline: Timeline, cluster: Cluster, data: dict[str, Any]) -> list[str]:
    """Lines about a simulated step; ``data`` gets the same."""
    lines = []
    data["fullest_link"] = None
    if timeline.loads:
        fullest = timeline.loads[0]
        busy = float(fullest.pipeline_s + fullest.averaging_s)
        data["fullest_link"] = {"name": fullest.name, "busy_s": busy}
        lines.append(f"{'fullest link':<24}{busy:10.4f} s of messages a step: {fullest.name}")
    data["assumed_limits"] = assumed_limits(cluster)
    if data["assumed_limits"]:
        lines.append(data["assumed_limits"])
    return lines
