"""The open benchmark: frozen instances, all methods, one checker (docs/benchmark.md)."""

from planner.bench.suite.command import main

__all__ = ["main"]
