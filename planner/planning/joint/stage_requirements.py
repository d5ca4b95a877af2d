"""What a stage must do between the ends of two steps, for any devices: FLOPs, bytes and seconds.

Let T be the end of a step and D the distance to the next end. A part of the layers that is a stage
of m devices needs D to satisfy inequalities (1) to (7). All of them use the m best devices of the
pool, so they hold for any devices.

=============  ====================================================================================
n              microbatches of a step; some device has at least ceil(n / m) of them
f, f_m         FLOP/s of the fastest device, and of the m fastest together
u_m, d_m       bytes per second: the m highest uploads together, and the m highest downloads
c_1 >= c_2 ..  bytes per second: smaller of a device's upload and download; hierarchical and
               two-frequency averaging: its upload
L_m            seconds: lower bound on the longest round-trip time in a round of m devices
F, B, H        FLOPs of one microbatch: forward pass, backward pass, head and loss
a, z           bytes of one microbatch's input and output
v, w           bytes of the gradient vector, encoded and unencoded
=============  ====================================================================================

Averaging of m > 1 devices sends at least s_m bytes and takes at least r_m seconds::

    s_m = 2 (m - 1) v                           one round of all members
    s_m = m v                                   aggregators may reduce, or hierarchical averaging
    s_m = 2 (k - 1) v + 2 (m - k) w             two frequencies, with k = min(m, number of regions)
    r_m = max(s_m / (c_1 + ... + c_m), v / c_m) + L_m
    r_m = 2 v / (c_1 + ... + c_m) + L_m         two frequencies

In the first case a member with share x sends, and receives, (1 - x) v + x (m - 1) v, and a reducer
exchanges messages with at least its (m - 1)-nearest devices. With aggregators, members send m v in
total if they reduce nothing, and an aggregator reaches its m-nearest devices. In hierarchical and
two-frequency averaging, the exchange between sites or regions ends at the same time for the whole
stage and counts as the end of the round: until then every member has sent v, and some pair of
devices was used in both directions. With two frequencies, n and w count H steps, of which the last
one exchanges 2 (k - 1) v >= 2 v between regions. The averaging of tied parameters on two stages,
which follows, is not counted.

With optimizer state in shards, gradients are reduced in one round and parameters spread in another,
in q of the bytes: a member with share x <= 1/2 first sends (1 - x) v and receives (m - 1) x v, then
sends q (m - 1) x v and receives q (1 - x) v. On its slower line that is at least q of what it sends
in a single round, and v counts q. Where no download is slower than the upload, c is the upload, and
v counts (1 + q) / 2: all members send (1 + q) (m - 1) v, and each 1 - x + q (m - 1) x, which is at
least (1 + q) / 2, of v. With aggregators v counts q: members may receive no more than q m v.

Each role of a stage (below) has its own FLOPs g that follow T, received bytes i, sent bytes o, and
seconds: b from T to its first operation, b' from T to the first message that it receives, e from
its last operation to the end of the step, q during which none of the bytes o is sent::

    (1)  b + ceil(n / m) g / (n f) + e <= D     some device computes its share of microbatches
    (2)  b' + i / d_m + e <= D                  all messages are received
    (3)  g / f_m <= D - e                       all FLOPs, also those that may precede b
    (4)  g' / f_m <= D - e - b                  the FLOPs g' that cannot begin before b
    (5)  o / u_m <= D - q                       all bytes are sent
    (6)  each of the m devices holds the parameters' state; one at least has room for a microbatch;
         m is at least the number of optimizer shards
    (7)  n t / h + e <= D                       memory holds the microbatches in flight

The last operation is followed by averaging, or by its microbatch's backward passes in the stages
before this one, so e = max(r_m, these passes).

==============  ===============================  ================  ===========  ===============
role            stage                            g                 i            o
==============  ===============================  ================  ===========  ===============
whole_pipeline  any, if stage 0 begins at T      n (F + B + H)     n (a + z)    n (a + z) + s_m
boundary        begins at T, not stage 0, m > 1  n (F + B + H)     n z          n (a + z) + s_m
downstream      after the boundary stage         n (F + B + H)     n (a + z)    n (a + z) + s_m
upstream        before the boundary stage        n (B + H)         n z          n a + (n - h) z
                                                 + (n - h) F                     + s_m
steady_state    any, over many steps             n (F + B + H)     n z          n (a + z) + s_m
==============  ===============================  ================  ===========  ===============

H is that of the last stage, or of the first one, where it follows F of the last stage and so T,
whichever stage begins at T. Messages from the last stage to a head on the first, and back, are not
counted.

The devices of a stage hold h microbatches between F and B, the more of its layers it recomputes; B
includes F of these. An upstream stage may have run F before T for as many. There g' is n B, and (1)
holds in two forms: with b and B alone, and with b = 0, B, H, and those F that the device with most
memory cannot have run before T. Elsewhere g' = g.

In the steady state q = 0, and all bytes sent are received, so o / d_m <= D. A step's operations lie
within those of each stage before, so e is the larger of r_m and all passes of one microbatch there.
The B begin after F and all passes of one microbatch in the stages after this one, so g' is n B, and
(1) holds with g and b = 0, too. Memory holds (7): each microbatch takes t or longer from its F to
its B, and on average over D - e at most h of them are on the way (Little's law).

`planner.planning.joint.joint_bound` finds the smallest D for which all stages together need no more
than all devices have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.planning.averaging.hierarchical import has_hierarchy
from planner.training_plan.choices import Head
from planner.workload.costs import StageCosts, stage_costs
from planner.workload.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEMORY_SLACK = 1e-6
"""Relative: a plan may exceed the memory of its devices by rounding."""
BLOCK = 512
"""Numbers of devices in a block."""
KEPT_BLOCKS = 2
"""Blocks that are kept: few stages are lightest with more devices."""
COLUMNS = (
    "m",
    "microbatches_per_device",
    "least_flops_per_s",
    "most_flops_per_s",
    "least_up",
    "most_up",
    "most_down",
    "line",
    "most_line",
    "rtt_s",
)
"""Attributes of `StageRequirements` with one entry for each number of devices."""


@dataclass(frozen=True)
class DevicePool:
    """Devices without identity or location.

    Attributes
    ----------
    flops_per_s, memory_bytes, up, down
        ``float[N]``; uploads and downloads in bytes per second.
    rtt_s
        ``float[N]``: entry m - 1 is a lower bound on the longest round-trip time in a round of m.
    hop_s, hop_bytes_per_s
        The smallest latency and the highest bandwidth of a pair.
    has_aggregators
        Whether other devices may reduce gradients, too.
    hierarchical
        Whether a stage may average hierarchically, or as copies of its optimizer state do.
    regions
        Number of regions in two-frequency averaging; otherwise 0.
    """

    flops_per_s: Floats
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
        cls,
        cluster: Cluster,
        aggregators_in: Cluster | None = None,
        *,
        two_frequency: bool = False,
        in_copies: bool = False,
    ) -> DevicePool:
        """The devices of a cluster."""
        regions = len(set(cluster.network.regions)) if two_frequency else 0
        n, has_aggregators = len(cluster), aggregators_in is not None
        hierarchical = in_copies or (has_hierarchy(cluster) and not two_frequency)
        up, down = device_limits(cluster)
        if n == 1:
            return cls(
                flops_per_s=cluster.flops,
                memory_bytes=cluster.memory_bytes,
                up=up,
                down=down,
                rtt_s=np.zeros(1),
                hop_s=0.0,
                hop_bytes_per_s=np.inf,
                has_aggregators=has_aggregators,
                hierarchical=hierarchical,
                regions=regions,
            )
        nearest, hop_s, hop_bytes_per_s = _nearest(cluster)
        if aggregators_in is not None:
            nearest = np.minimum(nearest, _aggregator_rtt_s(cluster, aggregators_in))
        if hierarchical or two_frequency:
            nearest = np.full(n - 1, nearest.min())
        return cls(
            flops_per_s=cluster.flops,
            memory_bytes=cluster.memory_bytes,
            up=up,
            down=down,
            rtt_s=np.concatenate([[0.0], nearest]),
            hop_s=hop_s,
            hop_bytes_per_s=hop_bytes_per_s,
            has_aggregators=has_aggregators,
            hierarchical=hierarchical,
            regions=regions,
        )

    @property
    def identical(self) -> bool:
        """Whether all devices are equal."""
        columns = (self.flops_per_s, self.memory_bytes, self.up, self.down)
        return all(bool((column == column[0]).all()) for column in columns)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form for a witness; equal devices and latencies are listed once.

        Keys of the plan file keep their first names; docs/reference/plan-file.md lists both.
        """
        table = np.stack([self.flops_per_s, self.memory_bytes, self.up, self.down], axis=1)
        rows, counts = np.unique(table, axis=0, return_counts=True)
        names = ("flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s")
        rises = np.flatnonzero(np.diff(self.rtt_s, prepend=-1.0) > 0)
        return {
            "devices": [
                {"count": count} | dict(zip(names, map(finite_or_none, row), strict=True))
                for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
            ],
            "return_s": [[int(k) + 1, float(self.rtt_s[k])] for k in rises],
            "hop_s": self.hop_s,
            "hop_bytes_per_s": finite_or_none(self.hop_bytes_per_s),
            **self.options(),
        }

    def options(self) -> dict[str, Any]:
        """How stages may average, in a witness, as far as that is unusual."""
        options = (
            ("helped", self.has_aggregators),
            ("levels", self.hierarchical),
            ("regions", self.regions),
        )
        return {name: value for name, value in options if value}


