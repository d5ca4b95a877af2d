"""Events of lost and joining devices, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from planner.training_plan.model import TrainingPlan
from planner.utils.text import listed

if TYPE_CHECKING:
    from planner.executor.elastic.membership import Generation

MEMBERSHIP_EVENTS = ("lost", "came", "torn")
"""Kinds of events."""


def membership_events(
    generation: Generation, plan: TrainingPlan, lost_s: float
) -> Iterator[dict[str, Any]]:
    """Events at the start of a generation.

    Yields
    ------
    dict[str, Any]
        JSON-ready: devices lost for one reason, devices that joined, a connection that was
        replaced.
    """
    common = {"step": generation.step, "go_on": list(generation.members), "lost_s": lost_s}
    lost = generation.lost
    for reason in dict.fromkeys(lost.values()):
        names = [name for name in lost if lost[name] == reason]
        yield {
            "event": "lost",
            "devices": names,
            "why": reason,
            "taken_over_by": _others(names, generation, plan),
            **common,
        }
    if generation.reset:
        yield {"event": "torn", "why": generation.reset, **common}
    if generation.joined:
        yield {"event": "came", "devices": list(generation.joined), **common}


def event_line(event: Mapping[str, Any]) -> str:
    """Text of an event."""
    head, count = f"step {event['step']:4d}  ", len(event["go_on"])
    tail = f"{count} devices continue, {event['lost_s']:.1f} s lost"
    if event["event"] == "came":
        named = listed(event["devices"])
        came = f"device {named} has joined"
        if len(event["devices"]) > 1:
            came = f"devices {named} have joined"
        return f"{head}{came}: {tail}"
    if event["event"] == "torn":
        return f"{head}{event['why']}; reconnected: {tail}"
    others = event["taken_over_by"]
    do = "takes" if len(others) == 1 else "take"
    return f"{head}{event['why']}; {listed(others)} {do} over: {tail}"


def _others(names: list[str], generation: Generation, plan: TrainingPlan) -> list[str]:
    """Remaining devices of the stages that lost devices held or aggregated for."""
    ids = plan.cluster.network.ids
    stages = {plan.averaged_stage(ids.index(name)) for name in names}
    left = (ids[d] for stage in sorted(stages) for d in plan.assignment.groups[stage])
    return [name for name in left if name in generation.members]
