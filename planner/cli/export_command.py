"""``planner export``: a plan in another tool's terms."""

from __future__ import annotations

import argparse
import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from planner.cli.arguments import count, positive
from planner.cli.output import show
from planner.exports.formats import FORMATS, export_plan
from planner.exports.launch import ELASTIC
from planner.exports.options import load_hosts
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import require_elastic
from planner.utils.output_files import Output, add_force, require_outputs

ABOUT = "write a plan in another tool's terms"
EXAMPLE = "planner export plan.json --to torchrun"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Plan, format, options of formats."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    formats = "; ".join(f"{name}: {one.about}" for name, one in FORMATS.items())
    sub.add_argument("--to", required=True, choices=list(FORMATS), metavar="FORMAT", help=formats)
    sub.add_argument("--out", type=Path, help="file to write; default: print it")
    sub.add_argument(
        "--hosts",
        type=Path,
        help=f"CSV device,host; default: a device is its own host ({_readers('hosts')})",
    )
    sub.add_argument(
        "--interface", help=f"network interface that ranks use ({_readers('interface')})"
    )
    sub.add_argument("--port", type=positive, help="of the first host; default 29500")
    sub.add_argument("--run-id", help="name of the run; default run1")
    sub.add_argument("--plan-path", help="where nodes find the plan; default: as given here")
    sub.add_argument(
        "--executor-options",
        help='more words for the executor, such as="--steps 100 --checkpoint kept"',
    )
    sub.add_argument("--pipeline", type=count, help=f"which one, from 0 ({_readers('pipeline')})")
    sub.add_argument(
        "--schedule", type=count, help=f"which one; default 0 ({_readers('schedule')})"
    )
    sub.add_argument("--stage", type=count, help=f"which one; default 0 ({_readers('stage')})")
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Write or print it."""
    if args.out is not None:
        require_outputs(vars(args), [Output("--out", args.out, [args.out.suffix])])
    names = (
        *("interface", "port", "run_id", "plan_path", "executor_options"),
        *("pipeline", "schedule", "stage"),
    )
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.hosts is not None:
        options["hosts"] = load_hosts(args.hosts)
    if "plan_path" in FORMATS[args.to].reads:
        options.setdefault("plan_path", str(args.plan))
    plan = load_plan(args.plan)
    if options.get("executor_options") and "executor_options" in FORMATS[args.to].reads:
        _require_understood(options["executor_options"], plan, args.to)
    text = export_plan(plan, args.to, args.out, **options)
    if args.out is None:
        show(args.json, {"format": args.to, "text": text}, [text.removesuffix("\n")])
    else:
        show(
            args.json,
            {"format": args.to, "written": str(args.out)},
            [f"wrote {args.out}: {FORMATS[args.to].about}"],
        )
    return 0


def _require_understood(text: str, plan: TrainingPlan, to: str) -> None:
    """Words that every rank would refuse are refused before they are sent to nodes.

    Files are the nodes' own. Without PyTorch, which the executor needs, nothing is known of them.
    """
    try:
        from planner.executor.fault_tolerance.run_segments import segments_of
        from planner.executor.launch.arguments import parse_arguments, validate, validate_for_plan
        from planner.executor.launch.options import optimizing_of
        from planner.executor.node import own_options, require_own
    except ImportError:
        return
    try:
        words = shlex.split(text)
    except ValueError:
        return  # said by the format
    if not words or not words[0].startswith("-"):
        return
    said = io.StringIO()
    # nodes' own command starts the ranks; else torchrun does
    by_node = to == "nodes" or (to == "slurm" and ELASTIC in words)
    own = None
    try:
        with redirect_stderr(said), redirect_stdout(said):
            if by_node:
                own, words = own_options(words)
            told = parse_arguments(["plan.json", "--devices", "", *words], None)
    except SystemExit as end:
        why = said.getvalue().partition(": ")[2].partition("; see ")[0]
        raise ValueError(f"--executor-options: {why if end.code else 'asks for help'}") from None
    if told.devices != [""] or told.bind is not None:
        name = "bind" if told.bind is not None else "devices"
        raise ValueError(f"--executor-options: --{name} differs from host to host; leave it out")
    if told.elastic and to == "torchrun":
        raise ValueError(
            "--executor-options: with --elastic, torchrun would end all ranks of a node when one "
            "fails; take --to nodes"
        )
    if own is not None:
        require_own(own, told)
    validate(told)
    validate_for_plan(told, plan)
    if told.elastic:
        require_elastic(plan, None if told.checkpoint is None else told.every)
    optimizing_of(told)
    segments_of(plan, told.move, told.steps)


def _readers(option: str) -> str:
    """Formats that read an option, for help."""
    return ", ".join(name for name, one in FORMATS.items() if option in one.reads)
