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
    ask
        Called with a microbatch to start.
    end
        Called when all microbatches of a step were started.
    """

    def __init__(
        self, plan: TrainingPlan, rank: int, ask: Callable[[int], None], end: Callable[[], None]
    ) -> None:
        (schedule,) = plan.schedules
        self._all = [b for b, path in enumerate(schedule.paths) if path[0] == rank]
        self._window = schedule.most_live()[rank]
        self._ask, self._end = ask, end
        self._waiting: deque[int] = deque()
        self._flying = 0

    @property
    def done(self) -> bool:
        """Whether all microbatches of the step have finished."""
        return not self._waiting and not self._flying

    def begin(self) -> None:
        """Start of a step."""
        self._waiting.extend(self._all)
        self._more()

    def finished(self) -> None:
        """A microbatch has finished."""
        self._flying -= 1
        self._more()

    def _more(self) -> None:
        if not self._waiting:
            return
        while self._waiting and self._flying < self._window:
            self._flying += 1
            self._ask(self._waiting.popleft())
        if not self._waiting:
            self._end()
