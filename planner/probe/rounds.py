"""Rounds of disjoint pairs, which are measured at the same time."""

from __future__ import annotations

from collections.abc import Iterable

Pair = tuple[int, int]


def disjoint_rounds(devices: int, wanted: Iterable[Pair]) -> list[list[Pair]]:
    """Rounds of pairs without a common device.

    All pairs of n devices take n - 1 rounds, or n if n is odd, by the circle method.
    """
    remaining = set(wanted)
    places = devices + devices % 2
    circle = list(range(places))
    rounds = []
    for _ in range(places - 1):
        half = [(circle[k], circle[places - 1 - k]) for k in range(places // 2)]
        pairs = sorted((min(pair), max(pair)) for pair in half)
        rounds.append([pair for pair in pairs if pair in remaining])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]
