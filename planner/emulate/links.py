"""The emulated network: rates, latencies and shared limits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PACKET_S = 5e-3
"""Longest transmission time of a packet, in seconds, which bounds the packet size."""
MAX_INSIDE_RATIO = 50.0
"""Most that a link within a machine is faster than all others."""
MTU_BYTES = (1500, 65_520)
IP_TCP_BYTES = 52
"""Size of IP and TCP headers with timestamps."""


class EmulatedLinks(NamedTuple):
    """The emulated network; pair (i, j) of n devices has index ``i * n + j``.

    Attributes
    ----------
    rate
        ``float[n * n]``, payload bytes per second; 0 from a device to itself.
    latency
        ``float[n * n]``, seconds from sending a packet's last byte to its arrival.
    capacity
        ``float[m]``, bytes per second of each shared limit.
    uses
        ``int[n * n, k]``, indices of a pair's limits: sender's upload, receiver's download, and
        lines of sites; -1 for unused entries.
    jitter
        ``float[n * n]``, amplitude of latency jitter in seconds. A new uniform value is drawn when
        an idle pair starts to send, about once per message. Packets stay in order.
    """

    rate: Floats
    latency: Floats
    capacity: Floats
    uses: Ints
    jitter: Floats

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.isqrt(len(self.rate))

    def mtu_bytes(self) -> list[list[int]]:
        """Largest packet by source and destination; small if the slower direction is slow."""
        n = self.devices
        rate = self.rate.reshape(n, n)
        payload = np.minimum(rate, rate.T) * PACKET_S
        packet = np.clip(payload + IP_TCP_BYTES, *MTU_BYTES).astype(int)
        return [[int(mtu) for mtu in row] for row in packet]

    def flight_bytes(self) -> float:
        """Largest bandwidth-delay product of any pair, in bytes."""
        n = self.devices
        delay = self.latency.reshape(n, n)
        return float((self.rate.reshape(n, n) * (delay + delay.T)).max())


def emulated_cluster(cluster: Cluster) -> Cluster:
    """The cluster with slower links within machines: at most `MAX_INSIDE_RATIO` times all others.

    Otherwise these links would decide by how much all rates are divided.
    """
    network, machines = cluster.network, np.array(cluster.devices.machines or ())
    if not len(machines):
        return cluster
    rate = network.bandwidth_bytes_per_s
    inside = (machines[:, None] == machines) & (machines != "")
    outside = rate[~inside & ~np.eye(len(cluster), dtype=bool)]
    if not len(outside):
        return cluster
    slower = np.where(inside, np.minimum(rate, MAX_INSIDE_RATIO * outside.max()), rate)
    return cluster.replace(network=network.replace(bandwidth_bytes_per_s=slower))


def links_of(
    cluster: Cluster, speed: float = 1.0, shrink: float = 1.0, jitter_s: float = 0.0
) -> EmulatedLinks:
    """Build the network that the simulator assumes for a cluster, including defaults."""
    network = cluster.network
    n = len(network)
    rate = np.array(network.bandwidth_bytes_per_s) * (speed / shrink)
    latency = np.array(network.latency_s) / speed
    np.fill_diagonal(rate, 0.0)
    np.fill_diagonal(latency, 0.0)
    capacity: list[float] = []
    # of both devices, and of all sites around them
    deepest = max(len(cluster.devices.sites_around(d)) for d in range(n))
    uses = np.full((n, n, 2 + 2 * deepest), -1, dtype=np.int64)
    used = np.zeros((n, n), dtype=np.int64)

    def limit(chosen: NDArray[np.bool_], bytes_per_s: float) -> None:
        uses[(*np.nonzero(chosen), used[chosen])] = len(capacity)
        used[chosen] += 1
        capacity.append(bytes_per_s)

    device = np.arange(n)
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    for d in range(n):
        # without a stated limit, the fastest measured pair counts
        most_up = rate[d].max() if up is None else up[d] * (speed / shrink)
        most_down = rate[:, d].max() if down is None else down[d] * (speed / shrink)
        limit(np.outer(device == d, device != d), float(most_up))
        limit(np.outer(device != d, device == d), float(most_down))
    for site, site_limit in (cluster.devices.site_upload_bytes_per_s or {}).items():
        inside = cluster.inside[site]
        limit(np.outer(inside, ~inside), site_limit * speed / shrink)
    for site, site_limit in (cluster.devices.site_download_bytes_per_s or {}).items():
        inside = cluster.inside[site]
        limit(np.outer(~inside, inside), site_limit * speed / shrink)
    return EmulatedLinks(
        rate.ravel(),
        latency.ravel(),
        np.array(capacity, dtype=float),
        uses.reshape(n * n, -1),
        np.where(latency > 0, jitter_s / speed, 0.0).ravel(),
    )
