"""One link."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """One direction of a link, SI units."""

    latency_s: float
    bandwidth_bytes_per_s: float
