"""Safe intervals of SIPP: times at which a place may be entered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


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
