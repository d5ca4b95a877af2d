"""``planner bench``: the benchmarks of `planner.bench`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence

from planner.cli.output import show

NAME = "bench"
DEFAULT = "suite"
ABOUT = "solver benchmarks on measured networks"
EXAMPLE = "planner bench --quick"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Which one, and what it takes."""
    sub.add_argument("name", nargs="?", help=f"which; default: {DEFAULT}; list: their names")
    sub.add_argument("rest", nargs=argparse.REMAINDER, help="passed on to the benchmark")


def named(argv: Sequence[str]) -> list[str]:
    """The words of a command line, with the default benchmark's name where none is given.

    Parameters
    ----------
    argv
        Any command's words.

    Returns
    -------
    list[str]
        ``planner bench --quick`` means ``planner bench suite --quick``.
    """
    words = list(argv)
    first = words[1] if len(words) > 1 else None
    if words[:1] == [NAME] and (first is None or (first[:1] == "-" and first not in HELP)):
        words.insert(1, DEFAULT)
    return words


HELP = ("-h", "--help")


def run(args: argparse.Namespace) -> int:
    """Run one, or list them."""
    import planner.bench

    names = [m.name for m in pkgutil.iter_modules(planner.bench.__path__) if m.name[0] != "_"]
    if args.name == "list":
        show(False, names, names)
        return 0
    if args.name not in names:
        raise ValueError(f"no benchmark {args.name!r}; choose one of {', '.join(names)}")
    return int(importlib.import_module(f"planner.bench.{args.name}").main(args.rest) or 0)
