"""``planner plan``: place stages on devices, and write a checked plan with its pictures."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from planner.cli.arguments import (
    Arguments,
    Grouped,
    add_cluster,
    add_prices,
    add_solver,
    add_workload,
    cluster_of,
    count,
    positive,
    prices_of,
    require_prices,
    sizes,
    stop_of,
    usual_devices,
    workload_of,
)
from planner.cli.comparison import compared
from planner.cli.output import BAD_INPUT, INVALID_PLAN, save, show
from planner.cli.partial_output import Spare, part_of
from planner.cli.plan_report import baselines, plan_data, plan_lines
from planner.cli.progress import PROGRESS
from planner.cli.time_budget import TimeLeft
from planner.network.devices_file import describes_all
from planner.planning.problem import PlanningProblem
from planner.planning.request import (
    EVEN,
    InnerAveraging,
    Objective,
    OperationOrder,
    PlanKind,
    PlanRequest,
    RequestedWiring,
    ShareRule,
)
from planner.problems.assignment_method import Method
from planner.problems.path_method import PathMethod
from planner.report.page import GENERATOR
from planner.search.interrupts import INTERRUPTS
from planner.search.stop import TimeLimitReached
from planner.simulator.timeline import Timeline
from planner.training_plan.alternative import Alternative
from planner.training_plan.choices import Codec, Head, OuterStep, RouterFeedback
from planner.training_plan.model import FORMAT, Routing, TrainingPlan
from planner.training_plan.sync import OuterOptimizer
from planner.utils.atomic_write import MADE
from planner.utils.output_files import Output, add_force, require_outputs
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.calibration import Calibration

ABOUT = "place stages on devices and write a checked plan"
EXAMPLE = "planner plan --network aws8_dtfm_worldwide_2022 --workload gpt3-1.3b --out plan.json"

RANDOM_PLACEMENTS = 20

GROUPS = {
    "main options": (
        *("--network", "--devices", "--devices-per-region", "--gpu", "--workload"),
        *("--batch-samples", "--sequence", "--effort", "--out", "--report"),
    ),
    "devices": (
        *("--intra-latency-ms", "--intra-bandwidth-gbps", "--complete", "--utilization"),
        *("--memory-gb", "--calibration"),
    ),
    "model": ("--microbatch-samples", "--precision"),
    "layout (who holds which layers)": (
        *("--stages", "--pipelines", "--stage-layers", "--wiring", "--recompute", "--head"),
        *("--schedule", "--in-flight", "--smoothing", "--told"),
    ),
    "paths that skip stages": (
        *("--path-stages", "--stage-sizes", "--full-every", "--max-swaps", "--path-method"),
    ),
    "averaging and what is sent": (
        *("--averaging", "--group-size", "--sync-every", "--within", "--delayed", "--outer-lr"),
        *("--outer-momentum", "--clip", "--codec", "--boundary-codec"),
    ),
    "objective and prices": (
        *("--objective", "--hour-usd", "--usd-per-hour", "--usd-per-gb", "--prices"),
    ),
    "search": ("--seconds", "--seed", "--method"),
    "output": ("--compare", "--random-placements", "--no-pictures", "--force"),
}
"""Options of the command by what they are about, those that matter first."""

SAVING_S, COMPARING_S, DRAWING_S = (2.0, 0.004), (3.0, 0.09), (2.0, 0.003)
"""About what saving and checking, comparing and drawing take: seconds, and more a device."""
MOST_COMPARING_S = 30.0
LEAST_SEARCH = 0.5
"""Part of what is left that is the search's, whatever the rest takes."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Cluster, workload, the decisions of a `PlanRequest`, what to write."""
    sub.usage = "%(prog)s --network NAME|FILE --workload NAME|FILE [options]"
    grouped = Grouped(sub, GROUPS)
    add_cluster(grouped)
    add_workload(grouped)
    _add_decisions(grouped)
    add_prices(grouped)
    add_solver(grouped, list(Method))
    add_force(grouped)


