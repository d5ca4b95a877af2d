"""Segments of a run, between which a device moves to another stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.training_plan.error import PlanError
from planner.training_plan.migration import Migration, migrated
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
    def taker(self) -> int:
        """The rank that has moved."""
        assert self.move is not None
        return self.plan.cluster.network.ids.index(self.move.device)

    @property
    def giver(self) -> int:
        """The first rank that was in its new stage before."""
        group = self.plan.assignment.groups[self.plan.stage_of[self.taker]]
        return next(d for d in group if d != self.taker)


def segments_of(plan: TrainingPlan, moves: Sequence[str], steps: int) -> list[RunSegment]:
    """Segments of a run."""
    found = [RunSegment(plan, 0, steps)]
    for move in sorted((Migration.of(text) for text in moves), key=lambda move: move.after):
        last = found[-1]
        if not last.begin < move.after < steps:
            raise PlanError(
                f"--move {move}: must be after 1 to {steps - 1} of {steps} steps, and two moves "
                "apart; correct it"
            )
        found[-1] = replace(last, end=move.after)
        found.append(RunSegment(migrated(last.plan, move), move.after, steps, move))
    return found
