"""``planner plan``: assign stages to devices, and write a checked plan with its charts."""

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
    add_workers,
    add_workload,
    count,
    positive,
    prices_of,
    problem_of,
    require_prices,
    sizes,
    stop_of,
    usual_devices,
)
from planner.cli.comparison import add_baselines
from planner.cli.output import BAD_INPUT, INVALID_PLAN, save, show
from planner.cli.partial_output import IncumbentFile, partial_path
from planner.cli.plan_report import baselines, not_tried, plan_data, plan_lines
from planner.cli.progress import PROGRESS
from planner.cli.time_budget import TimeLeft
from planner.network.assumed import assumed_sentences
from planner.network.cluster import Cluster
from planner.network.devices_file import assumes_flops, describes_all
from planner.network.dtype import Dtype
from planner.network.gpus import DEFAULT_GPU
from planner.network.prices import provider_of
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
from planner.planning.screening import REFUSALS
from planner.planning.workers import unused_gpus
from planner.problems.assignment_method import AssignmentMethod
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
from planner.utils.text import joined
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.calibration import Calibration

ABOUT = "search for the fastest plan, check it and write it to a file"
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
    "layout (which device holds which layers)": (
        *("--tensor-parallel", "--optimizer-shards", "--optimizer-copies"),
        *("--stages", "--pipelines", "--stage-layers", "--wiring"),
        *("--recompute", "--head", "--schedule", "--in-flight", "--smoothing", "--told"),
    ),
    "paths that skip stages": (
        *("--path-stages", "--stage-sizes", "--full-every", "--max-swaps", "--path-method"),
    ),
    "averaging and message encodings": (
        *("--averaging", "--group-size", "--sync-every", "--within", "--delayed", "--outer-lr"),
        *("--outer-momentum", "--clip", "--codec", "--boundary-codec"),
    ),
    "objective and prices": (
        *("--objective", "--hour-usd", "--usd-per-hour", "--usd-per-gb", "--prices"),
    ),
    "search": ("--seconds", "--seed", "--method", "--workers"),
    "output": ("--compare", "--random-placements", "--no-pictures", "--force"),
}
"""Groups of options in the help text, most important first."""

SAVING_S, COMPARING_S, DRAWING_S = (2.0, 0.004), (3.0, 0.09), (2.0, 0.003)
"""Estimated time to save and check, to compare, and to draw: (fixed, per device) seconds."""
MAX_COMPARING_S = 30.0
MIN_SEARCH = 0.5
"""Least fraction of the remaining time that the search gets."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add cluster, workload, the fields of `PlanRequest`, and outputs."""
    sub.usage = "%(prog)s --network NAME|FILE --workload NAME|FILE [options]"
    grouped = Grouped(sub, GROUPS)
    add_cluster(grouped)
    add_workload(grouped)
    _add_layout(grouped)
    _add_partial_paths(grouped)
    _add_averaging(grouped)
    _add_objective(grouped)
    _add_outputs(grouped)
    add_prices(grouped)
    add_solver(grouped, list(AssignmentMethod))
    add_workers(grouped)
    add_force(grouped)


