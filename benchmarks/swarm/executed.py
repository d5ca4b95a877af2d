"""Stochastic wiring over an emulated network, against the simulator (`benchmarks.swarm`).

Needs Linux and root (see ``planner emulate``). Compute times are imposed; messages have their
planned sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.swarm.plan_scene import plan_routers, plan_scenario
from benchmarks.swarm.queueing import Chooser, FixedPath, simulate_queues
from benchmarks.swarm.square_cube import BYTES_PER_S, FIGURE_3_S, STAGES, TABLE_1, TOKENS
from benchmarks.swarm.wiring import (
    FORWARD,
    JITTER_S,
    LATENCY_S,
    MODELS,
    PAPER_2,
    RACK_S,
)
from planner.emulate.emulation import EmulationSettings, resolve_settings
from planner.emulate.execution import Step, steps_of
from planner.emulate.links import links_of
from planner.emulate.network import emulated
from planner.emulate.processors import ProcessorUsage
from planner.emulate.ranks import run_ranks
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.planning.solve import plan as make_plan
from planner.planning.straight.schedules import eagerly_ordered
from planner.problems.answers import AssignmentPlan
from planner.search.stop import Effort
from planner.simulator.program import message_bytes
from planner.simulator.resources import LinkResources
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.choices import Head, RouterFeedback, Wiring
from planner.training_plan.file import save_plan
from planner.training_plan.model import Routing, TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.layers import Architecture, Family, Layer
from planner.workload.workload import Workload

Floats = NDArray[np.float64]
WORKERS, PIPELINE = 8, 4
MICROBATCHES = 48
IN_FLIGHT = (8, 32)
REST = 3
SPEED = {"GPT-3": 4.0, "xxlarge": 2.0}
"""Its messages are larger: what this machine carries is half as much."""
SWITCH_S = 2e-3
"""By which latencies vary in the simulator where there are none: without any difference alike peers
stay in step for ever, as no machines do."""
FLOPS = 1e12
KINDS: dict[str, Routing | None] = {
    "fixed": None,
    "planned flow": Routing(0.0),
    "stochastic": Routing(),
    "stochastic, told the work": Routing(told=RouterFeedback.WORK),
}
"""Wirings of an executed plan; None: its own paths and orders."""


@dataclass(frozen=True)
class Ran:
    """What was executed.

    Attributes
    ----------
    steps
        From rest, without the first.
    counts
        ``float[steps, N]``: forward passes of every device.
    busy
        Share of this machine's processor time.
    """

    steps: tuple[Step, ...]
    counts: Floats
    busy: float

    @property
    def pipeline_s(self) -> float:
        """Median."""
        return median(step.pipeline_s for step in self.steps)


def run(plan: TrainingPlan, rest: int, speed: float, jitter_s: float, warm: int = 1) -> Ran:
    """Execute steps from rest over the plan's network."""
    settings = EmulationSettings(speed, rest=rest, steps=1, jitter_s=jitter_s)
    asked = replace(resolve_settings(plan, settings), rest=rest, steps=1)
    links = links_of(plan.cluster, asked.speed, asked.shrink, asked.jitter_s)
    with emulated(links) as network, tempfile.TemporaryDirectory() as name:
        path, processors = Path(name) / "plan.json", ProcessorUsage()
        save_plan(plan, path)
        records = run_ranks(network, path, plan, asked, Path(name), lambda _: processors.look())
        network.stop()
    steps = tuple(steps_of(records, True, asked.speed))[warm:]
    counts = [
        np.bincount([op.device for op in step.operations if op.kind == "F"], minlength=len(records))
        for step in steps
    ]
    return Ran(steps, np.array(counts, dtype=np.float64), processors.busy)


