"""Path coarsening: microbatches of one start device grouped into one agent (SkipPipe, D.1).

A group takes one path and works through each device without interruption. There are far fewer
groups than microbatches, so they are scheduled sooner and worse; a schedule of groups, told apart
again, is one of microbatches.
"""

from __future__ import annotations

import numpy as np

from planner.mapf.tables import Floats, Ints, Tables
from planner.problems import PathProblem


def coarse_problem(problem: PathProblem) -> tuple[PathProblem, int] | None:
    """The problem of groups of equal size, and that size; None if only single ones fit memory.

    The largest size that divides the microbatches of a start device and, as the paper has it, that
    memory holds at once.
    """
    each = problem.microbatches_per_start
    for size in range(min(each, int(problem.memory.max())), 1, -1):
        cap = problem.max_total_swaps
        coarse = problem.replace(
            forward_s=problem.forward_s * size,
            backward_s=problem.backward_s * size,
            head_s=problem.head_s * size,
            memory=problem.memory // size,
            microbatches_per_start=each // size,
            max_total_swaps=None if cap is None else cap // size,
        )
        if each % size == 0 and Tables.of(coarse).impossible() is None:
            return coarse, size
    return None


def told_apart(tables: Tables, groups: Ints, begin: Floats, size: int) -> tuple[Ints, Floats]:
    """Paths of the microbatches, and times to follow: one after the other in each group's turn."""
    paths = np.repeat(groups, size, axis=0)
    back = paths[:, ::-1]
    seconds = np.hstack([tables.forward[paths], tables.head[paths[:, :1]], tables.backward[back]])
    turn = np.arange(len(paths))[:, None] % size
    return paths, np.repeat(begin, size, axis=0) + turn * seconds
