"""Reference implementations of compiled code."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[float, float]


def earliest(begin: float, length: float, blocks: Sequence[Span]) -> float:
    """Earliest start from ``begin`` on of ``length`` seconds outside all blocks, or infinity.

    Zero length fits anywhere.
    """
    at = begin
    for low, high in sorted(blocks):
        if length > 0 and at < high and low < at + length:
            at = high
    return at