def pipelines(
    stages: int,
    speeds: Floats,
    layer_s: float,
    output_bytes: float,
    microbatches: int,
    live: int,
    latency_s: float,
) -> TrainingPlan:
    """Straight pipelines of layers that take so long, all links alike.

    Parameters
    ----------
    speeds
        ``float[N]``.
    """
    n = len(speeds)
    layer = Layer("layer", 1000, FORWARD * layer_s * FLOPS, output_bytes, output_bytes)
    nothing = Layer("nothing", 0, 0.0, 0.0, 0.0)
    work = Workload(
        "layers",
        replace(nothing, output_bytes=output_bytes),
        (layer,) * stages,
        nothing,
        batch_samples=microbatches,
        microbatch_samples=1,
    )
    network = Network(np.full((n, n), latency_s), np.full((n, n), BYTES_PER_S))
    devices = Devices(
        FLOPS * speeds, 1e15, upload_bytes_per_s=BYTES_PER_S, download_bytes_per_s=BYTES_PER_S
    )
    cluster = Cluster(network, devices)
    request = PlanRequest(stages=stages, stage_layers="even", recompute="all", in_flight=live)
    problem = PlanningProblem.of(cluster, work, request, 0, {})
    grid = AssignmentPlan.of_grid(np.arange(n).reshape(-1, stages).tolist())
    return straight_plan(problem, shape_of(problem), grid)


def wired(plan: TrainingPlan, routing: Routing | None) -> TrainingPlan:
    """The plan with fixed paths, or with devices that choose."""
    if routing is None:
        return plan
    return plan.replace(wiring=Wiring.STOCHASTIC, routing=routing)


def simulated(
    plan: TrainingPlan, routing: Routing | None, rest: int, jitter_s: float, seed: int = 0
) -> tuple[list[float], Floats]:
    """The same steps in the simulator of queues.

    Returns
    -------
    counts : ndarray
        ``float[rest, N]``: forward passes of every device.
    """
    found = plan_scenario(plan, by_holder=routing is not None, limit_memory=True)
    scene = replace(found.scene, jitter_s=jitter_s)
    microbatches = len(plan.schedules[0].paths)
    chosen: Sequence[Chooser]
    if routing is None:
        chosen = [FixedPath(path) for path in sorted(set(plan.schedules[0].paths))]
    else:
        scene = replace(scene, told_work=routing.told is RouterFeedback.WORK)
        chosen = plan_routers(wired(plan, routing))
    logs = [
        simulate_queues(scene, chosen, microbatches, seed=seed + step, drain=True)
        for step in range(rest)
    ]
    counts = [log.counts(len(plan.cluster)) for log in logs]
    return [log.finished_s[-1] for log in logs], np.array(counts)


def table_2_executed(say: Callable[[str], None]) -> list[str]:
    """The section of the report."""
    lines = [
        "## Table 2's conditions, executed",
        "",
        f"As in Table 2, simulated, but for {WORKERS} workers, two of every stage, and steps from "
        f"rest of {MICROBATCHES} microbatches each: samples a second and worker in the part of a "
        "step before it averages. Executed: `python -m planner.executor` on eight devices of an "
        "emulated network ([emulate.md](emulate.md)), at "
        + ", ".join(f"{speed:g} times the speed for {name}" for name, speed in SPEED.items())
        + f", imposed compute times; median of {REST} steps after one. Simulated: the same steps "
        "in the simulator of queues, "
        "with the same bounds on what devices hold; where there is none, latency varies by "
        f"{SWITCH_S * 1e3:g} ms, or alike peers would stay in step for ever (fixed, on the clock "
        "without jitter: in brackets). Trainers are on the first stage's devices. Routers begin "
        "with the plan's pairs, which are those of the straight pipelines; planned flow keeps to "
        "them, in no fixed order. The paper's rows have 16 workers and real GPUs.",
        "",
        "| model | wiring | in flight | no latency: simulated | executed | latency: simulated | "
        "executed | kept, executed |",
        f"|{'---|' * 8}",
    ]
    busy: list[float] = []
    for model, (place, samples) in MODELS.items():
        for system, (without, delayed) in PAPER_2[model].items():
            lines.append(
                f"| {model} | paper: {system} | | | {without} | | {delayed} | "
                f"{delayed / without:.0%} |"
            )
        for in_flight in IN_FLIGHT:
            cells: dict[str, list[str]] = {name: [] for name in KINDS}
            rates: dict[str, list[float]] = {name: [] for name in KINDS}
            for latency_s, jitter_s in ((RACK_S, 0.0), (LATENCY_S, JITTER_S)):
                plan = pipelines(
                    PIPELINE,
                    np.ones(WORKERS),
                    FIGURE_3_S[place] / STAGES * samples,
                    TABLE_1[place].value_bytes * TABLE_1[place].units * TOKENS * samples,
                    MICROBATCHES,
                    in_flight * PIPELINE // WORKERS,
                    latency_s,
                )
                done = MICROBATCHES * samples / WORKERS
                for name, routing in KINDS.items():
                    seconds, _ = simulated(plan, routing, REST + 1, jitter_s or SWITCH_S)
                    ran = run(wired(plan, routing), REST + 1, SPEED[model], jitter_s)
                    rates[name].append(done / ran.pipeline_s)
                    clock = f" ({done / plan.predicted.pipeline_s:.3f})" if routing is None else ""
                    busy.append(ran.busy)
                    cells[name] += [
                        f"{done / median(seconds[1:]):.3f}{clock}",
                        f"{rates[name][-1]:.3f}",
                    ]
                    say(
                        f"table 2x: {model}, {name}, {in_flight}, {latency_s:g} s: {cells[name]}, "
                        f"processors {ran.busy:.0%} busy"
                    )
            for name in KINDS:
                kept = rates[name][1] / rates[name][0]
                lines.append(
                    f"| {model} | {name} | {in_flight} | {' | '.join(cells[name])} | {kept:.0%} |"
                )
    return [*lines, "", _busy(busy), ""]


