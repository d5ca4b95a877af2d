"""Recomputes bounds on paths from their witnesses.

A direct, slow implementation from the definitions of `PathProblem`. A witness only names a start
device or a stage; all numbers come from the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from planner.problems import ArrangedPathProblem, PathProblem


def recomputed_bound_s(witness: Any, problem: PathProblem | ArrangedPathProblem) -> float | None:
    """The bound in seconds that a witness proves; None if it proves none."""
    if not isinstance(witness, Mapping):
        return None
    kind = witness.get("kind")
    if isinstance(problem, ArrangedPathProblem):
        if kind == "work":
            return _work_s(problem)
        return _start_devices_s(problem) if kind == "turnover of start devices" else None
    if kind == "turnover":
        device = _index(witness.get("device"), len(problem.transfer_s))
        return None if device is None else _turnover_s(problem, device)
    if kind == "stage visits":
        stage = _index(witness.get("stage"), len(problem.stage_devices))
        return None if stage is None else _stage_visits_s(problem, stage)
    if kind in ("links out of", "links into"):
        return _links_s(problem, kind == "links out of", witness)
    return None


def _index(value: Any, size: int) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size:
        return value
    return None


def _turnover_s(problem: PathProblem, device: int) -> float | None:
    """Least time of a start device for its microbatches, given its memory and sequential work."""
    if device not in problem.stage_devices[0]:
        return None
    count = problem.microbatches_per_start
    memory = int(problem.memory[device]) if problem.live_memory else count
    if memory < 1:
        return None
    f, h, b = (float(x[device]) for x in (problem.forward_s, problem.head_s, problem.backward_s))
    return _span_s(count, memory, (f, h, b), _shortest_path_s(problem, device))


def _span_s(count: int, memory: int, work: tuple[float, float, float], chain_s: float) -> float:
    """Least time in which one device begins and ends ``count`` microbatches."""
    f, h, b = work
    head_s = _earliest_begins_s(count, memory, f, b, chain_s)
    # the same with time reversed: B begins and F ends
    tail_s = _earliest_begins_s(count, memory, b, f, chain_s)
    # start and end order may differ: pair the longest waits before with the shortest after
    pairs = zip(sorted(head_s), sorted(tail_s, reverse=True), strict=True)
    return max(max(a + chain_s + c for a, c in pairs), count * (f + h + b))


def _earliest_begins_s(
    count: int, memory: int, first_s: float, last_s: float, chain_s: float
) -> list[float]:
    """Earliest start of the j-th microbatch: longest paths in a precedence graph.

    A microbatch occupies the device for ``first_s`` when it begins and for ``last_s`` when it
    ends, ``chain_s`` after its start or later. The j-th to end is no earlier than a chain after
    the j-th begin. With full memory, the j-th begins after ``j - memory + 1`` have ended; each of
    those that ends after the r-th occupies the device for its end and for the start of one that
    had to wait for the r-th end.
    """
    arcs: list[tuple[tuple[str, int], tuple[str, int], float]] = []
    for j in range(count):
        arcs.append((("begin", j), ("end", j), chain_s))
        if j + 1 < count:
            arcs.append((("begin", j), ("begin", j + 1), first_s))
            arcs.append((("end", j), ("end", j + 1), last_s))
        for r in range(j - memory + 1):
            arcs.append((("end", r), ("begin", j), (j - memory - r) * (first_s + last_s)))
    arcs.sort(key=lambda arc: (arc[0][1], arc[0][0]))
    time_s = {(event, j): 0.0 for event in ("begin", "end") for j in range(count)}
    changed = True
    while changed:
        changed = False
        for earlier, later, seconds in arcs:
            if time_s[earlier] + seconds > time_s[later]:
                time_s[later] = time_s[earlier] + seconds
                changed = True
    return [time_s["begin", j] for j in range(count)]


def _shortest_path_s(problem: PathProblem, start: int) -> float:
    """Seconds of the quickest path from a start device on an idle network (CC1, CC2).

    Enumerated by blocks: one stage, or two neighbouring stages in reverse order.
    """
    round_trip_s = _round_trip_s(problem)
    busy: list[float] = (problem.forward_s + problem.backward_s).tolist()
    memory = problem.memory.tolist()
    usable = [[d for d in group if memory[d] > 0] for group in problem.stage_devices]
    max_swaps = problem.max_swaps
    if problem.max_total_swaps is not None:
        max_swaps = min(max_swaps, problem.max_total_swaps)

    @cache
    def remaining_s(device: int, top: int, stages_left: int, swaps: int) -> float:
        """Least seconds after ``device`` with ``stages_left`` more stages, all above ``top``."""
        if stages_left == 0:
            return round_trip_s(device, start)
        best = math.inf
        for s in range(top + 1, len(usable)):
            for d in usable[s]:
                best = min(
                    best,
                    round_trip_s(device, d) + busy[d] + remaining_s(d, s, stages_left - 1, swaps),
                )
            if stages_left < 2 or swaps == 0 or s + 1 == len(usable):
                continue
            for high in usable[s + 1]:
                for low in usable[s]:
                    block = (
                        round_trip_s(device, high)
                        + busy[high]
                        + round_trip_s(high, low)
                        + busy[low]
                    )
                    best = min(best, block + remaining_s(low, s + 1, stages_left - 2, swaps - 1))
        return best

    start_s = busy[start] + float(problem.head_s[start])
    return start_s + remaining_s(start, 0, problem.path_stages - 1, max_swaps)


def _round_trip_s(
    problem: PathProblem | ArrangedPathProblem,
) -> Callable[[int, int], float]:
    """Round-trip transfer seconds between two devices, 0 on the same device."""
    seconds = problem.transfer_s.tolist()
    return lambda u, v: 0.0 if u == v else float(seconds[u][v] + seconds[v][u])


def _stage_visits_s(problem: PathProblem, stage: int) -> float | None:
    """Least time in which a stage's devices can serve the fewest visits required by CC3.

    A device with v visits runs F and B v times, and in one visit H lies between them; before that
    a microbatch has to reach the device, and afterwards to return.
    """
    visits = _min_visits(problem, stage)
    if visits == 0:
        return None
    entry_s, return_s = _entry_and_return_s(problem)
    f, b = problem.forward_s.tolist(), problem.backward_s.tolist()
    head = min(float(problem.head_s[s]) for s in problem.stage_devices[0])
    ends = []
    for d in problem.stage_devices[stage]:
        busy = f[d] + b[d]
        for v in range(1, min(_max_paths(problem, d), visits) + 1):
            ends.append(entry_s(d) + max(v * busy, busy + head) + return_s(d))
    ends.sort()
    return ends[visits - 1] if len(ends) >= visits else None


def _min_visits(problem: PathProblem, stage: int) -> int:
    """Fewest visits by CC3; 0 for stage 0, which is never skipped."""
    if stage == 0:
        return 0
    microbatches = len(problem.stage_devices[0]) * problem.microbatches_per_start
    return microbatches * (problem.path_stages - 1) // (len(problem.stage_devices) - 1)


def _max_paths(problem: PathProblem, device: int) -> int:
    """Most paths through a device by TC1."""
    memory = int(problem.memory[device])
    if problem.live_memory:
        return len(problem.stage_devices[0]) * problem.microbatches_per_start if memory > 0 else 0
    return memory


def _entry_and_return_s(
    problem: PathProblem,
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Least seconds before F can begin on a device, and after B has ended there."""
    starts, hops = problem.stage_devices[0], problem.path_stages - 1
    hop = problem.transfer_s.tolist()
    f, b = problem.forward_s.tolist(), problem.backward_s.tolist()
    devices = range(len(hop))

    @cache
    def entry_s(d: int, hops: int) -> float:
        """Least seconds before F can begin on a device, over at most ``hops`` transfers."""
        best = min(f[s] + hop[s][d] for s in starts)
        if hops > 1:
            best = min(best, min(entry_s(v, hops - 1) + f[v] + hop[v][d] for v in devices))
        return float(best)

    @cache
    def return_s(d: int, hops: int) -> float:
        """Least seconds after B has ended on a device."""
        best = min(hop[d][s] + b[s] for s in starts)
        if hops > 1:
            best = min(best, min(hop[d][v] + b[v] + return_s(v, hops - 1) for v in devices))
        return float(best)

    return lambda d: entry_s(d, hops), lambda d: return_s(d, hops)


