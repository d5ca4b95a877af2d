"""Predicts when a device will be ready to average, to notify its peers one latency ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class ReadyHint:
    """Predicts from the last step of the same schedule: the time from each operation to readiness.

    An early notification starts a round before its last member is ready, at the cost of other
    messages; a late one delays the round.

    Parameters
    ----------
    notify_ahead_s
        By rank, how long before readiness it is notified.

    Attributes
    ----------
    notified
        Ranks that were notified in this step.
    """

    def __init__(self, notify_ahead_s: Mapping[int, float]) -> None:
        self._notify_ahead_s = dict(notify_ahead_s)
        self._remaining_s: dict[int, list[float]] = {}
        self._schedule = 0
        self._end_times: list[float] = []
        self.notified: set[int] = set()

    def begin(self, schedule: int) -> None:
        """Start of a step."""
        self._schedule, self._end_times, self.notified = schedule, [], set()

    def operation_ended(self, end: float, notify: Callable[[int], None]) -> None:
        """An operation has ended."""
        self._end_times.append(end)
        remaining_s = self._remaining_s.get(self._schedule, ())
        num_ended = len(self._end_times)
        if num_ended >= len(remaining_s):
            return  # the last operation: the caller notifies when the gradients are ready
        # now or after the next operation, whichever is nearer
        until_ready_s = (remaining_s[num_ended - 1] + remaining_s[num_ended]) / 2
        for rank, notify_ahead_s in self._notify_ahead_s.items():
            if rank not in self.notified and until_ready_s <= notify_ahead_s:
                self.notified.add(rank)
                notify(rank)

    def ready(self, now: float) -> None:
        """The device is ready to average."""
        self._remaining_s[self._schedule] = [now - end for end in self._end_times]