def _busy(found: Sequence[float]) -> str:
    """How far processors were used: others may have been at work on this machine."""
    return (
        f"Processors were {min(found):.0%} to {max(found):.0%} busy during the runs; what waits "
        "for them is executed late."
    )


STAGE_SPEEDS = ((1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0))
UNIT_S, BATCH, HELD, SHARE_STEPS, SHARE_SPEED = 0.4, 120, 8, 40, 4.0
SLOWED = 5
"""A device of the second stage, of speed 2."""


def shares_executed(say: Callable[[str], None]) -> list[str]:
    """The section of the report."""
    lines = [
        "## Shares of work against throughput, executed",
        "",
        f"Two stages of four devices of speeds 1, 2, 3, 4, over an emulated network of 1 or 50 ms; "
        f"F and B take {UNIT_S:g} s together at speed 1, {BATCH} microbatches a step from rest, "
        f"{4 * HELD} in flight; run at {SHARE_SPEED:g} times the speed. Routers begin with even "
        "parts (steady peers), or with the parts by speed while one device of speed 2 takes three "
        "times as long. Off: the largest relative distance of a device's part of its stage's "
        "forward passes from its part of the stage's speed, over the last "
        f"{SHARE_STEPS // 2} of {SHARE_STEPS} steps. Right after: the first step from which on the "
        "parts of a step are within 0.05 of those by speed (total variation), in the stage with "
        "that device.",
        "",
        "| peers | latency | told | off: simulated | executed | right after: simulated | "
        "executed |",
        f"|{'---|' * 7}",
    ]
    speeds = np.array(STAGE_SPEEDS).T.ravel()
    busy: list[float] = []
    for latency_s in (1e-3, 0.05):
        for what in ("steady", "one slowed to a third"):
            plan = pipelines(2, speeds, UNIT_S, 1e3, BATCH, HELD, latency_s)
            now = speeds.copy()
            if what != "steady":
                plan = by_speed(plan, speeds)
                now[SLOWED] /= 3
                plan = retimed(plan, speeds / now)
            for feedback in RouterFeedback:
                routing = Routing(told=feedback)
                _, counted = simulated(plan, routing, SHARE_STEPS, SWITCH_S)
                ran = run(wired(plan, routing), SHARE_STEPS, SHARE_SPEED, 0.0, warm=0)
                cells = [[f(c, now) for c in (counted, ran.counts)] for f in (_off, _right_after)]
                off, right = cells
                row = (
                    f"| {what} | {latency_s * 1e3:g} ms | {feedback} | {off[0]} | {off[1]} | "
                    f"{right[0]} | {right[1]} |"
                )
                say(f"{row} processors {ran.busy:.0%} busy")
                lines.append(row)
                busy.append(ran.busy)
    return [*lines, "", _busy(busy), ""]


