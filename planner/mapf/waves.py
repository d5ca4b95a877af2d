"""Several waves (live memory): the paths of one wave, found first, used for every wave.

Strictly one wave after the other it is the paper's reuse of paths (SkipPipe, Appendix D.1); with
every microbatch let in as soon as memory allows it is a starting point for the search.
"""

from __future__ import annotations

import sys

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.dispatch import PULL
from planner.mapf.fixed_order import FOLLOW, scheduled
from planner.mapf.incumbent import PathIncumbent
from planner.problems import PathProblem
from planner.search.arrays import Floats, Ints


def wave_problem(problem: PathProblem, most: int = sys.maxsize) -> PathProblem | None:
    """The problem of one wave, the largest that divides the iteration; None if it is no smaller.

    TC1 holds in it as a count of paths.
    """
    each = problem.microbatches_per_start
    if not problem.live_memory:
        return None
    room = int(problem.memory[list(problem.stage_devices[0])].min())
    for size in range(min(each - 1, room, most), 0, -1):
        cap = problem.max_total_swaps
        wave = problem.replace(
            microbatches_per_start=size,
            live_memory=False,
            # every wave repeats the swaps of the first
            max_total_swaps=None if cap is None else cap * size // each,
        )
        if each % size == 0 and PathArrays.of(wave).impossible() is None:
            return wave
    return None


def repeats_evenly(wave: PathProblem) -> bool:
    """Whether the paths of the wave, repeated, satisfy CC3 whatever they are."""
    fewest, most = wave.visits
    return fewest == most


def in_turn(
    arrays: PathArrays, wave: Ints, times: Floats, length_s: float
) -> tuple[Ints, Floats, float]:
    """Paths, starts and makespan of the wave repeated, each after the end of the one before."""
    rows, turn = _rows(arrays, len(wave))
    paths, starts = wave[rows], times[rows] + turn[:, None] * length_s
    return paths, starts, float((starts[:, -1] + arrays.backward[paths[:, 0]]).max())


def offer_waves(
    arrays: PathArrays, incumbent: PathIncumbent, wave: Ints, times: Floats, length_s: float
) -> None:
    """Offer the wave repeated: strictly in turn, and overlapping with different eagerness."""
    paths, begin, makespan = in_turn(arrays, wave, times, length_s)
    if even(arrays, paths):
        incumbent.offer_times(paths, begin, makespan)
    repair(arrays, paths)
    if not even(arrays, paths):
        return
    rows, turn = _rows(arrays, len(wave))
    later = turn[:, None] * length_s
    for early in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.5):
        makespan, found = scheduled(arrays, paths, times[rows] + later * early, FOLLOW)
        incumbent.offer_times(paths, found, makespan)
    for late in (0.02, 0.1, 0.3, 0.6, 1.0):
        nudge = np.repeat(later * late, arrays.steps, axis=1)
        for pull in (PULL, 0.1, 0.3):
            makespan, found = scheduled(arrays, paths, nudge, pull)
            incumbent.offer_times(paths, found, makespan)


def even(arrays: PathArrays, paths: Ints) -> bool:
    """CC3."""
    count = np.bincount(arrays.stage[paths.ravel()], minlength=len(arrays.most))
    return bool((count >= arrays.fewest).all() and (count <= arrays.most).all())


def repair(arrays: PathArrays, paths: Ints) -> None:
    """Move visits from stages with too many to stages with too few (CC3), in place.

    The shares of a part are rounded; those of the whole need not be their multiples. Where no
    device of a stage has room (TC1) visits stay where they are.
    """
    target = arrays.shares()
    count = np.bincount(arrays.stage[paths.ravel()], minlength=len(target))
    if even(arrays, paths):
        return
    for s in np.flatnonzero(count > target).tolist():
        for t in np.flatnonzero(count < target).tolist():
            for b in range(len(paths)):
                if count[s] <= target[s] or count[t] >= target[t]:
                    break
                stages = arrays.stage[paths[b]]
                if s in stages and t not in stages:
                    row = [d for d in paths[b, 1:].tolist() if arrays.stage[d] != s]
                    group = arrays.members[arrays.first[t] : arrays.first[t + 1]]
                    use = np.bincount(paths.ravel(), minlength=len(arrays.stage))
                    free = [d for d in group.tolist() if arrays.room[d] > use[d]]
                    if not free:
                        break
                    row.append(min(free, key=lambda d: (use[d], d)))
                    paths[b, 1:] = sorted(row, key=lambda d: int(arrays.stage[d]))
                    count[s] -= 1
                    count[t] += 1


def _rows(arrays: PathArrays, count: int) -> tuple[Ints, Ints]:
    """The microbatch of the wave that each microbatch repeats, and its wave."""
    starts = len(dict.fromkeys(arrays.starts.tolist()))
    size, each = count // starts, arrays.microbatches // starts
    index = np.arange(arrays.microbatches)
    return index // each * size + index % each % size, index % each // size
