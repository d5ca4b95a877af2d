"""What a stage must do between the ends of two steps, for any devices: FLOPs, bytes and seconds.

With m devices, T the end of a step, D the distance to the next end, c the smaller of a device's
upload and download, a stage whose vector has v bytes

- averages: a member with share s sends, and receives, (1 - s) v + s (m - 1) v, so a round of all
  members takes at least 2 (m - 1) v over the sum of c, and v over each c, plus latencies. Its
  reducers exchange messages with all others, at least with the (m - 1)-nearest. If aggregators may
  reduce parts, members send m v in total at least, and an aggregator reaches its m-nearest. In
  hierarchical averaging the exchange ends at the same time for the whole stage, and counts as the
  end of the round: until then members send m v in total at least, v each, some pair is used in both
  directions, and all devices begin their next step later. In two-frequency averaging, too; from
  the last operation to there R regions send 2 (R - 1) v, at least 2 v; in each of H steps the
  devices of a region send 2 (m - 1) v in addition, so more regions send less in total. Tied
  parameters on two stages are averaged by these afterwards in every step; this time is not counted;
- computes before that: the FLOPs certain to follow T, over the FLOP/s of all devices, within D;
  some device has its share of whole microbatches. The last operation is followed by averaging, or
  by the way of its microbatch back to the first stage;
- receives before that, over the downloads of all devices;
- sends over their uploads, at any time: its round takes (bytes + queued bytes) / capacity or more.

A stage before the one whose round ends the step may have run F before T, for as many microbatches
as its devices hold between F and B; what follows T are the other F, and all B.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.planning.hierarchical_averaging import has_hierarchy
from planner.workload.costs import StageCosts, stage_costs
from planner.workload.workload import Workload

Floats = NDArray[np.float64]

MEMORY_SLACK = 1e-6
"""Relative: a plan may exceed the memory of its devices by rounding."""


@dataclass(frozen=True)
class DevicePool:
    """Devices without identity or location.

    Attributes
    ----------
    flops, memory_bytes, up, down
        ``float[N]``; uploads and downloads in bytes per second.
    rtt_s
        ``float[N]``: entry m - 1 is a lower bound on the longest round-trip time in a round of m.
    hop_s, hop_bytes_per_s
        The smallest latency and the highest bandwidth of a pair.
    has_aggregators
        Whether other devices may reduce gradients, too.
    hierarchical
        Whether a stage may average hierarchically.
    regions
        Number of regions in two-frequency averaging; otherwise 0.
    """

    flops: Floats
    memory_bytes: Floats
    up: Floats
    down: Floats
    rtt_s: Floats
    hop_s: float
    hop_bytes_per_s: float
    has_aggregators: bool = False
    hierarchical: bool = False
    regions: int = 0

    @classmethod
    def of(
        cls, cluster: Cluster, aggregators_in: Cluster | None = None, *, two_frequency: bool = False
    ) -> DevicePool:
        """The devices of a cluster."""
        regions = len(set(cluster.network.regions)) if two_frequency else 0
        n, has_aggregators = len(cluster), aggregators_in is not None
        hierarchical = has_hierarchy(cluster) and not two_frequency
        up, down = device_limits(cluster)
        if n == 1:
            columns = (cluster.flops, cluster.memory_bytes, up, down)
            return cls(*columns, np.zeros(1), 0.0, np.inf, has_aggregators, hierarchical, regions)
        off = ~np.eye(n, dtype=bool)
        latency = cluster.network.latency_s
        rtt_s = np.sort(np.where(off, latency + latency.T, np.inf), axis=1)[:, :-1]
        nearest = rtt_s.min(axis=0)
        if aggregators_in is not None:
            nearest = np.minimum(nearest, _aggregator_rtt_s(cluster, aggregators_in))
        if hierarchical or two_frequency:
            nearest = np.full(n - 1, nearest.min())
        rate = cluster.limited_network().bandwidth_bytes_per_s
        return cls(
            cluster.flops,
            cluster.memory_bytes,
            up,
            down,
            np.concatenate([[0.0], nearest]),
            float(latency[off].min()),
            float(rate[off].max()),
            has_aggregators,
            hierarchical,
            regions,
        )

    @property
    def alike(self) -> bool:
        """Whether all devices are equal."""
        columns = (self.flops, self.memory_bytes, self.up, self.down)
        return all(bool((column == column[0]).all()) for column in columns)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form for a witness; equal devices and latencies are listed once."""
        options = (
            ("helped", self.has_aggregators),
            ("levels", self.hierarchical),
            ("regions", self.regions),
        )
        table = np.stack([self.flops, self.memory_bytes, self.up, self.down], axis=1)
        rows, counts = np.unique(table, axis=0, return_counts=True)
        names = ("flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s")
        rises = np.flatnonzero(np.diff(self.rtt_s, prepend=-1.0) > 0)
        return {
            "devices": [
                {"count": count} | dict(zip(names, map(_finite, row), strict=True))
                for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
            ],
            "return_s": [[int(k) + 1, float(self.rtt_s[k])] for k in rises],
            "hop_s": self.hop_s,
            "hop_bytes_per_s": _finite(self.hop_bytes_per_s),
        } | {name: value for name, value in options if value}


