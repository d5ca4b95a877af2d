"""``planner plan``: place stages on devices, and write a checked plan with its pictures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from planner.cli.arguments import (
    add_cluster,
    add_solver,
    add_workload,
    cluster_of,
    count,
    sizes,
    stop_of,
    workload_of,
)
from planner.cli.comparison import compared
from planner.cli.output import INVALID_PLAN, certificate_line, require_writable, show
from planner.compose.degrees import Candidate
from planner.compose.request import Order, PlanRequest, Question, Shares
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import TrainingPlan
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.calibration import Calibration

NAME = "plan"
ABOUT = "place stages on devices and write a checked plan"

RANDOM_PLACEMENTS = 20


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Cluster, workload, the decisions of a `PlanRequest`, what to write."""
    add_cluster(sub)
    add_workload(sub)
    sub.add_argument("--stages", type=_stages, help="a number, or auto; default: all is searched")
    sub.add_argument("--pipelines", type=int, help="default: devices / stages")
    sub.add_argument("--path-stages", type=int, help="stages a microbatch visits (SkipPipe)")
    sub.add_argument("--stage-sizes", type=sizes, help="with --path-stages, such as 5,3,3,3")
    sub.add_argument(
        "--recompute", type=_recompute, default=(), help="stages that run F again in B: 0,2 or all"
    )
    sub.add_argument("--full-every", type=int, help="one iteration in so many is full; default 10")
    sub.add_argument("--max-swaps", type=int, help="swaps of neighbouring stages; default 1")
    sub.add_argument(
        "--schedule",
        default=Order.EAGER_1F1B.value,
        choices=[order.value for order in Order],
        help="default %(default)s",
    )
    sub.add_argument(
        "--head",
        choices=[head.value for head in Head],
        help="who runs the head; default last, paths: first",
    )
    sub.add_argument("--in-flight", type=int, help="eager-1f1b: microbatches a device holds")
    sub.add_argument("--calibration", type=Path, help="measured compute times (planner run)")
    sub.add_argument(
        "--averaging",
        choices=[shares.value for shares in Shares],
        help="shares in a stage; default equal where stages are given",
    )
    sub.add_argument("--group-size", type=int, help="average in rounds of groups of this size")
    sub.add_argument(
        "--codec",
        default=Codec.NONE.value,
        choices=[codec.value for codec in Codec],
        help="of gradients sent",
    )
    sub.add_argument(
        "--boundary-codec",
        default=BoundaryCodec.NONE.value,
        choices=[codec.value for codec in BoundaryCodec],
        help="of activations between stages: priced, not executed yet",
    )
    sub.add_argument(
        "--random-placements", type=count, help="straight ones to compare with; default 20"
    )
    sub.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with ranks numbered region by region, and with one region alone",
    )
    sub.add_argument("--out", type=Path, default=Path("plan.json"), help="plan file to write")
    sub.add_argument("--no-pictures", action="store_true", help="write no trace and no Gantt")
    add_solver(sub)


