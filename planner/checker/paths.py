"""Independent verifier of microbatch paths: SkipPipe's constraints and the timeline, one by one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from planner.checker.violation import Violation
from planner.problems import ArrangedPathProblem, PathProblem
from planner.problems.answers import ArrangedPathPlan, PathOp, PathPlan

TOLERANCE = 1e-9
"""Relative to the makespan: intervals may overlap this much by rounding."""


def check_paths(plan: PathPlan, problem: PathProblem) -> list[Violation]:
    """Report every constraint that a plan breaks."""
    wrong = list(_paths(plan, problem)) or list(_not_finite(plan))
    return wrong if wrong else list(_timeline(plan, problem))


def check_arrangement(plan: ArrangedPathPlan, problem: ArrangedPathProblem) -> list[Violation]:
    """Check that every device holds one stage and that stages have the required sizes."""
    wrong = []
    assigned = sorted(d for group in plan.groups for d in group)
    if assigned != list(range(len(problem))):
        wrong.append(Violation("groups", "groups", f"each device once, found {assigned}"))
    sizes = tuple(len(group) for group in plan.groups)
    if sizes != problem.stage_sizes:
        stage_sizes = problem.stage_sizes
        as_many = len(sizes) == len(stage_sizes) and 0 not in sizes and sizes[0] == stage_sizes[0]
        if problem.fixed_sizes or not as_many:
            wrong.append(Violation("groups", "groups", f"sizes {stage_sizes}, found {sizes}"))
    return wrong


def stage_spans_s(plan: ArrangedPathPlan, problem: ArrangedPathProblem) -> float:
    """The longest time from a stage's first operation to the end of its averaging round."""
    averaging = problem.averaging
    assert averaging is not None
    longest = 0.0
    for s, group in enumerate(plan.groups):
        vector, m = float(averaging.vector_bytes[s]), len(group)
        uses = [0.0]
        for d in group:
            # send and receive m - 1 times a share in each of two phases
            uses.append(2 * (m - 1) * vector / m * float(averaging.line_s_per_byte[d]))
            uses += [
                2 * vector / m * float(averaging.pair_s_per_byte[d, e]) for e in group if e != d
            ]
        rtt_s = max((float(averaging.away_s[d, e]) for d in group for e in group), default=0.0)
        stage_ops = [op for op in plan.paths.ops if op.device in group]
        span = max((op.end_s for op in stage_ops), default=0.0)
        span -= min((op.start_s for op in stage_ops), default=0.0)
        longest = max(longest, span + (max(uses) + rtt_s if m > 1 else 0.0))
    return longest


def _paths(plan: PathPlan, problem: PathProblem) -> Iterator[Violation]:
    starts = [d for d in problem.stage_devices[0] for _ in range(problem.microbatches_per_start)]
    stage_of = {d: s for s, group in enumerate(problem.stage_devices) for d in group}
    if len(plan.paths) != len(starts):
        yield Violation("paths", "paths", f"expected {len(starts)} paths, found {len(plan.paths)}")
        return
    for b, path in enumerate(plan.paths):
        where = f"paths[{b}]"
        unknown = [d for d in path if d not in stage_of]
        if unknown or not path:
            yield Violation("paths", where, f"expected devices of the problem, found {list(path)}")
            return
        if path[0] != starts[b]:
            yield Violation("CC1", where, f"must start at device {starts[b]}, found {path[0]}")
        stages = [stage_of[d] for d in path]
        if len(path) != problem.path_stages:
            yield Violation(
                "skip", where, f"must visit {problem.path_stages} stages, found {len(path)}"
            )
        if len(set(stages)) < len(stages):
            yield Violation("paths", where, f"visits a stage twice: {stages}")
        swaps = swaps_of(stages[1:])
        if swaps is None or swaps > problem.max_swaps:
            yield Violation(
                "CC2",
                where,
                f"stages may ascend with at most {problem.max_swaps} swaps of neighbours, found "
                f"{stages}",
            )
    swapped = sum(swaps_of([stage_of[d] for d in path[1:]]) or 0 for path in plan.paths)
    if problem.max_total_swaps is not None and swapped > problem.max_total_swaps:
        yield Violation(
            "CC2",
            "paths",
            f"may have {problem.max_total_swaps} swaps together (D.2), found {swapped}",
        )
    yield from even_visits_violations(plan.paths, stage_of, len(problem.stage_devices))
    if not problem.live_memory:
        for d, memory in enumerate(problem.memory.tolist()):
            through = sum(d in path for path in plan.paths)
            if through > memory:
                yield Violation("TC1", f"device {d}", f"may hold {memory} paths, found {through}")


def even_visits_violations(
    paths: Sequence[Sequence[int]], stage_of: Mapping[int, int], stages: int
) -> Iterator[Violation]:
    """CC3: every stage but the first has the floor or ceiling of the mean visits."""
    visits = Counter(stage_of[d] for path in paths for d in path)
    del visits[0]
    other_stages = stages - 1
    total = visits.total()
    for s in range(1, stages):
        # integers: |visits - total / others| < 1
        if abs(visits[s] * other_stages - total) >= other_stages:
            low, high = total // other_stages, -(-total // other_stages)
            yield Violation(
                "CC3", f"stage {s}", f"must be visited {low} to {high} times, found {visits[s]}"
            )


def swaps_of(stages: Sequence[int]) -> int | None:
    """Number of swapped pairs s + 1, s in an otherwise ascending order; None for other orders."""
    order = list(stages)
    swaps = k = 0
    while k + 1 < len(order):
        if order[k] == order[k + 1] + 1:
            order[k], order[k + 1] = order[k + 1], order[k]
            swaps += 1
            k += 2
        else:
            k += 1
    return swaps if order == sorted(order) else None


