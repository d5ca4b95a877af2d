"""Command line of a rank: ``python -m planner.executor plan.json --devices a b ...``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from planner.executor.launch.run_config import RunConfig, add_options
from planner.executor.rendezvous.address import INTERFACE
from planner.executor.rendezvous.secret import SECRET_FILE, Secret
from planner.executor.transport.store import BIND
from planner.utils.argument_parser import OneLineParser
from planner.utils.output_files import add_force


def parse_arguments(
    argv: list[str] | None, about: str | None, *, prog: str = "python -m planner.executor"
) -> RunConfig:
    """Parse the command line."""
    # no abbreviations: launchers search the arguments for whole option names
    parser = OneLineParser(prog=prog, description=about, allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--devices", nargs="+", required=True, help="this node's device ids")
    add_options(parser)
    add_authentication_options(parser)
    add_force(parser)
    args = parser.parse_args(argv)
    return RunConfig.from_arguments(args, devices=tuple(args.devices))


def add_authentication_options(parser: argparse.ArgumentParser) -> None:
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


def load_secret(bind: str | None, secret_file: Path | None) -> Secret | None:
    """Load the secret of the run; sets the address on which this process listens."""
    if bind is not None:
        os.environ[BIND] = bind
    return Secret.from_environment(secret_file)