def _links_s(problem: PathProblem, out: bool, witness: Mapping[str, Any]) -> float | None:
    """Least time for all messages out of (into) a start device or a stage.

    A microbatch's visit causes two messages out and two in: forward and backward. A link's v-th
    message has been sent v times the busy seconds after the first F can end on the sender; then
    follow the rest of the transfer, a B, and the return.
    """
    if problem.link_s is None or problem.path_stages == 1:
        return None
    starts = problem.stage_devices[0]
    device = _index(witness.get("device"), len(problem.transfer_s))
    stage = _index(witness.get("stage"), len(problem.stage_devices))
    if device in starts and "stage" not in witness:
        group, messages = [device], 2 * problem.microbatches_per_start
    elif stage is not None and "device" not in witness:
        group, messages = list(problem.stage_devices[stage]), 2 * _min_visits(problem, stage)
    else:
        return None
    if messages == 0:
        return None
    entry_s, return_s = _entry_and_return_s(problem)
    stage_of = {d: s for s, devices in enumerate(problem.stage_devices) for d in devices}
    ends = []
    for source in group:
        for other in range(len(problem.transfer_s)):
            u, v = (source, other) if out else (other, source)
            if stage_of[u] == stage_of[v]:
                continue
            begins = (0.0 if u in starts else entry_s(u)) + float(problem.forward_s[u])
            ending = float(problem.backward_s[v]) + (0.0 if v in starts else return_s(v))
            busy = float(problem.link_s[u][v])
            slack_s = float(problem.transfer_s[u][v]) - busy + ending
            max_uses = 2 * min(_max_paths(problem, u), _max_paths(problem, v))
            ends += [begins + k * busy + slack_s for k in range(1, min(max_uses, messages) + 1)]
    ends.sort()
    return ends[messages - 1] if len(ends) >= messages else None


