"""Classes of interchangeable devices of a network."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def alike_devices(
    latency_s: NDArray[np.float64], bandwidth_bytes_per_s: NDArray[np.float64]
) -> list[list[int]]:
    """Classes of devices of which any two can be exchanged without changing a measurement.

    Two devices of a class have the same links, in both directions, to every other device, and the
    same link in both directions to each other.
    """
    n = len(latency_s)
    bits = [np.ascontiguousarray(a).view(np.int64) for a in (latency_s, bandwidth_bytes_per_s)]
    views = [*bits, *(a.T for a in bits)]
    # equal devices have the same multiset of links: compare fully only if it agrees
    hashes = map(_hashed, bits)
    sums = np.stack([values.sum(axis=k) for values in hashes for k in (0, 1)], axis=1)
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


def _hashed(bits: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Well-mixed 64-bit numbers, whose sums rarely collide: SplitMix64's finalizer."""
    z = bits.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
