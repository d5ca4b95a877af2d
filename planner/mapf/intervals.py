"""Continuous time: stays at places, and conflicts between them.

Intervals are half-open: who comes when another leaves does not meet it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Stay(NamedTuple):
    """An agent is at a place in ``[begin, end)``, seconds."""

    agent: int
    place: int
    begin: float
    end: float


class Forbidden(NamedTuple):
    """Rule for one agent: not at the place at any time in ``[begin, end)``, seconds."""

    place: int
    begin: float
    end: float


def conflicts(stays: Iterable[Stay], slack: float = 0.0) -> list[tuple[Stay, Stay]]:
    """Overlaps, by more than ``slack``, of two agents at one place, by the time they begin.

    The stay that begins first comes first in its pair; stays of no length meet nobody.
    """
    by_place: dict[int, list[Stay]] = {}
    for stay in stays:
        if stay.end > stay.begin:
            by_place.setdefault(stay.place, []).append(stay)
    found = []
    for here in by_place.values():
        here.sort(key=lambda s: (s.begin, s.end, s.agent))
        for k, one in enumerate(here):
            for other in here[k + 1 :]:
                if other.begin >= one.end - slack:
                    break
                if other.agent != one.agent:
                    found.append((one, other))
    found.sort(key=lambda pair: (pair[1].begin, pair[0].place, pair[0].agent, pair[1].agent))
    return found
