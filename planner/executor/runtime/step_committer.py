"""Interface by which a worker commits its steps."""

from __future__ import annotations

from typing import Protocol

from planner.executor.fault_tolerance.error_latch import ErrorLatch


class StepCommitter(Protocol):
    """Decides with all ranks whether a step counts, before any of them applies its update."""

    def abort_on(self, error_latch: ErrorLatch) -> None:
        """Abort a pending decision when a connection fails."""

    def commit_step(self, step: int, loss: float | None) -> None:
        """Wait for the decision on a step."""

    def commit_outer_step(self, step: int) -> None:
        """Wait for the decision on the outer step after a step."""
