"""``planner bench``: the benchmarks of `planner.bench`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil

from planner.cli.output import show

NAME = "bench"
ABOUT = "solver benchmarks on measured networks"
EXAMPLE = "planner bench plans --help"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Which one, and what it takes."""
    sub.add_argument("name", nargs="?", help="which; default: list them")
    sub.add_argument("rest", nargs=argparse.REMAINDER, help="passed on to the benchmark")


def run(args: argparse.Namespace) -> int:
    """Run one, or list them."""
    import planner.bench

    names = [m.name for m in pkgutil.iter_modules(planner.bench.__path__) if m.name[0] != "_"]
    if args.name is None:
        show(args.json, names, names)
        return 0
    if args.name not in names:
        raise ValueError(f"no benchmark {args.name!r}; choose one of {', '.join(names)}")
    return int(importlib.import_module(f"planner.bench.{args.name}").main(args.rest) or 0)
