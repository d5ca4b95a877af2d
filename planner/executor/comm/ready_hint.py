"""Predicts when a device will be ready to average, to send word one latency ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class ReadyHint:
    """Prediction from the last step of the same schedule: how long before readiness each operation
    ended.

    Word sent too early starts a round before its last member is ready, at the cost of other
    messages; word sent too late delays the round.

    Parameters
    ----------
    ahead_s
        By rank, how long before readiness word is sent to it.

    Attributes
    ----------
    told
        Ranks to which word was sent in this step.
    """

    def __init__(self, ahead_s: Mapping[int, float]) -> None:
        self._ahead_s = dict(ahead_s)
        self._left_s: dict[int, list[float]] = {}
        self._schedule = 0
        self._ends: list[float] = []
        self.told: set[int] = set()

    def begin(self, schedule: int) -> None:
        """Start of a step."""
        self._schedule, self._ends, self.told = schedule, [], set()

    def after(self, end: float, tell: Callable[[int], None]) -> None:
        """An operation has ended."""
        self._ends.append(end)
        left_s = self._left_s.get(self._schedule, ())
        done = len(self._ends)
        if done >= len(left_s):
            return  # what comes next is to be ready
        # now or after the next operation, whichever is nearer
        soon_s = (left_s[done - 1] + left_s[done]) / 2
        for rank, ahead_s in self._ahead_s.items():
            if rank not in self.told and soon_s <= ahead_s:
                self.told.add(rank)
                tell(rank)

    def ready(self, now: float) -> None:
        """The device is ready to average."""
        self._left_s[self._schedule] = [now - end for end in self._ends]
