"""Measures a pair, one direction after the other, and a device with all others at once."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

from planner.executor.transport.connections import ChannelKind, Connections
from planner.network.probe_log import ALL, LinkFinding
from planner.probe.flows import Flow, Rate, answer, receive, round_trips, send
from planner.probe.rounds import Pair

MESSAGES = (*(1,) * 21, *(1 << k for k in range(10, 25, 2) for _ in range(3)))
"""Bytes of timed messages; the smallest give the round-trip time."""
STREAMS = (ChannelKind.PIPELINE, ChannelKind.AVERAGING)
"""Kinds of connections that the executor uses between devices that are neighbours and average."""


@dataclass(frozen=True)
class ProbeTiming:
    """Durations of measurements.

    Attributes
    ----------
    seconds
        Measured time of each stream.
    warm_s
        Warm-up of each stream.
    messages_s
        Time for messages of all sizes.
    """

    seconds: float = 3.0
    warm_s: float = 2.0
    messages_s: float = 3.0

    def of_pair_s(self) -> float:
        """Approximate seconds for both directions of a pair."""
        return 2 * (len(STREAMS) * (self.warm_s + self.seconds) + self.messages_s)

    def of_device_s(self) -> float:
        """Approximate seconds for upload and download of a device."""
        return 2 * (self.warm_s + self.seconds)


@dataclass(frozen=True)
class Half:
    """What one rank of a pair has measured.

    Attributes
    ----------
    rates
        By number of flows, received rate.
    trips
        By bytes, round-trip seconds of its messages.
    """

    rates: dict[int, Rate]
    trips: dict[int, list[float]]

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(
            {"rates": {k: astuple(v) for k, v in self.rates.items()}, "trips": self.trips}
        )

    @classmethod
    def of_json(cls, text: str) -> Half:
        """Inverse of `to_json`."""
        data = json.loads(text)
        return cls(
            {int(k): Rate(*v) for k, v in data["rates"].items()},
            {int(k): v for k, v in data["trips"].items()},
        )


def measure_pair(rank: int, pair: Pair, opened: Connections, timing: ProbeTiming) -> Half:
    """Both directions of a pair, as one of its two ranks."""
    other = pair[1] if rank == pair[0] else pair[0]
    channel = opened[ChannelKind.PROBE, other]
    channels = tuple(opened[purpose, other] for purpose in STREAMS)
    half = Half({}, {})
    for source in pair:
        if rank == source:
            half.trips.update(round_trips(channel, MESSAGES, timing.messages_s))
        else:
            answer(channel)
        for count in range(1, len(channels) + 1):
            flows = {other: Flow(channel, channels[:count])}
            if rank == source:
                send(flows)
            else:
                half.rates[count] = receive(flows, timing.warm_s, timing.seconds)
    return half


def link_of(source: str, destination: str, sender: Half, receiver: Half) -> LinkFinding:
    """One direction of a pair from the measurements of source and destination."""
    small = sorted(sender.trips[MESSAGES[0]])
    rates = {count: (rate.mean, rate.low, rate.high) for count, rate in receiver.rates.items()}
    # the acknowledgement takes half a round trip; take the shortest of all sizes
    back = min(map(min, sender.trips.values())) / 2
    timed = {size: statistics.median(s) - back for size, s in sender.trips.items()}
    del timed[MESSAGES[0]]
    trips = (small[0], statistics.median(small), small[-1])
    return LinkFinding(source, destination, _timestamp(), rates, trips, timed)


def measure_device(
    rank: int, device: int, up: bool, world: int, opened: Connections, timing: ProbeTiming
) -> Rate | None:
    """One rank's part in measuring upload or download of a device with all others."""
    peers = [device] if rank != device else [r for r in range(world) if r != rank]
    flows = {
        other: Flow(opened[ChannelKind.PROBE, other], (opened[STREAMS[0], other],))
        for other in peers
    }
    if (rank == device) is up:
        send(flows)
        return None
    return receive(flows, timing.warm_s, timing.seconds)


def line_of(name: str, up: bool, rates: Iterable[Rate], peers: int) -> LinkFinding:
    """A device's total upload or download, from what each rank received."""
    mean, low, high = (sum(values) for values in zip(*map(astuple, rates), strict=True))
    ends = (name, ALL) if up else (ALL, name)
    return LinkFinding(*ends, _timestamp(), {1: (mean, low, high)}, peers=peers)


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
