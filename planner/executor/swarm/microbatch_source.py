"""A trainer (SWARM, 3.2): hands out its microbatches of a step, so many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from planner.training_plan.model import TrainingPlan


class MicrobatchSource:
    """The trainer on a device of the first stage; not safe for threads by itself.

    It has the microbatches whose path in the plan begins on its device, and as many on their way at
    a time as that device holds there.

    Parameters
    ----------
    ask
        Takes a microbatch to be done.
    end
        Called when all of a step are handed out.
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
        """Whether all of the step are finished."""
        return not self._waiting and not self._flying

    def begin(self) -> None:
        """A step begins."""
        self._waiting.extend(self._all)
        self._more()

    def finished(self) -> None:
        """A microbatch has come back."""
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
