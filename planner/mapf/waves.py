"""Several waves (live memory): the paths of one wave, found first, used for every wave.

Strictly one wave after the other it is the paper's reuse of paths (SkipPipe, Appendix D.1); with
every microbatch let in as soon as memory allows it is a starting point for the search.
"""

from __future__ import annotations

import numpy as np

from planner.mapf.dispatch import PULL
from planner.mapf.follow import FOLLOW, scheduled
from planner.mapf.incumbent import Incumbent
from planner.mapf.tables import Floats, Ints, Tables
from planner.problems import PathProblem


def wave_problem(problem: PathProblem) -> PathProblem | None:
    """The problem of one wave, the largest that divides the iteration; None if it is no smaller.

    TC1 holds in it as a count of paths.
    """
    each = problem.microbatches_per_start
    if not problem.live_memory:
        return None
    for size in range(
        min(each - 1, int(problem.memory[list(problem.stage_devices[0])].min())), 0, -1
    ):
        cap = problem.max_total_swaps
        wave = problem.replace(
            microbatches_per_start=size,
            live_memory=False,
            # every wave repeats the swaps of the first
            max_total_swaps=None if cap is None else cap * size // each,
        )
        if each % size == 0 and Tables.of(wave).impossible() is None:
            return wave
    return None


def repeats_evenly(wave: PathProblem) -> bool:
    """Whether the paths of the wave, repeated, satisfy CC3 whatever they are."""
    fewest, most = wave.visits
    return fewest == most


def in_turn(
    tables: Tables, wave: Ints, times: Floats, length_s: float
) -> tuple[Ints, Floats, float]:
    """Paths, starts and makespan of the wave repeated, each after the end of the one before."""
    rows, turn = _rows(tables, len(wave))
    starts = times[rows] + turn[:, None] * length_s
    return wave[rows], starts, length_s * (int(turn.max()) + 1)


def offer_waves(
    tables: Tables, incumbent: Incumbent, wave: Ints, times: Floats, length_s: float
) -> None:
    """Offer the wave repeated: strictly in turn, and overlapping with different eagerness."""
    paths, begin, makespan = in_turn(tables, wave, times, length_s)
    if even(tables, paths):
        incumbent.offer_times(paths, begin, makespan)
    repair(tables, paths)
    if not even(tables, paths):
        return
    rows, turn = _rows(tables, len(wave))
    later = turn[:, None] * length_s
    for early in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.5):
        makespan, found = scheduled(tables, paths, times[rows] + later * early, FOLLOW)
        incumbent.offer_times(paths, found, makespan)
    for late in (0.02, 0.1, 0.3, 0.6, 1.0):
        nudge = np.repeat(later * late, tables.steps, axis=1)
        for pull in (PULL, 0.1, 0.3):
            makespan, found = scheduled(tables, paths, nudge, pull)
            incumbent.offer_times(paths, found, makespan)


def even(tables: Tables, paths: Ints) -> bool:
    """CC3."""
    count = np.bincount(tables.stage[paths.ravel()], minlength=len(tables.most))
    return bool((count >= tables.fewest).all() and (count <= tables.most).all())


def repair(tables: Tables, paths: Ints) -> None:
    """Move visits from stages with too many to stages with too few (CC3), in place.

    The shares of a part are rounded; those of the whole need not be their multiples. Where no
    device of a stage has room (TC1) visits stay where they are.
    """
    target = tables.shares()
    count = np.bincount(tables.stage[paths.ravel()], minlength=len(target))
    if even(tables, paths):
        return
    for s in np.flatnonzero(count > target).tolist():
        for t in np.flatnonzero(count < target).tolist():
            for b in range(len(paths)):
                if count[s] <= target[s] or count[t] >= target[t]:
                    break
                stages = tables.stage[paths[b]]
                if s in stages and t not in stages:
                    row = [d for d in paths[b, 1:].tolist() if tables.stage[d] != s]
                    group = tables.members[tables.first[t] : tables.first[t + 1]]
                    use = np.bincount(paths.ravel(), minlength=len(tables.stage))
                    free = [d for d in group.tolist() if tables.room[d] > use[d]]
                    if not free:
                        break
                    row.append(min(free, key=lambda d: (use[d], d)))
                    paths[b, 1:] = sorted(row, key=lambda d: int(tables.stage[d]))
                    count[s] -= 1
                    count[t] += 1


def _rows(tables: Tables, count: int) -> tuple[Ints, Ints]:
    """The microbatch of the wave that each microbatch repeats, and its wave."""
    starts = len(dict.fromkeys(tables.starts.tolist()))
    size, each = count // starts, tables.microbatches // starts
    index = np.arange(tables.microbatches)
    return index // each * size + index % each % size, index % each // size