def _aggregator_rtt_s(cluster: Cluster, aggregators_in: Cluster) -> Floats:
    """``float[N - 1]``: round-trip time from the best aggregator to its m-nearest devices."""
    network = aggregators_in.network
    here = np.array([network.index_of(name) for name in cluster.network.ids])
    sums = np.asarray(aggregators_in.devices.can_aggregate).copy()
    sums[here] = False
    both = (network.latency_s + network.latency_s.T)[np.ix_(sums, here)]
    return np.asarray(np.sort(both, axis=1)[:, 1:].min(axis=0))


def _finite(value: float) -> float | None:
    """None for infinity, which JSON lacks."""
    return value if np.isfinite(value) else None


class Requirement(NamedTuple):
    """Lower bounds for parts of the layers in one role: rows are parts, columns 1 to N devices.

    Attributes
    ----------
    flops, late_flops
        FLOPs of all microbatches after T, and of those that begin ``begin_s`` after T or later.
    begin_s
        Start of the latter, after T.
    tail_s
        From the last of these operations to the end of the step.
    least_s
        From T to the end of the step, whatever the FLOP/s and uploads.
    sent
        Bytes sent by all devices.
    quiet_s
        Part of the distance between ends of steps in which none of them is sent.
    fits
        Whether memory allows this number of devices.
    """

    flops: Floats
    late_flops: Floats
    begin_s: Floats
    tail_s: Floats
    least_s: Floats
    sent: Floats
    quiet_s: Floats
    fits: NDArray[np.bool_]


