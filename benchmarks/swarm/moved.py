"""Devices that move between stages during a run, over an emulated network.

Part of ``python -m benchmarks.swarm``; needs Linux and root (see ``planner emulate``).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.swarm.executed import SWITCH_S, pipelines, simulated, wired
from planner.emulate.emulation import EmulationSettings, resolve_settings
from planner.emulate.execution import Step, steps_of
from planner.emulate.links import links_of
from planner.emulate.network import emulated
from planner.emulate.ranks import run_ranks
from planner.swarm.rebalance_policy import RebalanceRule
from planner.training_plan.choices import RouterFeedback
from planner.training_plan.file import save_plan
from planner.training_plan.migration import Migration, migrated
from planner.training_plan.model import Routing, TrainingPlan

DEVICES, UNIT_S, BATCH, HELD = 8, 0.4, 60, 8
STEPS, EVERY, SPEED = 40, 5, 4.0
LATENCY_S = 0.02
ROUTING = Routing(told=RouterFeedback.WORK)


def unbalanced(slow: bool) -> TrainingPlan:
    """Two equal stages, with two and with six devices."""
    speeds = np.ones(DEVICES)
    if slow:
        speeds[[1, 3]] /= 4
    plan = wired(pipelines(2, speeds, UNIT_S, 1e3, BATCH, HELD, LATENCY_S), ROUTING)
    for device in (2, 6):
        plan = migrated(plan, Migration(plan.cluster.network.ids[device], 1, 0))
    return plan


def moves_executed(say: Callable[[str], None]) -> list[str]:
    """The section of the report."""
    lines = [
        "## Devices that move while they run, executed",
        "",
        f"Two equal stages, one with two of {DEVICES} devices and the other with six, over an "
        f"emulated network of {LATENCY_S * 1e3:g} ms; F and B take {UNIT_S:g} s together, {BATCH} "
        f"microbatches a step, routers are told the work; {SPEED:g} times the speed. "
        f"`--rebalance {EVERY}`: after every {EVERY} of {STEPS} steps all tell what a microbatch "
        "took them, and at most one moves. Alike: all devices are equally fast. Unlike: two of the "
        "six are four times as slow. Best: of all ways to place these devices. Seconds of a step "
        f"are medians of the first {EVERY} and the last {EVERY * 2}, in brackets those of the "
        "simulator of queues with the stages as they then are.",
        "",
        "| devices | rule | moves after steps | slowest stage, 1/s: at first | at the end | best | "
        "s a step: at first | at the end |",
        f"|{'---|' * 8}",
    ]
    for what in ("alike", "unlike"):
        plan = unbalanced(what == "unlike")
        for rule in RebalanceRule:
            steps, moves = _run(plan, rule)
            last = plan
            for move in moves:
                last = migrated(last, Migration(move["device"], move["stage"], move["steps"]))
            seconds = [step.pipeline_s for step in steps]
            lines.append(
                f"| {what} | {rule} | {', '.join(str(m['steps']) for m in moves)} | "
                f"{_rate(plan):.2f} | {_rate(last):.2f} | {_best(plan):.2f} | "
                f"{median(seconds[:EVERY]):.2f} ({_simulated_s(plan):.2f}) | "
                f"{median(seconds[-2 * EVERY :]):.2f} ({_simulated_s(last):.2f}) |"
            )
            say(lines[-1])
    return [*lines, ""]


def _run(plan: TrainingPlan, rule: RebalanceRule) -> tuple[list[Step], list[dict[str, Any]]]:
    """Steps that chain, and the moves that were made."""
    settings = EmulationSettings(SPEED, rest=1, steps=1)
    asked = replace(resolve_settings(plan, settings), rest=0, steps=STEPS)
    links = links_of(plan.cluster, asked.speed, asked.shrink, asked.jitter_s)
    output: list[str] = []
    with emulated(links) as network, tempfile.TemporaryDirectory() as name:
        path = Path(name) / "plan.json"
        save_plan(plan, path)
        extra = ("--rebalance", str(EVERY), "--rebalance-rule", str(rule), "--events")
        records = run_ranks(network, path, plan, asked, Path(name), output.append, extra)
        network.stop()
    events = [json.loads(line) for line in output if line.startswith("{")]
    moves = [e for e in events if e["event"] == "move" and not e["why_not"]]
    return steps_of(records, False, asked.speed), moves


def _simulated_s(plan: TrainingPlan) -> float:
    seconds, _ = simulated(plan, ROUTING, 6, SWITCH_S)
    return median(seconds[1:])


def _speeds(plan: TrainingPlan) -> dict[int, float]:
    """Microbatches a second that a device does in either stage."""
    times = plan.compute_times
    return {d: 1 / (times.forward_s[d] + times.backward_s[d]) for d in plan.stage_of}


def _rate(plan: TrainingPlan) -> float:
    each = _speeds(plan)
    return min(sum(each[d] for d in group) for group in plan.assignment.groups)


def _best(plan: TrainingPlan) -> float:
    """Of the slowest stage, over all ways to have two."""
    each = list(_speeds(plan).values())
    sums = [
        sum(speed for d, speed in enumerate(each) if mask >> d & 1)
        for mask in range(1, 2 ** len(each) - 1)
    ]
    return max(min(total, sum(each) - total) for total in sums)
