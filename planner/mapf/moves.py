"""Compiled moves between sets of paths that keep CC1, CC2, CC3 and TC1.

Every move touches at most two microbatches. `Use` counts paths per device and per stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.search.arrays import Ints, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below, next_unit


class PathRules(NamedTuple):
    """What paths must satisfy; as in `PathArrays`."""

    stage: Ints
    members: Ints
    first: Ints
    room: Ints
    fewest: Ints
    most: Ints
    max_swaps: int
    max_total_swaps: int

    @classmethod
    def of(cls, arrays: PathArrays) -> PathRules:
        """From the arrays."""
        return cls(
            arrays.stage,
            arrays.members,
            arrays.first,
            arrays.room.copy(),
            arrays.fewest,
            arrays.most,
            arrays.max_swaps,
            arrays.max_total_swaps,
        )


class Use(NamedTuple):
    """Paths through each device and each stage."""

    device: Ints
    stage: Ints

    @classmethod
    def of(cls, arrays: PathArrays, paths: Ints) -> Use:
        """Counted from paths."""
        device = np.bincount(paths.ravel(), minlength=len(arrays.stage)).astype(np.int64)
        stages = np.bincount(arrays.stage[paths.ravel()], minlength=len(arrays.fewest))
        return cls(device, stages.astype(np.int64))


@kernel
def count_path(use: Use, stage: Ints, path: Ints, by: int) -> None:
    """Add (1) or remove (-1) a path."""
    for d in path:
        use.device[d] += by
        use.stage[stage[d]] += by


@kernel
def recount(use: Use, stage: Ints, paths: Ints) -> None:
    """Count all paths anew."""
    use.device[:] = 0
    use.stage[:] = 0
    for path in paths:
        count_path(use, stage, path, 1)


@entry
def in_order(path: Ints, stage: Ints, max_swaps: int) -> bool:
    """CC2: ascending stages after the first, save disjoint swaps of neighbours."""
    highest, swaps, k = 0, 0, 1
    while k < len(path):
        s = stage[path[k]]
        if k + 1 < len(path) and s == stage[path[k + 1]] + 1:
            swaps += 1
            k += 1
            if s - 1 <= highest:
                return False
        if s <= highest:
            return False
        highest = s
        k += 1
    return swaps <= max_swaps


@entry
def count_swaps(path: Ints, stage: Ints) -> int:
    """Swaps of a path that satisfies CC2."""
    swaps = 0
    for k in range(1, len(path) - 1):
        if stage[path[k]] == stage[path[k + 1]] + 1:
            swaps += 1
    return swaps


@kernel
def too_many_swaps(rules: PathRules, paths: Ints) -> bool:
    """Whether all paths together have more swaps than they may (D.2)."""
    if rules.max_total_swaps >= len(paths) * rules.max_swaps:
        return False
    swaps = 0
    for b in range(len(paths)):
        swaps += count_swaps(paths[b], rules.stage)
    return swaps > rules.max_total_swaps


@kernel
def sort_path(path: Ints, stage: Ints) -> None:
    """Bring the devices after the first into the order of their stages."""
    for k in range(2, len(path)):
        d = path[k]
        j = k
        while j > 1 and stage[path[j - 1]] > stage[d]:
            path[j] = path[j - 1]
            j -= 1
        path[j] = d


@kernel
def place_of(path: Ints, stage: Ints, s: int) -> int:
    """Place of stage ``s`` on a path, or -1."""
    for k in range(1, len(path)):
        if stage[path[k]] == s:
            return k
    return -1


@kernel
def change_device(rules: PathRules, use: Use, paths: Ints, b: int, word: Words) -> int:
    """Another device of the same stage, in exchange with a path through it if it is full.

    Returns the other microbatch, ``b`` if there is none, -1 if nothing was changed.
    """
    count, length = paths.shape
    k = 1 + next_below(word, length - 1)
    d = paths[b, k]
    s = rules.stage[d]
    size = rules.first[s + 1] - rules.first[s]
    if size < 2:
        return -1
    v = rules.members[rules.first[s] + next_below(word, size)]
    if v == d or rules.room[v] == 0:
        return -1
    if use.device[v] < rules.room[v] and next_unit(word) < 0.7:
        paths[b, k] = v
        return b
    offset = next_below(word, count)
    for i in range(count):
        c = (i + offset) % count
        j = place_of(paths[c], rules.stage, s)
        if c != b and j > 0 and paths[c, j] == v:
            paths[b, k], paths[c, j] = v, d
            return int(c)
    return -1


@kernel
def change_stage(rules: PathRules, use: Use, paths: Ints, b: int, word: Words) -> int:
    """Another stage; in exchange with a path that has it and lacks ours, if CC3 demands it.

    Returns as `change_device` does.
    """
    count, length = paths.shape
    stages = len(rules.fewest)
    k = 1 + next_below(word, length - 1)
    d = paths[b, k]
    s = rules.stage[d]
    t = 1 + next_below(word, stages - 1)
    if place_of(paths[b], rules.stage, t) > 0:
        return -1
    if use.stage[s] > rules.fewest[s] and use.stage[t] < rules.most[t]:
        size = rules.first[t + 1] - rules.first[t]
        v = rules.members[rules.first[t] + next_below(word, size)]
        if use.device[v] < rules.room[v]:
            paths[b, k] = v
            return b
    offset = next_below(word, count)
    for i in range(count):
        c = (i + offset) % count
        j = place_of(paths[c], rules.stage, t)
        if c != b and j > 0 and place_of(paths[c], rules.stage, s) < 0:
            paths[b, k], paths[c, j] = paths[c, j], d
            return int(c)
    return -1


@kernel
def exchange_paths(paths: Ints, b: int, word: Words) -> int:
    """Exchange all devices but the start with a microbatch of another start device."""
    count, length = paths.shape
    c = int(next_below(word, count))
    if paths[c, 0] == paths[b, 0]:
        return -1
    for k in range(1, length):
        paths[b, k], paths[c, k] = paths[c, k], paths[b, k]
    return c


@kernel
def change_order(rules: PathRules, paths: Ints, b: int, word: Words) -> int:
    """Swap two neighbouring places (CC2), or swap them back."""
    length = paths.shape[1]
    if length < 3 or rules.max_swaps == 0:
        return -1
    k = 1 + next_below(word, length - 2)
    gap = rules.stage[paths[b, k]] - rules.stage[paths[b, k + 1]]
    if gap != 1 and gap != -1:
        return -1
    paths[b, k], paths[b, k + 1] = paths[b, k + 1], paths[b, k]
    return b if in_order(paths[b], rules.stage, rules.max_swaps) else -1
