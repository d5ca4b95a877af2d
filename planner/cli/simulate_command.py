"""``planner simulate``: predict a plan's step time, optionally on another network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planner.cli.arguments import count
from planner.cli.output import all_wrapped, show
from planner.cli.simulation_report import cost_lines, timeline_lines
from planner.network.catalogue import load_network
from planner.planning.cost import with_cost
from planner.planning.request import PlanRequest
from planner.simulator.simulator import LinkModel, simulate_cycle
from planner.training_plan.file import load_plan
from planner.training_plan.other_network import network_for
from planner.utils.atomic_write import MADE
from planner.utils.output_files import Output, add_force, require_outputs

ABOUT = "predict the step time of a plan, optionally on another network"
EXAMPLE = "planner simulate plan.json --network other.csv --gantt step.png"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan, the network and output files."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    sub.add_argument("--network", help="network name or file; default: the plan's own")
    sub.add_argument(
        "--links",
        choices=[model.value for model in LinkModel],
        default=LinkModel.QUEUED.value,
        help="queued: messages share links; unlimited: messages never wait for each other, as in "
        "the papers; default %(default)s",
    )
    sub.add_argument(
        "--trace", type=Path, help="Chrome trace to write, for ui.perfetto.dev (.json)"
    )
    sub.add_argument("--gantt", type=Path, help="Gantt chart to write (.png, .svg, .pdf)")
    sub.add_argument(
        "--schedule",
        type=count,
        default=0,
        help="index of the schedule to trace and draw; default 0",
    )
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Print the step time and its parts, for every schedule."""
    pictures = [".png", ".svg", ".pdf"]
    require_outputs(
        vars(args),
        [
            Output("--trace", args.trace, [".json"], MADE),
            Output("--gantt", args.gantt, pictures, MADE),
        ],
    )
    plan = load_plan(args.plan)
    cluster = plan.cluster
    if args.network is not None:
        cluster = cluster.replace(network=network_for(plan, load_network(args.network)))
    if args.schedule >= len(plan.schedules):
        raise ValueError(
            f"--schedule must be 0 to {len(plan.schedules) - 1} for this plan, found "
            f"{args.schedule}; give one of these"
        )
    mean, timelines = simulate_cycle(plan, cluster, links=args.links)
    timeline = timelines[args.schedule]
    if args.trace is not None:
        timeline.to_chrome_trace(args.trace)
    if args.gantt is not None:
        timeline.gantt(args.gantt, groups=plan.assignment.groups)
    data: dict[str, Any] = {
        "links": args.links,
        "pipeline_s": mean.pipeline_s,
        "averaging_s": mean.averaging_s,
        "step_s": mean.step_s,
        "planned_step_s": plan.predicted.step_s,
        "schedules": [
            {"name": s.name, "pipeline_s": t.makespan_s, "averaging_s": t.averaging_s}
            for s, t in zip(plan.schedules, timelines, strict=True)
        ],
    }
    unlimited = args.links == LinkModel.UNLIMITED
    interval = plan.sync.every_steps
    of_steps = f" (mean of {interval} steps, one of which averages)" if interval > 1 else ""
    lines = [
        f"step time {mean.step_s:.4f} s{of_steps}; on an idle network: pipeline "
        f"{mean.pipeline_s:.4f} s, "
        f"averaging {mean.averaging_s:.4f} s   (planned {plan.predicted.step_s:.4f} s)"
        + ("   with unlimited links, as in the papers" if unlimited else "")
    ]
    limits = (cluster.upload_bytes_per_s, cluster.download_bytes_per_s, cluster.devices.sites)
    if args.network is not None and any(limit is not None for limit in limits):
        lines.append("upload and download limits of the devices are those of the plan")
    if not unlimited:
        lines += timeline_lines(timeline, cluster, data, interval)
        if plan.cost is not None:
            request = PlanRequest(prices=plan.cost.prices)
            on_mean = plan.replace(cluster=cluster, predicted=mean)
            lines += cost_lines(with_cost(on_mean, request), data)
    if len(timelines) > 1:
        lines += [
            f"schedule {k}, {s.name}: {plan.cycle.count(k)} of {len(plan.cycle)} iterations, "
            f"pipeline {t.makespan_s:.4f} s, averaging {t.averaging_s:.4f} s"
            for k, (s, t) in enumerate(zip(plan.schedules, timelines, strict=True))
        ]
    show(args.json, data, all_wrapped(lines))
    return 0
