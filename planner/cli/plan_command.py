"""``planner plan``: place stages on devices, and write a checked plan with its pictures."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from planner.cli.arguments import (
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
    workload_of,
)
from planner.cli.comparison import compared
from planner.cli.decisions import alternative_lines, candidate_lines
from planner.cli.output import BAD_INPUT, INVALID_PLAN, certificate_line, save, show
from planner.cli.progress import PROGRESS
from planner.cli.spare import Spare, part_of
from planner.cli.time_left import TimeLeft
from planner.clock.timeline import Timeline
from planner.compose.degrees import Candidate
from planner.compose.request import (
    EVEN,
    Objective,
    Order,
    PlanRequest,
    Question,
    Shares,
    Wiring,
    Within,
)
from planner.network.atomic import MADE
from planner.network.outputs import Output, add_force, require_outputs
from planner.network.words import some
from planner.problems.assignment_method import Method
from planner.problems.path_method import PathMethod
from planner.report.page import GENERATOR
from planner.search.interrupts import INTERRUPTS
from planner.search.stop import OutOfTime
from planner.training_plan.averaging_group import in_levels
from planner.training_plan.choices import Codec, Head, OuterStep, Told
from planner.training_plan.choices import Wiring as MadeWiring
from planner.training_plan.model import FORMAT, Routing, TrainingPlan
from planner.training_plan.sync import OuterOptimizer
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.calibration import Calibration

NAME = "plan"
ABOUT = "place stages on devices and write a checked plan"
EXAMPLE = "planner plan --network aws8_dtfm_worldwide_2022 --workload gpt3-1.3b --out plan.json"

RANDOM_PLACEMENTS = 20

SAVING_S, COMPARING_S, DRAWING_S = (2.0, 0.004), (3.0, 0.09), (2.0, 0.003)
"""About what saving and checking, comparing and drawing take: seconds, and more a device."""
MOST_COMPARING_S = 30.0
LEAST_SEARCH = 0.5
"""Part of what is left that is the search's, whatever the rest takes."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Cluster, workload, the decisions of a `PlanRequest`, what to write."""
    add_cluster(sub)
    add_workload(sub)
    sub.add_argument("--stages", type=_stages, help="a number, or auto; default: all is searched")
    sub.add_argument(
        "--wiring",
        choices=[wiring.value for wiring in Wiring],
        help="default flow, straight where stages are given; stochastic: a flow that devices begin "
        "with, and choose for themselves while they run",
    )
    sub.add_argument(
        "--smoothing",
        type=float,
        help="stochastic: weight of the newest response time, 0 keeps the flow's parts; default "
        f"{Routing().smoothing:g}",
    )
    sub.add_argument(
        "--told",
        choices=[told.value for told in Told],
        help="stochastic: what counts as response time, until the answer is there (default) or "
        "the work alone",
    )
    sub.add_argument(
        "--pipelines", type=int, help="copies of the chain of stages; default: devices / stages"
    )
    sub.add_argument("--path-stages", type=int, help="stages a microbatch visits (SkipPipe)")
    sub.add_argument(
        "--path-method",
        default=PathMethod.AUTO.value,
        choices=[method.value for method in PathMethod],
        help="how paths are found; cbs is SkipPipe's own, default %(default)s",
    )
    sub.add_argument("--stage-sizes", type=sizes, help="with --path-stages, such as 5,3,3,3")
    sub.add_argument(
        "--stage-layers", type=_layers, help="layers of every stage, such as 3,7,7,7, or even"
    )
    sub.add_argument(
        "--recompute", type=_recompute, help="stages that run F again in B: 0,2 or all or none"
    )
    sub.add_argument("--full-every", type=int, help="one iteration in so many is full; default 10")
    sub.add_argument("--max-swaps", type=int, help="swaps of neighbouring stages; default 1")
    sub.add_argument(
        "--schedule",
        default=Order.EAGER_1F1B.value,
        choices=[order.value for order in Order],
        help="order of a device's operations; default %(default)s",
    )
    sub.add_argument(
        "--head",
        choices=[head.value for head in Head],
        help="who runs the head; default last, paths: first",
    )
    sub.add_argument("--in-flight", type=int, help="eager-1f1b: microbatches a device holds")
    sub.add_argument(
        "--calibration",
        type=Path,
        help="measured compute times of planner run --calibrate; who was not measured is as fast "
        "as alike devices; default: from FLOPs",
    )
    sub.add_argument(
        "--averaging",
        choices=[shares.value for shares in Shares],
        help="shares in a stage; default equal in straight pipelines",
    )
    sub.add_argument("--group-size", type=int, help="average in rounds of groups of this size")
    sub.add_argument(
        "--codec",
        default=Codec.NONE.value,
        choices=[codec.value for codec in Codec],
        help="of gradients sent; default %(default)s",
    )
    sub.add_argument(
        "--sync-every",
        type=positive,
        default=1,
        help="average every so many steps, with an outer optimizer (DiLoCo-SWARM); default 1",
    )
    sub.add_argument(
        "--within",
        choices=[one.value for one in Within],
        help="with --sync-every: devices of a stage in one region average gradients in every step, "
        "and regions their parameters every so many",
    )
    sub.add_argument(
        "--delayed", action="store_true", help="average beside the next step, with --sync-every"
    )
    sub.add_argument(
        "--outer-lr",
        type=float,
        default=OuterOptimizer.learning_rate,
        help="learning rate of the outer optimizer; default %(default)s",
    )
    sub.add_argument(
        "--outer-momentum",
        type=float,
        default=OuterOptimizer.momentum,
        help="of the outer optimizer; default %(default)s",
    )
    sub.add_argument(
        "--objective",
        default=Objective.TIME.value,
        choices=[one.value for one in Objective],
        help="what is least: seconds or dollars of a step; default %(default)s",
    )
    sub.add_argument(
        "--hour-usd",
        type=float,
        default=0.0,
        help="objective cost: dollars that an hour's wait is worth; default %(default)g",
    )
    add_prices(sub)
    sub.add_argument(
        "--clip",
        type=float,
        help="largest norm of all gradients together; every update then waits for the slowest "
        "averaging",
    )
    sub.add_argument(
        "--boundary-codec",
        default=BoundaryCodec.NONE.value,
        choices=[codec.value for codec in BoundaryCodec],
        help="of activations and their gradients between stages; it changes what is computed; "
        "default %(default)s",
    )
    sub.add_argument(
        "--random-placements", type=count, help="straight ones to compare with; default 20"
    )
    sub.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with ranks numbered region by region, and with one region alone; default: yes",
    )
    sub.add_argument(
        "--out",
        type=Path,
        default=Path("plan.json"),
        help="plan file to write; default %(default)s",
    )
    sub.add_argument("--report", type=Path, help="page to write too, .html (planner report)")
    sub.add_argument("--no-pictures", action="store_true", help="write no trace and no Gantt chart")
    add_solver(sub, list(Method))
    add_force(sub)


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
    from planner.clock.simulator import predicted_timeline
    from planner.compose.planning import plan
    from planner.training_plan.file import plan_text, save_plan

    stop_of(args)  # what is wrong with it is said before anything else
    require_outputs(args, _outputs(args))
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
    if (request.skips or request.open) and args.random_placements:
        raise ValueError(
            f"--random-placements {args.random_placements} draws straight pipelines; leave it out, "
            "or give --stages"
        )
    spare = Spare(args.out, lambda one: isinstance(one, TrainingPlan), plan_text)
    result = plan(
        cluster,
        workload,
        request=request,
        stop=stop_of(args, _search_s(args, time_left, len(cluster)), spare),
        seed=args.seed,
    )
    if result.plan is None:
        print(f"planner plan: no plan found, {result.status}", file=sys.stderr)
        return INVALID_PLAN
    made = result.plan
    # whatever comes after it, the plan is there
    written = save(args.out, lambda path: save_plan(made, path))
    spare.done()
    asked = Question.of(cluster, workload, request, args.seed, {})
    timeline = predicted_timeline(made)
    data, lines = _report(made, timeline, result.candidates, asked)
    if args.devices is None:
        lines.append(_devices_line(args, made))
    data |= {"written": [str(written)], "no_time_for": []}
    failed: list[OSError] = []

    def part(doing: str, words: str, do: Callable[[], Iterable[str]]) -> None:
        PROGRESS.show(doing)
        try:
            if INTERRUPTS.asked:
                raise KeyboardInterrupt
            with INTERRUPTS.may_raise(), time_left.cut():
                for line in do():
                    lines.append(line)
        except OutOfTime:
            data["no_time_for"].append(words)
            lines.append(f"not {words}: {time_left.more()}")
        except KeyboardInterrupt:
            lines.append(f"not {words}: interrupted")
        except OSError as error:
            failed.append(error)
            lines.append(f"not {words}: {error.strerror}")

    def share(of_rest: float) -> float:
        left = math.inf if time_left.left_s is None else time_left.left_s
        return of_rest * (left - _drawing_s(args, len(cluster)))

    def compare() -> Iterable[str]:
        return compared(asked, made.predicted.step_s, data, share(1.0))

    part("checking", f"checked (planner check {written})", lambda: _checked(written))
    if request.open:
        part(
            "bounding the long run",
            "bounded in the long run",
            lambda: _long_run_line(made, asked, data),
        )
    drawn = RANDOM_PLACEMENTS if args.random_placements is None else args.random_placements
    if not request.skips and not request.open and drawn:
        question = replace(asked, workload=made.workload)
        part(
            "comparing with random placements",
            "compared with random ones",
            lambda: _random(question, made, drawn, data, share(0.3)),
        )
    if not request.skips and args.compare:
        part("comparing with ranks by region", "compared", compare)
    if not args.no_pictures:
        part("drawing", "drawn", lambda: _draw(timeline, args.out, data["written"]))
    if args.report is not None:
        part("writing the report", "reported", lambda: _page(made, args.report, data["written"]))
    data["runtime_s"] = time_left.spent_s
    lines.append(f"wrote {', '.join(data['written'])}  (hash {made.content_hash[:12]})")
    show(args.json, data, lines)
    for error in failed:
        raise error
    return BAD_INPUT if written != args.out else 0


