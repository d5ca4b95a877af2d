"""``planner average``: who contributes gradients and who sums which share (DeDLOC)."""

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
from planner.workload.workload import Workload

ABOUT = "who contributes gradients, and who sums which share"
EXAMPLE = "planner average peers.csv --batch-samples 64 --gradient-bytes 1e8"

COLUMNS = "name,samples_per_s,upload_mbps,download_mbps[,can_compute,can_aggregate]"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Peers, batch and limits."""
    sub.add_argument("peers", type=Path, help=f"CSV: {COLUMNS}")
    add_workload(sub, required=False)
    sub.add_argument(
        "--gradient-bytes",
        type=float,
        help="of the vector that is averaged; default: the workload's",
    )
    sub.add_argument(
        "--links", help="network (name or file) with limits between the peers' names; default: none"
    )
    sub.add_argument("--no-overlap", action="store_true", help="compute, then average")
    sub.add_argument(
        "--programme", type=Path, help="write LP (5) to this file, .lp or .mps; default: nowhere"
    )
    sub.add_argument("--out", type=Path, help="a plan of it, for --workload: compute, then average")
    sub.add_argument(
        "--seed", type=count, default=0, help="of the plan's weights; default %(default)s"
    )
    sub.add_argument(
        "--method",
        default="exact",
        choices=["exact", "relaxed"],
        help="exact, or the paper's relaxation (5) and its rule; default %(default)s",
    )
    add_limits(sub)
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Rate, bound, strategy and a line a peer."""
    from planner.lp.model_file import labels
    from planner.lp.paper_model import build_paper_model
    from planner.lp.solve import solve_averaging
    from planner.lp.strategy import recognise
    from planner.planning.peers_plan import peers_plan
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
                f"--programme {args.programme}: LP (5) is of averaging beside computing, "
                f"{other} of one after the other; leave one of them out"
            )
        build_paper_model(problem, names=labels(peers.names)).write(args.programme)
    result = solve_averaging(problem, args.method, stop_of(args))
    data = result_data(result)
    if result.plan is None:
        show(args.json, data, [f"no averaging is possible: {result.stop_reason}"])
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
    if args.programme is not None:
        data["written"] = [str(args.programme)]
        lines.append(f"wrote {args.programme}: LP (5)")
    written = args.out
    if args.out is not None:
        assert workload is not None
        planned = peers_plan(peers, problem, made, workload, links, args.seed)
        planned = planned.replace(network_name=args.links or args.peers.stem)
        written = save(args.out, lambda path: save_plan(planned, path))
        lines += _written(written, planned, data)
    show(args.json, data, lines)
    return 0 if written == args.out else BAD_INPUT


def _trained(args: argparse.Namespace) -> tuple[Workload | None, float, float]:
    """The workload, if one is named, samples of a step and bytes of its gradients."""
    if args.workload is None:
        if args.out is not None:
            raise ValueError("--out writes a plan for a workload; give --workload")
        for flag in ("batch_samples", "gradient_bytes"):
            if getattr(args, flag) is None:
                name = flag.replace("_", "-")
                raise ValueError(f"--{name} is missing; give it, or --workload")
        return None, args.batch_samples, args.gradient_bytes
    if args.gradient_bytes is not None:
        raise ValueError(
            f"--gradient-bytes {args.gradient_bytes:g} and --workload {args.workload} both say "
            "what is averaged; give one"
        )
    workload = workload_of(args)
    (gradient,) = workload.gradient_bytes(((0, len(workload.layers)),), 0)
    return workload, workload.batch_samples, gradient


def _written(written: Path, made: TrainingPlan, data: dict[str, Any]) -> list[str]:
    """The plan that was saved: what it takes in the simulator, and where it is."""
    violations = check(load_plan(written))
    if violations:
        raise ValueError(f"the plan does not pass its own check: {violations[0]}; report this")
    data |= {
        "predicted": asdict(made.predicted),
        "content_hash": made.content_hash,
        "left_out": list(made.left_out),
        "written": [str(written)],
    }
    trains, helps = len(made.stage_of), len(made.averages_for)
    lines = [
        f"predicted step time {made.predicted.step_s:.4f} s: {trains} train, {helps} only average, "
        f"{len(made.left_out)} left out",
    ]
    if made.left_out:
        lines.append(
            "those left out get no average, as all peers do in DeDLOC: the plan may be faster than "
            "the bound above"
        )
    return [
        *lines,
        "memory is taken as enough: the peers file does not say what there is",
        f"wrote {written}  (hash {made.content_hash[:12]})",
    ]