def _add_decisions(sub: Arguments) -> None:
    sub.add_argument(
        "--stages",
        metavar="N|auto",
        type=_stages,
        help="straight pipelines of N stages, or of the best number; default: search every layout",
    )
    sub.add_argument(
        "--wiring",
        choices=[wiring.value for wiring in RequestedWiring],
        help="how microbatches are routed; default flow, with --stages straight; stochastic: "
        "devices choose while running",
    )
    sub.add_argument(
        "--smoothing",
        metavar="WEIGHT",
        type=float,
        help="stochastic: weight of the newest response time, 0 keeps the plan's weights; default "
        f"{Routing().smoothing:g}",
    )
    sub.add_argument(
        "--told",
        choices=[told.value for told in RouterFeedback],
        help="stochastic: response time is measured until the answer arrives (default), or is the "
        "compute time",
    )
    sub.add_argument(
        "--pipelines",
        metavar="N",
        type=int,
        help="number of pipelines; default: devices / stages",
    )
    sub.add_argument(
        "--path-stages", metavar="N", type=int, help="stages a microbatch visits (SkipPipe)"
    )
    sub.add_argument(
        "--path-method",
        default=PathMethod.AUTO.value,
        choices=[method.value for method in PathMethod],
        help="how paths are found; cbs is SkipPipe's own, default %(default)s",
    )
    sub.add_argument(
        "--stage-sizes", metavar="N,N,...", type=sizes, help="with --path-stages, such as 5,3,3,3"
    )
    sub.add_argument(
        "--stage-layers",
        metavar="N,N,...|even",
        type=_layers,
        help="layers of every stage, such as 3,7,7,7, or even",
    )
    sub.add_argument(
        "--recompute",
        metavar="STAGES|all|none",
        type=_recompute,
        help="stages that recompute activations in the backward pass: 0,2 or all or none",
    )
    sub.add_argument(
        "--full-every", metavar="N", type=int, help="one iteration in N is full; default 10"
    )
    sub.add_argument(
        "--max-swaps",
        metavar="N",
        type=int,
        help="swaps of neighbouring stages in a path; default 1",
    )
    sub.add_argument(
        "--schedule",
        default=OperationOrder.EAGER_1F1B.value,
        choices=[order.value for order in OperationOrder],
        help="order of a device's operations; default %(default)s",
    )
    sub.add_argument(
        "--head",
        choices=[head.value for head in Head],
        help="who runs the head; default last, paths: first",
    )
    sub.add_argument(
        "--in-flight", metavar="N", type=int, help="eager-1f1b: microbatches in flight on a device"
    )
    sub.add_argument(
        "--calibration",
        metavar="JSON",
        type=Path,
        help="measured compute times (planner run --calibrate); devices that were not measured are "
        "as fast as equal ones; default: from FLOPs",
    )
    sub.add_argument(
        "--averaging",
        choices=[shares.value for shares in ShareRule],
        help="shares of the vector in a stage; default equal in straight pipelines",
    )
    sub.add_argument(
        "--group-size", metavar="N", type=int, help="average in rounds of groups of this size"
    )
    sub.add_argument(
        "--codec",
        default=Codec.NONE.value,
        choices=[codec.value for codec in Codec],
        help="encoding of gradients; default %(default)s",
    )
    sub.add_argument(
        "--sync-every",
        metavar="STEPS",
        type=positive,
        default=1,
        help="average every STEPS steps, with an outer optimizer (DiLoCo-SWARM); default 1",
    )
    sub.add_argument(
        "--within",
        choices=[one.value for one in InnerAveraging],
        help="with --sync-every: average gradients within regions in every step, and parameters "
        "between regions every STEPS steps",
    )
    sub.add_argument(
        "--delayed", action="store_true", help="average during the next step, with --sync-every"
    )
    sub.add_argument(
        "--outer-lr",
        metavar="RATE",
        type=float,
        default=OuterOptimizer.learning_rate,
        help="learning rate of the outer optimizer; default %(default)s",
    )
    sub.add_argument(
        "--outer-momentum",
        metavar="FACTOR",
        type=float,
        default=OuterOptimizer.momentum,
        help="momentum of the outer optimizer; default %(default)s",
    )
    sub.add_argument(
        "--objective",
        default=Objective.TIME.value,
        choices=[one.value for one in Objective],
        help="what to minimise: time or cost of a step; default %(default)s",
    )
    sub.add_argument(
        "--hour-usd",
        metavar="USD",
        type=float,
        default=0.0,
        help="with --objective cost: value of an hour's wait in dollars; default %(default)g",
    )
    sub.add_argument(
        "--clip",
        metavar="NORM",
        type=float,
        help="largest global norm of gradients; every update then waits for the slowest averaging",
    )
    sub.add_argument(
        "--boundary-codec",
        default=BoundaryCodec.NONE.value,
        choices=[codec.value for codec in BoundaryCodec],
        help="encoding of activations and their gradients between stages, which changes what is "
        "computed; default %(default)s",
    )
    sub.add_argument(
        "--random-placements",
        metavar="N",
        type=count,
        help="random placements to compare straight pipelines with; default 20",
    )
    sub.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with ranks by region and with one region alone; default: yes",
    )
    sub.add_argument(
        "--out",
        metavar="JSON",
        type=Path,
        default=Path("plan.json"),
        help="plan file to write; default %(default)s",
    )
    sub.add_argument(
        "--report", metavar="HTML", type=Path, help="HTML page to write too (planner report)"
    )
    sub.add_argument("--no-pictures", action="store_true", help="write no trace and no Gantt chart")


