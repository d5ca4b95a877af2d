"""Whether a step's update is taken: by all of its ranks, or by none."""

from __future__ import annotations

import threading
from collections.abc import Collection

from planner.executor.comm.connections import ConnectionLost
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.fault_tolerance.membership import AGAIN, CAUSE_S, NEW, DeviceLost, Membership
from planner.executor.rendezvous.process_group import ProcessGroup

GO, GROW = "go", "grow"
"""Take the update; and then begin anew, with those who wait to come in."""


class CommitProtocol:
    """Ranks' votes on their steps, and the losses that they tell with them.

    The store's atomic operations decide: the last of all to vote says yes, who sees a loss before
    says no, and what was said first counts for all.

    Parameters
    ----------
    ranks
        This process among those of the generation.
    tellers
        Ranks that have losses.
    last
        The last of all steps, after which nobody comes in.

    Attributes
    ----------
    grows
        Whether those who wait come in after the step.
    taken, agreed
        The last step whose update was taken, and the last after which the outer step was; none:
        less than any.
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

    def heed(self, failure: ErrorLatch) -> None:
        """Have a connection that ends end a vote, too: others may wait for what was to be sent."""
        self._failure = failure
        failure.on_failure(lambda: self._noticed(failure.error))

    def _noticed(self, error: Exception | None) -> None:
        asked = self._asked
        if not asked or not isinstance(error, ConnectionLost):
            return

        def report() -> None:
            if self._asked == asked and self._membership.loss.error is None:
                self._membership.report(error)

        # it may only follow from a loss that is told soon
        later = threading.Timer(CAUSE_S, report)
        later.daemon = True
        later.start()

    def decide(self, step: int, loss: float | None) -> None:
        """Wait for the decision on a step, whose gradients this rank has."""
        if self._ranks.rank in self._tellers:
            self._ranks.store.set(f"loss/{step}/{self._ranks.rank}", repr(loss or 0.0))
        self.grows = self._vote(f"step/{step}", bool(self._membership.comers) and step < self._last)
        self.taken = step
        if self._ranks.rank == 0 and self._votes > 2:
            self._forget(step - 2)

    def agree(self, step: int) -> None:
        """Wait for the decision on the outer step after a step, whose mean this rank has."""
        self._vote(f"outer/{step}", False)
        # before anybody goes on into another generation
        self._membership.tell_agreed(step)
        self.agreed = step
        self._outer.append(step)

    def end(self) -> None:
        """Wait until all ranks have done all there is."""
        self._vote("end", False)

    def of(self, step: int) -> float:
        """The loss of a step on which was decided."""
        keys = [f"loss/{step}/{rank}" for rank in self._tellers]
        return sum(float(value) for value in self._ranks.store.multi_get(keys))

    def newest(self, step: int) -> int:
        """The last step up to this one whose loss is known: it is."""
        return step

    def _vote(self, name: str, grows: bool) -> bool:
        """Whether those who wait come in: what the last of all to vote has said."""
        store = self._ranks.store
        # before the look, so that one of the two sees what fails now
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
        """All have voted since, and so have read what was said on this step."""
        names = [f"step/{step}", *(f"loss/{step}/{rank}" for rank in self._tellers)]
        for outer in [one for one in self._outer if one <= step]:
            self._outer.remove(outer)
            names += [f"outer/{outer}", *(f"samples/{outer}/{r}" for r in range(self._ranks.world))]
        self._membership.forget(names)