def _add_layout(sub: Arguments) -> None:
    """Options of tensor parallelism, straight pipelines, wiring and schedule."""
    sub.add_argument(
        "--tensor-parallel",
        metavar="N|M=N,...|auto",
        type=_gpus_per_worker,
        default=1,
        help="GPUs of a machine that hold a stage together: N in all machines, N in machine M and "
        "1 in others, or the best numbers with auto; needs column machine in --devices; default "
        "%(default)s",
    )
    sub.add_argument(
        "--optimizer-shards",
        metavar="N|auto",
        type=_number_or_auto,
        default=1,
        help="each device of a stage holds at most one part in N of the stage's fp32 parameters "
        "and moments (ZeRO, stage 1), or the best number with auto; default %(default)s",
    )
    sub.add_argument(
        "--optimizer-copies",
        metavar="N",
        type=int,
        default=1,
        help="devices of a stage that have each part of its optimizer state, at least: with 2, "
        "--elastic runs go on without a lost device; default %(default)s",
    )
    sub.add_argument(
        "--stages",
        metavar="N|auto",
        type=_number_or_auto,
        help="straight pipelines of N stages, or of the best number with auto; default: search all "
        "layouts",
    )
    sub.add_argument(
        "--pipelines",
        metavar="N",
        type=int,
        help="number of pipelines; default: devices / stages",
    )
    sub.add_argument(
        "--stage-layers",
        metavar="N,N,...|even",
        type=_layers,
        help="layers of each stage, such as 3,7,7,7, or even",
    )
    sub.add_argument(
        "--wiring",
        choices=[wiring.value for wiring in RequestedWiring],
        help="routing of microbatches; default flow, with --stages straight; stochastic: devices "
        "choose the next device at run time",
    )
    sub.add_argument(
        "--smoothing",
        metavar="WEIGHT",
        type=float,
        help="stochastic wiring: smoothing factor of measured response times, 0 keeps the plan's "
        f"weights; default {Routing().smoothing:g}",
    )
    sub.add_argument(
        "--told",
        choices=[feedback.value for feedback in RouterFeedback],
        help="stochastic wiring: feedback to the router: time until the answer arrives (default), "
        "or compute time",
    )
    sub.add_argument(
        "--recompute",
        metavar="STAGES|all|none",
        type=_recompute,
        help="stages that recompute all their layers in the backward pass: such as 0,2, all or "
        "none; by default searched",
    )
    sub.add_argument(
        "--schedule",
        default=OperationOrder.EAGER_1F1B.value,
        choices=[order.value for order in OperationOrder],
        help="pipeline schedule; default %(default)s",
    )
    sub.add_argument(
        "--head",
        choices=[head.value for head in Head],
        help="stage that runs the head; default last, or first with --path-stages; if the head "
        "shares the embedding's matrix, first with --sync-every, else searched",
    )
    sub.add_argument(
        "--in-flight",
        metavar="N",
        type=int,
        help="with eager-1f1b: most microbatches in flight on a device",
    )
    sub.add_argument(
        "--calibration",
        metavar="JSON",
        type=Path,
        help="compute times measured by planner run --calibrate; a device that was not measured "
        "gets the times of an equal one; default: estimate from FLOPs",
    )


def _add_partial_paths(sub: Arguments) -> None:
    """Options of paths that skip stages."""
    sub.add_argument(
        "--path-stages",
        metavar="N",
        type=int,
        help="number of stages that a microbatch visits (SkipPipe)",
    )
    sub.add_argument(
        "--stage-sizes",
        metavar="N,N,...",
        type=sizes,
        help="with --path-stages: devices of each stage, such as 5,3,3,3",
    )
    sub.add_argument(
        "--full-every",
        metavar="N",
        type=int,
        help="every Nth iteration visits all stages; default 10",
    )
    sub.add_argument(
        "--max-swaps",
        metavar="N",
        type=int,
        help="most swaps of neighbouring stages in a path; default 1",
    )
    sub.add_argument(
        "--path-method",
        default=PathMethod.AUTO.value,
        choices=[method.value for method in PathMethod],
        help="path solver; cbs is SkipPipe's own; default %(default)s",
    )


def _add_averaging(sub: Arguments) -> None:
    """Options of averaging and encodings."""
    sub.add_argument(
        "--averaging",
        choices=[shares.value for shares in ShareRule],
        help="sizes of the gradient shares that devices sum; default equal in straight pipelines",
    )
    sub.add_argument(
        "--group-size", metavar="N", type=int, help="average in rounds of groups of this size"
    )
    sub.add_argument(
        "--codec",
        default=Codec.NONE.value,
        choices=[codec.value for codec in Codec],
        help="encoding of averaged gradients; default %(default)s",
    )
    sub.add_argument(
        "--boundary-codec",
        default=BoundaryCodec.NONE.value,
        choices=[codec.value for codec in BoundaryCodec],
        help="lossy encoding of activations and their gradients between stages; default "
        "%(default)s",
    )
    sub.add_argument(
        "--sync-every",
        metavar="STEPS",
        type=positive,
        default=1,
        help="average parameters every STEPS steps with an outer optimizer (DiLoCo); default 1",
    )
    sub.add_argument(
        "--within",
        choices=[mode.value for mode in InnerAveraging],
        help="with --sync-every: average gradients within regions in every step, and parameters "
        "between regions every STEPS steps",
    )
    sub.add_argument(
        "--delayed",
        action="store_true",
        help="with --sync-every: average while the next step is computed",
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
        "--clip",
        metavar="NORM",
        type=float,
        help="clip gradients to this global norm; every update then waits for the slowest "
        "averaging",
    )


