"""A run whose devices move to the stages that need them, as they are seen to work (SWARM, 3.2).

Every so many steps all tell each other what a microbatch took them, and come to the same decision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.executor.pieces import Piece
from planner.executor.ranks import Ranks
from planner.executor.records import StepRecord
from planner.swarm.deciding import Decision, Rule, decide
from planner.training_plan.choices import Wiring
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.moving import moved


class Rebalancing:
    """Pieces of a run that are not known before.

    Parameters
    ----------
    plan
        With which it begins.
    every
        Steps between two decisions.
    rule
        Who moves.
    steps
        How many are done at the end.
    ranks
        This process among all.
    fits
        Whether a device of a plan, which is new in its stage, has the memory for it.
    told
        Takes what was decided.

    Raises
    ------
    PlanError
        Devices cannot move in this plan, or not after so many steps.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        every: int,
        rule: Rule,
        steps: int,
        ranks: Ranks,
        fits: Callable[[TrainingPlan, int], bool],
        told: Callable[[Decision, bool], None],
    ) -> None:
        require_movable(plan, every)
        self._plan, self._every, self._rule, self._steps = plan, every, rule, steps
        self._ranks, self._fits, self._told = ranks, fits, told
        self._busy_s, self._count = 0.0, 0

    def after(self, record: StepRecord) -> None:
        """Count a step of this rank.

        Parameters
        ----------
        record
            Of the step.
        """
        self._busy_s += sum(end - start for _, _, kind, start, end in record.ops if kind in "FHB")
        self._count += sum(kind == "B" for _, _, kind, _, _ in record.ops)

    def pieces(self) -> Iterator[Piece]:
        """One after the other; who takes the next has run the one before.

        Yields
        ------
        Piece
            Without a move where nothing was worth one.
        """
        piece = Piece(self._plan, 0, min(self._every, self._steps))
        while True:
            begun_s = time.monotonic()
            self._busy_s, self._count = 0.0, 0
            yield piece
            if piece.end == self._steps:
                return
            took_s = time.monotonic() - begun_s
            decision = self._decide(piece, took_s / (piece.end - piece.begin))
            end = min(piece.end + self._every, self._steps)
            piece = Piece(piece.plan, piece.end, end)
            if decision is not None:
                made = replace(piece, plan=moved(piece.plan, decision.move), move=decision.move)
                fits = self._fits(made.plan, made.taker)
                self._told(decision, fits)
                piece = made if fits else piece

    def _decide(self, piece: Piece, step_s: float) -> Decision | None:
        own_s = self._busy_s / self._count if self._count else 0.0
        told = self._ranks.share(f"rebalance/{piece.end}", json.dumps([own_s, step_s]))
        found = [json.loads(text) for text in told]
        seconds = {d: own_s for d, (own_s, _) in enumerate(found) if own_s > 0}
        left_s = (self._steps - piece.end) * max(step_s for _, step_s in found)
        return decide(piece.plan, seconds, piece.end, left_s, self._rule)


def require_movable(plan: TrainingPlan, every: int) -> None:
    """Raise `PlanError` where devices cannot move after so many steps.

    Parameters
    ----------
    plan
        The plan.
    every
        Steps between two decisions.

    Raises
    ------
    PlanError
        One line.
    """
    if every < 1:
        raise PlanError(f"--rebalance is {every}; give steps, at least 1")
    if plan.wiring is not Wiring.STOCHASTIC:
        raise PlanError(
            f"--rebalance: devices move where microbatches are routed, found wiring {plan.wiring}; "
            "plan with --wiring stochastic"
        )
    if plan.sync.delayed or every % plan.sync.every_steps:
        raise PlanError(
            f"--rebalance {every}: devices move after an outer step that is not delayed, found "
            f"averaging every {plan.sync.every_steps} steps; give a multiple of it"
        )
