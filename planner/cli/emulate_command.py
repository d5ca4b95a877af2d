"""``planner emulate``: run a plan on an emulated network and compare it with its prediction."""

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

ABOUT = "run a plan on an emulated network and compare with the prediction (Linux, root)"
EXAMPLE = "sudo planner emulate plan.json --trace both.json"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan, scaling factors, numbers of steps and the trace file."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    sub.add_argument(
        "--speed", type=float, default=1.0, help="divide all times by this factor; default 1"
    )
    sub.add_argument(
        "--shrink",
        type=_shrink,
        default=None,
        metavar="S|auto",
        help="divide all bytes and rates by this factor; default auto: as much as this machine "
        "needs",
    )
    sub.add_argument(
        "--steps",
        type=positive,
        default=5,
        help="measured consecutive steps, rounded up to whole cycles from one averaging to the "
        "next, after two cycles of warm-up; default 5",
    )
    sub.add_argument(
        "--rest",
        type=positive,
        default=5,
        help="measured steps that each start on an idle system, rounded up to whole cycles, after "
        "one cycle of warm-up; default 5",
    )
    sub.add_argument(
        "--real-compute",
        action="store_true",
        help="train the real model on this machine's CPUs; default: wait for the planned compute "
        "times",
    )
    sub.add_argument(
        "--jitter-ms",
        type=float,
        default=0.0,
        help="vary the latency by at most this much, about once per message; default 0",
    )
    sub.add_argument(
        "--trace",
        type=Path,
        help="Chrome trace of the predicted and the executed step to write (.json)",
    )
    add_force(sub)


def _shrink(text: str) -> float | None:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, found {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Validate the request, run the emulation and print the comparison."""
    from planner.emulate.emulation import EmulationSettings, emulate, resolve_settings
    from planner.emulate.links import MAX_INSIDE_RATIO, emulated_cluster
    from planner.emulate.namespaces import require_linux_root
    from planner.emulate.report import data_of, lines_of
    from planner.emulate.trace import write_trace

    require_outputs(vars(args), [Output("--trace", args.trace, [".json"], MADE)])
    settings = EmulationSettings(
        *(args.speed, args.shrink, args.steps, args.rest, args.real_compute),
        jitter_s=args.jitter_ms / 1e3,
    )

    def report(line: str) -> None:
        if not args.quiet or line.startswith("warning: "):
            _print_progress(line)

    require_linux_root()
    plan = load_plan(args.plan)
    violations = check(plan)
    if violations:
        raise PlanError(f"{args.plan}: {violations[0]}; make the plan again")
    cluster = emulated_cluster(plan.cluster)
    if cluster.network != plan.cluster.network:
        plan = plan.replace(cluster=cluster)
        report(
            "links within machines are emulated, and predicted, at most at "
            f"{MAX_INSIDE_RATIO:g} times the rate of the fastest link between them"
        )
    resolved = resolve_settings(plan, settings, report)
    emulation = emulate(args.plan, plan, resolved, report)
    if args.trace is not None:
        write_trace(args.trace, plan, emulation)
    show(args.json, data_of(emulation), lines_of(emulation))
    for warning in emulation.warnings():
        _print_progress(f"warning: {warning}")
    return 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