def _add_objective(sub: Arguments) -> None:
    """Options of what is minimised, and comparisons."""
    sub.add_argument(
        "--objective",
        default=Objective.TIME.value,
        choices=[objective.value for objective in Objective],
        help="minimise the time or the cost of a step; default %(default)s",
    )
    sub.add_argument(
        "--hour-usd",
        metavar="USD",
        type=float,
        default=0.0,
        help="with --objective cost: value of an hour of waiting; default %(default)g",
    )
    sub.add_argument(
        "--random-placements",
        metavar="N",
        type=count,
        help="with straight pipelines: random placements to compare with; default 20",
    )
    sub.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with ranks ordered by region and with a single region; default: yes",
    )


def _add_outputs(sub: Arguments) -> None:
    """Options of files."""
    sub.add_argument(
        "--out",
        metavar="JSON",
        type=Path,
        default=Path("plan.json"),
        help="plan file to write; default %(default)s",
    )
    sub.add_argument(
        "--report", metavar="HTML", type=Path, help="HTML page to write, as planner report does"
    )
    sub.add_argument(
        "--no-pictures", action="store_true", help="do not write the trace and the Gantt chart"
    )


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number or auto, found {text!r}"
        ) from None


def _gpus_per_worker(text: str) -> int | str | dict[str, int]:
    """Parse a number, or numbers by machine."""
    if "=" not in text:
        if text != "auto" and not text.lstrip("+-").isdecimal():
            raise argparse.ArgumentTypeError(
                f"must be a whole number, numbers by machine such as a=2,b=4, or auto, found "
                f"{text!r}"
            )
        return _number_or_auto(text)
    by_machine: dict[str, int] = {}
    for part in text.split(","):
        machine, _, number = part.rpartition("=")
        if not machine or not number.isdecimal() or machine in by_machine:
            raise argparse.ArgumentTypeError(
                f"must name each machine once with its number, such as a=2,b=4, found {part!r} in "
                f"{text!r}"
            )
        by_machine[machine] = int(number)
    return by_machine


def _layers(text: str) -> Sequence[tuple[int, int]] | str:
    """Parse layers per stage into layer ranges."""
    if text == EVEN:
        return text
    ends = [0, *accumulate(sizes(text))]
    return list(pairwise(ends))


def _recompute(text: str) -> Sequence[int] | str:
    return text if text in ("all", "none") else sizes(text)


def _routing(args: argparse.Namespace) -> Routing:
    values = {"smoothing": args.smoothing, "told": args.told}
    return Routing(**{name: value for name, value in values.items() if value is not None})


