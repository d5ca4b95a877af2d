"""Continuous time: stays at places, conflicts, and the times that an agent must avoid.

Intervals are half-open: who comes when another leaves does not meet it.
"""

from __future__ import annotations

import math
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


class EntryRule(NamedTuple):
    """Rule for one agent: who comes to the place in ``[first, last)`` is gone before ``before``.

    With ``before = -inf`` nobody may come then, with ``inf`` one may come but not stay for good.
    """

    place: int
    first: float
    last: float
    before: float


class Window(NamedTuple):
    """Who comes in ``[first, last)`` must leave before ``before``, or may stay for good."""

    first: float
    last: float
    before: float
    final: bool


def windows(rules: Iterable[EntryRule]) -> list[Window]:
    """Times at which a place may be entered, in ascending order (the safe intervals of SIPP).

    All rules must be of the same place.
    """
    given = list(rules)
    cuts = sorted({-math.inf, *(r.first for r in given), *(r.last for r in given)})
    found: list[Window] = []
    for low, high in zip(cuts, [*cuts[1:], math.inf], strict=True):
        if low >= high:
            continue
        over = [r.before for r in given if r.first <= low and high <= r.last]
        before = min(over, default=math.inf)
        if before == -math.inf:
            continue
        window = Window(low, high, before, not over)
        if found and found[-1].last == low and found[-1][2:] == window[2:]:
            window = window._replace(first=found.pop().first)
        found.append(window)
    return found


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
