"""How soon a start device can let in its microbatches: its memory, F and B in each other's way."""

from __future__ import annotations

from planner.mapf.tables import Tables


def waits(tables: Tables, start: int, count: int, shortest_s: float, last: bool) -> list[float]:
    """Least seconds before the j-th F of a start device begins, or after the j-th last B ends.

    Let S_j be the start of the j-th F (from 0), E_k the end of the k-th B (from 1), m the memory,
    f and b the seconds of F and B, C a chain that no microbatch undercuts. Then

    - S_j >= S_{j-1} + f, E_k >= E_{k-1} + b, and E_k >= S_{k-1} + C, as one of the first k to end
      was not among the first k - 1 to begin;
    - with j >= m, F_j comes after k = j - m + 1 ends. For every r <= k the device does, between
      the start of the r-th B and S_j, the B of r..k and the F of r + m - 1..j - 1, which had to
      wait for the r-th end: S_j >= E_r + (k - r) (b + f).

    The same holds with time reversed (``last``).
    """
    f, b = float(tables.forward[start]), float(tables.backward[start])
    if last:
        f, b = b, f
    memory = int(tables.memory[start])
    begins: list[float] = []
    ends: list[float] = []
    for j in range(count):
        soonest = begins[-1] + f if begins else 0.0
        done = j - memory + 1
        for r in range(1, done + 1):
            soonest = max(soonest, ends[r - 1] + (done - r) * (b + f))
        begins.append(soonest)
        ends.append(max(soonest + shortest_s, ends[-1] + b if ends else 0.0))
    return begins