def _request(args: argparse.Namespace) -> PlanRequest:
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    return PlanRequest(
        tensor_parallel=args.tensor_parallel,
        optimizer_shards=args.optimizer_shards,
        optimizer_copies=args.optimizer_copies,
        stages=args.stages,
        wiring=args.wiring,
        routing=_routing(args),
        pipelines=args.pipelines,
        stage_sizes=args.stage_sizes,
        stage_layers=args.stage_layers,
        path_stages=args.path_stages,
        recompute=args.recompute,
        microbatch_samples=args.microbatch_samples,
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
    """Return the files to write: the plan, its charts and its report."""
    outputs = [
        Output("--out", args.out, [".json"], FORMAT),
        Output("--report", args.report, [".html"], GENERATOR),
        Output("--out", partial_path(args.out), [".json"], FORMAT),
    ]
    if not args.no_pictures:
        trace, gantt = _chart_paths(args.out)
        outputs += [Output("--out", trace, [".json"], MADE), Output("--out", gantt, [".png"], MADE)]
    return outputs


def _chart_paths(out: Path) -> tuple[Path, Path]:
    """Return the paths of a plan's trace and Gantt chart."""
    return out.with_suffix(".trace.json"), out.with_suffix(".gantt.png")


def run(args: argparse.Namespace) -> int:
    """Search and save the plan, then run the slower steps: check, comparisons, charts."""
    from planner.planning.solve import plan
    from planner.simulator.simulator import predicted_timeline
    from planner.training_plan.file import plan_text, save_plan

    stop_of(args)  # validate the limits first
    require_outputs(vars(args), _outputs(args))
    time_left = TimeLeft(args.seconds, args.began)
    request = _request(args)
    asks_precision = args.precision is not None
    cluster, workload = problem_of(args)
    require_prices(args, cluster)
    usual = OuterOptimizer()
    if args.sync_every == 1 and request.outer != usual:
        raise ValueError(
            "--outer-lr and --outer-momentum need --sync-every above 1; give it, or leave them out"
        )
    if request.kind is not PlanKind.STRAIGHT and args.random_placements:
        raise ValueError(
            f"--random-placements {args.random_placements} needs straight pipelines; leave it out, "
            "or give --stages"
        )
    random_count = RANDOM_PLACEMENTS if args.random_placements is None else args.random_placements
    random_count *= request.kind is PlanKind.STRAIGHT
    incumbent_file = IncumbentFile(args.out, lambda plan: isinstance(plan, TrainingPlan), plan_text)
    stop = stop_of(args, _search_s(args, time_left, len(cluster), random_count), incumbent_file)
    try:
        result = plan(
            cluster, workload, request=request, stop=stop, seed=args.seed, executor=args.workers
        )
    except REFUSALS:
        incumbent_file.remove()
        raise
    if result.plan is None:
        print(f"planner plan: no plan found, {result.status}", file=sys.stderr)
        return INVALID_PLAN
    best_plan, asked = result.plan, request
    request = result.request
    planning_problem = PlanningProblem.of(cluster, workload, request, args.seed, {})
    search: dict[str, Any] = {}
    if args.compare and result.baselines is not None:
        add_baselines(planning_problem, result.baselines, search)
        best_plan = _with_baselines(best_plan, search)
    # save the plan first, whatever happens later
    written = save(args.out, lambda path: save_plan(best_plan, path))
    incumbent_file.remove()
    timeline = predicted_timeline(best_plan)
    data = plan_data(
        best_plan, timeline, result.candidates, planning_problem, _each_device(args, best_plan)
    )
    data["not_tried"] = not_tried(best_plan, asked, cluster)
    data["sequence_capped"] = _is_capped(args, best_plan)
    data["assumed_links"] = assumed_sentences(args.network)
    data["utilization"] = _assumed_utilization(args)
    data["traffic_price"] = _assumed_price(args, best_plan)
    scales_loss = best_plan.workload.precision.scales_loss
    if scales_loss and not asks_precision and _needs_no_fp16(cluster, best_plan):
        data["notes"].append(
            "The plan leaves out the only GPUs without bf16: with can_compute no for them in the "
            "devices file, training may use bf16 instead of fp16, without loss scaling."
        )
    if unused := unused_gpus(cluster, request.tensor_parallel):
        data["notes"].append(f"{unused}: they take no part.")
    data |= {**search, "written": [str(written)], "no_time_for": [], "not_done": []}
    write_errors: list[OSError] = []

    def run_part(doing: str, description: str, do: Callable[[], None]) -> None:
        PROGRESS.show(doing)
        try:
            if INTERRUPTS.requested:
                raise KeyboardInterrupt
            with INTERRUPTS.may_raise(), time_left.cut():
                do()
        except TimeLimitReached:
            data["no_time_for"].append(description)
            data["not_done"].append(f"{description}: {time_left.describe_skip()}")
        except KeyboardInterrupt:
            data["not_done"].append(f"{description}: interrupted")
        except OSError as error:
            write_errors.append(error)
            data["not_done"].append(f"{description}: {error.strerror}")

    def time_share(of_rest: float) -> float:
        left = math.inf if time_left.left_s is None else time_left.left_s
        return of_rest * (left - _drawing_s(args, len(cluster)))

    run_part("checking", f"checked (planner check {written})", lambda: _check(written))
    if random_count:
        problem = replace(planning_problem, workload=best_plan.workload)
        run_part(
            "comparing with random placements",
            "compared with random placements",
            lambda: _random(problem, best_plan, random_count, data, time_share(0.3)),
        )
    if not args.no_pictures:
        run_part("drawing", "drawn", lambda: _draw(best_plan, timeline, args.out, data["written"]))
    if args.report is not None:
        run_part(
            "writing the report", "reported", lambda: _page(best_plan, args.report, data["written"])
        )
    data["runtime_s"] = time_left.spent_s
    show(args.json, data, plan_lines(data))
    for error in write_errors:
        raise error
    return BAD_INPUT if written != args.out else 0


def _with_baselines(best_plan: TrainingPlan, data: dict[str, Any]) -> TrainingPlan:
    """Return the plan with its baselines stored in it, for the report."""
    return best_plan.replace(
        baselines=tuple(
            Alternative(name, text, step_s, why="" if step_s else text)
            for name, text, step_s in baselines(data)
        )
    )


def _search_s(
    args: argparse.Namespace, time_left: TimeLeft, devices: int, random_count: int
) -> float | None:
    """Return the search's time limit, which leaves time for the rest of the command."""
    left_s = time_left.left_s
    if left_s is None:
        return None
    after_s = SAVING_S[0] + SAVING_S[1] * devices
    if random_count:
        after_s += min(COMPARING_S[0] + COMPARING_S[1] * devices, MAX_COMPARING_S)
    after_s += _drawing_s(args, devices)
    return max(left_s - after_s, MIN_SEARCH * left_s)


def _drawing_s(args: argparse.Namespace, devices: int) -> float:
    return 0.0 if args.no_pictures else DRAWING_S[0] + DRAWING_S[1] * devices


def _check(path: Path) -> None:
    """Load the saved plan and verify it."""
    from planner.checker.dispatch import check
    from planner.training_plan.file import load_plan

    violations = check(load_plan(path))
    if violations:
        raise ValueError(
            f"{path} is saved, but fails its own check: {violations[0]}; please report this"
        )


def _draw(best_plan: TrainingPlan, timeline: Timeline, out: Path, written: list[str]) -> None:
    """Write trace and Gantt chart beside the plan file; append their paths to ``written``."""
    trace, gantt = _chart_paths(out)
    timeline.to_chrome_trace(trace)
    written.append(str(trace))
    timeline.gantt(gantt, groups=best_plan.assignment.groups)
    written.append(str(gantt))


def _page(best_plan: TrainingPlan, path: Path, written: list[str]) -> None:
    """Write the page of ``planner report``."""
    from planner.report.page import report_html
    from planner.utils.atomic_write import write_text

    write_text(path, report_html(best_plan))
    written.append(str(path))


def _random(
    problem: PlanningProblem,
    best_plan: TrainingPlan,
    random_count: int,
    data: dict[str, Any],
    most_s: float,
) -> None:
    from planner.planning.baselines.random_placements import random_placements
    from planner.planning.shape import Shape

    groups, schedule = best_plan.assignment.groups, best_plan.schedules[0]
    shape = Shape(
        best_plan.stage_layers,
        tuple(map(len, groups)),
        len(schedule.paths),
        schedule.head,
        best_plan.recompute,
    )
    began = time.perf_counter()
    outcome = random_placements(
        problem, shape, random_count, lambda: time.perf_counter() - began > most_s
    )
    data["random"] = asdict(outcome)


def _needs_no_fp16(cluster: Cluster, best_plan: TrainingPlan) -> bool:
    """Whether devices without bf16 are in the cluster, but not in the plan."""
    return bool(cluster.lacks(Dtype.BF16)) and not best_plan.cluster.lacks(Dtype.BF16)


def _each_device(args: argparse.Namespace, best_plan: TrainingPlan) -> str:
    """Describe the assumed device; empty if a devices file describes all devices."""
    if args.devices is not None and describes_all(args.devices):
        return ""
    usual = usual_devices(args, best_plan.workload.precision.compute)
    flops, memory_bytes = (np.asarray(x).item() for x in (usual.flops, usual.memory_bytes))
    hourly = usual.usd_per_hour
    price = "" if hourly is None else f", {np.asarray(hourly).item():.3g} $ an hour"
    where = "" if args.devices is None else "as in the devices file, otherwise "
    return (
        f"{where}{args.gpu or DEFAULT_GPU} with "
        f"{memory_bytes / 1e9:.3g} GB{price}, assumed to attain {flops / 1e12:.3g} TFLOP/s "
        f"({args.utilization:.0%} of its peak; --utilization)"
    )


def _assumed_utilization(args: argparse.Namespace) -> str:
    """What GPUs that a devices file names are assumed to attain; empty if that is not assumed."""
    if args.devices is None or args.calibration is not None or not assumes_flops(args.devices):
        return ""
    return (
        f"GPUs in the devices file without tflops are assumed to attain {args.utilization:.0%} of "
        "their peak FLOP/s in training (--utilization)"
    )


def _assumed_price(args: argparse.Namespace, best_plan: TrainingPlan) -> str:
    """The assumed price of traffic; empty if prices are given, or traffic costs nothing."""
    cost = best_plan.cost
    if cost is None or not cost.messages_usd or args.prices is not None:
        return ""
    regions = set(best_plan.cluster.network.regions)
    providers, between = {provider_of(region) for region in regions}, []
    if args.usd_per_gb is None and len(providers) < len(regions):
        between.append(f"{cost.prices.between_regions:g} $ a GB between regions (--usd-per-gb)")
    if len(providers) > 1:
        between.append(f"{cost.prices.between_providers:g} $ a GB between providers (--prices)")
    return f"traffic is assumed to cost {joined(between)}" if between else ""


def _is_capped(args: argparse.Namespace, best_plan: TrainingPlan) -> bool:
    """Whether the default sequence length is shorter than the model allows."""
    arch = best_plan.workload.architecture
    return args.sequence is None and arch is not None and arch.sequence < arch.position_rows