def _nearest(cluster: Cluster) -> tuple[Floats, float, float]:
    """Least round-trip time from a device to its m nearest; least latency and most bandwidth."""
    n, latency = len(cluster), cluster.network.latency_table
    nearest, hop_s = np.full(n - 1, np.inf), np.inf
    for members in cluster.network.alike:
        # devices of a class have the same links, but for those to themselves
        d = members[0]
        other = np.arange(n) != d
        rtt_s = np.sort(latency[d, other] + latency[other, d])
        nearest = np.minimum(nearest, rtt_s)
        hop_s = min(hop_s, float(latency[d, other].min()))
    fastest, _ = cluster.limited_network().fastest_bytes_per_s
    return nearest, hop_s, float(fastest.max())


def _aggregator_rtt_s(cluster: Cluster, aggregators_in: Cluster) -> Floats:
    """``float[N - 1]``: round-trip time from the best aggregator to its m-nearest devices."""
    network = aggregators_in.network
    members = np.array([network.index_of(name) for name in cluster.network.ids])
    aggregates = np.asarray(aggregators_in.devices.can_aggregate).copy()
    aggregates[members] = False
    there, latency = np.ix_(np.flatnonzero(aggregates), members), network.latency_table
    rtt_s = latency[there] + latency.T[there]
    return np.asarray(np.sort(rtt_s, axis=1)[:, 1:].min(axis=0))


