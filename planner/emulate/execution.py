"""Executed steps with their operations and messages, assembled from the ranks' records.

Times are in seconds of the plan: recorded times are multiplied by the emulation's speed.
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
"""Passes through the cycle before step times are measured."""


class Operation(NamedTuple):
    """An executed operation; times in seconds since the start of its step.

    Attributes
    ----------
    microbatch, device, kind
        Its identity; averaging (A) and update (U) have microbatch -1.
    """

    microbatch: int
    device: int
    kind: str
    start_s: float
    end_s: float


class Message(NamedTuple):
    """An executed message of the pipeline; times in seconds since the start of its step.

    Attributes
    ----------
    microbatch, kind
        Identity of the operation that waited for it.
    handed_over_s, arrived_s
        When it was sent, and when its last byte arrived.
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
        Index from 0; steps on an idle system are numbered separately.
    begin_s, end_s
        First rank's start and last rank's end, on this machine's monotonic clock.
    """

    number: int
    begin_s: float
    end_s: float
    operations: tuple[Operation, ...]
    messages: tuple[Message, ...]

    @property
    def pipeline_s(self) -> float:
        """Seconds until the last F, H or B ends."""
        return max(op.end_s for op in self.operations if op.kind in "FHB")

    def averaging_s(self, plan: TrainingPlan) -> float | None:
        """Return the longest averaging of a stage, from its first round's start; None without one.

        The averaging of a matrix shared by two stages counts for both of them.
        """
        done: dict[int, list[Operation]] = {}
        for op in sorted(self.operations, key=lambda op: op.start_s):
            if op.kind == "A":
                done.setdefault(op.device, []).append(op)
        # the averaging shared by two stages is recorded last, by both of them; with optimizer state
        # in shards, it is part of theirs
        stages = len(plan.stage_layers)
        apart = plan.averages_tied and not plan.shards_optimizer
        tied = plan.averaged_by(stages) if apart else ()
        shared = {d: [done[d].pop()] for d in tied if d in done}
        seconds: dict[int, float] = {}
        for j, rounds in enumerate(plan.averaging if apart else plan.averaging[:stages]):
            # with two-frequency averaging a device averages twice
            mine = {d: ops for d, ops in (done if j < stages else shared).items() if ops}
            starts_of = {d: ops[0].start_s for d, ops in mine.items()}
            ends_of = {d: ops[-1].end_s for d, ops in mine.items()}
            members = [d for groups in rounds for group in groups for d in group.members]
            ends = [ends_of[d] for d in members if d in ends_of]
            for group in rounds[0] if rounds else ():
                # a round starts when its last member is ready
                starts = [starts_of[d] for d in group.members if d in starts_of]
                if starts:
                    seconds[j] = max(seconds.get(j, 0.0), max(ends) - max(starts))
        return plan.longest_averaging_s(seconds) if seconds else None


def steps_of(records: Sequence[Mapping[str, Any]], rest: bool, speed: float) -> list[Step]:
    """Return the steps that start on an idle system, or the consecutive ones."""
    ranks = [[step for step in r["steps"] if bool(step["rest"]) is rest] for r in records]
    return [_step(parts, speed) for parts in zip(*ranks, strict=True)]


def _step(ranks: Sequence[Mapping[str, Any]], speed: float) -> Step:
    begin = min(float(rank["begin_s"]) for rank in ranks)

    def since(moment: Any) -> float:
        return (float(moment) - begin) * speed

    operations = sorted(
        (
            Operation(int(b), int(d), str(kind), since(start), since(end))
            for rank in ranks
            for b, d, kind, start, end in rank["ops"]
        ),
        key=lambda op: op.start_s,
    )
    return Step(
        number=int(ranks[0]["step"]),
        begin_s=begin,
        end_s=max(rank["end_s"] for rank in ranks),
        operations=tuple(operations),
        messages=tuple(_messages((m for rank in ranks for m in rank["messages"]), begin, speed)),
    )


def _messages(halves: Iterable[Sequence[Any]], begin_s: float, speed: float) -> list[Message]:
    """Join send and receive records of the same message."""
    sent_s: dict[tuple[int, str, int, int], float] = {}
    received_s: dict[tuple[int, str, int, int], float] = {}
    for b, kind, source, destination, _, handed_over, arrived in halves:
        key = int(b), str(kind), int(source), int(destination)
        if handed_over is not None:
            sent_s[key] = (float(handed_over) - begin_s) * speed
        if arrived is not None:
            received_s[key] = (float(arrived) - begin_s) * speed
    messages = [
        Message(*key, sent_s[key], received_s[key]) for key in sent_s.keys() & received_s.keys()
    ]
    return sorted(messages, key=lambda m: m.arrived_s)


@dataclass(frozen=True)
class Parts:
    """Measured time of a step and its parts, in seconds.

    Attributes
    ----------
    pipeline_s, averaging_s
        On an idle system; None if not measured or absent.
    step_s
        Mean time between the ends of consecutive steps.
    """

    pipeline_s: float | None
    averaging_s: float | None
    step_s: float


def period_of(plan: TrainingPlan) -> int:
    """Return the number of steps after which cycle and averaging repeat."""
    return math.lcm(len(plan.cycle), plan.sync.every_steps)


def planned_steps(plan: TrainingPlan, rest: int, steps: int) -> tuple[int, int]:
    """Return how many steps to run so that whole passes are measured.

    Returns
    -------
    tuple[int, int]
        Steps on an idle system, including one warm-up pass; consecutive steps, including two
        warm-up passes and one step at the end.
    """
    period = period_of(plan)
    whole = [period * math.ceil(count / period) for count in (rest, steps)]
    return whole[0] + period, whole[1] + WARM_PASSES * period + 1


def warm(plan: TrainingPlan, steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps on an idle system without the first pass, whose connections are cold."""
    period = period_of(plan)
    return steps[period:] if len(steps) > period else steps


def parts_of(
    plan: TrainingPlan, rest: Sequence[Step], chained: Sequence[Step], speed: float
) -> Parts:
    """Summarize the executed steps in one number per part."""
    period = period_of(plan)
    places: dict[int, list[Step]] = {}
    for step in warm(plan, rest):
        places.setdefault(step.number % period, []).append(step)
    pipeline = [median(step.pipeline_s for step in steps) for steps in places.values()]
    averaging = []
    for place, steps in places.items():
        if not plan.sync.due(place):
            continue  # no averaging, or within regions only
        seconds = [s for step in steps if (s := step.averaging_s(plan)) is not None]
        averaging += [median(seconds)] if seconds else []
    ends = [step.end_s * speed for step in chained[WARM_PASSES * period - 1 : -1 : period]]
    passes = [(late - early) / period for early, late in pairwise(ends)]
    return Parts(
        sum(pipeline) / len(pipeline) if pipeline else None,
        sum(averaging) / len(averaging) if averaging else None,
        # short and long steps may alternate, so use the mean, not the median
        sum(passes) / len(passes),
    )
