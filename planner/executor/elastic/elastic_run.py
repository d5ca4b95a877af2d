"""Elastic runs: training continues when devices are lost, and when they join again.

All members of a generation have the plan of the devices present. A generation ends when one of them
is lost: the others repeat the interrupted step, since an update is applied by all ranks or none
(`step_commit`). Or it ends after a step, when a device is waiting to join. The states of a run, and
what ends each of them, are listed in docs/explanation/elastic-runs.md.

In local SGD, a step's local updates and the outer step after it are committed separately. A
generation that ends between the two leaves the outer step to the next one, which begins with it. A
delayed outer step that was started and not finished is started again by the next generation, with
the same pseudo-gradients of the remaining devices. A joining device starts from the global
parameters; in two-frequency averaging, from the state of another device of its region.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from planner.executor.checkpoint.checkpoint import CheckpointManager
from planner.executor.checkpoint.state_transfer import transfer_state
from planner.executor.elastic.membership import (
    NO_STEP,
    POLL_S,
    RESET_CAUSE_S,
    DeviceLost,
    Generation,
    Membership,
)
from planner.executor.elastic.membership_events import event_line, membership_events
from planner.executor.elastic.shard_mover import ShardMover
from planner.executor.elastic.step_commit import StoreStepCommitter
from planner.executor.fault_tolerance.shutdown import RunAborted
from planner.executor.rendezvous.rank_group import RankGroup, close_older
from planner.executor.rendezvous.rendezvous import connect_ring
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.device_report import peak_flops
from planner.executor.runtime.evaluate import Evaluation, EvaluationData
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.outer_averaging import PendingOuterStep
from planner.executor.runtime.pipeline import FixedPipeline, Pipeline, head_ranks
from planner.executor.runtime.progress import Progress
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.sharded_model_stage import ShardedModelStage
from planner.executor.runtime.stage_module import has_head
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.runtime.worker import Worker
from planner.executor.transport.connections import ConnectionLost, ConnectionReset, is_network_error
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan, lockstep_devices
from planner.training_plan.remove_devices import remove_devices
from planner.utils.refusal import Refusal


class EmptyStageError(RuntimeError):
    """A stage has no device left."""


class RunRefused(RuntimeError):
    """A refusal while training: every rank, or a restarted one, would refuse the same input."""


@dataclass
class _LastStep:
    """The last step of this rank, which another generation may have to report."""

    record: StepRecord
    committer: StoreStepCommitter


class ElasticRun:
    """One rank of an elastic run.

    Parameters
    ----------
    ranks
        All ranks of the full plan.
    runtime
        Runs the operations of this rank; with the parameters of the first step, unless it joins
        late.
    progress
        Output of the first rank of each generation.
    checkpoints
        The checkpoint manager; None for none.
    held_out
        Evaluation data; None for no evaluation.
    wait_s
        See `planner.executor.elastic.membership.Membership`.
    device
        Where this rank computes.
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
        ranks: RankGroup,
        runtime: ModelStage | Aggregator,
        progress: Progress,
        checkpoints: CheckpointManager | None,
        held_out: EvaluationData | None,
        wait_s: float,
        device: torch.device,
        make_pipeline: Callable[[TrainingPlan, int, StageRuntime], Pipeline] = FixedPipeline,
    ) -> None:
        self.plan, self.ranks, self._make_pipeline = plan, ranks, make_pipeline
        self.worker: Worker | None = None
        self._full_plan, self._all_ranks, self._runtime = plan, ranks, runtime
        self._model_stage = runtime if isinstance(runtime, ModelStage) else None
        self._progress, self._checkpoints = progress, checkpoints
        self._held_out, self._device = held_out, device
        self._membership = Membership(ranks, wait_s)
        self._shard_mover: ShardMover | None = None
        if isinstance(runtime, ShardedModelStage):
            has_state = not ranks.joins_late
            self._shard_mover = ShardMover(plan, ranks.rank, runtime, has_state=has_state)
        self._step = NO_STEP
        self._began_s = time.monotonic()
        self._last_step: _LastStep | None = None
        self._committer: StoreStepCommitter | None = None
        self._outer_step_due = False
        self._unreported: list[Generation] = []
        self._older_resources: list[ExitStack] = []
        self._heartbeats: Mapping[socket.socket, str] | None = None

    def train(self, first: int, steps: int) -> StepRecord | None:
        """Run all steps; returns the record of the last one."""
        if self._all_ranks.joins_late:
            if not self._membership.join():
                return None
        else:
            self._step = first
            self._membership.start(first)
        while True:
            try:
                if self._run_generation(steps):
                    break
            except DeviceLost:
                pass
            except Refusal as error:
                raise RunRefused(str(error)) from error
            except ConnectionLost as error:
                self._await_cause(error)
            except OSError as error:
                # a connection may close before its first use
                if self._membership.rank_lost.error is None:
                    if not is_network_error(error):
                        raise
                    self._await_cause(ConnectionReset(str(error)))
            self._after_loss()
            if self._step >= steps and self._held_out is None and not self._outer_step_pending():
                # all steps are done: other ranks may have exited
                members = self._membership.generation.members
                present = (m for m in members if m not in self._membership.lost)
                if self._checkpoints is not None and self._membership.name == next(present, None):
                    self._checkpoints.warn_if_missing(steps)
                break
            self._membership.next_generation(self._step, self._outer_step_due)
            # all members have left the collective that was interrupted
            self.ranks.delete_used_keys()
        self._membership.finish()
        return None if self._last_step is None else self._last_step.record

    @contextmanager
    def after_last_step(self, consequence: str = "") -> Iterator[None]:
        """Context of collective calls after the last step."""
        try:
            yield
        except (DeviceLost, ConnectionLost) as error:
            if consequence:
                raise EmptyStageError(f"{error}; all steps were done, but {consequence}") from None
            assert self._all_ranks.detector is not None
            self._all_ranks.detector.stop_watching()

    def _run_generation(self, steps: int) -> bool:
        """Run a generation; returns whether all steps are done."""
        generation = self._membership.generation
        if generation.number:
            # one that ended before its first step was not reported
            self._unreported.append(generation)
        self.plan = self._plan_of(generation)
        self.ranks = self._membership.ranks(generation.members.index(self._membership.name))
        self._connect()
        self._outer_step_due = generation.outer_step_due
        if self._model_stage is not None:
            self._model_stage.set_plan(self.plan, self.ranks.rank)
        self._transfer_state(generation)
        self._move_shards(generation)
        self._report_missed_step()
        self._progress.set_plan(self.plan, peak_flops(self.plan, self.ranks, self._device))
        if self._checkpoints is not None:
            self._checkpoints.set_plan(self.plan, self._model_stage, self.ranks)
        committer = self._committer = StoreStepCommitter(
            self._membership, self.ranks, head_ranks(self.plan), steps - 1
        )
        pipeline = self._make_pipeline(self.plan, self.ranks.rank, self._runtime)
        self.worker = Worker(
            self.plan,
            self.ranks,
            self._runtime,
            pipeline,
            previous=self.worker,
            committer=committer,
        )
        for unreported in self._unreported if self.ranks.rank == 0 else ():
            for event in membership_events(
                unreported, self._full_plan, time.monotonic() - self._began_s
            ):
                self._progress.between_steps(event_line(event), **event)
        self._unreported.clear()
        self._began_s = time.monotonic()
        with self._evaluation(generation, steps) or nullcontext() as evaluation:
            # one that a lost device prevented, or that of a run without steps
            self._evaluate(evaluation, generation.step - 1)
            records = self.worker.steps(
                steps - self._step, first=self._step, pending=self._pending_outer_step(generation)
            )
            with closing(records):
                for record in records:
                    self._step_done(record, committer)
                    self._evaluate(evaluation, record.step)
                    if committer.admits_joiners:
                        if self.plan.shards_optimizer:
                            # others may still spread parameters, and need connections to all
                            self.ranks.barrier(f"spread/{record.step}")
                        self._finish_checkpoint()
                        return False
            self._finish_checkpoint()
            if self._held_out is not None:
                # stay until the last evaluation has been reported
                committer.finish()
        return True

    def _pending_outer_step(self, generation: Generation) -> PendingOuterStep:
        """State in which the previous generation left the outer step."""
        if generation.outer_step_due:
            return PendingOuterStep.INTERRUPTED
        started = self.plan.sync.has_pending_outer_step(generation.step)
        if started and generation.committed_outer_step < generation.step - 1:
            return PendingOuterStep.UNAVERAGED
        return PendingOuterStep.NONE

    def _evaluation(self, generation: Generation, steps: int) -> Evaluation | None:
        if self._held_out is None:
            return None
        evaluate_again = generation.evaluated_steps < generation.step or (
            not generation.number and generation.step == steps
        )
        after = range(generation.step - evaluate_again, steps)
        return Evaluation(self.plan, self.ranks, self._model_stage, self._held_out, after)

    def _evaluate(self, evaluation: Evaluation | None, step: int) -> None:
        """Evaluate after a step, if an evaluation is due; the first rank reports the results."""
        results = [] if evaluation is None else evaluation.after(step)
        if results and self.ranks.rank == 0:
            for result in results:
                self._progress.evaluated(result)
            self._membership.set_evaluated_steps(step + 1)

    def _plan_of(self, generation: Generation) -> TrainingPlan:
        """The plan of a generation, the same on all ranks."""
        try:
            plan = remove_devices(
                self._full_plan, set(self._all_ranks.names) - set(generation.members)
            )
        except PlanError as error:
            raise EmptyStageError(_with_reason(generation, str(error))) from None
        name, stage = self._membership.name, self._model_stage
        if stage and stage.module.head is None and has_head(plan, generation.members.index(name)):
            reason = f"device {name!r} has no head to go on with"
            raise EmptyStageError(_with_reason(generation, reason))
        return plan

    def _connect(self) -> None:
        """Replace heartbeat connections by those of this generation."""
        detector = self._all_ranks.detector
        assert detector is not None
        if self._heartbeats is not None:
            # all ranks stop watching older connections before any of them closes those
            detector.watch_only_connections(self._heartbeats)
        self._older_resources.append(self.ranks.resources)
        self._heartbeats = {}
        self._heartbeats = connect_ring(self.ranks)
        detector.watch_only_connections(self._heartbeats)
        close_older(self._older_resources)

    def _transfer_state(self, generation: Generation) -> None:
        """Transfer state to joining devices from others of their stage."""
        for name in generation.joined:
            target = generation.members.index(name)
            is_own = target == self.ranks.rank
            if target in self.plan.stage_of:
                source = self._source_of_state(generation, target)
                transfer_state(self.ranks, source, target, self._model_stage, generation.step)
                in_lockstep = source in lockstep_devices(self.plan, target)
                if is_own and not in_lockstep and self._model_stage is not None:
                    self._model_stage.restart_from_global()
            if is_own:
                self._step = generation.step

    def _move_shards(self, generation: Generation) -> None:
        """Share optimizer state as this generation's plan does; parameters may be incomplete."""
        if self._shard_mover is None or not generation.number:
            return
        try:
            self._shard_mover.move(self.plan, self.ranks)
        except PlanError as error:
            raise EmptyStageError(_with_reason(generation, str(error))) from None

    def _source_of_state(self, generation: Generation, target: int) -> int:
        """A device that has the parameters of a joining one, if possible in lockstep with it."""
        stage = self.plan.stage_of[target]
        group = self.plan.assignment.groups[stage]
        sources = [d for d in group if generation.members[d] not in generation.joined]
        if not sources:
            reason = f"stage {stage} has no device left that has its parameters"
            raise EmptyStageError(_with_reason(generation, reason))
        lockstep = lockstep_devices(self.plan, target)
        return next((d for d in sources if d in lockstep), sources[0])

    def _outer_step_pending(self) -> bool:
        """Whether a delayed outer step of the last step is pending."""
        committed = NO_STEP if self._committer is None else self._committer.committed_outer_step
        return self.plan.sync.has_pending_outer_step(self._step) and committed < self._step - 1

    def _after_loss(self) -> None:
        """Find out whether the interrupted step, or only its outer step, must be repeated."""
        committer, step, sync = self._committer, self._step, self.plan.sync
        if self._outer_step_due or committer is None or committer.committed_step != step:
            return
        assert self.worker is not None and self.worker.record is not None
        self._last_step = _LastStep(self.worker.record, committer)
        outer_step = step - 1 if sync.delayed else step
        applies_outer = sync.has_pending_outer_step(step) if sync.delayed else sync.due(step)
        if sync.local_steps and applies_outer and committer.committed_outer_step < outer_step:
            self._outer_step_due = True
        else:
            # committed by all: only a delayed outer step may have to be started again, or updated
            # parameters be spread
            self._step = step + 1

    def _step_done(self, record: StepRecord, committer: StoreStepCommitter) -> None:
        """Report a step on the first rank, and begin or complete a checkpoint if one is due."""
        self._step = record.step + 1
        self._began_s = time.monotonic()
        if self._outer_step_due:
            # its loss was reported at the start of the generation
            self._outer_step_due = False
        else:
            self._last_step = _LastStep(record, committer)
            if self.ranks.rank == 0:
                self._report(self._last_step)
        if self._checkpoints is not None:
            self._checkpoints.after_step(record.step)

    def _finish_checkpoint(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def _report(self, last: _LastStep) -> None:
        self._progress.step(last.record, last.committer)
        self._membership.set_reported_step(last.record.step)

    def _report_missed_step(self) -> None:
        """Report the last step if the first rank of the previous generation did not."""
        last, generation = self._last_step, self._membership.generation
        first = next((m for m in generation.members if m not in generation.joined), None)
        reports = self._membership.name == first
        if reports and last is not None and self._membership.reported_step() < last.record.step:
            self._report(last)

    def _await_cause(self, error: ConnectionLost) -> None:
        """Wait for a report of the lost device that explains a closed connection.

        If none arrives, the connection itself is reported; raises ``error`` if that is not
        possible or leads to nothing.
        """
        detector, rank_lost = self._all_ranks.detector, self._membership.rank_lost
        assert detector is not None
        for wait_s in (RESET_CAUSE_S, detector.heartbeat_timeout_s):
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                if detector.shutdown.reason is not None:
                    raise RunAborted
                if rank_lost.error is not None:
                    return
                time.sleep(POLL_S)
            if not self._membership.report_connection_lost(error):
                break
        raise error


def _with_reason(generation: Generation, consequence: str) -> str:
    reason = next(iter(generation.lost.values()), "")
    return f"{reason}; {consequence}" if reason else consequence