def _stages(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _recompute(text: str) -> list[int] | str:
    return text if text == "all" else sizes(text)


def _request(args: argparse.Namespace) -> PlanRequest:
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    return PlanRequest(
        stages=args.stages,
        pipelines=args.pipelines,
        stage_sizes=args.stage_sizes,
        path_stages=args.path_stages,
        recompute=args.recompute,
        full_every=args.full_every,
        max_swaps=args.max_swaps,
        schedule=args.schedule,
        head=args.head,
        in_flight=args.in_flight,
        averaging=args.averaging,
        group_size=args.group_size,
        codec=args.codec,
        boundary_codec=args.boundary_codec,
        method=args.method,
        calibration=calibration,
        network_name=args.network,
    )


def run(args: argparse.Namespace) -> int:
    """Plan, check, write, then what is slow: pictures and comparisons."""
    from planner.checker.dispatch import check
    from planner.compose.planning import plan
    from planner.training_plan.file import load_plan, save_plan

    cluster, workload, request = cluster_of(args), workload_of(args), _request(args)
    require_writable(args.out, [".json"])
    if request.skips and args.random_placements:
        raise ValueError(
            f"--random-placements {args.random_placements} draws straight pipelines; leave it out "
            "with --path-stages"
        )
    started = time.perf_counter()
    result = plan(cluster, workload, request=request, stop=stop_of(args), seed=args.seed)
    if result.plan is None:
        print(f"planner plan: no plan found, {result.status}", file=sys.stderr)
        return INVALID_PLAN
    made = result.plan
    save_plan(made, args.out)
    # what is written must load, and pass the checker
    violations = check(load_plan(args.out))
    if violations:
        raise ValueError(f"the plan does not pass its own check: {violations[0]}; report this")
    asked = Question.of(cluster, workload, request, args.seed, {})
    data, lines = _report(made, result.candidates, asked)
    data["written"] = [str(args.out)]
    try:
        if not args.no_pictures:
            for path in _draw(made, args.out):
                data["written"].append(str(path))
        drawn = RANDOM_PLACEMENTS if args.random_placements is None else args.random_placements
        if not request.skips and not request.open and drawn:
            lines += _random(replace(asked, workload=made.workload), made, drawn, data)
        if not request.skips and args.compare:
            lines += compared(asked, made.predicted.step_s, data)
    except KeyboardInterrupt:
        lines.append("interrupted: pictures or comparisons that are not listed here are missing")
    data["runtime_s"] = time.perf_counter() - started
    lines.append(f"wrote {', '.join(data['written'])}  (hash {made.content_hash[:12]})")
    show(args.json, data, lines)
    return 0


def _report(
    made: TrainingPlan,
    candidates: Sequence[Candidate],
    asked: Question,
) -> tuple[dict[str, Any], list[str]]:
    """The plan and its certificates, as data and as lines."""
    from planner.cli.clock_report import clock_lines
    from planner.cli.cycle_report import cycle_data, cycle_lines

    request = asked.request
    parts = {part: asdict(certificate) for part, certificate in made.certificates.items()}
    data: dict[str, Any] = {
        "content_hash": made.content_hash,
        **parts,
        "predicted": asdict(made.predicted),
        "recompute": list(made.recompute),
        "candidates": [asdict(c) for c in candidates],
    }
    lines = [
        *_candidate_lines(candidates),
        _shape_line(made, request.skips or request.open),
        *_recompute_line(made),
    ]
    if "assignment" in parts:
        lines.append(certificate_line("assignment cost", parts["assignment"]))
    if request.skips:
        lines.append(certificate_line("paths so arranged", parts["paths"]))
    lines += [
        certificate_line("predicted step time", parts["step"]),
        f"{'':24}{made.predicted.pipeline_s:10.4f} s pipeline + {made.predicted.averaging_s:.4f} s "
        "averaging",
    ]
    if request.open:
        lines += _long_run_line(made, asked, data)
    lines += clock_lines(made, data)
    if request.skips:
        lines += _directions_line(made)
        data |= cycle_data(made)
        lines += cycle_lines(data)
    return data, lines


def _draw(made: TrainingPlan, out: Path) -> Iterator[Path]:
    """Trace and Gantt beside the plan file; each path once it is written."""
    from planner.clock.simulator import simulate

    timeline = simulate(made)
    trace, gantt = out.with_suffix(".trace.json"), out.with_suffix(".gantt.png")
    timeline.to_chrome_trace(trace)
    yield trace
    timeline.gantt(gantt)
    yield gantt


def _random(question: Question, made: TrainingPlan, drawn: int, data: dict[str, Any]) -> list[str]:
    from planner.compose.baselines import random_placements
    from planner.compose.shape import Shape

    groups, schedule = made.assignment.groups, made.schedules[0]
    shape = Shape(
        made.stage_layers,
        tuple(map(len, groups)),
        len(schedule.paths),
        schedule.head,
        made.recompute,
    )
    found = random_placements(question, shape, drawn)
    data["random"] = asdict(found)
    if found.mean_cost_s is None or found.mean_step_s is None:
        return [f"none of {drawn} random placements fits the devices' memory"]
    cost_s, step_s = data["assignment"]["objective"], made.predicted.step_s
    cost = f"assignment cost {found.mean_cost_s:.4f} s"
    if cost_s > 0:
        cost += f" ({found.mean_cost_s / cost_s:.2f} x)"
    lines = [
        f"mean of {found.count} random placements: {cost}, step time {found.mean_step_s:.4f} s "
        f"({found.mean_step_s / step_s:.2f} x)"
    ]
    if found.refused:
        lines.append(f"{found.refused} more that were drawn do not fit the devices' memory")
    return lines


def _directions_line(made: TrainingPlan) -> list[str]:
    """Why the pipeline part differs from the path solver's makespan, where it does."""
    solver_s, simulated_s = made.certificates["paths"].objective, made.predicted.pipeline_s
    if solver_s is not None and abs(solver_s - simulated_s) <= 1e-6 * simulated_s:
        return []
    return [f"{'':24}paths count both directions of a pair averaged and share no up- and downlinks"]


def _long_run_line(made: TrainingPlan, asked: Question, data: dict[str, Any]) -> list[str]:
    """What no plan beats over many steps, where averaging is one round a stage."""
    from planner.compose.whole_bound import long_run_s

    if any(len(rounds) > 1 for rounds in made.averaging):
        return []
    data["long_run_bound_s"] = long_run_s(
        asked.cluster, made.workload, made.codec.wire_ratio, helped_in=asked.helped_in
    )
    return [f"{'':24}{data['long_run_bound_s']:10.4f} s: no plan is faster over many steps"]


def _shape_line(made: TrainingPlan, by_size: bool) -> str:
    groups, w = made.assignment.groups, made.workload
    shape = f"{len(groups)} stages x {len(groups[0])} pipelines"
    if by_size:
        shape = f"stages of {', '.join(str(len(group)) for group in groups)}"
    helpers = len(made.averages_for)
    words = [f"{helpers} to average only"] * (helpers > 0)
    words += [f"{len(made.left_out)} left out"] * bool(made.left_out)
    without = f" ({', '.join(words)})" if words else ""
    return (
        f"{len(made.cluster)} devices{without}, {shape}, {w.name}, "
        f"{len(made.schedules[0].paths)} microbatches of {w.microbatch_samples}"
    )


def _recompute_line(made: TrainingPlan) -> list[str]:
    stages = [str(j) for j, does in enumerate(made.recompute) if does]
    if not stages:
        return []
    which = "every stage keeps its" if all(made.recompute) else f"stage {', '.join(stages)}: keeps"
    return [f"{'':24}{which} input only and B runs F again"]


def _candidate_lines(table: Sequence[Candidate]) -> list[str]:
    if not table:
        return []
    rows = ["stages x pipelines  microbatch   step time       bound"]
    for c in table:
        shape = f"{c.stages:6d} x {c.pipelines:<9d}  {c.microbatch_samples:10d}"
        if c.step_s is None:
            rows.append(f"{shape}   refused: {c.refused.split(';')[0]}")
        else:
            bound = "none" if c.bound_s is None else f"{c.bound_s:.4f}"
            rows.append(f"{shape}   {c.step_s:10.4f} s  {bound}")
    return rows
