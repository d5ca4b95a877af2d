"""Device classes: groups of devices that nothing distinguishes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.network.prices import Prices
from planner.planning.cost import HOUR_S
from planner.simulator.resources import LinkResources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DeviceClasses:
    """Classes of devices with the same links, limits, speed and memory.

    Attributes
    ----------
    members
        Devices of each of the C places.
    size
        ``int[C]``: how many these are.
    there_and_back_s
        ``float[C, C]``: latency of both directions between devices of two places, or of one.
    bandwidth
        ``float[C, C]``: bytes per second of a pair; infinite within a place of one device.
    slower
        ``float[C, C]``: of its two directions, the slower.
    capacity
        ``float[C]``: the smaller of a device's upload and download.
    flops, memory_bytes
        ``float[C]``: of a device.
    sums
        ``bool[C]``: whether its devices can aggregate.
    site
        ``int[C]``: of whose line its devices have a part.
    line
        ``float[K]``: of every site's line out and in, the slower; empty where none is stated.
    region
        ``int[C]``: a number for each; of one of its devices, where it may have several.
    usd_per_s, usd_per_byte
        ``float[C]``, ``float[C, C]``: of a device and of messages; 0 without prices.
    """

    members: tuple[tuple[int, ...], ...]
    size: Ints
    there_and_back_s: Floats
    bandwidth: Floats
    slower: Floats
    capacity: Floats
    flops: Floats
    memory_bytes: Floats
    sums: NDArray[np.bool_]
    site: Ints
    line: Floats
    region: Ints
    usd_per_s: Floats
    usd_per_byte: Floats

    @classmethod
    def of(
        cls, cluster: Cluster, prices: Prices | None = None, *, by_region: bool = False
    ) -> DeviceClasses:
        """The places of the devices that can compute."""
        network = cluster.network
        up, down = device_limits(cluster)
        columns = [cluster.flops, cluster.memory_bytes, up, down]
        sites = cluster.devices.sites or [""] * len(cluster)
        able = np.asarray(cluster.devices.can_compute)
        sums = np.asarray(cluster.devices.can_aggregate)
        hourly = cluster.devices.usd_per_hour
        if prices is None or hourly is None:
            hourly = np.zeros(len(cluster))
        columns.append(np.asarray(hourly))
        apart = by_region or prices is not None
        regions = network.regions if apart else [""] * len(cluster)
        members: list[tuple[int, ...]] = []
        for alike in network.alike:
            kinds: dict[tuple[object, ...], list[int]] = {}
            for d in alike:
                if able[d]:
                    figures = (float(column[d]) for column in columns)
                    kind = (*figures, sites[d], regions[d], bool(sums[d]))
                    kinds.setdefault(kind, []).append(d)
            members += map(tuple, kinds.values())
        first = [m[0] for m in members]
        other = [m[-1] for m in members]
        links = LinkResources.of(cluster)
        out, into = links.capacity_bytes_per_s[2 * len(cluster) :].reshape(2, -1)
        line = np.minimum(out, into)
        latency = _between(network.latency_s, first)
        bandwidth = _between(network.bandwidth_bytes_per_s, first)
        for c, (a, b) in enumerate(zip(first, other, strict=True)):
            latency[c, c] = 0.0 if a == b else network.latency_s[a, b]
            bandwidth[c, c] = np.inf if a == b else network.bandwidth_bytes_per_s[a, b]
        return cls(
            tuple(members),
            np.array([len(m) for m in members], dtype=np.int64),
            latency + latency.T,
            bandwidth,
            np.minimum(bandwidth, bandwidth.T),
            np.minimum(up, down)[first],
            cluster.flops[first],
            cluster.memory_bytes[first],
            sums[first],
            links.site_of[first],
            line if np.isfinite(line).any() else line[:0],
            np.unique(np.array(network.regions)[first], return_inverse=True)[1].astype(np.int64),
            np.asarray(hourly, dtype=float)[first] / HOUR_S,
            np.zeros_like(latency)
            if prices is None
            else _between(prices.usd_per_byte(network), first),
        )

    def __len__(self) -> int:
        return len(self.members)


def _between(matrix: Floats, devices: list[int]) -> Floats:
    return np.array(matrix[np.ix_(devices, devices)], dtype=np.float64)
