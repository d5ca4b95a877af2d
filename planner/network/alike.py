"""Classes of interchangeable devices of a network."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.network.pair_table import PairTable

Floats = NDArray[np.float64]
ROWS = 128
"""Rows that are hashed at a time."""


def alike_in_tables(latency: PairTable, bandwidth: PairTable) -> list[list[int]]:
    """Classes of devices as `alike_devices` finds them, from tables with the same classes."""
    if latency.is_full:
        return alike_devices(latency.values, bandwidth.values)
    # two devices of each class of the tables decide which of these are one: their links to a third
    # would be the same
    some = latency.two_of_each
    members: list[list[int]] = [[] for _ in latency.values]
    for d, c in enumerate(latency.class_of.tolist()):
        members[c].append(d)
    merged = alike_devices(latency.between(some), bandwidth.between(some))
    joined = [{int(latency.class_of[some[i]]) for i in alike} for alike in merged]
    return sorted(sorted(d for c in classes for d in members[c]) for classes in joined)


def alike_devices(latency_s: Floats, bandwidth_bytes_per_s: Floats) -> list[list[int]]:
    """Classes of devices of which any two can be exchanged without changing a measurement.

    Two devices of a class have the same links, in both directions, to every other device, and the
    same link in both directions to each other.
    """
    n = len(latency_s)
    bits = [np.ascontiguousarray(a).view(np.int64) for a in (latency_s, bandwidth_bytes_per_s)]
    views = [*bits, *(a.T for a in bits)]
    # equal devices have the same multiset of links: compare fully only if it agrees
    sums = np.concatenate([_sums(a) for a in bits], axis=1)
    buckets: dict[bytes, list[list[int]]] = {}
    for i in range(n):
        classes = buckets.setdefault(sums[i].tobytes(), [])
        for members in classes:
            j = members[0]
            is_other = np.ones(n, dtype=bool)
            is_other[[i, j]] = False
            if all(
                view[i, j] == view[j, i] and np.array_equal(view[i, is_other], view[j, is_other])
                for view in views
            ):
                members.append(i)
                break
        else:
            classes.append([i])
    return sorted(members for classes in buckets.values() for members in classes)


def _sums(bits: NDArray[np.int64]) -> NDArray[np.uint64]:
    """``uint64[N, 2]``: sums of the hashed entries of every row and column."""
    sums = np.zeros((len(bits), 2), dtype=np.uint64)
    for first in range(0, len(bits), ROWS):
        hashed = _hashed(bits[first : first + ROWS])
        sums[first : first + ROWS, 0] = hashed.sum(axis=1)
        sums[:, 1] += hashed.sum(axis=0)
    return sums


def _hashed(bits: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Well-mixed 64-bit numbers, whose sums rarely collide: SplitMix64's finalizer."""
    z = bits.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
