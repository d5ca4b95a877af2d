"""Atomic commit of optimizer steps: every rank applies the update, or none does.

Each rank votes in the store once its gradients are averaged. The last vote commits the step; a rank
that detects a failure first aborts it. The first decision written to the store wins.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from planner.executor.comm.connections import ConnectionLost
from planner.executor.elastic.membership import AGAIN, CAUSE_S, NEW, DeviceLost, Membership
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.rendezvous.process_group import ProcessGroup

GO, GROW = "go", "grow"
"""Commit the step; commit it and start a new generation with joining ranks."""


class CommitProtocol:
    """Votes of ranks on their steps, and the losses sent with them.

    Parameters
    ----------
    ranks
        The process group of the generation.
    tellers
        Ranks that have losses.
    last
        The last step, after which no rank joins.

    Attributes
    ----------
    grows
        Whether waiting ranks join after the step.
    taken, agreed
        The last committed step, and the last one whose outer step was committed; smaller than any
        step if there is none.
    """

    def __init__(
        self, membership: Membership, ranks: ProcessGroup, tellers: Collection[int], last: int
    ) -> None:
        self._membership, self._ranks, self._last = membership, ranks, last
        self._tellers = sorted(tellers)
        self._votes = 0
        self.grows = False
        self.taken = self.agreed = NEW
        self._outer: list[int] = []
        self._failure: ErrorLatch | None = None
        self._asked = ""

    def abort_on(self, failure: ErrorLatch) -> None:
        """Abort a pending vote when a connection fails: peers may be waiting for its data."""
        self._failure = failure
        failure.on_failure(lambda: self._noticed(failure.error))

    def _noticed(self, error: Exception | None) -> None:
        vote = self._asked
        if not vote or not isinstance(error, ConnectionLost):
            return

        def report() -> None:
            if self._asked == vote and self._membership.loss.error is None:
                self._membership.report(error)

        # the failure may be a consequence of a loss reported soon
        later = threading.Timer(CAUSE_S, report)
        later.daemon = True
        later.start()

    def commit_step(self, step: int, loss: float | None) -> None:
        """Vote for a step, and wait for the decision."""
        if self._ranks.rank in self._tellers:
            self._ranks.store.set(f"loss/{step}/{self._ranks.rank}", repr(loss or 0.0))
        self.grows = self._vote(f"step/{step}", bool(self._membership.comers) and step < self._last)
        self.taken = step
        if self._ranks.rank == 0 and self._votes > 2:
            self._forget(step - 2)

    def commit_outer_step(self, step: int) -> None:
        """Vote for the outer step after a step, and wait for the decision."""
        self._vote(f"outer/{step}", False)
        # before any rank continues into another generation
        self._membership.tell_agreed(step)
        self.agreed = step
        self._outer.append(step)

    def end(self) -> None:
        """Wait until all ranks have finished."""
        self._vote("end", False)

    def of(self, step: int) -> float:
        """Loss of a committed step."""
        keys = [f"loss/{step}/{rank}" for rank in self._tellers]
        return sum(float(value) for value in self._ranks.store.multi_get(keys))

    def newest(self, step: int) -> int:
        """The last step up to this one whose loss is known: itself."""
        return step

    def _vote(self, name: str, grows: bool) -> bool:
        """Vote; returns whether waiting ranks join, as decided by the last vote."""
        store = self._ranks.store
        # before the check, so that a failure now is seen by one of both
        self._asked = name
        try:
            if self._failure is not None and isinstance(self._failure.error, ConnectionLost):
                raise self._failure.error
            self._votes += 1
            if store.add("votes", 1) == self._votes * self._ranks.world:
                store.compare_set(name, "", GROW if grows else GO)
            answer = self._membership.answer(name)
        finally:
            self._asked = ""
        if answer == AGAIN:
            raise self._membership.loss.error or DeviceLost(f"{name} is done again")
        return answer == GROW

    def _forget(self, step: int) -> None:
        """Delete keys of a step that all ranks have read."""
        names = [f"step/{step}", *(f"loss/{step}/{rank}" for rank in self._tellers)]
        for outer in [one for one in self._outer if one <= step]:
            self._outer.remove(outer)
            names += [f"outer/{outer}", *(f"samples/{outer}/{r}" for r in range(self._ranks.world))]
        self._membership.forget(names)
