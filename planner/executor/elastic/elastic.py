"""Training that continues when devices are lost, and when they return.

Each generation of ranks has the plan of the devices present. It ends when one of them is lost: the
interrupted step is then repeated by the others, since an update is applied by all ranks or none
(`commit`). Or it ends after a step, when a device is waiting to join.

In local SGD, a step's local updates and the outer step after it are committed separately. A
generation that ends between the two leaves the outer step to the next one, which begins with it. A
delayed outer step that was started and not finished is started again by the next generation, with
the same pseudo-gradients of the remaining devices. A joining device starts from the global
parameters; in two-frequency averaging, from the state of another device of its region.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass

from planner.executor.checkpoint.checkpoint import CheckpointManager
from planner.executor.checkpoint.state_transfer import transfer_state
from planner.executor.comm.connections import ConnectionLost, ConnectionReset
from planner.executor.elastic.commit import CommitProtocol
from planner.executor.elastic.membership import (
    CAUSE_S,
    NEW,
    DeviceLost,
    Generation,
    Membership,
)
from planner.executor.elastic.membership_events import event_line, membership_events
from planner.executor.fault_tolerance.shutdown import RunAborted
from planner.executor.rendezvous.process_group import ProcessGroup, close_older
from planner.executor.rendezvous.rank_assignment import ring
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.evaluate import Evaluation, EvaluationData
from planner.executor.runtime.pipeline import FixedPipeline, Pipeline, head_ranks
from planner.executor.runtime.progress import Progress
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_module import StageModule, has_head
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.runtime.worker import Worker
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan, lockstep_devices
from planner.training_plan.remove_devices import remove_devices

LOOK_S = 0.05


class EmptyStageError(RuntimeError):
    """A stage has no device left."""


@dataclass
class _Told:
    """The last step of this rank, for whoever reports it."""

    record: StepRecord
    commit: CommitProtocol


class ElasticRun:
    """One rank of an elastic run.

    Parameters
    ----------
    ranks
        The process group.
    works
        Runs its operations; with the parameters of the first step, unless it joins late.
    progress
        Output of the first rank of each generation.
    checkpoints
        The checkpoint manager; None for none.
    held_out
        Evaluation data; None for no evaluation.
    wait_s
        As in `planner.executor.elastic.membership.Membership`.
    make_pipeline
        Creates the pipeline of a rank of a plan.

    Attributes
    ----------
    plan, ranks, worker
        Of the last generation; no worker if this rank was in none.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: ProcessGroup,
        works: StageModule | Aggregator,
        progress: Progress,
        checkpoints: CheckpointManager | None,
        held_out: EvaluationData | None,
        wait_s: float,
        make_pipeline: Callable[[TrainingPlan, int, StageRuntime], Pipeline] = FixedPipeline,
    ) -> None:
        self.plan, self.ranks, self._make_pipeline = plan, ranks, make_pipeline
        self.worker: Worker | None = None
        self._whole, self._all, self._works = plan, ranks, works
        self._stage_module = works if isinstance(works, StageModule) else None
        self._progress, self._checkpoints = progress, checkpoints
        self._held_out = held_out
        self._membership = Membership(ranks, wait_s)
        self._step = NEW
        self._began_s = time.monotonic()
        self._told: _Told | None = None
        self._commit: CommitProtocol | None = None
        self._owes = False
        self._held: list[ExitStack] = []
        self._heartbeats: Mapping[socket.socket, str] | None = None

    def train(self, first: int, steps: int) -> StepRecord | None:
        """Run all steps."""
        if self._all.late:
            if not self._membership.join():
                return None
        else:
            self._step = first
            self._membership.open(first)
        while True:
            try:
                if self._generation(steps):
                    break
            except DeviceLost:
                pass
            except ConnectionLost as error:
                self._await_cause(error)
            except OSError as error:
                # a connection may close before its first use
                if self._membership.loss.error is None:
                    if error.errno != errno.ENOTCONN:
                        raise
                    self._await_cause(ConnectionReset(str(error)))
            self._note_owed()
            if self._step >= steps and self._held_out is None and not self._awaits_outer():
                break  # the others may have left already
            self._membership.next(self._step, self._owes)
        self._membership.close()
        return None if self._told is None else self._told.record

    @contextmanager
    def at_the_end(self, consequence: str = "") -> Iterator[None]:
        """Context of collective calls after the last step."""
        try:
            yield
        except (DeviceLost, ConnectionLost) as error:
            if consequence:
                raise EmptyStageError(f"{error}; all steps were done, but {consequence}") from None
            assert self._all.detector is not None
            self._all.detector.stop_watching()

    def _generation(self, steps: int) -> bool:
        """Run a generation; False if another one follows."""
        now = self._membership.now
        self.plan = self._plan_of(now)
        self.ranks = self._membership.ranks(now.members.index(self._membership.name))
        self._connect()
        self._owes = now.owes
        if self._stage_module is not None:
            self._stage_module.follow(self.plan, self.ranks.rank)
        self._hand_over(now)
        self._tell_before()
        if self._checkpoints is not None:
            self._checkpoints = self._checkpoints.of(self.plan, self._stage_module, self.ranks)
        commit = CommitProtocol(self._membership, self.ranks, head_ranks(self.plan), steps - 1)
        self._commit = commit
        pipeline = self._make_pipeline(self.plan, self.ranks.rank, self._works)
        self.worker = Worker(self.plan, self.ranks, self._works, pipeline=pipeline, commit=commit)
        if self.ranks.rank == 0 and now.number:
            for event in membership_events(now, self._whole, time.monotonic() - self._began_s):
                self._progress.between_steps(event_line(event), **event)
        self._began_s = time.monotonic()
        with self._evaluation(now, steps) or nullcontext() as evaluation:
            # an evaluation that a loss prevented, or of a run without steps
            self._evaluate(evaluation, now.step - 1)
            going_on = self.worker.steps(
                steps - self._step,
                first=self._step,
                owes=now.owes,
                begun=self.plan.sync.begun(now.step) and now.agreed < now.step - 1 and not now.owes,
            )
            with closing(going_on) as done:
                for record in done:
                    self._after(record, commit)
                    self._evaluate(evaluation, record.step)
                    if commit.grows:
                        return False
            if self._held_out is not None:
                # stay until the last evaluation has been reported
                commit.end()
        return True

    def _evaluation(self, now: Generation, steps: int) -> Evaluation | None:
        if self._held_out is None:
            return None
        assert self.worker is not None
        again = now.evaluated < now.step or (not now.number and now.step == steps)
        after = range(now.step - again, steps)
        return Evaluation(
            self.plan, self.ranks, self._stage_module, self.worker.wiring, self._held_out, after
        )

    def _evaluate(self, evaluation: Evaluation | None, step: int) -> None:
        results = [] if evaluation is None else evaluation.after(step)
        if results and self.ranks.rank == 0:
            for result in results:
                self._progress.evaluated(result)
            self._membership.tell_evaluated(step + 1)

    def _plan_of(self, now: Generation) -> TrainingPlan:
        """The plan of a generation, the same on all ranks."""
        try:
            plan = remove_devices(self._whole, set(self._all.names) - set(now.members))
        except PlanError as error:
            raise EmptyStageError(_because(now, str(error))) from None
        rank = now.members.index(self._membership.name)
        if (
            self._stage_module is not None
            and has_head(plan, rank)
            and self._stage_module.head is None
        ):
            name = self._membership.name
            raise EmptyStageError(_because(now, f"device {name!r} has no head to go on with"))
        return plan

    def _connect(self) -> None:
        """Replace heartbeat connections by those of this generation."""
        detector = self._all.detector
        assert detector is not None
        if self._heartbeats is not None:
            # all of this generation let go of older ones before any of them closes those
            detector.watch_only(self._heartbeats)
        self._held.append(self.ranks.held)
        self._heartbeats = {}
        self._heartbeats = ring(self.ranks)
        detector.watch_only(self._heartbeats)
        close_older(self._held)

    def _hand_over(self, now: Generation) -> None:
        """Transfer state to joining devices from others of their stage."""
        for name in now.new:
            taker = now.members.index(name)
            stage = self.plan.stage_of.get(taker)
            if stage is not None:
                # preferably from a device that acts as one with it
                near = set(lockstep_devices(self.plan, taker))
                group = sorted(self.plan.assignment.groups[stage], key=lambda d: d not in near)
                giver = next((d for d in group if now.members[d] not in now.new), None)
                if giver is None:
                    reason = f"stage {stage} has no device left that has its parameters"
                    raise EmptyStageError(_because(now, reason))
                transfer_state(self.ranks, giver, taker, self._stage_module, now.step)
                if (
                    taker == self.ranks.rank
                    and giver not in near
                    and self._stage_module is not None
                ):
                    self._stage_module.restart_from_global()
            if taker == self.ranks.rank:
                self._step = now.step

    def _awaits_outer(self) -> bool:
        """Whether a delayed outer step of the last step is pending."""
        agreed = NEW if self._commit is None else self._commit.agreed
        return self.plan.sync.begun(self._step) and agreed < self._step - 1

    def _note_owed(self) -> None:
        """Record a loss between the local updates and the outer step of a step."""
        commit, step, sync = self._commit, self._step, self.plan.sync
        if self._owes or commit is None or commit.taken != step:
            return
        assert self.worker is not None and self.worker.record is not None
        self._told = _Told(self.worker.record, commit)
        ends = sync.begun(step) if sync.delayed else sync.due(step)
        if ends and commit.agreed < step - sync.delayed:
            self._owes = True
        else:
            # others may have gone on: nothing of it is left but to begin an outer step
            self._step = step + 1

    def _after(self, record: StepRecord, commit: CommitProtocol) -> None:
        self._step = record.step + 1
        self._began_s = time.monotonic()
        if self._owes:
            # its loss was reported at the start of the generation
            self._owes = False
        else:
            self._told = _Told(record, commit)
            if self.ranks.rank == 0:
                self._tell(self._told)
        if self._checkpoints is not None and self._checkpoints.due(record.step):
            self._checkpoints.maybe_save(record.step)

    def _tell(self, last: _Told) -> None:
        self._progress.step(last.record, last.commit)
        self._membership.tell(last.record.step)

    def _tell_before(self) -> None:
        """Report what the first rank of the previous generation could not."""
        last, now = self._told, self._membership.now
        first = next((m for m in now.members if m not in now.new), None)
        reports = self._membership.name == first
        if reports and last is not None and self._membership.told() < last.record.step:
            self._tell(last)

    def _await_cause(self, error: ConnectionLost) -> None:
        """Wait until the lost device is known."""
        detector, loss = self._all.detector, self._membership.loss
        assert detector is not None
        for wait_s in (CAUSE_S, detector.heartbeat_timeout_s):
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                if detector.shutdown_.line is not None:
                    raise RunAborted
                if loss.error is not None:
                    return
                time.sleep(LOOK_S)
            if not self._membership.report(error):
                break
        raise error


def _because(now: Generation, consequence: str) -> str:
    why = next(iter((now.lost or {}).values()), "")
    return f"{why}; {consequence}" if why else consequence
