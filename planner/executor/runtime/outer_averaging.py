"""Outer steps of local SGD: pseudo-gradients are averaged at once, or while the next step computes.

A delayed outer step is applied one step later (DiLoCo with overlapped communication).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from planner.executor.comm.allreduce_links import AllReduceLinks
from planner.executor.comm.averaging import StageAverager
from planner.executor.comm.p2p import Sender
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_runtime import StageRuntime, StepCommit
from planner.training_plan.model import TrainingPlan, lockstep_devices


class OuterAveraging:
    """Averaging of pseudo-gradients of one rank, and the outer steps that follow.

    Parameters
    ----------
    averaging
        Its groups.
    commit
        Commits outer steps; None if each rank applies them when they are averaged.

    Attributes
    ----------
    pending
        The step whose outer step has been begun and not applied; None for none.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: ProcessGroup,
        compute: StageRuntime,
        averaging: StageAverager,
        commit: StepCommit | None,
    ) -> None:
        self._plan, self._ranks, self._compute = plan, ranks, compute
        self._averaging, self._commit = averaging, commit
        self.pending: int | None = None
        self._background: Future[float] | None = None
        self._begin_s = 0.0

    def open(self, peers: AllReduceLinks, sender: Sender) -> None:
        """Set the connections of the steps to come."""
        self._peers, self._sender = peers, sender

    def run(self, record: StepRecord) -> None:
        """Average the pseudo-gradients of a step and apply the outer step."""
        vector = self._pseudo_gradient(record.step)
        if self._averaging.peers:
            begin_s = time.monotonic()
            record.ops.append((-1, self._ranks.rank, "A", begin_s, self._average(vector)))
        self._apply(record.step)
        record.end_s = time.monotonic()

    def begin(self, step: int) -> None:
        """Start averaging while the next step computes."""
        vector = self._pseudo_gradient(step)
        self.pending = step
        if self._averaging.peers:
            self._begin_s = time.monotonic()
            self._background = ThreadPoolExecutor(1, "averaging").submit(self._average, vector)

    def end(self, record: StepRecord) -> None:
        """Apply an outer step that an earlier step has begun.

        After a checkpoint its mean is known.
        """
        if self.pending is None:
            return
        if self._background is not None:
            end_s = self._background.result()
            record.ops.append((-1, self._ranks.rank, "A", self._begin_s, end_s))
            self._background = None
        self._apply(self.pending)
        self.pending = None

    def finish_interrupted(self, record: StepRecord) -> None:
        """Apply the outer step that a lost device interrupted."""
        if self._plan.sync.delayed:
            self.begin(record.step - 1)
            self.end(record)
        else:
            self.run(record)
        record.end_s = time.monotonic()

    def settle(self) -> None:
        """Wait for averaging in the background."""
        if self._background is not None:
            self._background.result()

    def _average(self, vector: Tensor) -> float:
        return self._averaging.run(lambda on_device: vector, self._peers, self._sender)

    def _apply(self, step: int) -> None:
        if self._commit is not None:
            self._commit.commit_outer_step(step)
        self._compute.outer_step()

    def _pseudo_gradient(self, step: int) -> Tensor:
        """The pseudo-gradient for the outer step after a step."""
        samples = None
        if self._commit is not None:
            # of the remaining devices, which the plan does not know
            counts = self._ranks.all_gather(f"samples/{step}", str(self._compute.samples()))
            stage = self._plan.stage_of.get(self._ranks.rank)
            group = () if stage is None else self._plan.assignment.groups[stage]
            # the first of the devices that act as one reports
            reporters = {lockstep_devices(self._plan, d)[0] for d in group}
            samples = sum(int(counts[d]) for d in reporters)
        return self._compute.pseudo_gradient(samples)
