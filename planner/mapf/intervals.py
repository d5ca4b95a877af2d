"""Occupancy of places in continuous time, and conflicts between agents.

Intervals are half-open: an agent may enter a place at the time when another leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Occupancy(NamedTuple):
    """An agent occupies a place in ``[begin, end)``, seconds."""

    agent: int
    place: int
    begin: float
    end: float


class Constraint(NamedTuple):
    """CBS constraint: the agent must not occupy the place in ``[begin, end)``, seconds."""

    place: int
    begin: float
    end: float


def conflicts(
    occupancies: Iterable[Occupancy], slack: float = 0.0
) -> list[tuple[Occupancy, Occupancy]]:
    """Pairs of occupancies of one place that overlap by more than ``slack``, by start of overlap.

    The occupancy that begins first is first in its pair; those of no length never conflict.
    """
    by_place: dict[int, list[Occupancy]] = {}
    for occupancy in occupancies:
        if occupancy.end > occupancy.begin:
            by_place.setdefault(occupancy.place, []).append(occupancy)
    pairs = []
    for at_place in by_place.values():
        at_place.sort(key=lambda s: (s.begin, s.end, s.agent))
        for k, first in enumerate(at_place):
            for second in at_place[k + 1 :]:
                if second.begin >= first.end - slack:
                    break
                if second.agent != first.agent:
                    pairs.append((first, second))
    pairs.sort(key=lambda pair: (pair[1].begin, pair[0].place, pair[0].agent, pair[1].agent))
    return pairs
