"""Reading versions of compiled code, to compare it with."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[float, float]


def earliest(begin: float, length: float, blocks: Sequence[Span]) -> float:
    """First time from ``begin`` on with ``length`` clear of all blocks; infinite if there is none.

    A stay without length needs no room.
    """
    at = begin
    for low, high in sorted(blocks):
        if length > 0 and at < high and low < at + length:
            at = high
    return at
