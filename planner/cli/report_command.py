"""``planner report``: write a plan as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from planner.checker.dispatch import check
from planner.cli.output import INVALID_PLAN, show
from planner.cli.progress import PROGRESS
from planner.report.executed_steps import load_run
from planner.report.page import GENERATOR, report_html
from planner.report.sensitivity import sensitivity
from planner.training_plan.file import load_plan
from planner.utils.atomic_write import write_text
from planner.utils.output_files import Output, add_force, require_outputs
from planner.utils.validate import real

ABOUT = "show a plan as one HTML page"
EXAMPLE = "planner report plan.json --out plan.html"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan, the executed run, and what the page includes."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    sub.add_argument("--out", type=Path, help="page to write; default: plan.html beside the plan")
    add_force(sub)
    sub.add_argument(
        "--run",
        type=Path,
        dest="events",
        help="executed run to compare with: output of the executor's --events or of planner run "
        "--json",
    )
    sub.add_argument(
        "--tokens",
        type=float,
        help="tokens of the training run whose duration and cost are shown; default: 100 per "
        "parameter",
    )
    sub.add_argument(
        "--sensitivity",
        action="store_true",
        help="add the step time with each link or device slowed down; takes time",
    )


def run(args: argparse.Namespace) -> int:
    """Check the plan and write its page."""
    out = args.plan.with_suffix(".html") if args.out is None else args.out
    require_outputs(vars(args), [Output("--out", out, [".html"], GENERATOR)])
    if args.tokens is not None:
        real("--tokens", args.tokens, 0, above=True)
    plan = load_plan(args.plan)
    steps = [] if args.events is None else load_run(args.events, plan.content_hash)
    if violations := check(plan):
        print(f"planner report: {violations[0]}; see planner check", file=sys.stderr)
        return INVALID_PLAN
    slower = sensitivity(plan, _progress) if args.sensitivity else None
    write_text(out, report_html(plan, tokens=args.tokens, run=steps, slower=slower))
    show(args.json, {"written": str(out)}, [f"wrote {out}"])
    return 0


def _progress(done: int, total: int) -> None:
    PROGRESS.show(f"sensitivity: {done} of {total}")
