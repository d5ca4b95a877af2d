"""``planner average``: choose contributors and reducer shares as in DeDLOC."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner.checker.dispatch import check
from planner.cli.arguments import add_limits, add_workload, count, stop_of, workload_of
from planner.cli.output import BAD_INPUT, INVALID_PLAN, result_data, save, show
from planner.network.catalogue import load_network
from planner.network.error import NetworkError
from planner.training_plan.file import load_plan, save_plan
from planner.training_plan.model import FORMAT, TrainingPlan
from planner.utils.output_files import Output, add_force, require_outputs
from planner.utils.validate import real
from planner.workload.workload import Workload

ABOUT = "choose which peers compute gradients and which share each one sums (DeDLOC)"
EXAMPLE = "planner average peers.csv --batch-samples 64 --gradient-bytes 1e8"

NO_SHARE = 1e-3
"""Shares below this count as none, and rates so near to a limit as limited by it."""
COLUMNS = "name,samples_per_s,upload_mbps,download_mbps[,can_compute,can_aggregate]"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the peers file, batch, gradient size, outputs and search limits."""
    sub.add_argument("peers", type=Path, help=f"CSV: {COLUMNS}")
    add_workload(sub, required=False)
    sub.add_argument(
        "--gradient-bytes",
        type=float,
        help="bytes of the averaged vector; default: the workload's",
    )
    sub.add_argument(
        "--links",
        help="network (name or file) that limits the bandwidth of pairs of peers; default: none",
    )
    sub.add_argument(
        "--no-overlap",
        action="store_true",
        help="average after computing instead of at the same time",
    )
    sub.add_argument(
        "--programme", type=Path, help="write DeDLOC's linear program (5) to this .lp or .mps file"
    )
    sub.add_argument(
        "--out", type=Path, help="plan file to write, for --workload; implies --no-overlap"
    )
    sub.add_argument(
        "--seed",
        type=count,
        default=0,
        help="seed of the plan's initial weights; default %(default)s",
    )
    sub.add_argument(
        "--method",
        default="exact",
        choices=["exact", "relaxed"],
        help="exact optimum, or the paper's relaxation (5) with rounding; default %(default)s",
    )
    add_limits(sub)
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Solve the problem; print rate, bound, strategy and one line per peer."""
    from planner.lp.model_file import labels
    from planner.lp.paper_model import build_paper_model
    from planner.lp.solve import solve_averaging
    from planner.lp.strategy import recognise
    from planner.planning.averaging.peers_plan import peers_plan
    from planner.problems.peers_file import load_peers

    require_outputs(
        vars(args),
        [
            Output("--out", args.out, [".json"], FORMAT),
            Output("--programme", args.programme, [".lp", ".mps"]),
        ],
    )
    peers = load_peers(args.peers)
    links = None if args.links is None else load_network(args.links)
    workload, batch, gradient = _trained(args)
    overlap = not args.no_overlap and args.out is None
    try:
        problem = peers.problem(batch, gradient, links, overlap)
    except NetworkError as error:
        raise NetworkError(f"{args.links}: {error}") from None
    if args.programme is not None:
        if not overlap:
            other = "--no-overlap" if args.no_overlap else "--out"
            raise ValueError(
                f"--programme {args.programme}: linear program (5) overlaps averaging with "
                f"computing, {other} does not; leave one of them out"
            )
        build_paper_model(problem, names=labels(peers.names)).write(args.programme)
    result = solve_averaging(problem, args.method, stop_of(args))
    data = result_data(result)
    if result.plan is None:
        show(args.json, data, [f"no feasible averaging: {result.stop_reason}"])
        return INVALID_PLAN
    strategy = result.plan
    data["strategy"] = str(recognise(strategy))
    data["peers"] = [
        {
            "name": name,
            "computes": bool(strategy.computes[i]),
            "share": float(strategy.shares[i]),
            "samples_per_step": float(strategy.samples_per_step[i]),
        }
        for i, name in enumerate(peers.names)
    ]
    lines = [
        f"{strategy.steps_per_s:.6g} steps/s   bound {result.bound:.6g}   gap {result.gap:.2%}   "
        f"{result.status} ({result.stop_reason}, {result.runtime_s:.2f} s)",
        f"strategy: {data['strategy']}",
        f"{'peer':<20}{'computes':>9}{'share':>9}{'samples a step':>16}",
    ]
    lines += [
        f"{p['name']:<20}{'yes' if p['computes'] else 'no':>9}{p['share']:>9.2%}"
        f"{p['samples_per_step']:>16.1f}"
        for p in data["peers"]
    ]
    whole, data["limited_by"] = strategy.steps_per_s * gradient, []
    for name, rate, share in zip(
        peers.names, peers.download_bytes_per_s, strategy.shares, strict=True
    ):
        if share < NO_SHARE and whole > rate * (1 - NO_SHARE):
            data["limited_by"].append(name)
            lines.append(
                f"{name} limits the rate: its download, {rate * 8e-6:.4g} Mb/s, only just receives "
                "the average; without it the others may be faster"
            )
    if args.programme is not None:
        data["written"] = [str(args.programme)]
        lines.append(f"wrote {args.programme}: linear program (5)")
    written = args.out
    if args.out is not None:
        assert workload is not None
        planned = peers_plan(peers, problem, strategy, workload, links, args.seed)
        planned = planned.replace(network_name=args.links or args.peers.stem)
        written = save(args.out, lambda path: save_plan(planned, path))
        lines += _written(written, planned, data)
    show(args.json, data, lines)
    return 0 if written == args.out else BAD_INPUT


def _trained(args: argparse.Namespace) -> tuple[Workload | None, float, float]:
    """Return the workload if one is given, the samples of a step and the gradient bytes."""
    if args.workload is None:
        if args.out is not None:
            raise ValueError(f"--out {args.out}: a plan needs a workload; give --workload")
        for flag in ("batch_samples", "gradient_bytes"):
            name = flag.replace("_", "-")
            if getattr(args, flag) is None:
                raise ValueError(f"--{name} is missing; give it, or --workload")
            real(f"--{name}", getattr(args, flag), 0, above=True)
        return None, args.batch_samples, args.gradient_bytes
    if args.gradient_bytes is not None:
        raise ValueError(
            f"--gradient-bytes {args.gradient_bytes:g} and --workload {args.workload} both set "
            "the bytes to average; give only one"
        )
    workload = workload_of(args)
    (gradient,) = workload.gradient_bytes(((0, len(workload.layers)),), 0)
    return workload, workload.batch_samples, gradient


def _written(written: Path, plan: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """Check the saved plan and describe it: simulated step time, devices left out, path."""
    violations = check(load_plan(written))
    if violations:
        raise ValueError(f"the plan fails its own check: {violations[0]}; please report this")
    data |= {
        "predicted": asdict(plan.predicted),
        "content_hash": plan.content_hash,
        "left_out": list(plan.left_out),
        "written": [str(written)],
    }
    trains, aggregators = len(plan.stage_of), len(plan.averages_for)
    lines = [
        f"predicted step time {plan.predicted.step_s:.4f} s: {trains} train, {aggregators} only "
        f"average, {len(plan.left_out)} left out",
    ]
    if plan.left_out:
        lines.append(
            "devices left out do not receive the average, unlike in DeDLOC: the plan may be faster "
            "than the bound above"
        )
    return [
        *lines,
        "device memory is not checked: the peers file does not state it",
        f"wrote {written}  (hash {plan.content_hash[:12]})",
    ]
