"""Log of a probe of links, one JSON object per line, and the network that it gives.

The first line describes the measurement. Every other line is a finding on an ordered pair, or on a
device that sends to, or receives from, all others at once.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planner.network.error import NetworkError
from planner.network.network import Network
from planner.utils.input_files import parse_json, read_text

FORMAT = "planner.probe"
SCHEMA_VERSION = 1
ALL = "*"
"""Stands for all other devices at once."""
COLUMNS = (
    *("source", "destination", "latency_s", "bandwidth_bytes_per_s", "latency_high_s"),
    *("bandwidth_low_bytes_per_s", "bandwidth_high_bytes_per_s", "two_flows_bytes_per_s"),
    "measured_at",
)
MBIT = 1e6 / 8
MAX_BYTES = 1_000_000_000
"""Largest size of a log; a thousand devices have a million pairs."""


@dataclass(frozen=True)
class LinkFinding:
    """Measurement of one direction of a pair, or with ``*`` at one end.

    Attributes
    ----------
    at
        Date and time, UTC.
    rates
        By number of flows, bytes per second: mean, and slowest and fastest part of the interval.
    round_trips_s
        Round-trip times of the smallest message: minimum, median and maximum; None with ``*``.
    messages_s
        By bytes of a message, median seconds from sending to arrival.
    peers
        With ``*``, the number of peers.
    """

    source: str
    destination: str
    at: str
    rates: Mapping[int, tuple[float, float, float]]
    round_trips_s: tuple[float, float, float] | None = None
    messages_s: Mapping[int, float] = field(default_factory=dict)
    peers: int = 0

    @property
    def ends(self) -> tuple[str, str]:
        """Source and destination."""
        return self.source, self.destination

    def to_line(self) -> str:
        """As a line of the log."""
        return json.dumps(
            {
                "source": self.source,
                "destination": self.destination,
                "at": self.at,
                "rates": {str(k): list(v) for k, v in self.rates.items()},
                "round_trips_s": None if self.round_trips_s is None else list(self.round_trips_s),
                "messages_s": {str(k): v for k, v in self.messages_s.items()},
                "peers": self.peers,
            },
            allow_nan=False,
        )

    @classmethod
    def of_line(cls, text: str) -> LinkFinding:
        """Inverse of `to_line`."""
        try:
            data = parse_json(text, "the line")
            trips = data["round_trips_s"]
            finding = cls(
                str(data["source"]),
                str(data["destination"]),
                str(data["at"]),
                {int(k): _three(v) for k, v in data["rates"].items()},
                None if trips is None else _three(trips),
                {int(k): float(v) for k, v in data["messages_s"].items()},
                int(data["peers"]),
            )
        except (*(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),):
            raise NetworkError(f"not a finding of a probe: {text[:60]!r}; probe again") from None
        values = [x for v in finding.rates.values() for x in v] + list(finding.round_trips_s or ())
        values += finding.messages_s.values()
        if not all(0 < x < math.inf for x in values) or 1 not in finding.rates:
            raise NetworkError(
                f"{finding.source} to {finding.destination}: rates and times must be above 0 and "
                "those of one flow among them; probe again"
            )
        return finding


def _three(values: Any) -> tuple[float, float, float]:
    lowest, middle, highest = (float(x) for x in values)
    return lowest, middle, highest


@dataclass(frozen=True)
class ProbeLog:
    """All findings of a probe so far.

    Attributes
    ----------
    about
        How it was measured: seconds of a stream, versions, time of start.
    findings
        By source and destination; the last one counts.
    """

    about: Mapping[str, Any]
    findings: Mapping[tuple[str, str], LinkFinding]

    @classmethod
    def load(cls, path: str | Path) -> ProbeLog:
        """Read a log; an incomplete last line is ignored."""
        lines = read_text(path, error=NetworkError, most_bytes=MAX_BYTES).split("\n")
        try:
            about = parse_json(lines[0], path)
        except ValueError:
            about = None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise NetworkError(
                f"{path}: is not the log of a probe; its first line must be {FORMAT!r}"
            )
        if about.get("schema_version") != SCHEMA_VERSION:
            raise NetworkError(
                f"{path}: schema_version is {about.get('schema_version')!r}; this release reads "
                f"{SCHEMA_VERSION}"
            )
        findings: dict[tuple[str, str], LinkFinding] = {}
        for line in lines[1:-1]:  # after the last end of a line nothing is whole
            try:
                finding = LinkFinding.of_line(line)
            except NetworkError as error:
                raise NetworkError(f"{path}: {error}") from None
            findings[finding.ends] = finding
        return cls(about, findings)

    @property
    def names(self) -> tuple[str, ...]:
        """Devices with findings, in the order of the probe."""
        measured = {name for pair in self.findings for name in pair}
        declared = self.about.get("devices")
        first = (
            [name for name in declared if isinstance(name, str)]
            if isinstance(declared, list)
            else []
        )
        later = [name for pair in self.findings for name in pair if name != ALL]
        return tuple(dict.fromkeys([*(name for name in first if name in measured), *later]))

    def network(self) -> Network:
        """The network of half the median round-trip times and rates of one flow; NaN if missing."""
        names = self.names
        place = {name: k for k, name in enumerate(names)}
        arrays = np.full((2, len(names), len(names)), np.nan)
        for (source, destination), finding in self.findings.items():
            if ALL not in finding.ends and finding.round_trips_s is not None:
                arrays[0, place[source], place[destination]] = finding.round_trips_s[1] / 2
                arrays[1, place[source], place[destination]] = finding.rates[1][0]
        if len(names) < 2:
            raise NetworkError(
                "the log has no pair of devices; run the probe until it has measured one"
            )
        return Network(arrays[0], arrays[1], list(names))

    def network_csv(self) -> str:
        """The network file, with additional columns for spread and dates."""
        return _csv(COLUMNS, (_link_row(f) for f in self.findings.values() if ALL not in f.ends))

    def devices_csv(self) -> str:
        """The devices file, with total upload and download of each device."""
        rows = []
        for name in self.names:
            up, down = (self.findings.get(ends) for ends in ((name, ALL), (ALL, name)))
            rates = (
                "" if direction is None else repr(direction.rates[1][0] / MBIT)
                for direction in (up, down)
            )
            rows.append((name, *rates))
        return _csv(("name", "upload_mbps", "download_mbps"), rows)


def _link_row(finding: LinkFinding) -> tuple[str, ...]:
    trips, (mean, low, high) = finding.round_trips_s, finding.rates[1]
    two = finding.rates.get(2)
    return (
        *finding.ends,
        *("" if trips is None else repr(trips[k] / 2) for k in (1,)),
        repr(mean),
        "" if trips is None else repr(trips[2] / 2),
        *(repr(low), repr(high), "" if two is None else repr(two[0]), finding.at),
    )


def _csv(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()
