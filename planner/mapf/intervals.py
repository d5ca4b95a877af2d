"""Occupancy of resources in continuous time, and conflicts between agents.

Intervals are half-open: an agent may enter a resource at the time when another leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Occupancy(NamedTuple):
    """An agent occupies a resource in ``[begin, end)``, seconds."""

    agent: int
    resource: int
    begin: float
    end: float


class Constraint(NamedTuple):
    """CBS constraint: the agent must not occupy the resource in ``[begin, end)``, seconds."""

    resource: int
    begin: float
    end: float


def conflicts(
    occupancies: Iterable[Occupancy], slack: float = 0.0
) -> list[tuple[Occupancy, Occupancy]]:
    """Pairs of occupancies of a resource that overlap by more than ``slack``, by start of overlap.

    The occupancy that begins first is first in its pair; those of no length never conflict.
    """
    by_resource: dict[int, list[Occupancy]] = {}
    for occupancy in occupancies:
        if occupancy.end > occupancy.begin:
            by_resource.setdefault(occupancy.resource, []).append(occupancy)
    pairs = []
    for occupancies_of in by_resource.values():
        occupancies_of.sort(key=lambda s: (s.begin, s.end, s.agent))
        for k, first in enumerate(occupancies_of):
            for second in occupancies_of[k + 1 :]:
                if second.begin >= first.end - slack:
                    break
                if second.agent != first.agent:
                    pairs.append((first, second))
    pairs.sort(key=lambda pair: (pair[1].begin, pair[0].resource, pair[0].agent, pair[1].agent))
    return pairs
