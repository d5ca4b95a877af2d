"""``planner check``: verify a plan file independently of the solvers."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from planner.checker.bound_basis import BoundBasis, bound_bases
from planner.checker.dispatch import check
from planner.cli.output import INVALID_PLAN, all_wrapped, show
from planner.cli.simulation_report import unmodelled_lines
from planner.training_plan.file import load_plan

ABOUT = "verify a plan file independently of the solvers"
EXAMPLE = "planner check plan.json"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan file."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")


def run(args: argparse.Namespace) -> int:
    """Print every violated rule; if there is none, print how each bound was verified."""
    plan = load_plan(args.plan)
    violations = check(plan)
    if violations:
        show(args.json, [asdict(v) for v in violations], all_wrapped(map(str, violations)))
        return INVALID_PLAN
    lines = [
        f"{args.plan}: valid (hash {plan.content_hash[:12]}, network "
        f"{plan.cluster.network.content_hash[:12]})"
    ]
    lines += [_bound_line(basis) for basis in bound_bases(plan)]
    show(args.json, [], all_wrapped([*lines, *unmodelled_lines(plan)]))
    return 0


def _bound_line(basis: BoundBasis) -> str:
    """Describe how a certificate's lower bound was verified."""
    if basis.bound is None:
        return f"{basis.part}: no lower bound"
    bound = f"{basis.part}: lower bound {basis.bound:.6g} {'$' if basis.part == 'cost' else 's'}"
    if basis.recomputed is None:
        return f"{bound}, not verified; the solver states: {basis.basis or 'no reason'}"
    # without the witness's parameters, which are in the plan file
    return (
        f"{bound}, verified: recomputed from the plan's witness; method: "
        f"{basis.argument.split(' (')[0]}"
    )
