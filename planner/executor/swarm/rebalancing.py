"""Moves devices to stages that need them, by measured times (SWARM, 3.2).

At regular intervals all ranks exchange their time per microbatch, and the first one decides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.records import StepRecord
from planner.swarm.rebalance_policy import RebalanceDecision, RebalanceRule, decide
from planner.training_plan.error import PlanError
from planner.training_plan.migration import Migration, migrated, require_movable
from planner.training_plan.model import TrainingPlan


@dataclass(frozen=True)
class RunSegment:
    """Steps with one plan.

    Attributes
    ----------
    begin, end
        Numbers of steps done before and after it.
    move
        The move before it; None for the first segment.
    """

    plan: TrainingPlan
    begin: int
    end: int
    move: Migration | None = None

    @property
    def target(self) -> int:
        """The rank that has moved."""
        assert self.move is not None
        return self.plan.cluster.network.ids.index(self.move.device)

    @property
    def source(self) -> int:
        """The first rank that was in its new stage before."""
        group = self.plan.assignment.groups[self.plan.stage_of[self.target]]
        return next(d for d in group if d != self.target)


class Rebalancing:
    """Segments of a run that are decided during the run.

    Parameters
    ----------
    plan
        Initial plan.
    every
        Steps between two decisions.
    steps
        Total number of steps.
    ranks
        The rank group.
    fits
        Whether this rank's device has the memory for its part of a plan.
    report
        Called with a decision, and the reason if it is not carried out.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        every: int,
        rule: RebalanceRule,
        steps: int,
        ranks: RankGroup,
        fits: Callable[[TrainingPlan], bool],
        report: Callable[[RebalanceDecision, str], None],
    ) -> None:
        require_movable(plan, every)
        self._plan, self._every, self._rule, self._steps = plan, every, rule, steps
        self._ranks, self._fits, self._report = ranks, fits, report
        self._compute_s, self._microbatches = 0.0, 0
        self._unmovable: set[int] = set()

    def record_step(self, record: StepRecord) -> None:
        """Account for a step of this rank."""
        self._compute_s += sum(op.end_s - op.start_s for op in record.ops if op.kind in "FHB")
        self._microbatches += sum(op.kind == "B" for op in record.ops)

    def segments(self) -> Iterator[RunSegment]:
        """Segments, each requested after the previous one has been run."""
        segment = RunSegment(self._plan, 0, min(self._every, self._steps))
        while True:
            begin_s = time.monotonic()
            self._compute_s, self._microbatches = 0.0, 0
            yield segment
            if segment.end == self._steps:
                return
            elapsed_s = time.monotonic() - begin_s
            decision = self._decide(segment, elapsed_s / (segment.end - segment.begin))
            end = min(segment.end + self._every, self._steps)
            segment = RunSegment(segment.plan, segment.end, end)
            if decision is not None:
                moved, why_not = self._moved_segment(segment, decision)
                self._report(decision, why_not)
                if moved is None:
                    # and it is not proposed again
                    self._unmovable.add(
                        segment.plan.cluster.network.ids.index(decision.move.device)
                    )
                else:
                    segment = moved

    def _decide(self, segment: RunSegment, step_s: float) -> RebalanceDecision | None:
        """The first rank's decision, since sums may differ in the last bit between machines."""
        own_s = self._compute_s / self._microbatches if self._microbatches else 0.0
        name = f"rebalance/{segment.end}"
        measured = [
            json.loads(t) for t in self._ranks.all_gather(name, json.dumps([own_s, step_s]))
        ]
        text = ""
        if self._ranks.rank == 0:
            seconds = {d: own_s for d, (own_s, _) in enumerate(measured) if own_s > 0}
            left_s = (self._steps - segment.end) * max(step_s for _, step_s in measured)
            decision = decide(
                segment.plan, seconds, segment.end, left_s, self._rule, frozenset(self._unmovable)
            )
            if decision is not None:
                text = json.dumps([asdict(decision.move), decision.before, decision.after])
        answer = self._ranks.all_gather(f"{name}/decision", text)[0]
        if not answer:
            return None
        move, before, after = json.loads(answer)
        return RebalanceDecision(Migration(**move), before, after)

    def _moved_segment(
        self, segment: RunSegment, decision: RebalanceDecision
    ) -> tuple[RunSegment | None, str]:
        """The segment after a move, or why there is none; memory is checked by the device."""
        try:
            moved = replace(segment, plan=migrated(segment.plan, decision.move), move=decision.move)
        except PlanError as error:
            return None, str(error)
        fits = moved.target != self._ranks.rank or self._fits(moved.plan)
        answers = self._ranks.all_gather(f"rebalance/{segment.begin}/fits", "fits" if fits else "")
        return (moved, "") if answers[moved.target] else (None, "its memory is too small")
