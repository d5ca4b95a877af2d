"""Continuous-time conflict-based search: stays, conflicts, and times that agents must avoid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Forbidden(NamedTuple):
    """An agent may not be at a place at any time in ``[begin, end)``."""

    agent: int
    place: int
    begin: float
    end: float


class Stay(NamedTuple):
    """An agent is at a place in ``[begin, end)``."""

    agent: int
    place: int
    begin: float
    end: float


def earliest(begin: float, length: float, blocks: list[tuple[float, float]]) -> float:
    """First time from ``begin`` on with ``length`` clear of all blocks; infinite if there is none.

    A stay without length needs no room.
    """
    at = begin
    for low, high in sorted(blocks):
        if length > 0 and at < high and low < at + length:
            at = high
    return at


def first_conflict(stays: list[Stay], slack: float = 0.0) -> tuple[Stay, Stay] | None:
    """Earliest overlap, by more than ``slack``, of two agents at one place; stays of no length
    meet nobody."""
    last: dict[int, Stay] = {}
    lasting = [stay for stay in stays if stay.end > stay.begin]
    for stay in sorted(lasting, key=lambda s: (s.begin, s.end, s.agent)):
        before = last.get(stay.place)
        meets = before is not None and before.agent != stay.agent
        if before is not None and meets and stay.begin < before.end - slack:
            return before, stay
        if before is None or stay.end > before.end:
            last[stay.place] = stay
    return None


@dataclass(frozen=True)
class Constraints:
    """All constraints of a search node; adding some gives another value."""

    all: tuple[Forbidden, ...] = ()

    def plus(self, *more: Forbidden) -> Constraints:
        """These and more."""
        return Constraints((*self.all, *(f for f in more if f not in self.all)))

    def of(self, agent: int) -> dict[int, list[tuple[float, float]]]:
        """Blocks of one agent by place."""
        found: dict[int, list[tuple[float, float]]] = {}
        for f in self.all:
            if f.agent == agent:
                found.setdefault(f.place, []).append((f.begin, f.end))
        return found