def _stages(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number or auto, found {text!r}"
        ) from None


def _layers(text: str) -> Sequence[tuple[int, int]] | str:
    """Ranges, from how many there are in each."""
    if text == EVEN:
        return text
    ends = [0, *accumulate(sizes(text))]
    return list(pairwise(ends))


def _recompute(text: str) -> Sequence[int] | str:
    return text if text in ("all", "none") else sizes(text)


def _routing(args: argparse.Namespace) -> Routing:
    given = {"smoothing": args.smoothing, "told": args.told}
    return Routing(**{name: value for name, value in given.items() if value is not None})


def _request(args: argparse.Namespace) -> PlanRequest:
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    return PlanRequest(
        stages=args.stages,
        wiring=args.wiring,
        routing=_routing(args),
        pipelines=args.pipelines,
        stage_sizes=args.stage_sizes,
        stage_layers=args.stage_layers,
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
        objective=args.objective,
        hour_usd=args.hour_usd,
        prices=prices_of(args),
        clip=args.clip,
        sync_every=args.sync_every,
        within=args.within,
        delayed=args.delayed,
        outer=OuterOptimizer(OuterStep.NESTEROV, args.outer_lr, args.outer_momentum),
        method=args.method,
        path_method=args.path_method,
        calibration=calibration,
        network_name=args.network,
    )


def _outputs(args: argparse.Namespace) -> list[Output]:
    """The plan, its pictures beside it, and its page."""
    outputs = [
        Output("--out", args.out, [".json"], FORMAT),
        Output("--report", args.report, [".html"], GENERATOR),
        Output("--out", part_of(args.out), [".json"], FORMAT),
    ]
    if not args.no_pictures:
        trace, gantt = _beside(args.out)
        outputs += [Output("--out", trace, [".json"], MADE), Output("--out", gantt, [".png"], MADE)]
    return outputs


def _beside(out: Path) -> tuple[Path, Path]:
    """Where trace and Gantt of a plan go."""
    return out.with_suffix(".trace.json"), out.with_suffix(".gantt.png")


