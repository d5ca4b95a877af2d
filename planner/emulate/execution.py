"""What the ranks recorded, put together: steps with operations and messages, and their parts.

Times are those of the plan: what was run at a speed is multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from planner.training_plan.model import TrainingPlan

WARM_PASSES = 2
"""Passes through the cycle before the distances of step ends count."""


class Operation(NamedTuple):
    """An operation as it was done; seconds since its step's begin.

    Attributes
    ----------
    microbatch, device, kind
        Which; averaging (A) and update (U) have microbatch -1.
    """

    microbatch: int
    device: int
    kind: str
    start_s: float
    end_s: float


class Message(NamedTuple):
    """A message of the pipeline; seconds since its step's begin.

    Attributes
    ----------
    microbatch, kind
        Of the operation that waited for it.
    handed_over_s, arrived_s
        When it left its operation, and when its last byte was there.
    """

    microbatch: int
    kind: str
    source: int
    destination: int
    handed_over_s: float
    arrived_s: float


@dataclass(frozen=True)
class Step:
    """One step of all ranks.

    Attributes
    ----------
    number
        From 0; steps from rest are counted by themselves.
    begin_s, end_s
        Seconds of this machine's monotonic clock, from the first rank's begin to the last one's
        end.
    """

    number: int
    begin_s: float
    end_s: float
    operations: tuple[Operation, ...]
    messages: tuple[Message, ...]

    @property
    def pipeline_s(self) -> float:
        """To the end of the last F, H or B."""
        return max(op.end_s for op in self.operations if op.kind in "FHB")

    def averaging_s(self, plan: TrainingPlan) -> float | None:
        """The longest averaging of a stage, from a first round's begin; None: there was none.

        With that of what two stages share, of these.
        """
        done: dict[int, list[Operation]] = {}
        for op in sorted(self.operations, key=lambda op: op.start_s):
            if op.kind == "A":
                done.setdefault(op.device, []).append(op)
        # what two stages share comes last, of all who have a part in it
        stages = len(plan.stage_layers)
        tied = plan.averaged_by(stages) if plan.averages_tied else ()
        shared = {d: [done[d].pop()] for d in tied if d in done}
        found: dict[int, float] = {}
        for j, rounds in enumerate(plan.averaging):
            # on two frequencies a device does so twice
            mine = {d: ops for d, ops in (done if j < stages else shared).items() if ops}
            starts_of = {d: ops[0].start_s for d, ops in mine.items()}
            ends_of = {d: ops[-1].end_s for d, ops in mine.items()}
            members = [d for groups in rounds for group in groups for d in group.members]
            ends = [ends_of[d] for d in members if d in ends_of]
            for group in rounds[0] if rounds else ():
                # a round begins when its last member is ready
                starts = [starts_of[d] for d in group.members if d in starts_of]
                if starts:
                    found[j] = max(found.get(j, 0.0), max(ends) - max(starts))
        return plan.longest_averaging_s(found) if found else None


def steps_of(records: Sequence[Mapping[str, Any]], rest: bool, speed: float) -> list[Step]:
    """The steps from rest, or those that chain."""
    ranks = [[step for step in r["steps"] if bool(step["rest"]) is rest] for r in records]
    return [_step(parts, speed) for parts in zip(*ranks, strict=True)]


def _step(parts: Sequence[Mapping[str, Any]], speed: float) -> Step:
    begin = min(float(part["begin_s"]) for part in parts)

    def since(moment: Any) -> float:
        return (float(moment) - begin) * speed

    operations = sorted(
        (
            Operation(int(b), int(d), str(kind), since(start), since(end))
            for part in parts
            for b, d, kind, start, end in part["ops"]
        ),
        key=lambda op: op.start_s,
    )
    return Step(
        number=int(parts[0]["step"]),
        begin_s=begin,
        end_s=max(part["end_s"] for part in parts),
        operations=tuple(operations),
        messages=tuple(_messages((m for part in parts for m in part["messages"]), begin, speed)),
    )


def _messages(halves: Iterable[Sequence[Any]], begin_s: float, speed: float) -> list[Message]:
    """Each is known by halves: its sender knows when it left, its receiver when it arrived."""
    left: dict[tuple[int, str, int, int], float] = {}
    came: dict[tuple[int, str, int, int], float] = {}
    for b, kind, source, destination, _, handed_over, arrived in halves:
        key = int(b), str(kind), int(source), int(destination)
        if handed_over is not None:
            left[key] = (float(handed_over) - begin_s) * speed
        if arrived is not None:
            came[key] = (float(arrived) - begin_s) * speed
    whole = [Message(*key, left[key], came[key]) for key in left.keys() & came.keys()]
    return sorted(whole, key=lambda m: m.arrived_s)


@dataclass(frozen=True)
class Parts:
    """Seconds of a step and its parts.

    Attributes
    ----------
    pipeline_s, averaging_s
        From rest; None where it was not measured or does not take place.
    step_s
        Mean distance of step ends.
    """

    pipeline_s: float | None
    averaging_s: float | None
    step_s: float


def period_of(plan: TrainingPlan) -> int:
    """Steps after which a plan does the same again: its cycle and its averagings."""
    return math.lcm(len(plan.cycle), plan.sync.every_steps)


def planned_steps(plan: TrainingPlan, rest: int, steps: int) -> tuple[int, int]:
    """How many to run to get whole passes.

    Returns
    -------
    tuple[int, int]
        From rest, with a pass before those that count, which finds connections cold; chained, with
        two passes before and a step after them.
    """
    period = period_of(plan)
    whole = [period * math.ceil(count / period) for count in (rest, steps)]
    return whole[0] + period, whole[1] + WARM_PASSES * period + 1


def warm(plan: TrainingPlan, steps: Sequence[Step]) -> Sequence[Step]:
    """Steps from rest without the first pass, which finds connections cold."""
    period = period_of(plan)
    return steps[period:] if len(steps) > period else steps


def parts_of(
    plan: TrainingPlan, rest: Sequence[Step], chained: Sequence[Step], speed: float
) -> Parts:
    """What was run, in one number a part."""
    period = period_of(plan)
    places: dict[int, list[Step]] = {}
    for step in warm(plan, rest):
        places.setdefault(step.number % period, []).append(step)
    pipeline = [median(step.pipeline_s for step in steps) for steps in places.values()]
    averaging = []
    for place, steps in places.items():
        if not plan.sync.due(place):
            continue  # nothing, or regions by themselves
        seconds = [s for step in steps if (s := step.averaging_s(plan)) is not None]
        averaging += [median(seconds)] if seconds else []
    ends = [step.end_s * speed for step in chained[WARM_PASSES * period - 1 : -1 : period]]
    passes = [(late - early) / period for early, late in pairwise(ends)]
    return Parts(
        sum(pipeline) / len(pipeline) if pipeline else None,
        sum(averaging) / len(averaging) if averaging else None,
        # steps may take turns, a short one and a long one: no median
        sum(passes) / len(passes),
    )
