"""Source of microbatches (a trainer in SWARM, 3.2), with a limit on those in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from planner.training_plan.model import TrainingPlan


class MicrobatchSource:
    """The source on a device of the first stage; not thread-safe.

    It has the microbatches whose planned path begins on its device, and keeps as many in flight as
    that device holds there.

    Parameters
    ----------
    start
        Called with a microbatch to start.
    on_all_started
        Called when all microbatches of a step were started.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        start: Callable[[int], None],
        on_all_started: Callable[[], None],
    ) -> None:
        (schedule,) = plan.schedules
        self._microbatches = [b for b, path in enumerate(schedule.paths) if path[0] == rank]
        self._window = schedule.most_live()[rank]
        self._start, self._on_all_started = start, on_all_started
        self._waiting: deque[int] = deque()
        self._in_flight = 0

    @property
    def all_finished(self) -> bool:
        """Whether all microbatches of the step have finished."""
        return not self._waiting and not self._in_flight

    def begin(self) -> None:
        """Start of a step."""
        self._waiting.extend(self._microbatches)
        self._start_more()

    def microbatch_finished(self) -> None:
        """A microbatch has finished."""
        self._in_flight -= 1
        self._start_more()

    def _start_more(self) -> None:
        if not self._waiting:
            return
        while self._waiting and self._in_flight < self._window:
            self._in_flight += 1
            self._start(self._waiting.popleft())
        if not self._waiting:
            self._on_all_started()
