"""Local search on balanced partitions: the paper's circular swaps, and Kernighan-Lin's.

DT-FM, section 3.4. A partition is an array with the group of every device; w is the link cost
between two devices (eq. 3). Compiled, because a genetic run makes many thousand swaps.
"""

from __future__ import annotations

import enum

import numpy as np

from planner.search.arrays import Floats2, Ints
from planner.search.compiled import allocating_entry, kernel


class LocalSearch(enum.StrEnum):
    """Local search of an offspring.

    ``CIRCULAR_SWAPS``: the paper's chains of swaps between the ends of fast links.
    ``KERNIGHAN_LIN``: one swap of any pair of devices per pair of groups.
    """

    CIRCULAR_SWAPS = "circular swaps"
    KERNIGHAN_LIN = "kernighan-lin"
    NONE = "none"


@kernel
def _fastest_link(w: Floats2, group_of: Ints, group: int) -> tuple[int, int]:
    """Endpoints of the fastest link within a group; (-1, -1) for a group of one."""
    n = len(group_of)
    a, b = -1, -1
    for d in range(n):
        if group_of[d] != group:
            continue
        for e in range(d + 1, n):
            if group_of[e] == group and (a < 0 or w[d, e] < w[a, b]):
                a, b = d, e
    return a, b


@kernel
def _cost_to_group(w: Floats2, group_of: Ints, device: int, group: int) -> float:
    """Sum of w from a device to the members of a group."""
    total: float = 0.0
    for e in range(len(group_of)):
        if group_of[e] == group and e != device:
            total += w[device, e]
    return total


@kernel
def _gain_paper(
    w: Floats2, group_of: Ints, sizes: Ints, d: int, d_fast: int, e: int, e_fast: int
) -> float:
    """The paper's GAIN for d of C_j (fastest partner ``d_fast``) and e of C_j'.

    Before the swap d would reach C_j' at the mean cost of its links there; after it, over its fast
    link to the partner that stays in C_j; and likewise for e.
    """
    own_group, other = group_of[d], group_of[e]
    gain: float = (
        _cost_to_group(w, group_of, d, other) / sizes[other]
        - w[d, d_fast]
        + _cost_to_group(w, group_of, e, own_group) / sizes[own_group]
        - w[e, e_fast]
    )
    return gain


@kernel
def _gain_kl(w: Floats2, group_of: Ints, d: int, e: int) -> float:
    """GAIN_KL of section 3.4."""
    own_group, other = group_of[d], group_of[e]
    gain: float = (
        _cost_to_group(w, group_of, d, other)
        - _cost_to_group(w, group_of, d, own_group)
        + _cost_to_group(w, group_of, e, own_group)
        - _cost_to_group(w, group_of, e, other)
        - 2 * w[d, e]
    )
    return gain


@kernel
def _best_paper_swap(
    w: Floats2, group_of: Ints, sizes: Ints, locked: Ints, i: int, j: int
) -> tuple[float, int, int]:
    """Best of the four swaps between the endpoints of both groups' fastest links.

    Returns its gain, the device of group i and that of group j (-1 if there is none). Locked
    devices are not moved.
    """
    best, best_d, best_e = -np.inf, -1, -1
    d1, d2 = _fastest_link(w, group_of, i)
    e1, e2 = _fastest_link(w, group_of, j)
    if d1 < 0 or e1 < 0:
        return best, best_d, best_e
    for d, d_fast in ((d1, d2), (d2, d1)):
        for e, e_fast in ((e1, e2), (e2, e1)):
            if locked[d] or locked[e]:
                continue
            gain = _gain_paper(w, group_of, sizes, d, d_fast, e, e_fast)
            if gain > best:
                best, best_d, best_e = gain, d, e
    return best, best_d, best_e


@kernel
def _best_kl_swap(
    w: Floats2, group_of: Ints, locked: Ints, i: int, j: int
) -> tuple[float, int, int]:
    """Best swap by Kernighan-Lin's gain over all pairs, returned as by `_best_paper_swap`."""
    best, best_d, best_e = -np.inf, -1, -1
    for d in range(len(group_of)):
        if group_of[d] != i or locked[d]:
            continue
        for e in range(len(group_of)):
            if group_of[e] != j or locked[e]:
                continue
            gain = _gain_kl(w, group_of, d, e)
            if gain > best:
                best, best_d, best_e = gain, d, e
    return best, best_d, best_e


@allocating_entry
def greedy_swap_pass(w: Floats2, group_of: Ints, order: Ints) -> None:
    """Swap once between every pair of groups if Kernighan-Lin's gain is positive.

    A device is moved at most once per call.

    Parameters
    ----------
    w
        ``float[N, N]``, the link cost between two devices.
    group_of
        ``int[N]``, the group of every device; changed in place.
    order
        ``int[S]``, the groups in the order in which their pairs are visited.
    """
    locked = np.zeros(len(group_of), dtype=np.int64)
    for a in range(len(order)):
        for b in range(a + 1, len(order)):
            gain, d, e = _best_kl_swap(w, group_of, locked, order[a], order[b])
            if d >= 0 and gain > 0:
                group_of[d], group_of[e] = group_of[e], group_of[d]
                locked[d] = locked[e] = 1


@allocating_entry
def circular_swap_pass(w: Floats2, group_of: Ints, sizes: Ints, order: Ints) -> None:
    """Apply the best prefix of a chain of swaps by the paper's gain.

    The chain cycles through the groups in ``order``: each step swaps the best unlocked pair between
    consecutive groups even at a loss; swaps after the prefix with the largest total gain are
    undone.

    Parameters
    ----------
    w
        ``float[N, N]``, the link cost between two devices.
    group_of
        ``int[N]``, the group of every device; changed in place.
    sizes
        ``int[S]``, devices per group.
    order
        ``int[S]``, the groups in the order of the cycle.

    References
    ----------
    S.-J. Kang and B.-R. Moon, "A hybrid genetic algorithm for multiway graph partitioning" (2000).
    """
    n, groups = len(group_of), len(order)
    locked = np.zeros(n, dtype=np.int64)
    moved_d, moved_e = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    total, best_total = 0.0, 0.0
    count, best_count = 0, 0
    misses, at = 0, 0
    while count < n // 2 and misses < groups:
        i, j = order[at % groups], order[(at + 1) % groups]
        at += 1
        gain, d, e = _best_paper_swap(w, group_of, sizes, locked, i, j)
        if d < 0:
            misses += 1
            continue
        misses = 0
        group_of[d], group_of[e] = group_of[e], group_of[d]
        locked[d] = locked[e] = 1
        moved_d[count], moved_e[count] = d, e
        count += 1
        total += gain
        if total > best_total + 1e-12:
            best_total, best_count = total, count
    for k in range(count - 1, best_count - 1, -1):
        d, e = moved_d[k], moved_e[k]
        group_of[d], group_of[e] = group_of[e], group_of[d]
