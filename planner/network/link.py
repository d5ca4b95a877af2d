"""Latency and bandwidth of a link."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """One direction of a link, in SI units.

    Attributes
    ----------
    latency_s
        One-way latency.
    bandwidth_bytes_per_s
        Bandwidth of one message.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
