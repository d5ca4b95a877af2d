"""``planner completion``: print a shell script that completes commands, options and names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planner.cli.output import show
from planner.network.catalogue import list_networks
from planner.workload.presets import PRESETS

ABOUT = "print a script that completes commands and options in a shell"
EXAMPLE = "planner completion bash > ~/.local/share/bash-completion/completions/planner"
SHELLS = ("bash", "zsh")

PREAMBLE = {
    "bash": """\
_planner_network() { compgen -W "%s" -- "$1"; compgen -f -- "$1"; }
_planner_workload() { compgen -W "%s" -- "$1"; compgen -f -- "$1"; }
""",
    "zsh": """\
_planner_network() { compadd -- %s; _files; }
_planner_workload() { compadd -- %s; _files; }
""",
}
"""Shell functions that complete a known name or a file."""
NAMED = {
    "network": "_planner_network",
    "workload": "_planner_workload",
}


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the shell."""
    sub.add_argument("shell", choices=SHELLS, help="shell that will load the script")


def run(args: argparse.Namespace) -> int:
    """Print the completion script."""
    import shtab

    from planner.cli.main import parser  # imported here: that module imports this one

    main_parser = parser()
    _mark(main_parser, shtab.FILE)
    names = " ".join(list_networks()), " ".join(PRESETS)
    preamble = PREAMBLE[args.shell] % names
    text = shtab.complete(main_parser, shell=args.shell, preamble=preamble)
    show(args.json, {"shell": args.shell, "script": text}, [text])
    return 0


def _mark(parser: argparse.ArgumentParser, files: Any) -> None:
    """Mark the arguments that take a file, and those that take a network or workload name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _mark(sub, files)
        elif action.dest in NAMED:
            action.complete = dict.fromkeys(SHELLS, NAMED[action.dest])  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
