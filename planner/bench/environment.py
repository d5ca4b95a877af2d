"""Versions and machine of a report."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version

LIBRARIES = ("planner", "numpy", "scipy", "numba", "ortools")


def describe_environment(before: str, libraries: Iterable[str] = LIBRARIES) -> str:
    """Return versions, machine and load average in one line."""
    kernel = ".".join(platform.release().split(".")[:2])
    packages = ", ".join(f"{name} {version(name)}" for name in libraries)
    return (
        f"Python {platform.python_version()}, {packages}; {platform.system()} {kernel} on "
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; load {before} before."
    )
