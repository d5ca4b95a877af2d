"""Registry of all instances and methods of the open benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from planner.bench import assignment, averaging, paths, plans, rebalancing
from planner.bench.method import BenchMethod
from planner.bench.problem import BenchInstance

FAMILIES = (assignment, averaging, paths, plans, rebalancing)
INSTANCES: dict[str, BenchInstance] = {
    instance.id: instance for module in FAMILIES for instance in module.INSTANCES
}
METHODS: tuple[BenchMethod, ...] = tuple(method for module in FAMILIES for method in module.METHODS)


def instances_of(patterns: Iterable[str] = (), *, quick: bool = False) -> list[BenchInstance]:
    """Return the instances whose id matches one of the shell patterns."""
    all_instances = [instance for instance in INSTANCES.values() if instance.quick or not quick]
    selected = list(patterns)
    for pattern in selected:
        if not any(fnmatchcase(instance.id, pattern) for instance in all_instances):
            where = "the quick instances" if quick else "the instances"
            raise ValueError(f"no instance id of {where} matches {pattern!r}; --list shows all")
    return [
        instance
        for instance in all_instances
        if not selected or any(fnmatchcase(instance.id, p) for p in selected)
    ]
