"""Ordered pairs of devices that exchange messages, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.arrays import Ints2
from planner.simulator.resources import NONE, Floats, Ints, LinkResources


class Pairs(NamedTuple):
    """The ordered pairs of devices that exchange pipeline messages.

    Attributes
    ----------
    source, destination
        ``int[P]``.
    latency_s, bandwidth
        ``float[P]``; bytes per second of the pair alone.
    max_rate
        ``float[P]``: the least of the pair's bandwidth and its shared resources' capacities.
    shared
        ``int[P, k]``: indices of the pair's shared resources, padded with -1.
    capacity
        ``float[R]``.
    resource_ptr
        ``int[R + 1]``: offsets of the resources' pairs in `FlowState.active`.
    """

    source: Ints
    destination: Ints
    latency_s: Floats
    bandwidth: Floats
    max_rate: Floats
    shared: Ints2
    capacity: Floats
    resource_ptr: Ints


def pairs_of(source: Ints, destination: Ints, links: LinkResources) -> Pairs:
    """Build `Pairs` from devices' indices.

    Parameters
    ----------
    source, destination
        ``int[P]``.
    """
    shared = links.shared(source, destination)
    bandwidth = links.bandwidth_bytes_per_s[source, destination]
    capacity = links.capacity_bytes_per_s
    limits = np.where(shared == NONE, np.inf, capacity[np.maximum(shared, 0)])
    users = np.bincount(shared[shared != NONE], minlength=len(capacity))
    return Pairs(
        source,
        destination,
        links.latency_s[source, destination],
        bandwidth,
        np.minimum(bandwidth, limits.min(axis=1, initial=np.inf)),
        shared,
        capacity,
        np.concatenate([[0], np.cumsum(users)]),
    )