def _work_s(problem: ArrangedPathProblem) -> float:
    """All visits shared by devices that never idle, each on its fastest stage."""
    visits = problem.stage_sizes[0] * problem.microbatches_per_start * problem.path_stages
    busy = [
        min(float(f + b) for f, b in zip(forward, backward, strict=True))
        for forward, backward in zip(problem.forward_s.T, problem.backward_s.T, strict=True)
    ]
    return 0.0 if min(busy) == 0 else visits / sum(1 / x for x in busy)


def _start_devices_s(problem: ArrangedPathProblem) -> float | None:
    """Turnover of the slowest start device if those with the least turnover are chosen."""
    n, per_start = len(problem.transfer_s), problem.microbatches_per_start
    count = problem.stage_sizes[0]
    round_trip_s = _round_trip_s(problem)
    busy_later = [
        min((float(row[d]) for row in (problem.forward_s + problem.backward_s)[1:]), default=0.0)
        for d in range(n)
    ]
    spans = []
    for start in range(n):
        memory = int(problem.memory[0, start])
        if memory < (1 if problem.live_memory else per_start):
            continue
        f, h, b = (
            float(x)
            for x in (
                problem.forward_s[0, start],
                problem.head_s[start],
                problem.backward_s[0, start],
            )
        )
        chain = f + h + b + _closed_walk_s(round_trip_s, busy_later, start, problem.path_stages - 1)
        spans.append(
            _span_s(per_start, memory if problem.live_memory else per_start, (f, h, b), chain)
        )
    spans.sort()
    return spans[count - 1] if len(spans) >= count else None


def _closed_walk_s(
    round_trip_s: Callable[[int, int], float], busy: list[float], start: int, devices: int
) -> float:
    """Least seconds of a closed walk over ``devices`` other devices, repetitions allowed."""

    @cache
    def remaining_s(device: int, stages_left: int) -> float:
        if stages_left == 0:
            return round_trip_s(device, start)
        return min(
            (
                round_trip_s(device, d) + busy[d] + remaining_s(d, stages_left - 1)
                for d in range(len(busy))
                if d not in (device, start)
            ),
            default=math.inf,
        )

    return remaining_s(start, devices)
