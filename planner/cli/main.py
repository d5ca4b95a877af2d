"""The command line: ``planner networks | plan | assign | paths | average | check | ...``.

Results go to stdout, progress to stderr. Bad input ends with one line and exit code 2, Ctrl-C in a
search with the best so far.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.compose.averaging import SHARES
from planner.compose.degrees import Candidate
from planner.compose.random_placements import RandomPlacements, random_placements
from planner.compose.schedules import ORDERS
from planner.compose.shape import Shape
from planner.network.atomic import write_text
from planner.network.catalogue import intra_link, list_networks, load_network
from planner.network.cluster import Cluster, Devices
from planner.network.error import NetworkError
from planner.network.gpus import GPUS
from planner.network.network import Network
from planner.search.result import Result
from planner.search.stop import MaxRuntime, StoppingCriterion, StopRun
from planner.training_plan.file import from_dict, load_plan, save_plan
from planner.training_plan.model import CODECS, TrainingPlan
from planner.workload.calibration import Calibration
from planner.workload.presets import PRESETS
from planner.workload.workload import Workload

RANDOM_PLACEMENTS = 20
BAD_INPUT = 2
INVALID_PLAN = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except ValueError as error:
        print(f"planner {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(
            f"planner {args.command}: {error.filename or 'a file'}: {error.strerror}; check path "
            "and permissions",
            file=sys.stderr,
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"planner {args.command}: interrupted", file=sys.stderr)
        return 130


@dataclass(frozen=True)
class Reporting(StoppingCriterion):
    """A criterion that also shows on stderr how far the search is, at most once a second."""

    inner: StoppingCriterion
    printed: list[float] = field(default_factory=lambda: [0.0])

    def reason(self, run: StopRun) -> str | None:
        if run.objective is not None and run.elapsed_s - self.printed[0] >= 1.0:
            self.printed[0] = run.elapsed_s
            bound = "-" if run.bound is None else f"{run.bound:.4f}"
            print(
                f"  {run.elapsed_s:6.1f} s  best {run.objective:.4f}  bound {bound}",
                file=sys.stderr,
            )
        return self.inner.reason(run)

    def seconds(self) -> float:
        return self.inner.seconds()

    def iterations(self) -> float:
        return self.inner.iterations()


# ---------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="planner",
        description="Plans for training large models over slow, uneven, unreliable networks.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], Any], about: str) -> Any:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        return sub

    command("networks", _networks, "list the measured networks that ship with the package")

    sub = command("plan", _plan, "place stages on devices and write a checked plan")
    _cluster_arguments(sub)
    _workload_arguments(sub)
    sub.add_argument("--stages", type=_stages, help="a number, or auto")
    sub.add_argument("--pipelines", type=int, help="default: devices / stages")
    sub.add_argument("--path-stages", type=int, help="stages a microbatch visits (SkipPipe)")
    sub.add_argument("--stage-sizes", type=_sizes, help="with --path-stages, such as 5,3,3,3")
    sub.add_argument("--full-every", type=int, help="one iteration in so many is full; default 10")
    sub.add_argument("--max-swaps", type=int, help="swaps of neighbouring stages; default 1")
    sub.add_argument("--schedule", default=ORDERS[0], choices=ORDERS, help="default %(default)s")
    sub.add_argument(
        "--head", choices=["first", "last"], help="who runs the head; default last, paths: first"
    )
    sub.add_argument("--in-flight", type=int, help="eager-1f1b: microbatches a device holds")
    sub.add_argument("--calibration", type=Path, help="measured compute times (planner run)")
    sub.add_argument("--averaging", default="equal", choices=SHARES, help="shares in a stage")
    sub.add_argument("--group-size", type=int, help="average in rounds of groups of this size")
    sub.add_argument("--codec", default="none", choices=list(CODECS), help="of gradients sent")
    sub.add_argument(
        "--random-placements", type=_count, help="straight ones to compare with; default 20"
    )
    sub.add_argument("--out", type=Path, default=Path("plan.json"), help="plan file to write")
    sub.add_argument("--no-pictures", action="store_true", help="write no trace and no Gantt")
    _solver_arguments(sub)

    sub = command("assign", _assign, "solve one assignment problem and print groups and bound")
    _cluster_arguments(sub)
    sub.add_argument("--stages", type=int)
    sub.add_argument("--pipelines", type=int)
    sub.add_argument("--stage-sizes", type=_sizes, help="such as 6,4,4,4")
    sub.add_argument("--activation-bytes", type=float, required=True, help="c_PP of a boundary")
    sub.add_argument("--gradient-bytes", type=float, required=True, help="c_DP of a stage")
    _solver_arguments(sub)

    sub = command("paths", _paths, "paths that skip and swap stages, with times and a bound")
    sub.add_argument("problem", type=Path, nargs="?", help="JSON with the fields of PathProblem")
    _cluster_arguments(sub, required=False)
    _workload_arguments(sub, required=False)
    sub.add_argument("--stage-sizes", type=_sizes, help="such as 5,3,3,3,3,3")
    sub.add_argument("--path-stages", type=int, help="stages a microbatch visits")
    sub.add_argument("--microbatches-per-start", type=int, help="default: the batch's share")
    sub.add_argument("--memory", type=int, help="microbatches a device holds; default: what fits")
    sub.add_argument(
        "--live-memory",
        action=argparse.BooleanOptionalAction,
        help="a whole iteration, memory freed as microbatches return; default with --network",
    )
    sub.add_argument("--max-swaps", type=int, help="swaps of neighbouring stages; default 1")
    sub.add_argument("--arrange", action="store_true", help="choose the arrangement too")
    sub.add_argument("--out", type=Path, help="write the result here as JSON")
    _solver_arguments(sub)

    sub = command("average", _average, "who contributes gradients, and who sums which share")
    columns = "name,samples_per_s,upload_mbps,download_mbps[,can_compute,can_aggregate]"
    sub.add_argument("peers", type=Path, help=f"CSV: {columns}")
    sub.add_argument("--batch-samples", type=float, required=True)
    sub.add_argument("--gradient-bytes", type=float, required=True)
    sub.add_argument("--links", help="network with pairwise limits between the peers' names")
    sub.add_argument("--no-overlap", action="store_true", help="compute, then average")
    sub.add_argument("--method", default="exact", choices=["exact", "relaxed"])
    sub.add_argument("--seconds", type=float, default=10.0)

    sub = command("check", _check, "verify a plan file independently of the solvers")
    sub.add_argument("plan", type=Path)

    sub = command("simulate", _simulate, "price a plan, also on another network")
    sub.add_argument("plan", type=Path)
    sub.add_argument("--network", help="name or file; default: the plan's own")
    sub.add_argument("--share-links", action="store_true", help="messages share a device's links")
    sub.add_argument("--trace", type=Path, help="write Chrome/Perfetto JSON here")
    sub.add_argument("--gantt", type=Path, help="draw the iteration here (.png, .svg, .pdf)")
    sub.add_argument(
        "--schedule", type=_count, default=0, help="the one to trace and draw; default 0"
    )

    sub = command("run", _run, "run a plan on this machine, one local process a device")
    sub.add_argument("plan", type=Path)
    sub.add_argument("--steps", type=_positive, default=10)
    sub.add_argument("--learning-rate", type=float, default=1e-3)
    sub.add_argument("--data", type=Path, help="text file to train on; default: synthetic text")
    sub.add_argument("--calibrate", type=Path, help="measure F, H, B and store them here")
    sub.add_argument("--calibration", type=Path, help="use times measured before")
    sub.add_argument("--trace", type=Path, help="write the executed iteration here")
    sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])

    sub = command("bench", _bench, "solver benchmarks on measured networks")
    sub.add_argument("name", nargs="?", help="which; default: list them")
    sub.add_argument("rest", nargs=argparse.REMAINDER, help="passed on to the benchmark")
    return parser


def _cluster_arguments(sub: argparse.ArgumentParser, required: bool = True) -> None:
    sub.add_argument("--network", required=required, help="name (planner networks), .csv or .json")
    sub.add_argument("--devices-per-region", type=int, help="replicate every region")
    sub.add_argument("--intra-latency-ms", type=float, help="inside a region; default: source's")
    sub.add_argument("--intra-bandwidth-gbps", type=float, help="inside a region, gigabits")
    sub.add_argument("--complete", action="store_true", help="drop devices with missing pairs")
    sub.add_argument("--gpu", default="V100", choices=list(GPUS), help="default V100")
    sub.add_argument("--utilization", type=float, default=0.4, help="of its peak; default 0.4")
    sub.add_argument("--memory-gb", type=float, help="10^9 bytes; default: the GPU's")


def _workload_arguments(sub: argparse.ArgumentParser, required: bool = True) -> None:
    sub.add_argument("--workload", required=required, help=f"config.json or {', '.join(PRESETS)}")
    sub.add_argument("--batch-samples", type=int, help="samples of one optimizer step")
    sub.add_argument("--microbatch-samples", type=int, help="samples that travel together")
    sub.add_argument("--sequence", type=int, help="tokens per sample")
    sub.add_argument(
        "--activation-bytes-per-element", type=float, help="4 where training is in fp32; default 2"
    )


def _solver_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--seconds", type=float, default=10.0, help="time for the search; default 10")
    sub.add_argument("--seed", type=_count, default=0)
    sub.add_argument("--method", default="auto")


def _count(text: str) -> int:
    """A whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, found {text!r}")
    return int(text)


