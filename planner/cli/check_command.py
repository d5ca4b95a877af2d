"""``planner check``: a plan file against the independent verifier."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from planner.checker.bound_basis import bound_bases
from planner.checker.dispatch import check
from planner.cli.output import INVALID_PLAN, all_wrapped, show
from planner.cli.simulation_report import priced_alone_lines
from planner.training_plan.file import load_plan

ABOUT = "verify a plan file independently of the solvers"
EXAMPLE = "planner check plan.json"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """The plan file."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")


def run(args: argparse.Namespace) -> int:
    """Every broken rule; else what each bound stands on."""
    plan = load_plan(args.plan)
    violations = check(plan)
    if violations:
        show(args.json, [asdict(v) for v in violations], all_wrapped(map(str, violations)))
        return INVALID_PLAN
    lines = [
        f"{args.plan}: valid (hash {plan.content_hash[:12]}, network "
        f"{plan.cluster.network.content_hash[:12]})"
    ]
    lines += [str(line) for line in bound_bases(plan)]
    show(args.json, [], all_wrapped([*lines, *priced_alone_lines(plan)]))
    return 0
