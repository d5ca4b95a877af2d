"""``python -m benchmarks.swarm``: SWARM's tables, simulated and executed."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.command_line import report_path, run
from benchmarks.swarm.executed import flow_executed, shares_executed, table_2_executed
from benchmarks.swarm.law import table_1
from benchmarks.swarm.moved import moves_executed
from benchmarks.swarm.moves import figure_7, scale, table_5
from benchmarks.swarm.wiring import flow, shares, table_2
from planner.emulate.namespaces import require_linux_root
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text
from planner.utils.processors import cores

PARTS = ("1", "2", "5", "7", "shares", "flow", "scale")
"""Tables 1, 2 and 5, Figure 7, and what the paper has no table of."""
EXECUTED = ("2x", "sharesx", "movesx", "flowx")
"""Over an emulated network, as root; only where asked for."""


def main(argv: Sequence[str]) -> int:
    """Play what was asked for and write the report; returns the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.swarm", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/swarm-DATE.md")
    parser.add_argument("--tables", nargs="+", choices=(*PARTS, *EXECUTED), default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--trace", type=Path, help="a CSV of time_s,change for Table 5")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    runs = bool(set(EXECUTED) & set(args.tables))
    if runs:
        require_linux_root()
    kind = "swarm-executed" if set(args.tables) <= set(EXECUTED) else "swarm"
    out = args.out or report_path(kind)
    picture = out.with_suffix(".png")
    parts: dict[str, Callable[[], list[str]]] = {
        "1": table_1,
        "2": lambda: table_2(say),
        "5": lambda: table_5(args.seeds, args.trace, say),
        "7": lambda: figure_7(args.seeds, picture, say),
        "shares": lambda: shares(args.seeds, say),
        "flow": lambda: flow(args.seeds, say),
        "scale": lambda: scale(args.seeds[0], say),
        "2x": lambda: table_2_executed(say),
        "sharesx": lambda: shares_executed(say),
        "movesx": lambda: moves_executed(say),
        "flowx": lambda: flow_executed(say),
    }
    load_before = f"{os.getloadavg()[0]:.1f}"
    lines = [line for name in (*PARTS, *EXECUTED) if name in args.tables for line in parts[name]()]
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "numba"))
    seeds = " ".join(str(seed) for seed in args.seeds)
    command = f"python -m benchmarks.swarm --tables {' '.join(args.tables)} --seeds {seeds}"
    head = [
        f"# SWARM's tables, simulated{' and executed' * runs}, {today}",
        "",
        f"Python {platform.python_version()}, {packages}, planner {version('planner')}; "
        f"{platform.system()} on {platform.machine()}, {cores()} cores; load "
        f"{load_before} before.",
        "",
        f"Regenerate with `{command}`. The paper: M. Ryabinin et al., “SWARM Parallelism” (2023). "
        "No figure of ours is of GPUs or of a real network; its figures are. Only Table 1's law "
        "has constants that were fitted. What the rows mean: [swarm.md](swarm.md).",
        "",
    ]
    write_text(out, "\n".join([*head, *lines]).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    run(main)