def _positive(text: str) -> int:
    """A whole number >= 1."""
    if _count(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return int(text)


def _stages(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers such as 5,3,3,3, found {text!r}"
        ) from None


def _cluster(args: argparse.Namespace) -> Cluster:
    network = load_network(args.network)
    if args.complete:
        network = network.complete()
    if args.devices_per_region is not None:
        network = _replicated(network, args)
    devices = Devices.of_gpu(args.gpu, args.utilization)
    if args.memory_gb is not None:
        devices = Devices(devices.flops, args.memory_gb * 1e9)
    return Cluster(network, devices)


def _replicated(network: Network, args: argparse.Namespace) -> Network:
    inside = intra_link(args.network)
    latency = None if inside is None else inside.latency_s
    bandwidth = None if inside is None else inside.bandwidth_bytes_per_s
    if args.intra_latency_ms is not None:
        latency = args.intra_latency_ms * 1e-3
    if args.intra_bandwidth_gbps is not None:
        bandwidth = args.intra_bandwidth_gbps * 1e9 / 8
    if latency is None or bandwidth is None:
        raise NetworkError(
            f"network {args.network!r} does not say how devices of one region are linked; give "
            "--intra-latency-ms and --intra-bandwidth-gbps"
        )
    return network.replicate(
        dict.fromkeys(network.ids, args.devices_per_region),
        intra_latency_s=latency,
        intra_bandwidth_bytes_per_s=bandwidth,
    )


def _workload(args: argparse.Namespace) -> Workload:
    changes = {
        name: getattr(args, name)
        for name in (
            "batch_samples",
            "microbatch_samples",
            "sequence",
            "activation_bytes_per_element",
        )
    }
    if Path(args.workload).suffix == ".json":
        return Workload.from_hf_config(args.workload, **changes)
    return Workload.preset(args.workload, **changes)


def _stop(args: argparse.Namespace) -> StoppingCriterion:
    return Reporting(MaxRuntime(args.seconds))


# ---------------------------------------------------------------- commands


def _print(args: argparse.Namespace, data: Any, lines: Sequence[str]) -> None:
    print(json.dumps(data, allow_nan=False, indent=1) if args.json else "\n".join(lines))


def _result_data(result: Result[Any]) -> dict[str, Any]:
    return asdict(result.certificate())


def _certificate_line(what: str, result: dict[str, Any]) -> str:
    def number(value: float | None, spec: str) -> str:
        return "none" if value is None else format(value, spec)

    return (
        f"{what:<24}{number(result['objective'], '10.4f')} s   "
        f"bound {number(result['bound'], '.4f')}   gap {number(result['gap'], '.2%')}   "
        f"{result['status']} ({result['stop_reason']}, {result['runtime_s']:.1f} s)"
    )


def _networks(args: argparse.Namespace) -> None:
    named = list_networks()
    rows = [f"{name:<32}{len(load_network(name)):>4}  {about}" for name, about in named.items()]
    _print(args, named, [f"{'name':<32}   N  what", *rows])


def _plan(args: argparse.Namespace) -> int:
    from planner.checker.dispatch import check
    from planner.cli.cycle_report import cycle_data, cycle_lines
    from planner.clock.simulator import simulate, simulate_cycle
    from planner.compose import plan
    from planner.compose.pricing import Setting

    cluster, workload = _cluster(args), _workload(args)
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    require_writable(args.out, [".json"])
    if args.path_stages is not None and args.random_placements:
        raise ValueError(
            f"--random-placements {args.random_placements} draws straight pipelines; leave it out "
            "with --path-stages"
        )
    started = time.perf_counter()
    result = plan(
        cluster,
        workload,
        stages=args.stages,
        pipelines=args.pipelines,
        stage_sizes=args.stage_sizes,
        path_stages=args.path_stages,
        full_every=args.full_every,
        max_swaps=args.max_swaps,
        stop=_stop(args),
        schedule=args.schedule,
        head=args.head,
        in_flight=args.in_flight,
        seed=args.seed,
        method=args.method,
        calibration=calibration,
        averaging=args.averaging,
        group_size=args.group_size,
        codec=args.codec,
        network_name=args.network,
    )
    if result.plan is None:
        print(f"planner plan: no plan found, {result.status}", file=sys.stderr)
        return INVALID_PLAN
    made = result.plan
    straight = args.path_stages is None
    # what is written must load, and pass the checker
    violations = check(from_dict(made.to_dict()))
    if violations:
        raise ValueError(f"the plan does not pass its own check: {violations[0]}; report this")
    save_plan(made, args.out)
    assignment = asdict(made.certificates["assignment"])
    data: dict[str, Any] = {
        "content_hash": made.content_hash,
        "assignment": assignment,
        "step": asdict(made.certificates["step"]),
        "predicted": asdict(made.predicted),
        "candidates": [asdict(c) for c in result.candidates],
        "written": [str(args.out)],
    }
    lines = [
        *_candidate_lines(result.candidates),
        _shape_line(made, straight),
        _certificate_line("assignment cost", assignment),
    ]
    if not straight:
        data["paths"] = asdict(made.certificates["paths"])
        lines.append(_certificate_line("paths so arranged", data["paths"]))
    lines += [
        _certificate_line("predicted step time", data["step"]),
        f"{'':24}{made.predicted.pipeline_s:10.4f} s pipeline + {made.predicted.averaging_s:.4f} s "
        "averaging",
    ]
    if not straight:
        lines += _directions_line(made)
        data |= cycle_data(made)
        lines += cycle_lines(data)
    try:
        if not args.no_pictures:
            timeline = simulate(made)
            trace, gantt = args.out.with_suffix(".trace.json"), args.out.with_suffix(".gantt.png")
            timeline.to_chrome_trace(trace)
            data["written"].append(str(trace))
            timeline.gantt(gantt)
            data["written"].append(str(gantt))
        shared, _ = simulate_cycle(made, share_links=True)
        data["step_with_shared_links_s"] = shared.step_s
        lines.append(f"{'with shared links':<24}{shared.step_s:10.4f} s")
        count = RANDOM_PLACEMENTS if args.random_placements is None else args.random_placements
        if straight and count:
            setting = Setting(
                cluster,
                made.workload,
                args.schedule,
                made.schedules[0].head,
                args.in_flight,
                args.seed,
                calibration,
                averaging=args.averaging,
                group_size=args.group_size,
                codec=args.codec,
            )
            drawn = random_placements(setting, _shape(made), count)
            data["random"] = asdict(drawn)
            lines.append(_random_line(drawn, assignment["objective"], made.predicted.step_s))
    except KeyboardInterrupt:
        lines.append("interrupted: pictures or comparisons that are not listed here are missing")
    data["runtime_s"] = time.perf_counter() - started
    lines.append(f"wrote {', '.join(data['written'])}  (hash {made.content_hash[:12]})")
    _print(args, data, lines)
    return 0


def _shape(made: TrainingPlan) -> Shape:
    s, stages = made.schedules[0], len(made.stage_layers)
    return Shape(made.stage_layers, len(made.cluster) // stages, len(s.paths), s.head)


def _directions_line(made: TrainingPlan) -> list[str]:
    """Why the pipeline part differs from the path solver's makespan, where it does."""
    solver_s, simulated_s = made.certificates["paths"].objective, made.predicted.pipeline_s
    if solver_s is not None and abs(solver_s - simulated_s) <= 1e-6 * simulated_s:
        return []
    return [f"{'':24}paths count both directions of a link averaged, the pipeline part each apart"]


def _shape_line(made: TrainingPlan, straight: bool) -> str:
    groups, w = made.assignment.groups, made.workload
    shape = f"{len(groups)} stages x {len(groups[0])} pipelines"
    if not straight:
        shape = f"stages of {', '.join(str(len(group)) for group in groups)}"
    return (
        f"{len(made.cluster)} devices, {shape}, {w.name}, {len(made.schedules[0].paths)} "
        f"microbatches of {w.microbatch_samples}"
    )


def _random_line(drawn: RandomPlacements, cost_s: float, step_s: float) -> str:
    cost = f"assignment cost {drawn.mean_cost_s:.4f} s"
    if cost_s > 0:
        cost += f" ({drawn.mean_cost_s / cost_s:.2f} x)"
    return (
        f"mean of {drawn.count} random placements: {cost}, step time {drawn.mean_step_s:.4f} s "
        f"({drawn.mean_step_s / step_s:.2f} x)"
    )


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


def require_writable(path: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse an output that cannot be written, before the work it would be lost after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: must end in {' or '.join(suffixes)}; rename it")


def _assign(args: argparse.Namespace) -> int:
    from planner.genetic import solve_assignment
    from planner.problems import AssignmentProblem

    network = _cluster(args).network
    problem = AssignmentProblem(
        network,
        args.stages,
        args.pipelines,
        args.activation_bytes,
        args.gradient_bytes,
        stage_sizes=args.stage_sizes,
    )
    result = solve_assignment(problem, _stop(args), args.seed, args.method)
    data = _result_data(result)
    lines = [_certificate_line("assignment cost", data)]
    if result.plan is not None:
        groups = [[network.ids[d] for d in group] for group in result.plan.groups]
        data["groups"] = groups
        data["grid"] = None if result.plan.grid is None else result.plan.grid.tolist()
        lines += [f"stage {j}: {' '.join(names)}" for j, names in enumerate(groups)]
    _print(args, data, lines)
    return 0 if result.plan is not None else INVALID_PLAN


def _paths(args: argparse.Namespace) -> int:
    from planner.cli.path_command import Answer, ask, question

    require_writable(args.out, [".json"])
    asked = question(args, _cluster, _workload)
    if asked.ignored:
        names = ", ".join(asked.ignored)
        print(f"planner paths: {args.problem}: not used: {names}", file=sys.stderr)
    result = ask(asked, args, _stop(args))
    data = _result_data(result)
    if result.plan is None:
        _print(args, data, [f"no paths: {result.stop_reason}"])
        return INVALID_PLAN
    answer = Answer.of(asked, result.plan)
    answer.require_valid()
    data |= answer.data()
    lines = [_certificate_line("makespan", data), *answer.lines()]
    if args.out is not None:
        write_text(args.out, json.dumps(data, allow_nan=False, indent=1) + "\n")
        lines.append(f"wrote {args.out}")
    _print(args, data, lines)
    return 0


def _average(args: argparse.Namespace) -> int:
    from planner.lp import solve_averaging
    from planner.lp.strategy import recognise
    from planner.problems.peers_file import load_peers

    peers = load_peers(args.peers)
    links = None if args.links is None else load_network(args.links)
    problem = peers.problem(args.batch_samples, args.gradient_bytes, links, not args.no_overlap)
    result = solve_averaging(problem, args.method, _stop(args))
    data = _result_data(result)
    if result.plan is None:
        _print(args, data, [f"no averaging is possible: {result.stop_reason}"])
        return INVALID_PLAN
    made = result.plan
    data["strategy"] = str(recognise(made))
    data["peers"] = [
        {
            "name": name,
            "computes": bool(made.computes[i]),
            "share": float(made.shares[i]),
            "samples_per_step": float(made.samples_per_step[i]),
        }
        for i, name in enumerate(peers.names)
    ]
    lines = [
        f"{made.steps_per_s:.6g} steps/s   bound {result.bound:.6g}   gap {result.gap:.2%}   "
        f"{result.status} ({result.stop_reason}, {result.runtime_s:.2f} s)",
        f"strategy: {data['strategy']}",
        f"{'peer':<20}{'computes':>9}{'share':>9}{'samples a step':>16}",
    ]
    lines += [
        f"{p['name']:<20}{'yes' if p['computes'] else 'no':>9}{p['share']:>9.2%}"
        f"{p['samples_per_step']:>16.1f}"
        for p in data["peers"]
    ]
    _print(args, data, lines)
    return 0


def _check(args: argparse.Namespace) -> int:
    from planner.checker.dispatch import check

    plan = load_plan(args.plan)
    violations = check(plan)
    lines = [str(v) for v in violations] or [
        f"{args.plan}: valid (hash {plan.content_hash[:12]}, network "
        f"{plan.cluster.network.content_hash[:12]})"
    ]
    _print(args, [asdict(v) for v in violations], lines)
    return INVALID_PLAN if violations else 0


def _simulate(args: argparse.Namespace) -> None:
    from planner.clock.simulator import simulate_cycle

    require_writable(args.trace, [".json"])
    require_writable(args.gantt, [".png", ".svg", ".pdf"])
    plan = load_plan(args.plan)
    cluster = plan.cluster
    if args.network is not None:
        cluster = cluster.replace(network=network_for(plan, load_network(args.network)))
    if args.schedule >= len(plan.schedules):
        raise ValueError(
            f"--schedule is {args.schedule}, the plan has schedules 0 to "
            f"{len(plan.schedules) - 1}; name one of them"
        )
    mean, timelines = simulate_cycle(plan, cluster, share_links=args.share_links)
    timeline = timelines[args.schedule]
    if args.trace is not None:
        timeline.to_chrome_trace(args.trace)
    if args.gantt is not None:
        timeline.gantt(args.gantt)
    data = {
        "pipeline_s": mean.pipeline_s,
        "averaging_s": mean.averaging_s,
        "update_s": timeline.update_s,
        "step_s": mean.step_s,
        "planned_step_s": plan.predicted.step_s,
        "schedules": [
            {"name": s.name, "pipeline_s": t.makespan_s, "step_s": t.step_s}
            for s, t in zip(plan.schedules, timelines, strict=True)
        ],
    }
    lines = [
        f"step time {mean.step_s:.4f} s = pipeline {mean.pipeline_s:.4f} s + averaging "
        f"{mean.averaging_s:.4f} s / {plan.sync.every_steps} + update "
        f"{timeline.update_s:.4f} s   (planned {plan.predicted.step_s:.4f} s)"
    ]
    if len(timelines) > 1:
        lines += [
            f"schedule {k}, {s.name}: {plan.cycle.count(k)} of {len(plan.cycle)} iterations, "
            f"pipeline {t.makespan_s:.4f} s, step {t.step_s:.4f} s"
            for k, (s, t) in enumerate(zip(plan.schedules, timelines, strict=True))
        ]
    _print(args, data, lines)


def network_for(plan: TrainingPlan, network: Network) -> Network:
    """Another measurement of a plan's devices, by device id, or by region.

    A network of the plan's regions is taken apart into its devices; links inside a region, which
    it does not have, stay as they were in the plan.
    """
    own = plan.cluster.network
    if set(own.ids) <= set(network.ids):
        return network.subset(own.ids)
    missing = sorted(set(own.regions) - set(network.ids))
    if missing:
        raise NetworkError(
            f"the network has neither the plan's devices nor its region {missing[0]!r}; give one "
            f"with ids such as {own.ids[0]!r} or {own.regions[0]!r}"
        )
    index = [network.index_of(region) for region in own.regions]
    latency = own.latency_s.copy()
    bandwidth = own.bandwidth_bytes_per_s.copy()
    for i, a in enumerate(index):
        for j, b in enumerate(index):
            if a != b:
                latency[i, j] = network.latency_s[a, b]
                bandwidth[i, j] = network.bandwidth_bytes_per_s[a, b]
    return own.replace(latency_s=latency, bandwidth_bytes_per_s=bandwidth)


def _run(args: argparse.Namespace) -> int:
    from planner.cli.local_run import run_local

    require_writable(args.trace, [".json"])
    require_writable(args.calibrate, [".json"])
    return run_local(args, print)


def _bench(args: argparse.Namespace) -> int:
    import importlib
    import pkgutil

    import planner.bench

    names = [m.name for m in pkgutil.iter_modules(planner.bench.__path__) if m.name[0] != "_"]
    if args.name is None:
        _print(args, names, names)
        return 0
    if args.name not in names:
        raise ValueError(f"no benchmark {args.name!r}; choose one of {', '.join(names)}")
    return int(importlib.import_module(f"planner.bench.{args.name}").main(args.rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
