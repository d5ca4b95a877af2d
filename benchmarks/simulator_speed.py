"""Run time of the simulator on one core, without compilation."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.command_line import run, versions
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.problems.answers import AssignmentPlan
from planner.simulator.simulator import simulate, simulate_cycle
from planner.training_plan.model import TrainingPlan
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text
from planner.workload.workload import Workload

NETWORK = "aws8_dtfm_worldwide_2022"
UPLOAD = 0.5
"""Upload limit relative to a device's fastest pair, in rows with limits."""


class Row(NamedTuple):
    """Size of one plan, and median CPU seconds."""

    devices: int
    events: int
    limits: bool
    order_s: float
    pass_s: float
    step_s: float


PASSES = 5
"""Simulated passes per step time: one on an idle system, and four consecutive ones."""


def random_plan(devices: int, microbatches: int, limits: bool, seed: int) -> TrainingPlan:
    """Build eight stages on a random grid over eight regions, with a simulated order."""
    base = load_network(NETWORK)
    network = base.replicate(
        dict.fromkeys(base.ids, devices // len(base)),
        intra_latency_s=0.005,
        intra_bandwidth_bytes_per_s=2.5e8,
    )
    upload = UPLOAD * 2.5e8 if limits else None
    gpu = Devices.of_gpu("A100")
    cluster = Cluster(network, Devices(gpu.flops, gpu.memory_bytes, upload_bytes_per_s=upload))
    workload = Workload.preset("gpt3-1.3b", batch_samples=microbatches)
    problem = PlanningProblem(cluster, workload, PlanRequest(stages=8), seed)
    grid = np.random.default_rng(seed).permutation(devices).reshape(-1, 8)
    return straight_plan(problem, shape_of(problem), AssignmentPlan.of_grid(grid))


def measure(devices: int, microbatches: int, limits: bool, repeats: int, seed: int) -> Row:
    """Return median seconds of ordering, of one step, and of the plan's step time."""
    random_plan(8, 16, limits, seed)
    began = time.process_time()
    plan = random_plan(devices, microbatches, limits, seed)
    order_s = time.process_time() - began
    timeline = simulate(plan)

    def median(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
        return statistics.median(seconds)

    step_s = median(lambda: simulate_cycle(plan))
    events = len(timeline.ops) + len(timeline.transfers)
    return Row(devices, events, limits, order_s, step_s / PASSES, step_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.simulator_speed", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print")
    args = parser.parse_args(argv)
    rows = [
        measure(devices, microbatches, limits, args.repeats, args.seed)
        for devices, microbatches in ((64, 1024), (1024, 8192))
        for limits in (False, True)
    ]
    lines = [
        f"# The clock's own seconds, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.simulator_speed --repeats {args.repeats} --seed {args.seed}`: "
        "gpt3-1.3b in 8 stages",
        f"on a random grid over eight AWS regions ({NETWORK}). Medians of the CPU seconds of one",
        "thread, after compiling.",
        f"{versions('numpy', 'numba')}, {platform.machine()}.",
        "",
        "The step time takes five passes: one from rest with all times kept, four that chain.",
        "Planning takes one more to choose the orders, and all of these.",
        "",
        "| devices | operations and messages | uploads limited | step time, s | a pass of it, s |"
        " order and price, once, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.devices} | {row.events} | {'yes' if row.limits else 'no'} | {row.step_s:.2f} "
            f"| {row.pass_s:.2f} | {row.order_s:.2f} |"
        )
    text = "\n".join(lines) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        write_text(args.out, text)
    return 0


if __name__ == "__main__":
    run(main)