def by_speed(plan: TrainingPlan, speeds: Floats) -> TrainingPlan:
    """The plan with paths in proportion to speeds.

    Parameters
    ----------
    speeds
        ``float[N]``.
    """
    (schedule,) = plan.schedules
    columns = []
    for group in plan.assignment.groups:
        clock = dict.fromkeys(group, 0.0)
        column = []
        for _ in schedule.paths:
            d = min(group, key=lambda d: (clock[d] + 1 / speeds[d], d))
            clock[d] += 1 / speeds[d]
            column.append(d)
        columns.append(column)
    paths = tuple(zip(*columns, strict=True))
    bare = Schedule("by speed", Head.LAST, paths, ())
    room = dict.fromkeys(range(len(speeds)), max(schedule.most_live()))
    links, sent = LinkResources.of(plan.cluster), message_bytes(plan, plan.workload)
    made = eagerly_ordered(bare, plan.compute_times, sent, links, room)
    return plan.replace(schedules=(made,))


def retimed(plan: TrainingPlan, factors: Floats) -> TrainingPlan:
    """The plan on devices that take so many times as long; paths and orders stay.

    Parameters
    ----------
    factors
        ``float[N]``.
    """
    times = plan.compute_times
    columns: Mapping[str, tuple[float, ...]] = {
        name: tuple(float(s * f) for s, f in zip(getattr(times, name), factors, strict=True))
        for name in ("forward_s", "backward_s")
    }
    made = plan.replace(compute_times=replace(times, **columns))  # type: ignore[arg-type]
    return made.replace(predicted=simulate_cycle(made)[0])


def _off(counts: Floats, speeds: Floats) -> str:
    last = counts[-(SHARE_STEPS // 2) :].sum(axis=0)
    found = []
    for first in range(2):
        done, could = last[first::2], speeds[first::2]
        found.append(np.abs(done / done.sum() / (could / could.sum()) - 1).max())
    return f"{max(found):.1%}"


def _right_after(counts: Floats, speeds: Floats) -> str:
    """Steps; the stage with the slowed device."""
    done, could = counts[:, SLOWED % 2 :: 2], speeds[SLOWED % 2 :: 2]
    parts = done / done.sum(axis=1, keepdims=True)
    off = np.abs(parts - could / could.sum()).sum(axis=1) / 2
    wrong = np.flatnonzero(off > 0.05)
    after = 0 if not len(wrong) else int(wrong[-1]) + 1
    return f"{after} steps" if after < len(counts) else "never"


FLOW_BATCH, FLOW_REST, FLOW_SPEED = 32, 7, 0.5


def flow_executed(say: Callable[[str], None]) -> list[str]:
    """The section of the report."""
    arch = Architecture(Family.GPT2, 4, 64, 4, 4, 256, 256, 64, False)
    work = Workload.transformer("4 layers of 64", arch, batch_samples=FLOW_BATCH, precision="fp32")
    cluster = Cluster(load_network("aws8_dtfm_worldwide_2022"), Devices.of_gpu("A100"))
    plan = make_plan(cluster, work, stages=2, wiring="flow", stop=Effort(0.5)).plan
    assert plan is not None
    ids = plan.cluster.network.ids
    stages = "; ".join(", ".join(ids[d] for d in group) for group in plan.assignment.groups)
    pairs = sorted(set(plan.schedules[0].paths))
    lines = [
        "## A flow between continents, executed",
        "",
        f"A model so small that latencies are most of a step: {work.name}, {FLOW_BATCH} "
        f"microbatches, planned on aws8_dtfm_worldwide_2022 as two stages ({stages}), over "
        + " and ".join("-".join(ids[d] for d in path) for path in pairs)
        + f". Part of a step before it averages, from rest, median of {FLOW_REST} steps after one; "
        f"speed {FLOW_SPEED:g}.",
        "",
        "| wiring | predicted, ms | executed, ms |",
        f"|{'---|' * 3}",
    ]
    for name, routing in KINDS.items():
        ran = run(wired(plan, routing), FLOW_REST + 1, FLOW_SPEED, 0.0)
        predicted = f"{plan.predicted.pipeline_s * 1e3:.1f}" if routing is None else ""
        lines.append(f"| {name} | {predicted} | {ran.pipeline_s * 1e3:.1f} |")
        say(f"{lines[-1]} processors {ran.busy:.0%} busy")
    return [*lines, ""]
