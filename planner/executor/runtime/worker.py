"""Steps of one rank: operations, averaging, update, without a global barrier."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.comm_plan import CommPlan, owned_ranges
from planner.executor.comm.device_collectives import DeviceCollectives
from planner.executor.comm.losses import LossCollector, LossSender
from planner.executor.comm.p2p import Sender
from planner.executor.comm.ready_hint import ReadyHint
from planner.executor.comm.stage_averager import StageAverager
from planner.executor.comm.tcp_tuning import (
    disable_slow_start_after_idle,
    grow_windows,
    uses_network,
)
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.outer_averaging import OuterAveraging, PendingOuterStep
from planner.executor.runtime.pipeline import Pipeline, PipelineConnections
from planner.executor.runtime.records import OperationRecord, StepRecord
from planner.executor.runtime.stage_runtime import Simulation, StageRuntime
from planner.executor.runtime.step_committer import StepCommitter
from planner.executor.transport.connections import (
    REVERSE,
    ChannelKind,
    Connection,
    Connections,
    DuplexChannels,
    duplex_channels,
)
from planner.training_plan.model import TrainingPlan


class Worker:
    """Runs the steps of one rank.

    Parameters
    ----------
    runtime
        Runs the operations of this rank.
    pipeline
        Decides which operations run, and in which order.
    simulation
        Simulated compute; None if a model is trained.
    previous
        The worker of the previous segment or generation, whose counts continue.
    segment
        Number of the segment among those of the rank group.
    committer
        Commits steps and collects losses; None if each rank updates when its gradients are ready.
    collectives
        Collectives between GPUs, used where they support a group; None to average in host memory.

    Attributes
    ----------
    comm_plan
        Peers and rounds of this rank.
    losses
        Losses received so far, on rank 0; None on other ranks and with a committer.
    record
        The current step, or the last one.
    began_s
        Start of the last isolated step, or of the first step after them, on the monotonic clock.
    microbatches
        Number of backward passes of this rank.
    sent_bytes
        Bytes sent by averaging and pipeline, by name of the destination.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: RankGroup,
        runtime: StageRuntime,
        pipeline: Pipeline,
        *,
        simulation: Simulation | None = None,
        previous: Worker | None = None,
        segment: int = 0,
        committer: StepCommitter | None = None,
        collectives: DeviceCollectives | None = None,
    ) -> None:
        self.plan, self.ranks, self.rank = plan, ranks, ranks.rank
        self.losses: LossCollector | None = None
        self.record: StepRecord | None = None
        self.began_s = 0.0
        self.microbatches = 0
        self._segment = segment
        self._earlier_sent_bytes: dict[str, int] = {}
        if previous is not None:
            self.microbatches, self._earlier_sent_bytes = previous.microbatches, previous.sent_bytes
        self._channels: dict[ChannelKind, DuplexChannels] = {}
        self._runtime, self._pipeline = runtime, pipeline
        self._simulated = simulation is not None
        self._barrier: Callable[[str], None] = ranks.barrier
        if simulation is not None:
            self._barrier = simulation.make_barrier(plan, ranks)
        self._committer, self._collectives = committer, collectives
        reports_losses = committer is None and simulation is None
        self._loss_ranks = pipeline.loss_ranks if reports_losses else set()
        time_scale = None if simulation is None else simulation.time_scale
        self.comm_plan = CommPlan(plan, ranks.rank, pipeline.peers, self._loss_ranks, time_scale)
        averager = self.comm_plan.averager
        self._outer = OuterAveraging(plan, ranks, runtime, averager, committer)
        # readiness can be predicted if a step that averages has a fixed order of operations;
        # collectives need no notification
        predictable = (
            self._pipeline.fixed_order
            and not plan.sync.local_steps
            and not averager.starts_on_device(collectives)
        )
        notify_ahead_s = averager.notify_ahead_s
        self._ready_hint = ReadyHint(notify_ahead_s) if predictable and notify_ahead_s else None

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent by averaging and pipeline, by name of the destination."""
        totals = dict(self._earlier_sent_bytes)
        for channels in self._channels.values():
            for destination, connection in channels.outgoing.items():
                name = self.ranks.name(destination)
                totals[name] = totals.get(name, 0) + connection.sent_bytes
        return totals

    def steps(
        self,
        count: int,
        *,
        first: int = 0,
        isolated_steps: int = 0,
        pending: PendingOuterStep | None = None,
    ) -> Generator[StepRecord, None, None]:
        """Train; yields the record of every step when it ends.

        Parameters
        ----------
        count
            Number of steps.
        first
            Number of the first one.
        isolated_steps
            Steps before, each started on all ranks together, and numbered separately from 0.
        pending
            State of an outer step that earlier steps began; by default a delayed one is restored
            from a checkpoint.
        """
        if pending is None:
            restored = self.plan.sync.has_pending_outer_step(first)
            pending = PendingOuterStep.RESTORED if restored else PendingOuterStep.NONE
        numbers = range(first, first + count)
        cycle = self.plan.cycle
        schedule_ids = [cycle[t % len(cycle)] for t in (*range(isolated_steps), *numbers)]
        if pending is PendingOuterStep.INTERRUPTED:
            # only the outer step of the first step is left
            del schedule_ids[0]
            numbers = numbers[1:]
        with ExitStack() as resources:
            resources.callback(self._outer.close)
            error_latch = resources.enter_context(self.ranks.error_latch())
            connections = self._connect(resources)
            self._start_connections(connections, schedule_ids, error_latch)
            loss_sender = self._open_loss_channel(connections, numbers)
            record = StepRecord(numbers.start - 1, False, time.monotonic())
            if self._outer.resume(pending, record):
                yield record
            for index, schedule_id in enumerate(schedule_ids):
                is_isolated = index < isolated_steps
                step = index if is_isolated else numbers[index - isolated_steps]
                if index <= isolated_steps:
                    self._barrier(f"begin/{self._segment}/{index}")
                    self.began_s = time.monotonic()
                record = self.record = StepRecord(step, is_isolated, time.monotonic())
                self._run_step(record, index, schedule_id)
                if loss_sender is not None:
                    loss_sender.report(step, self._runtime.loss() or 0.0)
                yield record
            self._outer.apply_pending(record)
            self._finish_connections(error_latch)

    def wait_for_averaging(self) -> None:
        """Wait for averaging in the background."""
        self._outer.wait()

    def _connect(self, resources: ExitStack) -> Connections:
        """Connect to all peers, watch their heartbeats and tune TCP."""
        keys = self.comm_plan.connection_keys
        keys |= {(ChannelKind.HEARTBEAT, peer) for _, peer in keys}
        connections = resources.enter_context(
            connections_to(self.ranks, keys, f"steps/{self._segment}")
        )
        self._channels = {kind: duplex_channels(connections, kind, self.rank) for kind in REVERSE}
        resources.enter_context(
            self._watch_heartbeats(_connections_of_kind(connections, ChannelKind.HEARTBEAT))
        )
        if any(uses_network(connection) for connection in connections.values()):
            disable_slow_start_after_idle()
        grow_windows(self._channels.values(), self.comm_plan.bandwidth_delay_bytes())
        return connections

    def _start_connections(
        self, connections: Connections, schedule_ids: Sequence[int], error_latch: ErrorLatch
    ) -> None:
        """Start the threads that send and receive."""
        if self._committer is not None:
            self._committer.abort_on(error_latch)
        channels = self._channels[ChannelKind.PIPELINE]
        self._sender = Sender(
            channels.outgoing,
            error_latch,
            self.comm_plan.rates(),
            self.comm_plan.round_trips_s(),
            self._runtime.backend,
        )
        self._pipeline.open(
            PipelineConnections(channels.incoming, self._sender, error_latch), schedule_ids
        )
        self._averaging = AveragingConnections(self._channels[ChannelKind.AVERAGING], error_latch)
        self._outer.set_connections(self._averaging, self._sender)
        self._norm = _connections_of_kind(connections, ChannelKind.NORM)

    def _finish_connections(self, error_latch: ErrorLatch) -> None:
        """Wait until all messages have been sent and received."""
        self._pipeline.finish()
        self._sender.finish()
        self._averaging.finish()
        error_latch.check()
        if self.losses is not None:
            self.losses.wait()

    def _open_loss_channel(
        self, connections: Connections, steps: range
    ) -> LossCollector | LossSender | None:
        """Loss collector on rank 0, loss sender on others; None if this rank has no losses."""
        loss_connections = _connections_of_kind(connections, ChannelKind.LOSSES)
        has_losses = self.rank in self._loss_ranks
        if self.rank == 0 and self._loss_ranks:
            self.losses = LossCollector(loss_connections, has_losses, steps)
        if not has_losses:
            return None
        return self.losses or LossSender(loss_connections[0])

    def _watch_heartbeats(self, connections: dict[int, Connection]) -> AbstractContextManager[None]:
        """Context in which the failure detector watches heartbeat connections."""
        detector = self.ranks.detector
        if detector is None:
            return nullcontext()
        return detector.watching_connections(
            {c: self.ranks.name(peer) for peer, c in connections.items()}
        )

    def _run_step(self, record: StepRecord, index: int, schedule_id: int) -> None:
        """Operations, averaging and updates of one step."""
        self._runtime.begin(record.step, self.plan.schedules[schedule_id])
        self._run_operations(record, index, schedule_id)
        if self.plan.sync.local_steps:
            self._local_step(record)
        else:
            self._average_and_update(record)
        self.microbatches += sum(op.kind == "B" for op in record.ops)

    def _run_operations(self, record: StepRecord, index: int, schedule_id: int) -> None:
        ready_hint = self._ready_hint

        def on_operation_end(end_s: float) -> None:
            if ready_hint is not None:
                ready_hint.operation_ended(end_s, self._averaging.notify_ready)

        if ready_hint is not None:
            ready_hint.begin(schedule_id)
        self._pipeline.run(index, schedule_id, record, on_operation_end)

    def _average_and_update(self, record: StepRecord) -> None:
        """Average gradients over the stage, clip them, and update.

        With optimizer state in shards, the last round spreads updated parameters.
        """
        tied, shards = self._runtime.tied_numel, self.plan.shards_optimizer
        averaging = slice(-1 if shards else None)
        self._runtime.unscale()
        # before peers are notified
        self.comm_plan.averager.prepare(self._runtime.gradients, self._collectives)
        notified = None
        if self._ready_hint is not None:
            self._ready_hint.ready(time.monotonic())
            notified = self._ready_hint.notified
        self._average_all(record, tied, averaging, notified)
        self._clip(record)
        if self._committer is not None:
            self._committer.commit_step(record.step, self._runtime.loss())
        self._update(record)
        if shards:
            self._average_all(record, tied, slice(-1, None))
            self._runtime.receive_parameters()
            record.end_s = time.monotonic()

    def _average_all(
        self,
        record: StepRecord,
        tied: int,
        rounds: slice,
        notified: Collection[int] | None = None,
    ) -> None:
        """Some rounds of averaging the stage's vector, and its tied part with another stage's."""
        averager, tied_averager = self.comm_plan.averager, self.comm_plan.tied_averager
        self._average(record, averager, slice(tied, None), notified, rounds)
        if tied:
            self._average(record, tied_averager, slice(tied), rounds=rounds)

    def _clip(self, record: StepRecord) -> None:
        """Compute the global norm and clip by it, if the plan needs it."""
        norm = self.comm_plan.gradient_norm
        if norm is None:
            return
        if self._simulated:
            # simulated compute has no gradients, only messages
            norm.clip_grad_norm_([], self._norm)
            return
        gradients, tied = self._runtime.gradients, self._runtime.tied_numel
        owned = None
        if self.plan.shards_optimizer:
            owned = owned_ranges(self.plan, self.rank, len(gradients.current), tied)
        vector = gradients.for_update(None if owned is None else owned.values())
        parts, counted = [vector], [vector]
        if owned is not None:
            parts = [vector[slice(*part)] for part in owned.values()]
            # sites may each own all of a vector: those of the first one are counted
            counted = [
                vector[slice(*part)]
                for entry, part in owned.items()
                if self.rank in self.plan.averaging[entry][-1][0].members
            ]
        elif self.rank not in self.plan.assignment.groups[0]:
            # tied parameters are counted on the first stage
            counted = [vector[tied:]]
        record.gradient_norm = norm.clip_grad_norm_(parts, self._norm, counted)

    def _local_step(self, record: StepRecord) -> None:
        """The local update and, where due, averaging and outer step.

        In two-frequency averaging the update uses the averaged gradient of the region.
        """
        sync = self.plan.sync
        self._average(record, self.comm_plan.region_averager)
        if self._committer is not None:
            self._committer.commit_step(record.step, self._runtime.loss())
        self._update(record)
        self._outer.apply_pending(record)
        if sync.due(record.step):
            self._runtime.take_snapshot()
            # isolated steps are measured one by one
            if sync.delayed and not record.is_isolated:
                self._outer.start_averaging(record.step)
            else:
                self._outer.run(record)
        record.end_s = time.monotonic()

    def _average(
        self,
        record: StepRecord,
        averager: StageAverager,
        part: slice = slice(None),
        notified: Collection[int] | None = None,
        rounds: slice = slice(None),
    ) -> None:
        buffer, collectives = self._runtime.gradients, self._collectives
        if averager.peers:
            begin_s = time.monotonic()
            end_s = averager.run(
                buffer,
                self._averaging,
                self._sender,
                notified,
                collectives,
                part,
                rounds,
            )
            record.ops.append(OperationRecord(-1, self.rank, "A", begin_s, end_s))

    def _update(self, record: StepRecord) -> None:
        begin_s = time.monotonic()
        self._runtime.update(record.gradient_norm)
        record.loss_scale = self._runtime.loss_scale
        record.end_s = time.monotonic()
        record.ops.append(OperationRecord(-1, self.rank, "U", begin_s, record.end_s))


def _connections_of_kind(connections: Connections, kind: ChannelKind) -> dict[int, Connection]:
    return {peer: c for (other_kind, peer), c in connections.items() if other_kind is kind}
