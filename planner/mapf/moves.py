"""Compiled moves between sets of paths that keep CC1, CC2, CC3 and TC1.

Every move changes at most two microbatches. `PathCounts` holds the paths per device and stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.search.arrays import Ints, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below, next_unit


class PathRules(NamedTuple):
    """Constraints on paths; as in `PathArrays`."""

    stage: Ints
    members: Ints
    stage_ptr: Ints
    capacity: Ints
    min_visits: Ints
    max_visits: Ints
    max_swaps: int
    max_total_swaps: int

    @classmethod
    def of(cls, arrays: PathArrays) -> PathRules:
        """The rules of a path problem."""
        return cls(
            arrays.stage,
            arrays.members,
            arrays.stage_ptr,
            arrays.capacity.copy(),
            arrays.min_visits,
            arrays.max_visits,
            arrays.max_swaps,
            arrays.max_total_swaps,
        )


class PathCounts(NamedTuple):
    """Number of paths through each device and each stage."""

    device: Ints
    stage: Ints

    @classmethod
    def of(cls, arrays: PathArrays, paths: Ints) -> PathCounts:
        """The counts of given paths."""
        device = np.bincount(paths.ravel(), minlength=len(arrays.stage)).astype(np.int64)
        stages = np.bincount(arrays.stage[paths.ravel()], minlength=len(arrays.min_visits))
        return cls(device, stages.astype(np.int64))


@kernel
def count_path(counts: PathCounts, stage: Ints, path: Ints, by: int) -> None:
    """Add (1) or remove (-1) a path."""
    for d in path:
        counts.device[d] += by
        counts.stage[stage[d]] += by


@kernel
def recount(counts: PathCounts, stage: Ints, paths: Ints) -> None:
    """Recompute the counts from all paths."""
    counts.device[:] = 0
    counts.stage[:] = 0
    for path in paths:
        count_path(counts, stage, path, 1)


@entry
def in_order(path: Ints, stage: Ints, max_swaps: int) -> bool:
    """CC2: stages ascend after the first, except for disjoint swaps of neighbours."""
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
    """Whether the swaps of all paths exceed the limit (D.2)."""
    if rules.max_total_swaps >= len(paths) * rules.max_swaps:
        return False
    swaps = 0
    for b in range(len(paths)):
        swaps += count_swaps(paths[b], rules.stage)
    return swaps > rules.max_total_swaps


@kernel
def sort_path(path: Ints, stage: Ints) -> None:
    """Sort the devices after the first by stage."""
    for k in range(2, len(path)):
        d = path[k]
        j = k
        while j > 1 and stage[path[j - 1]] > stage[d]:
            path[j] = path[j - 1]
            j -= 1
        path[j] = d


@kernel
def position_of(path: Ints, stage: Ints, s: int) -> int:
    """Position of stage ``s`` on a path, or -1."""
    for k in range(1, len(path)):
        if stage[path[k]] == s:
            return k
    return -1


@kernel
def change_device(
    rules: PathRules, counts: PathCounts, paths: Ints, b: int, rng_state: Words
) -> int:
    """Move to another device of the same stage; if it is full, exchange with a path through it.

    Returns the other microbatch, ``b`` if there is none, -1 if nothing was changed.
    """
    count, length = paths.shape
    k = 1 + next_below(rng_state, length - 1)
    d = paths[b, k]
    s = rules.stage[d]
    size = rules.stage_ptr[s + 1] - rules.stage_ptr[s]
    if size < 2:
        return -1
    v = rules.members[rules.stage_ptr[s] + next_below(rng_state, size)]
    if v == d or rules.capacity[v] == 0:
        return -1
    if counts.device[v] < rules.capacity[v] and next_unit(rng_state) < 0.7:
        paths[b, k] = v
        return b
    offset = next_below(rng_state, count)
    for i in range(count):
        c = (i + offset) % count
        j = position_of(paths[c], rules.stage, s)
        if c != b and j > 0 and paths[c, j] == v:
            paths[b, k], paths[c, j] = v, d
            return int(c)
    return -1


@kernel
def change_stage(
    rules: PathRules, counts: PathCounts, paths: Ints, b: int, rng_state: Words
) -> int:
    """Visit another stage; if CC3 requires it, exchange with a path that visits only that stage.

    Returns as `change_device` does.
    """
    count, length = paths.shape
    stages = len(rules.min_visits)
    k = 1 + next_below(rng_state, length - 1)
    d = paths[b, k]
    s = rules.stage[d]
    t = 1 + next_below(rng_state, stages - 1)
    if position_of(paths[b], rules.stage, t) > 0:
        return -1
    if counts.stage[s] > rules.min_visits[s] and counts.stage[t] < rules.max_visits[t]:
        size = rules.stage_ptr[t + 1] - rules.stage_ptr[t]
        v = rules.members[rules.stage_ptr[t] + next_below(rng_state, size)]
        if counts.device[v] < rules.capacity[v]:
            paths[b, k] = v
            return b
    offset = next_below(rng_state, count)
    for i in range(count):
        c = (i + offset) % count
        j = position_of(paths[c], rules.stage, t)
        if c != b and j > 0 and position_of(paths[c], rules.stage, s) < 0:
            paths[b, k], paths[c, j] = paths[c, j], d
            return int(c)
    return -1


@kernel
def exchange_paths(paths: Ints, b: int, rng_state: Words) -> int:
    """Exchange all devices after the first with a microbatch of another start device."""
    count, length = paths.shape
    c = int(next_below(rng_state, count))
    if paths[c, 0] == paths[b, 0]:
        return -1
    for k in range(1, length):
        paths[b, k], paths[c, k] = paths[c, k], paths[b, k]
    return c


@kernel
def change_order(rules: PathRules, paths: Ints, b: int, rng_state: Words) -> int:
    """Swap two neighbouring stages (CC2), or swap them back."""
    length = paths.shape[1]
    if length < 3 or rules.max_swaps == 0:
        return -1
    k = 1 + next_below(rng_state, length - 2)
    gap = rules.stage[paths[b, k]] - rules.stage[paths[b, k + 1]]
    if gap != 1 and gap != -1:
        return -1
    paths[b, k], paths[b, k + 1] = paths[b, k + 1], paths[b, k]
    return b if in_order(paths[b], rules.stage, rules.max_swaps) else -1
