"""Arguments of a rank: ``python -m planner.executor plan.json --devices a b ...``."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

from planner.executor.fault_tolerance.failure_detector import HEARTBEAT_TIMEOUT_S
from planner.executor.launch.options import ALONE, EVERY, FILES, NUMBERS, add_device, add_training
from planner.executor.rendezvous.address import INTERFACE
from planner.executor.rendezvous.rank_assignment import WAIT_S
from planner.executor.rendezvous.secret import SECRET_FILE, Secret
from planner.executor.rendezvous.store import BIND
from planner.swarm.rebalance_policy import RebalanceRule
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import MADE
from planner.utils.output_files import Output, add_force, require_outputs
from planner.workload.calibration import FORMAT

ALIKE = (
    *("steps", "every", "rest", "impose", "speed", "shrink"),
    *("own_pace", "move", "rebalance", "rebalance_rule", "elastic", "direct", "compile"),
    *NUMBERS,
)
"""Options that must have the same value on all ranks."""
TOGETHER = ("calibrate", "trace", "checkpoint", "resume", *FILES)
"""Options given to all ranks or none; file names may differ."""
NO_MOVES = ("resume", "eval_data", "own_pace")
"""Options that exclude devices that move to other stages."""
NO_ELASTIC = ("impose", "own_pace", "move", "rebalance", "routes", "record")
"""Options that exclude lost devices."""
NO_DIRECT = ("elastic", "move", "rebalance")
"""Options with transfers through the host."""
NO_MODEL = (
    *("own_pace", "calibrate", "checkpoint", "resume", "eval_data", "weights", "export"),
    *("direct", "compile"),
)
"""Options that need a model."""


def parse_arguments(
    argv: list[str] | None, about: str | None, *, prog: str = "python -m planner.executor"
) -> argparse.Namespace:
    """Parse the command line."""
    # keep options as given, for those who search the words
    parser = OneLineParser(prog=prog, description=about, allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--devices", nargs="+", required=True, help="this node's device ids")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--calibrate", type=Path, help="measure first and store it here")
    parser.add_argument("--checkpoint", type=Path, help="folder for checkpoints")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two checkpoints")
    parser.add_argument(
        "--resume", type=Path, help="folder with checkpoints; --steps counts those before too"
    )
    parser.add_argument("--trace", type=Path, help="Perfetto trace of the last step")
    add_device(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        help="seconds for ranks that have not come; default %(default)g",
    )
    parser.add_argument(
        "--patience",
        type=float,
        help=f"seconds of a device's silence that end the run; default {HEARTBEAT_TIMEOUT_S:g}, "
        "and more where the plan has long latencies",
    )
    parser.add_argument(
        "--own-pace", action="store_true", help="one stage: take microbatches as fast as possible"
    )
    parser.add_argument(
        "--routes",
        type=Path,
        help="JSON lines of the peers that each microbatch went through, where devices choose: a "
        "file a trainer, {rank} in the name stands for it",
    )
    parser.add_argument(
        "--move",
        nargs="+",
        action="extend",
        default=[],
        metavar="DEVICE:STAGE@STEPS",
        help="where devices choose paths: after so many steps this device goes to this stage, and "
        "takes its state from a device there",
    )
    parser.add_argument(
        "--rebalance",
        type=int,
        metavar="STEPS",
        help="where devices choose paths: after every so many steps a device may go to another "
        "stage, by what all were seen to take",
    )
    parser.add_argument(
        "--rebalance-rule",
        choices=list(RebalanceRule),
        default=RebalanceRule.PLANNED,
        help="the move that saves most over the rest of the run, or SWARM's Algorithm 2; default "
        "%(default)s",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="continue without a lost device where its stage has another; started again, it "
        "rejoins",
    )
    add_trust(parser)
    add_force(parser)
    parser.add_argument("--events", action="store_true", help="JSON lines instead of text")
    add_training(parser)
    time_scale = parser.add_argument_group("imposed compute: the plan's times and bytes, no model")
    time_scale.add_argument("--impose", action="store_true")
    time_scale.add_argument("--speed", type=float, default=1.0, help="times are divided by it")
    time_scale.add_argument("--shrink", type=float, default=1.0, help="bytes are divided by it")
    time_scale.add_argument("--rest", type=int, default=0, help="steps before, each begun together")
    parser.add_argument(
        "--record",
        type=Path,
        help="times of operations and messages, a file a rank: {rank} in the name stands for it",
    )
    return parser.parse_args(argv)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add options for authentication, and for the address to listen on."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        help="a secret that all ranks prove to each other, in a file that its owner alone may "
        f"read; default: the file that {SECRET_FILE} names, or none",
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="of this node, to listen on; default: MASTER_ADDR for the store, and for ranks that "
        f"of the interface in {INTERFACE}, or the one from which they reach the store",
    )


def secret_of(args: argparse.Namespace) -> Secret | None:
    """The secret given by the options of `add_trust`; sets the address for this process."""
    if args.bind is not None:
        os.environ[BIND] = args.bind
    return Secret.of_environment(args.secret_file)


def validate(args: argparse.Namespace) -> None:
    """Raise `ValueError` for invalid values and combinations of options."""
    if not args.impose and (args.rest or args.speed != 1 or args.shrink != 1):
        raise ValueError("--speed, --shrink and --rest are for imposed runs; add --impose")
    for option in NO_MODEL if args.impose else ():
        if getattr(args, option):
            raise ValueError(f"--impose runs no model; leave out --{option.replace('_', '-')}")
    if args.move and args.rebalance is not None:
        raise ValueError("--move says who moves and --rebalance decides it; leave one out")
    moving = "move" if args.move else "rebalance"
    for name, given, excluded in (
        (moving, args.move or args.rebalance is not None, NO_MOVES),
        ("elastic", args.elastic, NO_ELASTIC),
        ("direct", args.direct is not None, NO_DIRECT),
    ):
        for option in excluded if given else ():
            if getattr(args, option):
                other = option.replace("_", "-")
                raise ValueError(f"--{name} conflicts with --{other}; leave one out")
    if args.every < 1:
        raise ValueError(f"--every is {args.every}; give steps, at least 1")
    if args.steps < 0 or args.rest < 0:
        raise ValueError(f"--steps and --rest must be at least 0, found {args.steps}, {args.rest}")
    for option in ("wait", "patience"):
        if (value := getattr(args, option)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{option} is {value:g}; give seconds above 0")
    for option, (whether, usual) in ALONE.items():
        if getattr(args, option) != usual and getattr(args, whether) is None:
            raise ValueError(
                f"--{option.replace('_', '-')} is for --{whether.replace('_', '-')}; add that, or "
                "leave it out"
            )


def validate_for_plan(args: argparse.Namespace, plan: TrainingPlan) -> None:
    """Raise `ValueError` for options that the plan does not support."""
    if args.direct is not None and plan.wiring is Wiring.STOCHASTIC:
        raise ValueError(
            "--direct: messages' order must be planned, found wiring 'stochastic'; leave it out"
        )


def validate_files(args: argparse.Namespace) -> None:
    """Refuse outputs that would overwrite other files."""
    require_outputs(
        vars(args),
        [
            Output("--trace", args.trace, [".json"], MADE),
            Output("--calibrate", args.calibrate, [".json"], FORMAT),
        ],
    )


def shared_settings(args: argparse.Namespace) -> str:
    """Settings that all ranks must have in common."""
    said = {name: getattr(args, name) for name in ALIKE}
    said |= {name: getattr(args, name) is not None for name in TOGETHER}
    return json.dumps(said, default=str)
