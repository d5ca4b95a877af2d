"""``planner export``: write a plan in the format of another tool."""

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
from planner.utils.output_files import Output, add_force, require_outputs

ABOUT = "write a plan in the format of another tool"
EXAMPLE = "planner export plan.json --to torchrun"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan, the format, and options of the formats."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    formats = "; ".join(f"{name}: {export.about}" for name, export in FORMATS.items())
    sub.add_argument("--to", required=True, choices=list(FORMATS), metavar="FORMAT", help=formats)
    sub.add_argument("--out", type=Path, help="file to write; default: print it")
    sub.add_argument(
        "--hosts",
        type=Path,
        help="CSV with columns device,host; default: machines are hosts, and devices without one "
        f"({_readers('hosts')})",
    )
    sub.add_argument(
        "--interface", help=f"network interface of the ranks ({_readers('interface')})"
    )
    sub.add_argument(
        "--port", type=positive, help="port on the first host for rendezvous; default 29500"
    )
    sub.add_argument("--run-id", help="name of the run; default run1")
    sub.add_argument(
        "--plan-path", help="path of the plan file on the nodes; default: the path given here"
    )
    sub.add_argument(
        "--executor-options",
        help='options for the executor, such as="--steps 100 --checkpoint checkpoints"',
    )
    sub.add_argument(
        "--pipeline", type=count, help=f"index of the pipeline, from 0 ({_readers('pipeline')})"
    )
    sub.add_argument(
        "--schedule", type=count, help=f"index of the schedule; default 0 ({_readers('schedule')})"
    )
    sub.add_argument(
        "--stage", type=count, help=f"index of the stage; default 0 ({_readers('stage')})"
    )
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Write the exported plan to a file, or print it."""
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
        _validate_executor_options(options["executor_options"], plan, args.to)
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


def _validate_executor_options(text: str, plan: TrainingPlan, target: str) -> None:
    """Reject executor options that every rank would reject, before they are sent to nodes.

    Paths are not checked, since they refer to the nodes' file systems. Without PyTorch the options
    are not checked at all.
    """
    try:
        from planner.executor.launch.arguments import parse_arguments
        from planner.executor.node import parse_node_options, validate_node_options
    except ImportError:
        return
    try:
        options = shlex.split(text)
    except ValueError:
        return  # the format reports it
    if not options or not options[0].startswith("-"):
        return
    output = io.StringIO()
    # ranks are started by planner.executor.node, otherwise by torchrun
    by_node = target == "nodes" or (target == "slurm" and ELASTIC in options)
    node_args = None
    try:
        with redirect_stderr(output), redirect_stdout(output):
            if by_node:
                node_args, options = parse_node_options(options)
            config = parse_arguments(["plan.json", "--devices", "", *options], None)
    except SystemExit as end:
        why = output.getvalue().partition(": ")[2].partition("; see ")[0]
        raise ValueError(
            f"--executor-options: {why if end.code else '--help is not allowed'}"
        ) from None
    if config.devices != ("",) or config.bind is not None:
        name = "bind" if config.bind is not None else "devices"
        raise ValueError(f"--executor-options: --{name} differs from host to host; leave it out")
    if config.elastic and target == "torchrun":
        raise ValueError(
            "--executor-options: with --elastic, torchrun would end all ranks of a node when one "
            "fails; take --to nodes"
        )
    if node_args is not None:
        validate_node_options(node_args, config)
    config.validate()
    config.validate_for_plan(plan)


def _readers(option: str) -> str:
    """Return the formats that use an option, for its help text."""
    return ", ".join(name for name, export in FORMATS.items() if option in export.reads)