def run(args: argparse.Namespace) -> int:
    """Plan and write, then what may be slow: check, comparisons, pictures."""
    from planner.planning.solve import plan
    from planner.simulator.simulator import predicted_timeline
    from planner.training_plan.file import plan_text, save_plan

    stop_of(args)  # what is wrong with it is said before anything else
    require_outputs(vars(args), _outputs(args))
    time_left = TimeLeft(args.seconds, args.began)
    workload, request = workload_of(args), _request(args)
    cluster = cluster_of(args, workload.precision.compute)
    require_prices(args, cluster)
    usual = OuterOptimizer()
    if args.sync_every == 1 and request.outer != usual:
        raise ValueError(
            "--outer-lr and --outer-momentum go with --sync-every above 1; give it, or leave them "
            "out"
        )
    if request.kind is not PlanKind.STRAIGHT and args.random_placements:
        raise ValueError(
            f"--random-placements {args.random_placements} draws straight pipelines; leave it out, "
            "or give --stages"
        )
    drawn = RANDOM_PLACEMENTS if args.random_placements is None else args.random_placements
    drawn *= request.kind is PlanKind.STRAIGHT
    spare = Spare(args.out, lambda one: isinstance(one, TrainingPlan), plan_text)
    result = plan(
        cluster,
        workload,
        request=request,
        stop=stop_of(args, _search_s(args, time_left, len(cluster), drawn), spare),
        seed=args.seed,
    )
    if result.plan is None:
        print(f"planner plan: no plan found, {result.status}", file=sys.stderr)
        return INVALID_PLAN
    made = result.plan
    asked = PlanningProblem.of(cluster, workload, request, args.seed, {})
    found: dict[str, Any] = {}
    if args.compare and result.baselines is not None:
        compared(asked, result.baselines, found)
        made = _with_baselines(made, found)
    # the plan is saved before anything else, whatever happens later
    written = save(args.out, lambda path: save_plan(made, path))
    spare.done()
    timeline = predicted_timeline(made)
    data = plan_data(made, timeline, result.candidates, asked, _each_device(args, made))
    data["sequence_capped"] = _is_capped(args, made)
    data |= {**found, "written": [str(written)], "no_time_for": [], "not_done": []}
    failed: list[OSError] = []

    def part(doing: str, words: str, do: Callable[[], None]) -> None:
        PROGRESS.show(doing)
        try:
            if INTERRUPTS.requested:
                raise KeyboardInterrupt
            with INTERRUPTS.may_raise(), time_left.cut():
                do()
        except TimeLimitReached:
            data["no_time_for"].append(words)
            data["not_done"].append(f"{words}: {time_left.more()}")
        except KeyboardInterrupt:
            data["not_done"].append(f"{words}: interrupted")
        except OSError as error:
            failed.append(error)
            data["not_done"].append(f"{words}: {error.strerror}")

    def share(of_rest: float) -> float:
        left = math.inf if time_left.left_s is None else time_left.left_s
        return of_rest * (left - _drawing_s(args, len(cluster)))

    part("checking", f"checked (planner check {written})", lambda: _check(written))
    if request.kind is PlanKind.JOINT:
        part(
            "bounding the long run",
            "bounded in the long run",
            lambda: _bound_long_run(made, asked, data),
        )
    if drawn:
        problem = replace(asked, workload=made.workload)
        part(
            "comparing with random placements",
            "compared with random ones",
            lambda: _random(problem, made, drawn, data, share(0.3)),
        )
    if not args.no_pictures:
        part("drawing", "drawn", lambda: _draw(made, timeline, args.out, data["written"]))
    if args.report is not None:
        part("writing the report", "reported", lambda: _page(made, args.report, data["written"]))
    data["runtime_s"] = time_left.spent_s
    show(args.json, data, plan_lines(data))
    for error in failed:
        raise error
    return BAD_INPUT if written != args.out else 0


def _with_baselines(made: TrainingPlan, data: dict[str, Any]) -> TrainingPlan:
    """The plan with what it was compared with, which its file keeps for a report."""
    return made.replace(
        baselines=tuple(
            Alternative(name, text, step_s, why="" if step_s else text)
            for name, text, step_s in baselines(data)
        )
    )