def _search_s(args: argparse.Namespace, time_left: TimeLeft, devices: int) -> float | None:
    """What the search may take, so that the rest of the command finds time."""
    left = time_left.left_s
    if left is None:
        return None
    after = SAVING_S[0] + SAVING_S[1] * devices
    if args.compare:
        after += min(COMPARING_S[0] + COMPARING_S[1] * devices, MOST_COMPARING_S)
    after += _drawing_s(args, devices)
    return max(left - after, LEAST_SEARCH * left)


def _drawing_s(args: argparse.Namespace, devices: int) -> float:
    return 0.0 if args.no_pictures else DRAWING_S[0] + DRAWING_S[1] * devices


def _checked(path: Path) -> list[str]:
    """What is written must load, and pass the checker."""
    from planner.checker.dispatch import check
    from planner.training_plan.file import load_plan

    violations = check(load_plan(path))
    if violations:
        raise ValueError(
            f"{path} is saved, but does not pass its own check: {violations[0]}; report this"
        )
    return []


def _report(
    made: TrainingPlan,
    timeline: Timeline,
    candidates: Sequence[Candidate],
    asked: Question,
) -> tuple[dict[str, Any], list[str]]:
    """The plan and its certificates, as data and as lines."""
    from planner.cli.clock_report import cost_lines, learning_lines, sync_lines, timeline_lines
    from planner.cli.cycle_report import cycle_data, cycle_lines

    request = asked.request
    parts = {part: asdict(certificate) for part, certificate in made.certificates.items()}
    data: dict[str, Any] = {
        "content_hash": made.content_hash,
        **parts,
        "predicted": asdict(made.predicted),
        "recompute": list(made.recompute),
        "candidates": [asdict(one) for one in candidates],
        "alternatives": [one.to_dict() for one in made.alternatives],
    }
    lines = [
        *candidate_lines(candidates),
        _shape_line(made, request.skips or request.open),
        *_workload_lines(made),
        *_recompute_line(made),
        *_levels_line(made),
        *_routing_line(made),
    ]
    if "assignment" in parts:
        lines.append(certificate_line("assignment cost", parts["assignment"]))
    if request.skips:
        lines.append(certificate_line("paths so arranged", parts["paths"]))
    lines += [
        *_objective_lines(made, parts),
        f"{'':24}{made.predicted.pipeline_s:10.4f} s pipeline + {made.predicted.averaging_s:.4f} s "
        f"averaging{_update_words(made)}",
    ]
    lines += learning_lines(made)
    lines += sync_lines(made, data)
    lines += cost_lines(made, data)
    if not candidates:  # whose table has them
        lines += alternative_lines(made)
    lines += timeline_lines(timeline, made.cluster, data, made.sync.every_steps)
    if request.skips:
        lines += _directions_line(made)
        data |= cycle_data(made)
        lines += cycle_lines(data)
    return data, lines


