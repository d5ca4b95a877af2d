"""``planner average``: who contributes gradients and who sums which share (DeDLOC)."""

from __future__ import annotations

import argparse
from pathlib import Path

from planner.cli.arguments import add_limits, stop_of
from planner.cli.output import INVALID_PLAN, result_data, show
from planner.network.catalogue import load_network

NAME = "average"
ABOUT = "who contributes gradients, and who sums which share"

COLUMNS = "name,samples_per_s,upload_mbps,download_mbps[,can_compute,can_aggregate]"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Peers, batch and limits."""
    sub.add_argument("peers", type=Path, help=f"CSV: {COLUMNS}")
    sub.add_argument("--batch-samples", type=float, required=True)
    sub.add_argument("--gradient-bytes", type=float, required=True)
    sub.add_argument("--links", help="network with pairwise limits between the peers' names")
    sub.add_argument("--no-overlap", action="store_true", help="compute, then average")
    sub.add_argument("--method", default="exact", choices=["exact", "relaxed"])
    add_limits(sub)


def run(args: argparse.Namespace) -> int:
    """Rate, bound, strategy and a line a peer."""
    from planner.lp.solve import solve_averaging
    from planner.lp.strategy import recognise
    from planner.problems.peers_file import load_peers

    peers = load_peers(args.peers)
    links = None if args.links is None else load_network(args.links)
    problem = peers.problem(args.batch_samples, args.gradient_bytes, links, not args.no_overlap)
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
    show(args.json, data, lines)
    return 0
