"""Device classes: groups of interchangeable devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.network.prices import Prices
from planner.planning.cost import HOUR_S, pair_prices
from planner.simulator.resources import LinkResources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DeviceClasses:
    """C classes of devices with the same links, limits, FLOP/s and memory.

    Attributes
    ----------
    members
        Devices of each class.
    size
        ``int[C]``: number of devices.
    rtt_s
        ``float[C, C]``: round-trip time between a device of one class and one of the other.
    bandwidth
        ``float[C, C]``: bytes per second between such devices; infinite within a class of one.
    pair_bandwidth
        ``float[C, C]``: the slower of both directions.
    capacity
        ``float[C]``: the smaller of a device's upload and download, in bytes per second.
    flops_per_s, memory_bytes
        ``float[C]``: of one device.
    can_aggregate
        ``bool[C]``: whether the devices may reduce gradients.
    sites
        ``int[C, L]``: indices of the sites whose lines the devices share, from the inside out, -1
        where there are no more.
    site_bandwidth
        ``float[K]``: bytes per second of each site's line in its slower direction; empty if no site
        has a limit.
    region
        ``int[C]``: index of the region, or of one device's region if the class spans several.
    usd_per_s, usd_per_byte
        ``float[C]``, ``float[C, C]``: price of a device and of traffic; 0 without prices.
    """

    members: tuple[tuple[int, ...], ...]
    size: Ints
    rtt_s: Floats
    bandwidth: Floats
    pair_bandwidth: Floats
    capacity: Floats
    flops_per_s: Floats
    memory_bytes: Floats
    can_aggregate: NDArray[np.bool_]
    sites: Ints
    site_bandwidth: Floats
    region: Ints
    usd_per_s: Floats
    usd_per_byte: Floats

    @classmethod
    def of(
        cls, cluster: Cluster, prices: Prices | None = None, *, by_region: bool = False
    ) -> DeviceClasses:
        """Classes of the devices that can compute; with ``by_region``, none spans two regions."""
        network = cluster.network
        up, down = device_limits(cluster)
        columns = [cluster.flops, cluster.memory_bytes, up, down]
        sites = cluster.devices.sites or [""] * len(cluster)
        can_compute = np.asarray(cluster.devices.can_compute)
        can_aggregate = np.asarray(cluster.devices.can_aggregate)
        hourly = cluster.devices.usd_per_hour
        if prices is None or hourly is None:
            hourly = np.zeros(len(cluster))
        columns.append(np.asarray(hourly))
        split_by_region = by_region or prices is not None
        regions = network.regions if split_by_region else [""] * len(cluster)
        members: list[tuple[int, ...]] = []
        for alike in network.alike:
            classes: dict[tuple[object, ...], list[int]] = {}
            for d in alike:
                if can_compute[d]:
                    numbers = (float(column[d]) for column in columns)
                    key = (*numbers, sites[d], regions[d], bool(can_aggregate[d]))
                    classes.setdefault(key, []).append(d)
            members += map(tuple, classes.values())
        first = [m[0] for m in members]
        other = [m[-1] for m in members]
        links = LinkResources.of(cluster)
        upload, download = links.capacity_bytes_per_s[2 * len(cluster) :].reshape(2, -1)
        line = np.minimum(upload, download)
        latency = network.latency_table.between(first)
        bandwidth = network.bandwidth_table.between(first)
        for c, (a, b) in enumerate(zip(first, other, strict=True)):
            latency[c, c] = 0.0 if a == b else network.latency_table[a, b]
            bandwidth[c, c] = np.inf if a == b else network.bandwidth_table[a, b]
        return cls(
            members=tuple(members),
            size=np.array([len(m) for m in members], dtype=np.int64),
            rtt_s=latency + latency.T,
            bandwidth=bandwidth,
            pair_bandwidth=np.minimum(bandwidth, bandwidth.T),
            capacity=np.minimum(up, down)[first],
            flops_per_s=cluster.flops[first],
            memory_bytes=cluster.memory_bytes[first],
            can_aggregate=can_aggregate[first],
            sites=links.sites_of[first],
            site_bandwidth=line if np.isfinite(line).any() else line[:0],
            region=np.unique(np.array(network.regions)[first], return_inverse=True)[1].astype(
                np.int64
            ),
            usd_per_s=np.asarray(hourly, dtype=float)[first] / HOUR_S,
            usd_per_byte=np.zeros_like(latency)
            if prices is None
            else pair_prices(prices, cluster, *np.ix_(first, first)),
        )

    @cached_property
    def class_of(self) -> dict[int, int]:
        """The class of every device that can compute."""
        return {d: c for c, members in enumerate(self.members) for d in members}

    def __len__(self) -> int:
        return len(self.members)
