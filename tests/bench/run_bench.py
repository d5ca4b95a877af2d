"""Run ``planner bench`` from tests, with exceptions instead of printed errors."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cli import bench_command
from planner.cli.main import parser


def bench(words: Sequence[str]) -> int:
    """Run the command with these options; returns the exit code."""
    return bench_command.run(parser(["bench"]).parse_args(["bench", *words]))
