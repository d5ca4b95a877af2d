"""Lower bound by start devices: how soon their memory admits the next microbatch."""

from __future__ import annotations


def earliest_begins_s(
    forward_s: float, backward_s: float, memory: int, count: int, shortest_s: float
) -> list[float]:
    """Earliest start of the j-th F of a start device, for every j.

    Notes
    -----
    Let S_j be the start of the j-th F (from 0), E_k the end of the k-th B (from 1), m the memory,
    f and b the seconds of F and B, C the shortest chain of any microbatch. Then

    - S_j >= S_{j-1} + f, E_k >= E_{k-1} + b, and E_k >= S_{k-1} + C, as one of the first k to end
      was not among the first k - 1 to begin;
    - with j >= m, F_j comes after k = j - m + 1 ends. For every r <= k the device does, between
      the start of the r-th B and S_j, the B of r..k and the F of r + m - 1..j - 1, which had to
      wait for the r-th end: S_j >= E_r + (k - r) (b + f).

    The same holds with time reversed: with F and B exchanged these are the least seconds after the
    end of the j-th last B.
    """
    f, b = forward_s, backward_s
    starts: list[float] = []
    ends: list[float] = []
    for j in range(count):
        earliest = starts[-1] + f if starts else 0.0
        num_ended = j - memory + 1
        for r in range(1, num_ended + 1):
            earliest = max(earliest, ends[r - 1] + (num_ended - r) * (b + f))
        starts.append(earliest)
        ends.append(max(earliest + shortest_s, ends[-1] + b if ends else 0.0))
    return starts


def turnover_s(
    forward_s: float, head_s: float, backward_s: float, memory: int, count: int, shortest_s: float
) -> float:
    """Least seconds in which a start device starts and finishes ``count`` microbatches.

    Parameters
    ----------
    forward_s, head_s, backward_s
        Seconds of F, H and B on the device.
    memory
        Most microbatches between F and B on it.
    count
        Its microbatches.
    shortest_s
        Least seconds from the begin of a microbatch's F on the device to the end of its B.
    """
    first = earliest_begins_s(forward_s, backward_s, memory, count, shortest_s)
    last = earliest_begins_s(backward_s, forward_s, memory, count, shortest_s)
    # over all orders of F and B:
    # the largest of sums of two sequences is least when one ascends and the other descends
    span = max(a + b for a, b in zip(first, reversed(last), strict=True)) + shortest_s
    return max(span, count * (forward_s + head_s + backward_s))
