"""``planner emulate``: a plan on an emulated network on this machine, against its prediction."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from planner.checker.dispatch import check
from planner.cli.arguments import positive
from planner.cli.output import show
from planner.training_plan.error import PlanError
from planner.training_plan.file import load_plan
from planner.utils.atomic_write import MADE
from planner.utils.output_files import Output, add_force, require_outputs

ABOUT = "run a plan on an emulated network (Linux, root), beside what is predicted"
EXAMPLE = "sudo planner emulate plan.json --trace both.json"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Plan, how it is scaled, what is measured."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    sub.add_argument("--speed", type=float, default=1.0, help="divide all times by it; default 1")
    sub.add_argument(
        "--shrink",
        type=_shrink,
        default=None,
        metavar="S|auto",
        help="divide all bytes and rates by it; default: auto, as much as this machine needs",
    )
    sub.add_argument(
        "--steps",
        type=positive,
        default=5,
        help="chained that count, after those that are to warm up; default 5",
    )
    sub.add_argument(
        "--rest",
        type=positive,
        default=5,
        help="each from rest that count, after one to warm up; default 5",
    )
    sub.add_argument(
        "--real-compute",
        action="store_true",
        help="train the real model on this machine's processors; default: imposed compute times",
    )
    sub.add_argument(
        "--jitter-ms",
        type=float,
        default=0.0,
        help="latencies are more or less by at most this, about once a message; default 0",
    )
    sub.add_argument("--trace", type=Path, help="write predicted and executed step here (.json)")
    add_force(sub)


def _shrink(text: str) -> float | None:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, found {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Refuse what cannot be done, then run and compare."""
    from planner.emulate.emulation import EmulationSettings, emulate, resolve_settings
    from planner.emulate.namespaces import require_linux_root
    from planner.emulate.report import data_of, lines_of
    from planner.emulate.trace import write_trace

    require_outputs(vars(args), [Output("--trace", args.trace, [".json"], MADE)])
    settings = EmulationSettings(
        *(args.speed, args.shrink, args.steps, args.rest, args.real_compute),
        jitter_s=args.jitter_ms / 1e3,
    )
    require_linux_root()
    plan = load_plan(args.plan)
    violations = check(plan)
    if violations:
        raise PlanError(f"{args.plan}: {violations[0]}; make the plan again")
    asked = resolve_settings(plan, settings, _tell)
    emulation = emulate(args.plan, plan, asked, _tell)
    if args.trace is not None:
        write_trace(args.trace, plan, emulation)
    show(args.json, data_of(emulation), lines_of(emulation))
    for warning in emulation.warnings():
        _tell(f"warning: {warning}")
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
