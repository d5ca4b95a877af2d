"""Outer steps of local SGD: pseudo-gradients are averaged at once, or while the next step computes.

A delayed outer step is applied one step later (DiLoCo with overlapped communication).
"""

from __future__ import annotations

import enum
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.comm.p2p import Sender
from planner.executor.comm.stage_averager import StageAverager
from planner.executor.rendezvous.rank_group import JOIN_S, RankGroup
from planner.executor.runtime.records import OperationRecord, StepRecord
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.runtime.step_committer import StepCommitter
from planner.training_plan.model import TrainingPlan, lockstep_devices


class PendingOuterStep(enum.Enum):
    """State of the last outer step where a sequence of steps begins."""

    NONE = enum.auto()
    """It is complete."""
    RESTORED = enum.auto()
    """It is delayed, and its mean pseudo-gradient was restored from a checkpoint."""
    UNAVERAGED = enum.auto()
    """It is delayed, and its pseudo-gradients must be averaged again."""
    INTERRUPTED = enum.auto()
    """The local update of the first step is committed, the outer step after it is not."""


class OuterAveraging:
    """Averaging of pseudo-gradients of one rank, and the outer steps that follow.

    Parameters
    ----------
    averager
        Averages over its groups.
    committer
        Commits outer steps; None if each rank applies them when they are averaged.

    Attributes
    ----------
    pending_step
        The step after which an outer step was started that is not applied yet; None for none.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: RankGroup,
        runtime: StageRuntime,
        averager: StageAverager,
        committer: StepCommitter | None,
    ) -> None:
        self._plan, self._ranks, self._runtime = plan, ranks, runtime
        self._averager, self._committer = averager, committer
        self.pending_step: int | None = None
        self._background: Future[float] | None = None
        self._begin_s = 0.0

    def set_connections(self, connections: AveragingConnections, sender: Sender) -> None:
        """Set the connections for the following steps."""
        self._connections, self._sender = connections, sender

    def run(self, record: StepRecord) -> None:
        """Average the pseudo-gradients of a step and apply the outer step."""
        vector = self._pseudo_gradient(record.step)
        if self._averager.peers:
            begin_s = time.monotonic()
            record.ops.append(
                OperationRecord(-1, self._ranks.rank, "A", begin_s, self._average(vector))
            )
        self._apply_outer_step(record.step)
        record.end_s = time.monotonic()

    def start_averaging(self, step: int) -> None:
        """Start averaging while the next step computes."""
        vector = self._pseudo_gradient(step)
        self.pending_step = step
        if self._averager.peers:
            self._begin_s = time.monotonic()
            executor = ThreadPoolExecutor(1, "averaging")
            self._background = executor.submit(self._average, vector)
            executor.shutdown(wait=False)

    def apply_pending(self, record: StepRecord) -> None:
        """Apply the outer step that an earlier step has started, if any.

        One that was restored from a checkpoint is averaged already.
        """
        if self.pending_step is None:
            return
        if self._background is not None:
            end_s = self._background.result()
            record.ops.append(OperationRecord(-1, self._ranks.rank, "A", self._begin_s, end_s))
            self._background = None
        self._apply_outer_step(self.pending_step)
        self.pending_step = None

    def resume(self, pending: PendingOuterStep, record: StepRecord) -> bool:
        """Continue from the state that earlier steps left.

        Returns
        -------
        bool
            Whether this completed ``record``, the step before the first one to run.
        """
        if pending is PendingOuterStep.RESTORED:
            self.pending_step = record.step
        elif pending is PendingOuterStep.UNAVERAGED:
            self.start_averaging(record.step)
        elif pending is PendingOuterStep.INTERRUPTED:
            if self._plan.sync.delayed:
                self.start_averaging(record.step - 1)
                self.apply_pending(record)
            else:
                self.run(record)
            record.end_s = time.monotonic()
            return True
        return False

    def wait(self) -> None:
        """Wait for averaging in the background."""
        if self._background is not None:
            self._background.result()

    def close(self) -> None:
        """Wait until averaging in the background has ended, after its connections are closed."""
        if self._background is not None:
            wait([self._background], JOIN_S)

    def _average(self, vector: Tensor) -> float:
        return self._averager.run(GradientBuffer(vector), self._connections, self._sender)

    def _apply_outer_step(self, step: int) -> None:
        if self._committer is not None:
            self._committer.commit_outer_step(step)
        self._runtime.outer_step()

    def _pseudo_gradient(self, step: int) -> Tensor:
        """The pseudo-gradient for the outer step after a step."""
        microbatches = None
        if self._committer is not None:
            # of the remaining devices, which the plan does not know
            counts = self._ranks.all_gather(
                f"microbatches/{step}", str(self._runtime.pseudo_gradient_microbatches())
            )
            stage = self._plan.stage_of.get(self._ranks.rank)
            group = () if stage is None else self._plan.assignment.groups[stage]
            # the first of the devices that act as one reports
            reporters = {lockstep_devices(self._plan, d)[0] for d in group}
            microbatches = sum(int(counts[d]) for d in reporters)
        return self._runtime.pseudo_gradient(microbatches)
