"""``planner bench``: the benchmarks of `planner.bench`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from planner.cli.output import show
from planner.network.outputs import Output, add_force, require_outputs

DEFAULT = "suite"
ABOUT = "solver benchmarks on measured networks"
EXAMPLE = "planner bench --quick"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Which one, and what it takes."""
    sub.add_argument(
        "benchmark", metavar="name", nargs="?", help=f"which; default: {DEFAULT}; list: their names"
    )
    add_force(sub)
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
    if words[:1] == ["bench"] and (first is None or (first[:1] == "-" and first not in HELP)):
        words.insert(1, DEFAULT)
    return words


HELP = ("-h", "--help")


def run(args: argparse.Namespace) -> int:
    """Run one, or list them."""
    names, name = benchmarks(), args.benchmark
    if name == "list":
        show(args.json or "--json" in args.rest, names, names)
        return 0
    if name not in names:
        raise ValueError(f"no benchmark {name!r}; choose one of {', '.join(names)}")
    args.rest = _own_outputs(args)
    return int(importlib.import_module(f"planner.bench.{name}").main(args.rest) or 0)


def benchmarks() -> list[str]:
    """Names of all."""
    import planner.bench

    return [m.name for m in pkgutil.iter_modules(planner.bench.__path__) if m.name[0] != "_"]


OUTPUTS = ("--out", "--json", "--html", "--markdown")
"""Options of benchmarks that name a file to be written."""
MARKS = (
    "egenerate with `planner bench",
    "egenerate with `python -m planner.bench",
    "Made by `planner bench",
    "Commands: `python -m planner.bench",
    "`planner bench clock --repeats",
    '"planner.bench_suite"',
    '<meta name="generator" content="planner bench">',
)
"""What their files have."""


def _own_outputs(args: argparse.Namespace) -> list[str]:
    """Words for the benchmark, once it is known that it writes over its own files alone."""
    words = [word for word in args.rest if word != "--force"]
    args.force = args.force or "--force" in args.rest
    outputs, others = [], []
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = word.partition("=")
        if before in OUTPUTS or (option in OUTPUTS and value):
            path = Path(value or word)
            outputs.append(Output(option if value else before, path, [path.suffix], MARKS))
        else:
            others.append(word)
    if outputs:
        require_outputs(argparse.Namespace(force=args.force, rest=others), outputs)
    return words
