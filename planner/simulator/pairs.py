"""Ordered pairs of devices that exchange messages, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.arrays import Ints2
from planner.simulator.resources import MOST_SHARED, NONE, Floats, Ints, LinkResources


class Pairs(NamedTuple):
    """The ordered pairs that messages of the pipeline use.

    Attributes
    ----------
    source, destination
        ``int[P]``.
    latency_s, bandwidth
        ``float[P]``; bytes per second of the pair itself.
    most
        ``float[P]``: the pair's bandwidth within the capacities that it shares.
    shared
        ``int[P, 4]``: numbers of these resources, -1 for none.
    capacity
        ``float[R]``.
    first
        ``int[R + 1]``: where the resource's pairs begin in a list of all.
    """

    source: Ints
    destination: Ints
    latency_s: Floats
    bandwidth: Floats
    most: Floats
    shared: Ints2
    capacity: Floats
    first: Ints


def pairs_of(source: Ints, destination: Ints, links: LinkResources) -> Pairs:
    """The arrays of some pairs.

    Parameters
    ----------
    source, destination
        ``int[P]``.
    """
    shared = np.full((len(source), MOST_SHARED), NONE)
    for p, (i, j) in enumerate(zip(source.tolist(), destination.tolist(), strict=True)):
        found = links.shared(i, j)
        shared[p, : len(found)] = found
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
