"""Iterations of several waves (live memory): solve one wave and repeat its paths.

Strictly one wave after the other is the paper's reuse of paths (SkipPipe, Appendix D.1);
overlapping waves, with every microbatch admitted as soon as memory allows, are initial solutions of
the search.
"""

from __future__ import annotations

import sys

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.fixed_order import FOLLOW_TIMES, schedule_paths
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.list_scheduling import DEFAULT_TAIL_WEIGHT
from planner.problems import PathProblem
from planner.search.arrays import Floats, Ints


def wave_problem(problem: PathProblem, max_size: int = sys.maxsize) -> PathProblem | None:
    """The problem of the largest wave that divides the iteration; None if there is no smaller one.

    In a wave TC1 limits the number of paths through a device.
    """
    per_start = problem.microbatches_per_start
    if not problem.live_memory:
        return None
    capacity = int(problem.memory[list(problem.stage_devices[0])].min())
    for size in range(min(per_start - 1, capacity, max_size), 0, -1):
        max_total_swaps = problem.max_total_swaps
        wave = problem.replace(
            microbatches_per_start=size,
            live_memory=False,
            # every wave repeats the swaps of the first, so each gets an equal part of the limit
            max_total_swaps=None
            if max_total_swaps is None
            else max_total_swaps * size // per_start,
        )
        if per_start % size == 0 and PathArrays.of(wave).infeasibility() is None:
            return wave
    return None


def repeats_evenly(wave: PathProblem) -> bool:
    """Whether repeating any valid paths of the wave satisfies CC3."""
    fewest, largest = wave.visits
    return fewest == largest


def repeat_in_turn(
    arrays: PathArrays, wave: Ints, times: Floats, length_s: float
) -> tuple[Ints, Floats, float]:
    """Paths, starts and makespan of the repeated wave, without overlap of waves."""
    row_in_wave, wave_number = _rows(arrays, len(wave))
    paths, starts = wave[row_in_wave], times[row_in_wave] + wave_number[:, None] * length_s
    return paths, starts, float((starts[:, -1] + arrays.backward[paths[:, 0]]).max())


def offer_repeated_wave(
    arrays: PathArrays, incumbent: PathIncumbent, wave: Ints, times: Floats, length_s: float
) -> None:
    """Offer the repeated wave: without overlap, and with several degrees of overlap."""
    paths, begin, makespan = repeat_in_turn(arrays, wave, times, length_s)
    if visits_balanced(arrays, paths):
        incumbent.offer_schedule(paths, begin, makespan)
    repair_visits(arrays, paths)
    if not visits_balanced(arrays, paths):
        return
    row_in_wave, wave_number = _rows(arrays, len(wave))
    delay_s = wave_number[:, None] * length_s
    for overlap_factor in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.5):
        makespan, begins = schedule_paths(
            arrays, paths, times[row_in_wave] + delay_s * overlap_factor, FOLLOW_TIMES
        )
        incumbent.offer_schedule(paths, begins, makespan)
    for offset_factor in (0.02, 0.1, 0.3, 0.6, 1.0):
        offset = np.repeat(delay_s * offset_factor, arrays.steps, axis=1)
        for tail_weight in (DEFAULT_TAIL_WEIGHT, 0.1, 0.3):
            makespan, begins = schedule_paths(arrays, paths, offset, tail_weight)
            incumbent.offer_schedule(paths, begins, makespan)


def visits_balanced(arrays: PathArrays, paths: Ints) -> bool:
    """Whether the visits per stage satisfy CC3."""
    count = np.bincount(arrays.stage[paths.ravel()], minlength=len(arrays.max_visits))
    return bool((count >= arrays.min_visits).all() and (count <= arrays.max_visits).all())


def repair_visits(arrays: PathArrays, paths: Ints) -> None:
    """Move visits from stages with too many to stages with too few (CC3), in place.

    Visits per stage of a wave are rounded, so their multiples can violate CC3. Visits stay where
    they are if no device of the other stage has capacity (TC1).
    """
    target = arrays.visits_per_stage()
    count = np.bincount(arrays.stage[paths.ravel()], minlength=len(target))
    if visits_balanced(arrays, paths):
        return
    for s in np.flatnonzero(count > target).tolist():
        for t in np.flatnonzero(count < target).tolist():
            for b in range(len(paths)):
                if count[s] <= target[s] or count[t] >= target[t]:
                    break
                stages = arrays.stage[paths[b]]
                if s in stages and t not in stages:
                    devices = [d for d in paths[b, 1:].tolist() if arrays.stage[d] != s]
                    group = arrays.members[arrays.stage_ptr[t] : arrays.stage_ptr[t + 1]]
                    visits_of = np.bincount(paths.ravel(), minlength=len(arrays.stage))
                    free = [d for d in group.tolist() if arrays.capacity[d] > visits_of[d]]
                    if not free:
                        break
                    devices.append(min(free, key=lambda d: (visits_of[d], d)))
                    paths[b, 1:] = sorted(devices, key=lambda d: int(arrays.stage[d]))
                    count[s] -= 1
                    count[t] += 1


def _rows(arrays: PathArrays, count: int) -> tuple[Ints, Ints]:
    """The microbatch of the wave that each microbatch repeats, and its wave."""
    starts = len(dict.fromkeys(arrays.starts.tolist()))
    wave_size, per_start = count // starts, arrays.microbatches // starts
    index = np.arange(arrays.microbatches)
    start, of_start = index // per_start, index % per_start
    return start * wave_size + of_start % wave_size, of_start // wave_size
