"""Enumeration of all paths from a start device, and the duration of a chain alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from planner.mapf.arrays import PathArrays

Path = tuple[int, ...]


def swapped(length: int, max_swaps: int) -> Iterator[tuple[int, ...]]:
    """All sets of disjoint positions k at which k and k + 1 are swapped (CC2)."""
    for count in range(min(max_swaps, length // 2) + 1):
        for positions in itertools.combinations(range(length - 1), count):
            if all(b - a > 1 for a, b in itertools.pairwise(positions)):
                yield positions


def chain_s(arrays: PathArrays, path: Sequence[int]) -> float:
    """Seconds of F, H and B along a path and back, with transfers and no other microbatch."""
    transfer = arrays.transfer
    total = arrays.head[path[0]] + sum(arrays.forward[d] + arrays.backward[d] for d in path)
    for u, v in zip(path, [*path[1:], path[0]], strict=True):
        total += transfer[u, v] + transfer[v, u]
    return float(total)


def count_paths(arrays: PathArrays) -> int:
    """Number of paths from one start device, without swapped ones."""
    sizes = [
        int((arrays.capacity[_group(arrays, s)] > 0).sum())
        for s in range(1, len(arrays.min_visits))
    ]
    counts = [1, *[0] * len(sizes)]
    for size in sizes:
        for k in range(len(sizes), 0, -1):
            counts[k] += counts[k - 1] * size
    return counts[arrays.path_stages - 1]


def all_paths(arrays: PathArrays, start: int, limit_s: float = math.inf) -> list[Path]:
    """Every path from ``start`` that satisfies CC1 and CC2 and takes at most ``limit_s`` alone."""
    stages = [s for s in range(1, len(arrays.min_visits)) if arrays.max_visits[s] > 0]
    usable = {s: [d for d in _group(arrays, s) if arrays.capacity[d] > 0] for s in stages}
    length = arrays.path_stages - 1
    swaps = list(swapped(length, arrays.max_swaps))
    paths = []
    for chosen in itertools.combinations(stages, length):
        fit = [p for p in swaps if all(chosen[k + 1] == chosen[k] + 1 for k in p)]
        for devices in itertools.product(*(usable[s] for s in chosen)):
            for positions in fit:
                path = list(devices)
                for k in positions:
                    path[k], path[k + 1] = path[k + 1], path[k]
                if chain_s(arrays, (start, *path)) <= limit_s:
                    paths.append((start, *path))
    return paths


def _group(arrays: PathArrays, s: int) -> list[int]:
    devices: list[int] = arrays.members[arrays.stage_ptr[s] : arrays.stage_ptr[s + 1]].tolist()
    return devices