def finite_or_none(value: float) -> float | None:
    """None for infinity, which JSON lacks."""
    return value if np.isfinite(value) else None


class Requirement(NamedTuple):
    """Terms of (1) to (6) in one role: rows are parts of the layers, columns 1 to N devices.

    Attributes
    ----------
    flops, late_flops
        g and g': FLOPs after T, and those that start ``begin_s`` after T or later.
    begin_s
        b: start of the latter, after T.
    tail_s
        e: from the last of these operations to the end of the step.
    least_s
        Largest left side of (1) and (2): D is at least this, whatever all devices share.
    sent
        o: bytes sent by all devices of the stage.
    quiet_s
        q: part of D in which none of them is sent.
    fits
        (6): whether memory allows this number of devices.
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

    Those of a role are computed for blocks of numbers of devices.

    Parameters
    ----------
    pool, workload
        Devices and model.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    recomputes
        Whether stages may recompute their activations.
    every_steps
        H: the number of steps covered, of which the last averages between regions.
    head
        Which stage runs head and loss.

    Attributes
    ----------
    pool, num_devices, layers
        The devices, their number, and the number of layers.
    recompute_choices
        Indices of `_recompute_ranges`.
    starts, stops
        ``int[P]``: layers of every part.
    m
        ``float[M]``: numbers of devices, of the whole 1 to N, of a block some of them.
    most_flops_per_s, least_flops_per_s, most_up, least_up
        ``float[M]``: sums over the m fastest and the m slowest devices.
    scale_s
        Magnitude of a step: all FLOPs on all devices at once.
    """

    def __init__(
        self,
        pool: DevicePool,
        workload: Workload,
        wire_ratio: float,
        recomputes: bool,
        every_steps: int = 1,
        head: Head = Head.LAST,
    ) -> None:
        self.pool, self.num_devices, self.layers = pool, len(pool.flops_per_s), len(workload.layers)
        wire_ratio *= _least_averaged(pool, workload.spread_ratio)
        self.recompute_choices = range(len(_recompute_ranges(1)) if recomputes else 1)
        self.microbatches = float(workload.batch_samples // workload.microbatch_samples)
        self.m = np.arange(1.0, self.num_devices + 1)
        self.microbatches_per_device = np.ceil(self.microbatches / self.m)
        self.least_flops_per_s, self.most_flops_per_s = _sorted_sums(pool.flops_per_s)
        self.least_up, self.most_up = _sorted_sums(pool.up)
        self.most_down = _sorted_sums(pool.down)[1]
        self.rtt_s = pool.rtt_s
        self.has_exchange = pool.hierarchical or pool.regions > 0
        line = np.sort(pool.up if self.has_exchange else np.minimum(pool.up, pool.down))[::-1]
        self.line, self.most_line = line, line.cumsum()
        self.fastest = float(pool.flops_per_s.max())
        spans = [(a, b) for b in range(1, self.layers + 1) for a in range(b)]
        self.starts, self.stops = np.array(spans).T
        # embedding and head on different stages average what they share after the rest
        tied_apart = every_steps == 1 and pool.regions == 0 and head is Head.LAST
        self._set_stage_costs(workload, wire_ratio, spans, head, tied_apart=tied_apart)
        self.scale_s = self.microbatches * 3 * workload.forward_flops * workload.microbatch_samples
        self.scale_s = self.scale_s / float(pool.flops_per_s.sum()) or 1.0
        self._set_travel_times([stage_costs(workload, k, k + 1) for k in range(self.layers)])
        # bytes averaged within regions over those of one encoded vector
        self.unencoded_ratio = every_steps / wire_ratio
        self.first = 0
        self._blocks: dict[int, StageRequirements] = {}

    def blocks(self) -> Iterator[StageRequirements]:
        """The requirements for some numbers of devices each, in ascending order."""
        for first in range(0, self.num_devices, BLOCK):
            yield self._block(first)

    def _block(self, first: int) -> StageRequirements:
        """The requirements for the numbers of devices after ``first``."""
        block = self._blocks.get(first)
        if block is None:
            block = copy(self)
            block._blocks = {}
            numbers = slice(first, first + BLOCK)
            for name in COLUMNS:
                setattr(block, name, getattr(self, name)[numbers])
            block.first = first
            block._set_averaging()
            if len(self._blocks) < KEPT_BLOCKS:
                self._blocks[first] = block
        return block

    def _set_stage_costs(
        self,
        workload: Workload,
        wire_ratio: float,
        spans: list[tuple[int, int]],
        head: Head,
        *,
        tied_apart: bool,
    ) -> None:
        """``tied_apart``: tied parameters on two stages are averaged after the rest."""

        def has_head(a: int, b: int) -> bool:
            return b == self.layers if head is Head.LAST else a == 0

        kinds = {(x.forward_flops, x.saved_bytes, x.output_bytes) for x in workload.layers}

        def candidates(group: range, a: int, b: int) -> Iterable[int]:
            # between equal layers, without embedding and head, room grows or shrinks throughout
            inner = len(kinds) == 1 and a > 0 and b < self.layers
            return {*group[:1], *group[-1:]} if inner else group

        # by part, costs with the numbers of recomputed layers in a group that may be best
        chosen = [
            [
                [
                    stage_costs(workload, a, b, with_head=has_head(a, b), recomputed=count)
                    for count in candidates(_recompute_ranges(b - a)[choice], a, b)
                ]
                for a, b in spans
            ]
            for choice in self.recompute_choices
        ]
        keeping = [costs for (costs,) in chosen[0]]
        self.forward_flops = _column(c.forward_flops for c in keeping)
        self.backward_flops = [
            _column(
                # without a number in the range, no less than with any other
                min((c.backward_flops for c in costs), default=3 * least.forward_flops)
                for costs, least in zip(parts, keeping, strict=True)
            )
            for parts in chosen
        ]
        self.head_flops = _column(c.head_flops for c in keeping)
        boundary_bytes = {b: c.output_bytes for (_, b), c in zip(spans, keeping, strict=True)}
        boundary_bytes[self.layers] = boundary_bytes[0] = 0.0
        self.input_bytes = _column(boundary_bytes[a] for a, _ in spans)
        self.output_bytes = _column(boundary_bytes[b] for _, b in spans)
        tied_bytes = tied_apart * workload.tied_parameters * workload.gradient_bytes_per_parameter
        self.vector_bytes = _column(
            (c.gradient_bytes - tied_bytes * ((a == 0) != (b == self.layers))) * wire_ratio
            for (a, b), c in zip(spans, keeping, strict=True)
        )
        # by size of memory, largest first
        memory = -self.pool.memory_bytes * (1 + MEMORY_SLACK)
        sizes, self.size_index, counts = np.unique(memory, return_inverse=True, return_counts=True)
        self.size_index.sort()
        # microbatches between F and B, per part and size
        self.max_live = [
            np.minimum([_most_room(costs, -sizes) for costs in parts], self.microbatches)
            for parts in chosen
        ]
        self._sizes = sizes
        self.holding = -sizes >= _column(c.state_bytes for c in keeping)
        self.num_holding = (self.holding * counts).sum(axis=1, keepdims=True)
        self.holds_one = np.max([live[:, :1] for live in self.max_live], axis=0) >= 1
        self.min_devices = workload.optimizer_shards

    def _live_sums(self, choice: int) -> Floats:
        """Microbatches between F and B on the m devices with most memory, per part."""
        live, before, sizes = self.max_live[choice], *np.split(self.size_index, [self.first])
        live_before = live * np.bincount(before, minlength=live.shape[1])
        in_block = live[:, sizes[: len(self.m)]].cumsum(axis=1)
        return np.asarray(live_before.sum(axis=1, keepdims=True) + in_block)

    def _set_travel_times(self, single: list[StageCosts]) -> None:
        """Seconds of one microbatch before and after every part, on the fastest device."""
        flops = np.array([0.0, *(c.forward_flops for c in single)])
        flops_before = np.cumsum(flops)
        self.hop_in_s, self.hop_out_s = (
            np.where(size > 0, self.pool.hop_s + size / self.pool.hop_bytes_per_s, 0.0)
            for size in (self.input_bytes, self.output_bytes)
        )
        self.input_latency_s = np.where(self.input_bytes > 0, self.pool.hop_s, 0.0)
        self.upstream_forward_s = flops_before[self.starts, None] / self.fastest
        self.previous_layer_s = flops[self.starts, None] / self.fastest
        # a gradient comes from the last layers, through F, H and B there
        turnaround_s = (flops[-1] + self.head_flops.max()) / self.fastest
        self.turnaround_s = (
            turnaround_s + 2 * (flops_before[-1] - flops_before[self.stops, None]) / self.fastest
        )
        # between F and B of a microbatch: all passes of the stages after this one, and two messages
        flops_after = 3 * (flops_before[-1] - flops_before[self.stops, None])
        flops_after += np.where(self.head_flops > 0, 0.0, self.head_flops.max())
        self.away_s = flops_after / self.fastest + 2 * self.hop_out_s
        self.upstream_backward_s = 2 * flops_before[self.starts, None] / self.fastest
        # before the first F and after the last B of a step, all passes of the stages before
        self.upstream_s = 3 * flops_before[self.starts, None] / self.fastest + 2 * self.hop_in_s

    def _set_averaging(self) -> None:
        """Bytes and seconds of averaging, for the numbers of devices of a block."""
        self.averaged_bytes = self.vectors_sent(self.m) * self.vector_bytes
        round_s = self.least_round_s(self.averaged_bytes, self.most_line, self.line)
        self.round_s = np.where(self.m > 1, round_s + self.rtt_s, 0.0)
        # nothing is sent while the last messages of a round travel; without a round, while the last
        # gradient travels through all stages before this one
        sends = (self.m > 1) & (self.vector_bytes > 0)
        self.unsent_s = np.where(sends, self.rtt_s, self.input_latency_s + self.upstream_backward_s)
        self.tail_s = np.maximum(self.round_s, self.hop_in_s + self.upstream_backward_s)

    def vectors_sent(self, devices: Floats) -> Floats:
        """How often a stage of so many devices sends the gradient vector, encoded, at least."""
        pool = self.pool
        if pool.regions:
            used = np.minimum(devices, pool.regions)
            return 2 * (used - 1) + 2 * self.unencoded_ratio * (devices - used)
        if pool.has_aggregators or pool.hierarchical:
            return np.where(devices > 1, devices, 0.0)
        return 2 * (devices - 1)

    def least_round_s(self, averaged_bytes: Floats, line: Floats, slowest_line: Floats) -> Floats:
        """Seconds of a round of devices with these lines together, without latencies."""
        if self.pool.regions:
            return 2 * self.vector_bytes / line
        return np.maximum(averaged_bytes / line, self.vector_bytes / slowest_line)

    def size_of(self, memory_bytes: Floats) -> Ints:
        """Columns of `max_live` and `holding` for devices of these sizes."""
        return np.searchsorted(self._sizes, -memory_bytes * (1 + MEMORY_SLACK))

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether memory allows the number of devices, all of which hold optimizer state."""
        return np.asarray(
            (self.m <= self.num_holding) & self.holds_one & (self.m >= self.min_devices)
        )

    def whole_pipeline(self) -> Requirement:
        """Any stage, if the first stage begins its step at T: everything follows T."""
        return self._full_step(self.upstream_forward_s, arrives=True)

    def downstream(self) -> Requirement:
        """A stage after the one that begins at T, which is not the first: everything follows T."""
        return self._full_step(self.previous_layer_s, arrives=True)

    def boundary(self) -> Requirement:
        """The stage that begins at T, if it is not the first; its inputs may have arrived before.

        A stage of one device does not average, so an earlier stage ends no earlier.
        """
        requirement = self._full_step(np.zeros_like(self.input_bytes), arrives=False)
        return requirement._replace(fits=requirement.fits & (self.m > 1))

    def _full_step(self, earliest_s: Floats, *, arrives: bool) -> Requirement:
        """F, B and H follow T; the previous stage's first F ends ``earliest_s`` after T."""
        flops = self.forward_flops + self.backward_flops[0] + self.head_flops
        received, begin_s, first_arrival_s = self.output_bytes, earliest_s, earliest_s
        if arrives:
            received = received + self.input_bytes
            begin_s = earliest_s + self.hop_in_s
            first_arrival_s = earliest_s + self.input_latency_s
        least_s = np.maximum(
            begin_s + self.microbatches_per_device * flops / self.fastest,  # (1)
            first_arrival_s + self.microbatches * received / self.most_down,  # (2)
        )
        return Requirement(
            flops=self.microbatches * flops,
            late_flops=self.microbatches * flops,
            begin_s=begin_s,
            tail_s=self.tail_s,
            least_s=least_s + self.tail_s,
            sent=self.microbatches * (self.input_bytes + self.output_bytes) + self.averaged_bytes,
            quiet_s=begin_s + self.forward_flops / self.fastest + self.unsent_s,
            fits=self.fits,
        )

    def upstream(self, choice: int) -> Requirement:
        """A stage before the one that begins at T; its forward passes may precede T.

        It recomputes as much as in this one of `recompute_choices`.
        """
        most_live, backward_flops = (
            self.max_live[choice][:, :1],
            self.backward_flops[choice],
        )
        late_forwards = np.maximum(self.microbatches - self._live_sums(choice), 0.0)
        late_forwards_per_device = np.maximum(self.microbatches_per_device - most_live, 0.0)
        begin_s = self.turnaround_s + self.hop_out_s
        backward_s = self.microbatches_per_device * backward_flops / self.fastest
        own_flops = (
            self.microbatches_per_device * (backward_flops + self.head_flops)
            + late_forwards_per_device * self.forward_flops
        )
        least_s = np.max(
            np.broadcast_arrays(
                begin_s + backward_s,  # (1)
                own_flops / self.fastest,  # (1)
                self.turnaround_s + self.microbatches * self.output_bytes / self.most_down,  # (2)
            ),
            axis=0,
        )
        idle_s = np.where(late_forwards > 0, 0.0, begin_s + backward_flops / self.fastest)
        return Requirement(
            flops=self.microbatches * (backward_flops + self.head_flops)
            + late_forwards * self.forward_flops,
            late_flops=self.microbatches * backward_flops,
            begin_s=begin_s,
            tail_s=self.tail_s,
            least_s=least_s + self.tail_s,
            sent=self.microbatches * self.input_bytes
            + late_forwards * self.output_bytes
            + self.averaged_bytes,
            quiet_s=idle_s + self.unsent_s,
            fits=self.fits,
        )

    def steady_state(self, choice: int) -> Requirement:
        """Any stage, from the end of its round to the end of its next one.

        It recomputes as much as in this one of `recompute_choices`.
        """
        flops = self.forward_flops + self.backward_flops[choice] + self.head_flops
        in_flight_s = flops / self.fastest + self.away_s
        live = self._live_sums(choice)
        held_s = np.divide(  # (7)
            self.microbatches * in_flight_s,
            live,
            out=np.where(in_flight_s > 0, np.inf, np.zeros_like(live)),
            where=live > 0,
        )
        sent = self.microbatches * (self.input_bytes + self.output_bytes) + self.averaged_bytes
        backward_flops = self.backward_flops[choice]
        first_backward_s = self.forward_flops / self.fastest + self.away_s
        window_s = np.max(
            np.broadcast_arrays(
                self.microbatches_per_device * flops / self.fastest,  # (1)
                first_backward_s + self.microbatches_per_device * backward_flops / self.fastest,
                self.microbatches * self.output_bytes / self.most_down,  # (2)
                held_s,
            ),
            axis=0,
        )
        tail_s = np.maximum(self.round_s, self.upstream_s)
        return Requirement(
            flops=self.microbatches * flops,
            late_flops=self.microbatches * backward_flops,
            begin_s=first_backward_s,
            tail_s=tail_s,
            # all bytes that a stage's neighbours and members send are received, too
            least_s=np.maximum(window_s + tail_s, sent / self.most_down),
            sent=sent,
            quiet_s=np.zeros_like(self.input_bytes),
            fits=self.fits,
        )


def _most_room(costs: Sequence[StageCosts], memory_bytes: Floats) -> Floats:
    """As `StageCosts.room`, for several sizes of memory, of the costs with most room; 0 if none."""
    room = np.zeros(len(memory_bytes))
    for each in costs:
        free_bytes = memory_bytes - each.state_bytes - each.scratch_bytes
        if each.saved_bytes > 0:
            fits = np.floor_divide(free_bytes, each.saved_bytes)
        else:
            fits = np.where(free_bytes >= 0, np.inf, 0.0)
        np.maximum(room, fits, out=room)
    return room


def _recompute_ranges(size: int) -> tuple[range, ...]:
    """How many layers a stage recomputes, in four groups: none, few, many and all."""
    half = size // 2
    return range(1), range(1, half + 1), range(half + 1, size), range(size, size + 1)


def _least_averaged(pool: DevicePool, spread_ratio: float) -> float:
    """What v counts if parameters are spread in so many of the bytes."""
    if pool.has_aggregators or bool((pool.up > pool.down).any()):
        return spread_ratio
    return (1 + spread_ratio) / 2


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)[:, None]


def _sorted_sums(values: Floats) -> tuple[Floats, Floats]:
    """Sums over the m smallest, and over the m largest values, for all m."""
    ascending = np.sort(values)
    return ascending.cumsum(), ascending[::-1].cumsum()
