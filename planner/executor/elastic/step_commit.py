"""Atomic commit of optimizer steps: every rank applies the update, or none does.

Each rank votes in the store once its gradients are averaged. The last vote commits the step; a rank
that detects a failure first aborts it. The first decision written to the store wins.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from planner.executor.elastic.membership import (
    NO_STEP,
    REPEAT,
    RESET_CAUSE_S,
    DeviceLost,
    Membership,
)
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.transport.connections import ConnectionLost

COMMIT, COMMIT_AND_ADMIT = "commit", "commit_and_admit"
"""Commit the step; commit it and start a new generation with joining ranks."""


class StoreStepCommitter:
    """Commits steps by votes in the store, which also carry the losses.

    Parameters
    ----------
    ranks
        The rank group of the generation.
    loss_ranks
        Ranks that have losses.
    last
        The last step, after which no rank joins.

    Attributes
    ----------
    admits_joiners
        Whether waiting ranks join after the step.
    committed_step, committed_outer_step
        The last committed step, and the last one whose outer step was committed; smaller than any
        step if there is none.
    """

    def __init__(
        self, membership: Membership, ranks: RankGroup, loss_ranks: Collection[int], last: int
    ) -> None:
        self._membership, self._ranks, self._last = membership, ranks, last
        self._loss_ranks = sorted(loss_ranks)
        self._votes = 0
        self.admits_joiners = False
        self.committed_step = self.committed_outer_step = NO_STEP
        self._outer_steps: list[int] = []
        self._error_latch: ErrorLatch | None = None
        self._pending_vote = ""

    def abort_on(self, error_latch: ErrorLatch) -> None:
        """Abort a pending vote when a connection fails: peers may be waiting for its data."""
        self._error_latch = error_latch
        error_latch.on_failure(lambda: self._report_later_if_pending(error_latch.error))

    def _report_later_if_pending(self, error: Exception | None) -> None:
        vote = self._pending_vote
        if not vote or not isinstance(error, ConnectionLost):
            return

        def report() -> None:
            if self._pending_vote == vote and self._membership.rank_lost.error is None:
                self._membership.report_connection_lost(error)

        # the failure may be a consequence of a loss reported soon
        later = threading.Timer(RESET_CAUSE_S, report)
        later.daemon = True
        later.start()

    def commit_step(self, step: int, loss: float | None) -> None:
        """Vote for a step and wait for the decision.

        Raises
        ------
        DeviceLost
            A device failed before the last vote; the step must be repeated.
        """
        if self._ranks.rank in self._loss_ranks:
            self._ranks.store.set(f"loss/{step}/{self._ranks.rank}", repr(loss or 0.0))
        self.admits_joiners = self._vote(
            f"step/{step}", bool(self._membership.joiners) and step < self._last
        )
        self.committed_step = step
        if self._ranks.rank == 0 and self._votes > 2:
            self._delete_keys(step - 2)

    def commit_outer_step(self, step: int) -> None:
        """Vote for the outer step after a step and wait for the decision; raises `DeviceLost`."""
        self._vote(f"outer/{step}", False)
        # written before any rank can start another generation
        self._membership.set_outer_step(step)
        self.committed_outer_step = step
        self._outer_steps.append(step)

    def finish(self) -> None:
        """Wait until all ranks have finished."""
        self._vote("end", False)

    def loss(self, step: int) -> float:
        """Loss of a committed step."""
        keys = [f"loss/{step}/{rank}" for rank in self._loss_ranks]
        return sum(float(value) for value in self._ranks.store.multi_get(keys))

    def latest_known_step(self, step: int) -> int:
        """The last step up to this one whose loss is known: itself."""
        return step

    def _vote(self, name: str, admits_joiners: bool) -> bool:
        """Vote; returns whether waiting ranks join, as decided by the last vote."""
        store = self._ranks.store
        # set before the check: a failure is noticed either here or by
        # `_report_later_if_pending`
        self._pending_vote = name
        try:
            if self._error_latch is not None and isinstance(
                self._error_latch.error, ConnectionLost
            ):
                raise self._error_latch.error
            self._votes += 1
            if store.add("votes", 1) == self._votes * self._ranks.world_size:
                store.compare_set(name, "", COMMIT_AND_ADMIT if admits_joiners else COMMIT)
            decision = self._membership.wait_for_decision(name)
        finally:
            self._pending_vote = ""
        if decision == REPEAT:
            raise self._membership.rank_lost.error or DeviceLost(f"{name} is repeated")
        return decision == COMMIT_AND_ADMIT

    def _delete_keys(self, step: int) -> None:
        """Delete the keys of steps up to this one, which all ranks have read."""
        keys = [f"step/{step}", *(f"loss/{step}/{rank}" for rank in self._loss_ranks)]
        keys += [f"outer/{outer_step}" for outer_step in self._outer_steps if outer_step <= step]
        self._outer_steps = [outer_step for outer_step in self._outer_steps if outer_step > step]
        self._ranks.delete_keys(keys)
