"""Safe intervals of SIPP: times at which a resource may be entered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class EntryConstraint(NamedTuple):
    """Constraint on one agent: if it enters in ``[first, last)``, it must leave by ``before``.

    With ``before = -inf`` it must not enter then; with ``inf`` it must leave eventually.
    """

    resource: int
    first: float
    last: float
    before: float


class Window(NamedTuple):
    """An agent that enters in ``[first, last)`` must leave by ``before``, unless ``final``."""

    first: float
    last: float
    before: float
    final: bool


def windows(constraints: Iterable[EntryConstraint]) -> list[Window]:
    """Times at which a resource may be entered, in ascending order (the safe intervals of SIPP).

    All rules must be of the same resource.
    """
    given = list(constraints)
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
