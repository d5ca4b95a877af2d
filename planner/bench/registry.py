"""Registry of all instances and methods of the open benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from planner.bench import assignment, averaging, paths, plans, rebalancing
from planner.bench.method import BenchMethod
from planner.bench.problem import BenchInstance

FAMILIES = (assignment, averaging, paths, plans, rebalancing)
INSTANCES: dict[str, BenchInstance] = {one.id: one for room in FAMILIES for one in room.INSTANCES}
METHODS: tuple[BenchMethod, ...] = tuple(one for room in FAMILIES for one in room.METHODS)


def instances_of(patterns: Iterable[str] = (), *, quick: bool = False) -> list[BenchInstance]:
    """Return the instances whose id matches one of the shell patterns."""
    every = [one for one in INSTANCES.values() if one.quick or not quick]
    asked = list(patterns)
    for pattern in asked:
        if not any(fnmatchcase(one.id, pattern) for one in every):
            where = "the quick instances" if quick else "the instances"
            raise ValueError(f"no instance id of {where} matches {pattern!r}; --list shows all")
    return [one for one in every if not asked or any(fnmatchcase(one.id, p) for p in asked)]