def _not_finite(plan: PathPlan) -> Iterator[Violation]:
    """Report times that are not finite: comparisons with NaN would pass all other rules."""
    for op in plan.ops:
        if not (math.isfinite(op.start_s) and math.isfinite(op.end_s)):
            yield Violation(
                "timeline",
                f"{op.kind} of microbatch {op.microbatch} on device {op.device}",
                f"must begin and end at finite times, found {op.start_s:g} and {op.end_s:g} s",
            )


def _timeline(plan: PathPlan, problem: PathProblem) -> Iterator[Violation]:
    slack = TOLERANCE * max((op.end_s for op in plan.ops), default=0.0)
    seconds = {"F": problem.forward_s, "B": problem.backward_s, "H": problem.head_s}
    by_key: dict[tuple[int, str, int], PathOp] = {}
    for op in plan.ops:
        key = (op.microbatch, op.kind, op.device)
        if key in by_key:
            yield Violation("timeline", f"ops of microbatch {op.microbatch}", f"{key} is twice")
            return
        by_key[key] = op
    expected_ops = 0
    for b, path in enumerate(plan.paths):
        chain = [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in reversed(path))]
        expected_ops += len(chain)
        ready, device = 0.0, path[0]
        for kind, d in chain:
            op_or_none = by_key.get((b, kind, d))
            where = f"{kind} of microbatch {b} on device {d}"
            if op_or_none is None:
                yield Violation("timeline", where, "is missing")
                return
            begins = ready + float(problem.transfer_s[device, d])
            if op_or_none.start_s < begins - slack:
                yield Violation(
                    "timeline",
                    where,
                    f"cannot start before {begins:.9g} s, found {op_or_none.start_s:.9g} s",
                )
            duration_s = op_or_none.end_s - op_or_none.start_s
            if abs(duration_s - float(seconds[kind][d])) > slack:
                yield Violation(
                    "timeline", where, f"takes {seconds[kind][d]:.9g} s, found {duration_s:.9g} s"
                )
            ready, device = op_or_none.end_s, d
    if expected_ops != len(plan.ops):
        yield Violation(
            "timeline", "ops", f"expected {expected_ops} operations, found {len(plan.ops)}"
        )
    yield from _collisions(plan, problem, slack)
    if problem.link_s is not None:
        yield from _queues(plan, problem.link_s.tolist(), problem.transfer_s.tolist(), slack)
    if problem.live_memory:
        yield from _live_memory(plan, problem, slack)


def _collisions(plan: PathPlan, problem: PathProblem, slack: float) -> Iterator[Violation]:
    for d in range(len(problem)):
        device_ops = sorted(
            (op for op in plan.ops if op.device == d), key=lambda o: (o.start_s, o.end_s)
        )
        free = 0.0
        for op in device_ops:
            # operations that take no time cannot collide
            if op.start_s < free - slack and op.end_s > op.start_s:
                yield Violation(
                    "TC2",
                    f"device {d}",
                    f"{op.kind}{op.microbatch} starts at {op.start_s:.9g} s, before "
                    f"{free:.9g} s when the device is free",
                )
            free = max(free, op.end_s)


def _queues(
    plan: PathPlan, link_s: list[list[float]], transfer_s: list[list[float]], slack: float
) -> Iterator[Violation]:
    """Links carry one message at a time: no operation begins before its message arrives."""
    ops = {(op.microbatch, op.kind, op.device): op for op in plan.ops}
    sent: dict[tuple[int, int], list[tuple[float, PathOp]]] = defaultdict(list)
    for b, path in enumerate(plan.paths):
        chain = [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in reversed(path))]
        for (kind, u), (next_kind, v) in pairwise(chain):
            if u != v:
                sent[u, v].append((ops[b, kind, u].end_s, ops[b, next_kind, v]))
    for (u, v), messages in sorted(sent.items()):
        free = 0.0
        for enqueued_s, op in _fifo_order(messages, slack):
            departs_s = max(enqueued_s, free)
            free = departs_s + link_s[u][v]
            if op.start_s < departs_s + transfer_s[u][v] - slack:
                yield Violation(
                    "links",
                    f"link {u} -> {v}",
                    f"the message of {op.kind}{op.microbatch} leaves at {departs_s:.9g} s and is "
                    f"there at {departs_s + transfer_s[u][v]:.9g} s, found a start at "
                    f"{op.start_s:.9g} s",
                )


def _fifo_order(
    messages: Sequence[tuple[float, PathOp]], slack: float
) -> Iterator[tuple[float, PathOp]]:
    """Messages in queue order; of those queued together, the one that is needed first."""
    queued: list[tuple[float, PathOp]] = []
    for message in sorted(messages, key=lambda m: m[0]):
        if queued and message[0] > queued[0][0] + slack:
            yield from sorted(queued, key=lambda m: m[1].start_s)
            queued = []
        queued.append(message)
    yield from sorted(queued, key=lambda m: m[1].start_s)


def _live_memory(plan: PathPlan, problem: PathProblem, slack: float) -> Iterator[Violation]:
    for d, memory in enumerate(problem.memory.tolist()):
        events = []
        for op in plan.ops:
            if op.device == d and op.kind == "F":
                events.append((op.start_s + slack, 1))
            elif op.device == d and op.kind == "B":
                # half-open intervals: an end frees memory for a start at the same time
                events.append((op.end_s - slack, -1))
        live = peak = 0
        for _, change in sorted(events):
            live += change
            peak = max(peak, live)
        if peak > memory:
            yield Violation(
                "TC1", f"device {d}", f"may hold {memory} microbatches at a time, found {peak}"
            )
