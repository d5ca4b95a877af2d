"""Steps of one rank: operations, averaging, update, without a global barrier."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from torch import Tensor

from planner.executor.comm.allreduce_links import AllReduceLinks
from planner.executor.comm.averaging import StageAverager
from planner.executor.comm.comm_plan import CommPlan
from planner.executor.comm.connections import (
    BACK,
    ChannelKind,
    Connection,
    Connections,
    DuplexChannels,
    channels_of,
)
from planner.executor.comm.device_collectives import DeviceCollectives
from planner.executor.comm.losses import LossCollector, LossSender
from planner.executor.comm.p2p import Sender
from planner.executor.comm.ready_hint import ReadyHint
from planner.executor.comm.tcp_tuning import (
    disable_slow_start_after_idle,
    grow_windows,
    leaves_the_machine,
)
from planner.executor.comm.time_scale import TimeScale
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.runtime.outer_averaging import OuterAveraging
from planner.executor.runtime.pipeline import FixedPipeline, Pipeline, PipelineLinks
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_runtime import StageRuntime, StepCommit
from planner.training_plan.model import TrainingPlan


class Worker:
    """One rank of a plan.

    Parameters
    ----------
    ranks
        The process group.
    compute
        Runs its operations.
    pipeline
        How it runs its operations; by default in the planned order.
    time_scale
        Scale of simulated compute; None if a model is trained.
    start
        Called with a name that all ranks share, to start a step together; by default a barrier.
    before
        The worker of the steps before, whose counts continue.
    commit
        Commits steps and collects losses; None if each rank updates when its gradients are ready.
    collectives
        Averages from GPU to GPU where it can; None for averaging through the host.

    Attributes
    ----------
    wiring
        The plan from this rank's view.
    losses
        On rank 0, losses known so far; None where there are none.
    began_s
        Start of the last step from an idle system, or of the first step after those, on the
        monotonic clock.
    microbatches
        Number that passed this rank, forward and backward.
    sent_bytes
        By rank, bytes sent by averaging and pipeline.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: ProcessGroup,
        compute: StageRuntime,
        *,
        pipeline: Pipeline | None = None,
        time_scale: TimeScale | None = None,
        start: Callable[[str], None] | None = None,
        before: Worker | None = None,
        commit: StepCommit | None = None,
        collectives: DeviceCollectives | None = None,
    ) -> None:
        self.plan, self.ranks, self.rank = plan, ranks, ranks.rank
        self.losses: LossCollector | None = None
        self.record: StepRecord | None = None
        self.began_s = 0.0
        self.microbatches = 0
        self._part = 0
        self._sent_before: dict[int, int] = {}
        if before is not None:
            self.microbatches, self._sent_before = before.microbatches, before.sent_bytes
            self._part = before._part + 1
        self._channels: dict[ChannelKind, DuplexChannels] = {}
        self._compute, self._time_scale = compute, time_scale
        self._pipeline = pipeline or FixedPipeline(plan, ranks.rank, compute)
        self._start = start or ranks.barrier
        self._commit, self._collectives = commit, collectives
        reports = commit is None and time_scale is None
        self._loss_ranks = self._pipeline.loss_ranks if reports else set()
        self.wiring = CommPlan(plan, ranks.rank, self._pipeline.peers, self._loss_ranks, time_scale)
        self._outer = OuterAveraging(plan, ranks, compute, self.wiring.averaging, commit)
        # for steps that average and have a fixed order of operations
        fixed = self._pipeline.fixed_order and not plan.sync.local_steps
        ahead_s = self.wiring.averaging.ahead_s
        # collectives need no word of readiness
        fixed &= not self.wiring.averaging.begins_here(collectives)
        self._ready_hint = ReadyHint(ahead_s) if fixed and ahead_s else None

    @property
    def sent_bytes(self) -> dict[int, int]:
        """See the class."""
        totals = dict(self._sent_before)
        for channels in self._channels.values():
            for other, connection in channels.to.items():
                totals[other] = totals.get(other, 0) + connection.sent_bytes
        return totals

    def steps(
        self,
        count: int,
        rest: int = 0,
        first: int = 0,
        owes: bool = False,
        begun: bool | None = None,
    ) -> Generator[StepRecord, None, None]:
        """Train; yields after every step."""
        cycle = self.plan.cycle
        walk = [cycle[t % len(cycle)] for t in (*range(rest), *range(first, first + count))]
        with ExitStack() as held:
            channels = self.wiring.connections
            channels |= {(ChannelKind.HEARTBEAT, other) for _, other in channels}
            connections = held.enter_context(
                connections_to(self.ranks, channels, f"steps/{self._part}")
            )
            self._channels = {kind: channels_of(connections, kind, self.rank) for kind in BACK}
            held.enter_context(self._watched(_of(connections, ChannelKind.HEARTBEAT)))
            if any(leaves_the_machine(connection) for connection in connections.values()):
                held.enter_context(disable_slow_start_after_idle(before_end=self._before_end))
            grow_windows(self._channels.values(), self.wiring.bandwidth_delay_bytes())
            if owes:
                del walk[0]
                first += 1
            with self.ranks.failing() as failure:
                yield from self._run_steps(walk, rest, first, owes, begun, connections, failure)

    def _run_steps(
        self,
        walk: Sequence[int],
        rest: int,
        first: int,
        owes: bool,
        begun: bool | None,
        connections: Connections,
        failure: ErrorLatch,
    ) -> Iterator[StepRecord]:
        if self._commit is not None:
            self._commit.abort_on(failure)
        channels = self._channels[ChannelKind.PIPELINE]
        rates, round_trips_s = self.wiring.rates(), self.wiring.round_trips_s()
        sender = Sender(channels.to, failure, rates, round_trips_s, self._compute.backend)
        self._pipeline.open(PipelineLinks(channels.of, sender, failure), walk)
        peers = AllReduceLinks(self._channels[ChannelKind.AVERAGING], failure)
        self._sender, self._peers = sender, peers
        self._norms = _of(connections, ChannelKind.NORM)
        self._outer.open(peers, sender)
        numbers = range(first, first + len(walk))
        record = StepRecord(first - 1, False, time.monotonic())  # of the steps before
        loss_sender = self._teller(_of(connections, ChannelKind.LOSSES), numbers)
        if owes:
            self._outer.finish_interrupted(record)
            yield record
        if begun:
            self._outer.begin(first - 1)
        elif begun is None and self.plan.sync.begun(first):
            self._outer.pending = first - 1
        for serial, k in enumerate(walk):
            if serial <= rest:
                self._start(f"begin/{self._part}/{serial}")
                self.began_s = time.monotonic()
            step = serial if serial < rest else first + serial - rest
            record = self.record = StepRecord(step, serial < rest, time.monotonic())
            self._compute.begin(step, self.plan.schedules[k])
            self._operations(record, serial, k)
            if self.plan.sync.local_steps:
                self._local_step(record)
            else:
                self._average_and_update(record)
            self.microbatches += sum(kind == "B" for _, _, kind, _, _ in record.ops)
            if loss_sender is not None:
                loss_sender.tell(step, self._compute.loss() or 0.0)
            yield record
        self._outer.end(record)
        self._pipeline.finish()
        sender.finish()
        peers.finish()
        failure.check()
        if self.losses is not None:
            self.losses.wait()

    def _watched(self, heartbeats: dict[int, Connection]) -> AbstractContextManager[None]:
        """Let the failure detector watch connections."""
        if self.ranks.detector is None:
            return nullcontext()
        return self.ranks.detector.watching({c: self.ranks.name(r) for r, c in heartbeats.items()})

    def _before_end(self, undo: Callable[[], None]) -> None:
        if self.ranks.detector is not None:
            self.ranks.detector.shutdown_.before_end(undo)

    def _operations(self, record: StepRecord, serial: int, k: int) -> None:
        ready_hint = self._ready_hint

        def ended(end: float) -> None:
            if ready_hint is not None:
                ready_hint.after(end, self._peers.tell)

        if ready_hint is not None:
            ready_hint.begin(k)
        self._pipeline.run(serial, k, record, ended)

    def _average_and_update(self, record: StepRecord) -> None:
        tied = self._compute.tied_values
        self._compute.unscale()
        gradients, averaging = self._compute.gradients, self.wiring.averaging
        # copy to the first round's memory before sending word
        gradients(on_device=averaging.begins_here(self._collectives))
        announced = None
        if self._ready_hint is not None:
            self._ready_hint.ready(time.monotonic())
            announced = self._ready_hint.told
        rest, shared = slice(tied, None), slice(tied)
        self._average(record, averaging, lambda on: gradients(on_device=on)[rest], announced)
        if tied:
            self._average(record, self.wiring.tied, lambda on: gradients(on_device=on)[shared])
        vector = gradients()
        if self.wiring.norm is not None:
            if self._time_scale is None:
                # tied parameters count on the first stage
                copied = tied if self.rank not in self.plan.assignment.groups[0] else 0
                record.norm = self.wiring.norm.run(vector, self._norms, copied)
            else:
                # simulated compute has no gradients
                self.wiring.norm.run(vector[:0], self._norms)
        if self._commit is not None:
            self._commit.commit_step(record.step, self._compute.loss())
        self._update(record)

    def _local_step(self, record: StepRecord) -> None:
        """The local update and, where due, averaging and outer step.

        In two-frequency averaging, with the averaged gradient of the region.
        """
        sync = self.plan.sync
        if self.wiring.within.peers:
            gradients, within = self._compute.gradients, self.wiring.within
            gradients(on_device=within.begins_here(self._collectives))
            self._average(record, within, lambda on: gradients(on_device=on))
        if self._commit is not None:
            self._commit.commit_step(record.step, self._compute.loss())
        self._update(record)
        self._outer.end(record)
        if sync.due(record.step):
            self._compute.take_snapshot()
            # steps from an idle system are measured one by one
            if sync.delayed and not record.rest:
                self._outer.begin(record.step)
            else:
                self._outer.run(record)
        record.end_s = time.monotonic()

    def settle(self) -> None:
        """Wait for averaging in the background."""
        self._outer.settle()

    def _average(
        self,
        record: StepRecord,
        averaging: StageAverager,
        values: Callable[[bool | None], Tensor],
        announced: Collection[int] | None = None,
    ) -> None:
        if averaging.peers:
            ready = time.monotonic()
            end = averaging.run(values, self._peers, self._sender, announced, self._collectives)
            record.ops.append((-1, self.rank, "A", ready, end))

    def _update(self, record: StepRecord) -> None:
        update = time.monotonic()
        self._compute.update(record.norm)
        record.loss_scale = self._compute.loss_scale
        record.end_s = time.monotonic()
        record.ops.append((-1, self.rank, "U", update, record.end_s))

    def _teller(
        self, connections: dict[int, Connection], steps: range
    ) -> LossCollector | LossSender | None:
        """Loss collector on rank 0, loss sender on others."""
        if self.rank == 0 and self._loss_ranks:
            self.losses = LossCollector(connections, 0 in self._loss_ranks, steps)
        if self.rank not in self._loss_ranks:
            return None
        return self.losses or LossSender(connections[0])


def _of(connections: Connections, purpose: ChannelKind) -> dict[int, Connection]:
    return {other: c for (what, other), c in connections.items() if what is purpose}
