"""The open benchmark: frozen instances, every method, one checker, one clock (docs/benchmark.md)."""

from planner.bench.suite.command import main

__all__ = ["main"]
