"""Versions and machine of a report."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

from planner.utils.processors import cores

LIBRARIES = ("planner", "numpy", "scipy", "numba", "ortools")


def describe_environment(load_before: str, libraries: Iterable[str] = LIBRARIES) -> str:
    """Return versions, machine and load average in one line."""
    kernel = ".".join(platform.release().split(".")[:2])
    packages = ", ".join(f"{name} {version(name)}" for name in libraries)
    return (
        f"Python {platform.python_version()}, {packages}; {platform.system()} {kernel} on "
        f"{platform.machine()}, {cores()} cores; load {load_before} before."
    )