def _objective_lines(made: TrainingPlan, parts: dict[str, Any]) -> list[str]:
    """What was least, and its bound."""
    if "step" in parts:
        return [certificate_line("predicted step time", parts["step"])]
    assert made.cost is not None
    worth = f"; an hour's wait is worth {made.cost.hour_usd:g} $" if made.cost.hour_usd else ""
    return [
        certificate_line("least cost of a step", parts["cost"], "$") + worth,
        f"{'predicted step time':<24}{made.predicted.step_s:10.4f} s",
    ]


def _draw(timeline: Timeline, out: Path, written: list[str]) -> list[str]:
    """Trace and Gantt beside the plan file; ``written`` gets each path once it is there."""
    trace, gantt = _beside(out)
    timeline.to_chrome_trace(trace)
    written.append(str(trace))
    timeline.gantt(gantt)
    written.append(str(gantt))
    return []


def _page(made: TrainingPlan, path: Path, written: list[str]) -> list[str]:
    """What ``planner report`` writes."""
    from planner.network.atomic import write_text
    from planner.report.page import report_html

    write_text(path, report_html(made))
    written.append(str(path))
    return []


def _random(
    question: Question, made: TrainingPlan, drawn: int, data: dict[str, Any], most_s: float
) -> list[str]:
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
    began = time.perf_counter()
    found = random_placements(question, shape, drawn, lambda: time.perf_counter() - began > most_s)
    data["random"] = asdict(found)
    if found.mean_cost_s is None or found.mean_step_s is None:
        return [f"none of {found.refused} random placements fits the devices' memory"]
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
    """What no plan beats over many steps; rounds of small groups are not bounded."""
    from planner.compose.whole_bound import plans_long_run_s

    seconds = plans_long_run_s(asked, made)
    if seconds is None:
        return []
    step = made.certificates.get("step")
    if step is not None and step.bound is not None:
        # what no step is shorter than, no mean over steps is
        seconds = max(seconds, step.bound)
    data["long_run_bound_s"] = seconds
    gap = max(1.0 - seconds / made.predicted.step_s, 0.0)
    return [f"{'':24}{seconds:10.4f} s: no plan is faster over many steps   gap {gap:.2%}"]