class StageRequirements:
    """Requirements of all parts of a workload's layers as stages of a device pool.

    Parameters
    ----------
    pool, workload
        Devices and model.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    recomputes
        Whether stages may recompute their activations.
    every
        H: the number of steps covered, of which the last averages between regions.

    Attributes
    ----------
    pool, n, layers
        The devices, their number, and the number of layers.
    choices
        Whether a stage recomputes: the possible values.
    starts, stops
        ``int[P]``: layers of every part.
    m
        ``float[N]``: 1 to N.
    most_flops, least_flops, most_up, least_up
        ``float[N]``: sums over the m fastest and the m slowest devices.
    scale_s
        Magnitude of a step: all FLOPs on all devices at once.
    """

    def __init__(
        self,
        pool: DevicePool,
        workload: Workload,
        wire_ratio: float,
        recomputes: bool,
        every: int = 1,
    ) -> None:
        self.pool, self.n, self.layers = pool, len(pool.flops), len(workload.layers)
        self.choices = (False, True) if recomputes else (False,)
        self.count = float(workload.batch_samples // workload.microbatch_samples)
        self.m = np.arange(1.0, self.n + 1)
        self.microbatches_per_device = np.ceil(self.count / self.m)
        self.least_flops, self.most_flops = _sorted_sums(pool.flops)
        self.least_up, self.most_up = _sorted_sums(pool.up)
        self.most_down = _sorted_sums(pool.down)[1]
        self.fastest = float(pool.flops.max())
        spans = [(a, b) for b in range(1, self.layers + 1) for a in range(b)]
        self.starts, self.stops = np.array(spans).T
        self._set_stage_costs(workload, wire_ratio, spans, apart=every == 1 and pool.regions == 0)
        self.scale_s = self.count * 3 * workload.forward_flops * workload.microbatch_samples
        self.scale_s = self.scale_s / float(pool.flops.sum()) or 1.0
        self._set_travel_times([stage_costs(workload, k, k + 1) for k in range(self.layers)])
        self._average(every / wire_ratio)

    def _set_stage_costs(
        self, workload: Workload, wire_ratio: float, spans: list[tuple[int, int]], *, apart: bool
    ) -> None:
        """``apart``: tied parameters on two stages are averaged after the rest."""
        plain, again = (
            [
                stage_costs(workload, a, b, with_head=b == self.layers, recompute=twice)
                for a, b in spans
            ]
            for twice in (False, True)
        )
        chosen = (plain, again)[: len(self.choices)]
        self.forward = _column(c.forward_flops for c in plain)
        self.backward = [_column(c.backward_flops for c in costs) for costs in chosen]
        self.head = _column(c.head_flops for c in plain)
        given = {b: c.output_bytes for (_, b), c in zip(spans, plain, strict=True)}
        given[self.layers] = given[0] = 0.0
        self.into = _column(given[a] for a, _ in spans)
        self.out = _column(given[b] for _, b in spans)
        matrix = apart * workload.tied_parameters * workload.gradient_bytes_per_parameter
        self.vector = _column(
            (c.gradient_bytes - matrix * ((a == 0) != (b == self.layers))) * wire_ratio
            for (a, b), c in zip(spans, plain, strict=True)
        )
        have = self.pool.memory_bytes * (1 + MEMORY_SLACK)
        self.room = [self._room(costs, have) for costs in chosen]
        hold = (have >= _column(c.state_bytes for c in plain)).sum(axis=1, keepdims=True)
        one = np.max([room[:, :1] for room in self.room], axis=0) >= 1
        self.fits = (self.m <= hold) & one

    def _room(self, costs: list[StageCosts], have: Floats) -> Floats:
        """Microbatches between F and B, per part and device, largest first."""
        sizes, index = np.unique(-have, return_inverse=True)
        rooms = [[min(c.room(-size), self.count) for size in sizes.tolist()] for c in costs]
        return np.array(rooms)[:, np.sort(index)]

    def _set_travel_times(self, single: list[StageCosts]) -> None:
        """Seconds of one microbatch before and after every part, on the fastest device."""
        flops = np.array([0.0, *(c.forward_flops for c in single)])
        until = np.cumsum(flops)
        self.hop_in_s, self.hop_out_s = (
            np.where(size > 0, self.pool.hop_s + size / self.pool.hop_bytes_per_s, 0.0)
            for size in (self.into, self.out)
        )
        self.input_latency_s = np.where(self.into > 0, self.pool.hop_s, 0.0)
        self.way_in_s = until[self.starts, None] / self.fastest
        self.first_layer_s = flops[self.starts, None] / self.fastest
        # a gradient comes from the last layers, through F, H and B there
        turn = (flops[-1] + self.head.max()) / self.fastest
        self.turnaround_s = turn + 2 * (until[-1] - until[self.stops, None]) / self.fastest
        self.way_back_s = 2 * until[self.starts, None] / self.fastest

    def _average(self, within: float) -> None:
        """``within``: bytes averaged within regions, relative to those on the wire."""
        pool = self.pool
        apart = pool.hierarchical or pool.regions > 0
        line = np.sort(pool.up if apart else np.minimum(pool.up, pool.down))[::-1]
        vectors_sent = 2 * (self.m - 1)
        if pool.has_aggregators or pool.hierarchical:
            vectors_sent = np.where(self.m > 1, self.m, 0.0)
        if pool.regions:
            used = np.minimum(self.m, pool.regions)
            vectors_sent = 2 * (used - 1) + 2 * within * (self.m - used)
        self.averaged = vectors_sent * self.vector
        round_s = np.maximum(self.averaged / line.cumsum(), self.vector / line)
        if pool.regions:
            round_s = 2 * self.vector / line.cumsum()
        self.round_s = np.where(self.m > 1, round_s + self.pool.rtt_s, 0.0)
        # a message home arrives, and is worked on in all stages before; a round that sends nothing
        # waits for no message
        sends = (self.m > 1) & (self.vector > 0)
        self.unsent_s = np.where(sends, self.pool.rtt_s, self.input_latency_s + self.way_back_s)
        self.tail_s = np.maximum(self.round_s, self.hop_in_s + self.way_back_s)

    def tail(self) -> Requirement:
        """Of stages that do everything after T, where T is the start of the first stage's step."""
        return self._full_step(self.way_in_s, arrives=True)

    def downstream(self) -> Requirement:
        """Of stages that do everything after T, if an earlier stage, not the first, begins at T."""
        return self._full_step(self.first_layer_s, arrives=True)

    def boundary(self) -> Requirement:
        """Of the stage that begins at T, if it is not the first; its messages may have arrived.

        A stage of one device does not average, so an earlier stage ends no earlier.
        """
        need = self._full_step(np.zeros_like(self.into), arrives=False)
        return need._replace(fits=need.fits & (self.m > 1))

    def _full_step(self, way_s: Floats, *, arrives: bool) -> Requirement:
        flops = self.forward + self.backward[0] + self.head
        received, begin, listens = self.out, way_s, way_s
        if arrives:
            received = received + self.into
            begin, listens = way_s + self.hop_in_s, way_s + self.input_latency_s
        least = np.maximum(
            begin + self.microbatches_per_device * flops / self.fastest,
            listens + self.count * received / self.most_down,
        )
        return Requirement(
            self.count * flops,
            self.count * flops,
            begin,
            self.tail_s,
            least + self.tail_s,
            self.count * (self.into + self.out) + self.averaged,
            begin + self.forward / self.fastest + self.unsent_s,
            self.fits,
        )

    def upstream(self, again: bool) -> Requirement:
        """Of stages before the one that begins at T."""
        room, back = self.room[again], self.backward[again]
        forward = np.maximum(self.count - room.cumsum(axis=1), 0.0)
        begin = self.turnaround_s + self.hop_out_s
        mine = np.maximum(self.microbatches_per_device - room[:, :1], 0.0)
        least = np.max(
            np.broadcast_arrays(
                begin + self.microbatches_per_device * back / self.fastest,
                self.turnaround_s + self.count * self.out / self.most_down,
                (self.microbatches_per_device * back + mine * self.forward) / self.fastest,
            ),
            axis=0,
        )
        return Requirement(
            self.count * back + forward * self.forward,
            self.count * back,
            begin,
            self.tail_s,
            least + self.tail_s,
            self.count * self.into + forward * self.out + self.averaged,
            np.where(forward > 0, 0.0, begin + back / self.fastest) + self.unsent_s,
            self.fits,
        )

    def steady_state(self) -> Requirement:
        """Of any stage from the end of its round to the end of the next one."""
        flops = self.forward + self.backward[0] + self.head
        sent = self.count * (self.into + self.out) + self.averaged
        before_round = np.maximum(
            self.microbatches_per_device * flops / self.fastest,
            self.count * self.out / self.most_down,
        )
        nothing = np.zeros_like(self.into)
        return Requirement(
            self.count * flops,
            self.count * flops,
            nothing,
            self.round_s,
            np.maximum(before_round + self.round_s, sent / self.most_down),
            sent,
            nothing,
            self.fits,
        )


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)[:, None]


def _sorted_sums(values: Floats) -> tuple[Floats, Floats]:
    """Sums over the m smallest, and over the m largest values, for all m."""
    ascending = np.sort(values)
    return ascending.cumsum(), ascending[::-1].cumsum()