def _search_s(
    args: argparse.Namespace, time_left: TimeLeft, devices: int, drawn: int
) -> float | None:
    """What the search may take, so that the rest of the command finds time."""
    left = time_left.left_s
    if left is None:
        return None
    after = SAVING_S[0] + SAVING_S[1] * devices
    if drawn:
        after += min(COMPARING_S[0] + COMPARING_S[1] * devices, MOST_COMPARING_S)
    after += _drawing_s(args, devices)
    return max(left - after, LEAST_SEARCH * left)


def _drawing_s(args: argparse.Namespace, devices: int) -> float:
    return 0.0 if args.no_pictures else DRAWING_S[0] + DRAWING_S[1] * devices


def _check(path: Path) -> None:
    """What is written must load, and pass the checker."""
    from planner.checker.dispatch import check
    from planner.training_plan.file import load_plan

    violations = check(load_plan(path))
    if violations:
        raise ValueError(
            f"{path} is saved, but does not pass its own check: {violations[0]}; report this"
        )


def _draw(made: TrainingPlan, timeline: Timeline, out: Path, written: list[str]) -> None:
    """Trace and Gantt beside the plan file; ``written`` gets each path once it is there."""
    trace, gantt = _beside(out)
    timeline.to_chrome_trace(trace)
    written.append(str(trace))
    timeline.gantt(gantt, groups=made.assignment.groups)
    written.append(str(gantt))


def _page(made: TrainingPlan, path: Path, written: list[str]) -> None:
    """What ``planner report`` writes."""
    from planner.report.page import report_html
    from planner.utils.atomic_write import write_text

    write_text(path, report_html(made))
    written.append(str(path))


def _random(
    problem: PlanningProblem, made: TrainingPlan, drawn: int, data: dict[str, Any], most_s: float
) -> None:
    from planner.planning.baselines.random_placements import random_placements
    from planner.planning.shape import Shape

    groups, schedule = made.assignment.groups, made.schedules[0]
    shape = Shape(
        made.stage_layers,
        tuple(map(len, groups)),
        len(schedule.paths),
        schedule.head,
        made.recompute,
    )
    began = time.perf_counter()
    found = random_placements(problem, shape, drawn, lambda: time.perf_counter() - began > most_s)
    data["random"] = asdict(found)


def _bound_long_run(made: TrainingPlan, asked: PlanningProblem, data: dict[str, Any]) -> None:
    """What no plan beats over many steps; rounds of small groups are not bounded."""
    from planner.planning.joint_bound import plan_long_run_bound_s

    seconds = plan_long_run_bound_s(asked, made)
    if seconds is None:
        return
    step = made.certificates.get("step")
    if step is not None and step.bound is not None:
        # what no step is shorter than, no mean over steps is
        seconds = max(seconds, step.bound)
    data["long_run_bound_s"] = seconds


def _each_device(args: argparse.Namespace, made: TrainingPlan) -> str:
    """What devices are assumed to be; empty where a devices file describes all of them."""
    if args.devices is not None and describes_all(args.devices):
        return ""
    usual = usual_devices(args, made.workload.precision.compute)
    flops, memory_bytes = (np.asarray(x).item() for x in (usual.flops, usual.memory_bytes))
    hourly = usual.usd_per_hour
    price = "" if hourly is None else f", {np.asarray(hourly).item():.3g} $ an hour"
    return (
        f"{'' if args.devices is None else 'what the devices file says of it, else '}{args.gpu}: "
        f"{flops / 1e12:.3g} TFLOP/s attained ({args.utilization:.0%} of its peak), "
        f"{memory_bytes / 1e9:.3g} GB{price}"
    )


def _is_capped(args: argparse.Namespace, made: TrainingPlan) -> bool:
    """Whether samples are shorter than the model allows though no length was given."""
    arch = made.workload.architecture
    return args.sequence is None and arch is not None and arch.sequence < arch.position_rows