def _devices_line(args: argparse.Namespace, made: TrainingPlan) -> str:
    """What all devices are taken to be; a devices file says it of each."""
    devices = made.cluster.devices
    hourly = devices.usd_per_hour
    price = "" if hourly is None else f", {float(np.asarray(hourly)[0]):.3g} $ an hour"
    return (
        f"each device: {args.gpu}, {made.cluster.flops[0] / 1e12:.3g} TFLOP/s attained "
        f"({args.utilization:.0%} of its peak), {made.cluster.memory_bytes[0] / 1e9:.3g} GB{price}"
    )


def _update_words(made: TrainingPlan) -> str:
    """Of the longest optimizer step, where they were measured."""
    longest_s = max(made.compute_times.update_s)
    return f", then {longest_s:.4f} s update at most" if longest_s > 0 else ""


def _shape_line(made: TrainingPlan, by_size: bool) -> str:
    groups, w = made.assignment.groups, made.workload
    shape = f"{len(groups)} stages x {len(groups[0])} pipelines"
    if by_size:
        shape = f"stages of {', '.join(str(len(group)) for group in groups)}"
    helpers = len(made.averages_for)
    busy = {d for schedule in made.schedules for path in schedule.paths for d in path}
    idle = len(set(made.stage_of) - busy)
    words = [f"{idle} without microbatches"] * (idle > 0)
    words += [f"{helpers} to average only"] * (helpers > 0)
    words += [f"{len(made.left_out)} left out"] * bool(made.left_out)
    without = f" ({', '.join(words)})" if words else ""
    return (
        f"{some(len(made.cluster), 'device')}{without}, {shape}, {w.name}, "
        f"{len(made.schedules[0].paths)} microbatches of {w.microbatch_samples}"
    )


