"""Measurements found in one file, which other files may complete."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from planner.network.error import NetworkError

Pair = tuple[str, str]
"""Source and destination."""


@dataclass
class Measurements:
    """Latencies and bandwidths by pair, in SI units.

    Attributes
    ----------
    latency_s, bandwidth_bytes_per_s
        By ordered pair; pairs that were not measured are absent.
    mirrored_latencies, mirrored_bandwidths
        Number of values copied from the opposite direction.
    """

    latency_s: dict[Pair, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: dict[Pair, float] = field(default_factory=dict)
    mirrored_latencies: int = 0
    mirrored_bandwidths: int = 0

    def set_latency(self, source: str, destination: str, seconds: float) -> None:
        """Set the latency of a pair, which must not be set yet."""
        _set(self.latency_s, (source, destination), seconds, "latency")

    def set_bandwidth(self, source: str, destination: str, bytes_per_s: float) -> None:
        """Set the bandwidth of a pair, which must not be set yet."""
        pair = (source, destination)
        if bytes_per_s == 0:
            raise NetworkError(
                f"{source!r} to {destination!r}: a bandwidth of 0 was measured; measure it again"
            )
        _set(self.bandwidth_bytes_per_s, pair, bytes_per_s, "bandwidth")

    def add(self, other: Measurements) -> None:
        """Add the measurements of another file."""
        self.mirrored_latencies += other.mirrored_latencies
        self.mirrored_bandwidths += other.mirrored_bandwidths
        for (a, b), seconds in other.latency_s.items():
            self.set_latency(a, b, seconds)
        for (a, b), rate in other.bandwidth_bytes_per_s.items():
            self.set_bandwidth(a, b, rate)

    def mirror_half(self, names: Sequence[str]) -> None:
        """Complete a matrix of which only one triangle has values; some of these may be missing.

        A row or a column alone is no triangle: it may be what one device measured.
        """
        upper = set(combinations(names, 2))
        lower = {(b, a) for a, b in upper}
        for values in (self.latency_s, self.bandwidth_bytes_per_s):
            found = set(values)
            sources, destinations = ({pair[k] for pair in found} for k in range(2))
            is_line = min(len(sources), len(destinations)) < 2
            if not is_line and (found <= upper or found <= lower):
                values.update({(b, a): value for (a, b), value in values.items()})
                if values is self.latency_s:
                    self.mirrored_latencies = len(found)
                else:
                    self.mirrored_bandwidths = len(found)

    def renamed(self, names: Mapping[str, str]) -> Measurements:
        """The same with some devices renamed."""
        result = Measurements(
            mirrored_latencies=self.mirrored_latencies,
            mirrored_bandwidths=self.mirrored_bandwidths,
        )
        for (a, b), seconds in self.latency_s.items():
            result.set_latency(names.get(a, a), names.get(b, b), seconds)
        for (a, b), rate in self.bandwidth_bytes_per_s.items():
            result.set_bandwidth(names.get(a, a), names.get(b, b), rate)
        return result


def _set(values: dict[Pair, float], pair: Pair, value: float, label: str) -> None:
    source, destination = pair
    if not source or not destination:
        raise NetworkError("a device has an empty name; name both ends of every link")
    if source == destination:
        raise NetworkError(
            f"{label} of {source!r} to itself: both ends have one name; give their names with a "
            "names file, or move the row to the file that is made, if it is the link within a place"
        )
    if not (math.isfinite(value) and value >= 0):
        raise NetworkError(
            f"{label} of {source!r} to {destination!r} is {value:g}; measure it again"
        )
    if pair in values:
        raise NetworkError(
            f"{label} of {source!r} to {destination!r} is given twice; keep one of them"
        )
    values[pair] = value