def _workload_lines(made: TrainingPlan) -> list[str]:
    """Of a model with experts, what a token meets; of one that cannot be run, why; what is tied."""
    from planner.workload.transformer import active_parameters

    arch, lines = made.workload.architecture, list[str]()
    if made.must_average_tied and made.averages_tied:
        size = made.vector_bytes()[-1] / 1e9
        lines.append(
            f"{'':24}stage {made.head_stage} has a copy of the embedding for its head: its "
            f"{size:.3g} GB of gradients are averaged with stage 0's"
        )
    elif made.must_average_tied:
        lines.append(
            f"{'':24}stage {made.head_stage} has a copy of the embedding for its head; what keeps "
            "both alike between averagings is not priced, and the executor refuses it (straight "
            "pipelines with --head first need none)"
        )
    if arch is None:
        return lines
    if arch.experts is not None:
        every, met = made.workload.parameters / 1e9, active_parameters(arch) / 1e9
        lines.append(
            f"{'':24}{every:.4g} billion parameters are stored and averaged, a token meets "
            f"{met:.4g} billion"
        )
    if arch.unexecuted:
        lines.append(
            f"{'':24}to plan only, the executor does not do this: {'; '.join(arch.unexecuted)}"
        )
    return lines


def _recompute_line(made: TrainingPlan) -> list[str]:
    stages = [str(j) for j, does in enumerate(made.recompute) if does]
    if not stages:
        return []
    which = "every stage keeps its" if all(made.recompute) else f"stage {', '.join(stages)}: keeps"
    return [f"{'':24}{which} input only and B runs F again"]


def _levels_line(made: TrainingPlan) -> list[str]:
    if made.two_clocks:
        regions = sorted({len(rounds[0]) for rounds in made.averaging})
        workers = " to ".join(str(count) for count in dict.fromkeys((regions[0], regions[-1])))
        return [
            f"{'':24}gradients averaged within regions in every step, {workers} regions to a stage"
        ]
    two = [str(j) for j, rounds in enumerate(made.averaging) if in_levels(rounds)]
    if not two:
        return []
    who = "every stage averages"
    if len(two) < len(made.averaging):
        own = [stage for stage in two if int(stage) < len(made.stage_layers)]
        tied = ["stages 0 and the head's, what they share"] * (len(own) < len(two))
        who = "; ".join([f"stage {', '.join(own)}"] * bool(own) + tied) + ": averages"
    return [f"{'':24}{who} in two levels: within sites, then between them"]


def _routing_line(made: TrainingPlan) -> list[str]:
    """That what is predicted is a steady state."""
    if made.wiring is not MadeWiring.STOCHASTIC:
        return []
    return [
        f"{'':24}devices choose paths while they run, beginning with this plan's: orders are not "
        "fixed, times are those of the plan's own"
    ]
