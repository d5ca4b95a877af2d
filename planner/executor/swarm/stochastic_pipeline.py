"""One device's part of iterations with stochastic wiring (SWARM, 3.2, Algorithm 1).

Every device of the first stage is the source of the microbatches that start there in the plan, and
chooses a peer of the first stage for each. The device that has run F chooses the peer of the next
stage; B follows the path back. A device runs one operation at a time, backward before forward, in
order of arrival, and starts no F while it holds as many microbatches in flight as in the plan. This
cannot deadlock: the last stage holds none that waits for others, so earlier stages get theirs back.

A step is over for a device when all that may choose it have announced their last F, and everything
it forwarded has returned. There is no barrier: requests of the next step wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from planner.executor.comm.p2p_schedule import Message
from planner.executor.runtime.pipeline import EndCallback, PipelineConnections, head_ranks
from planner.executor.runtime.records import OperationRecord, StepRecord
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.swarm.mailbox import Mailbox, RoutedMessage
from planner.executor.swarm.microbatch_source import MicrobatchSource
from planner.executor.swarm.routing_messages import (
    KINDS,
    UNCHOSEN,
    MessageFormat,
    MessageKind,
    RoutingHeader,
)
from planner.swarm.routing import Router, begun_router
from planner.training_plan.choices import Head, RouterFeedback
from planner.training_plan.initial_routes import initial_routes
from planner.training_plan.model import TrainingPlan

MIN_S = 1e-6
"""Smallest response time, since routers divide by it."""


class Neighbourhood:
    """Peers of one device of a plan with stochastic wiring.

    Parameters
    ----------
    rank
        A device with a stage.

    Attributes
    ----------
    stage, last
        Its stage, and the last stage.
    next
        Devices of the next stage.
    source_devices
        Devices of the first stage.
    forward_senders
        Devices that may send it F.
    head_first
        Whether head and loss are at the start of a path instead of its end.
    neighbours
        Devices with which it may exchange messages.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        groups = plan.assignment.groups
        self.stage, self.last = plan.stage_of[rank], len(groups) - 1
        self.source_devices = groups[0]
        self.next = groups[self.stage + 1] if self.stage < self.last else ()
        self.forward_senders = groups[max(self.stage - 1, 0)]
        self.head_first = plan.schedules[0].head is Head.FIRST and self.last > 0
        neighbours = {*self.forward_senders, *self.next}
        if self.head_first:
            neighbours |= set(groups[-1]) if self.stage == 0 else set()
            neighbours |= set(groups[0]) if self.stage == self.last else set()
        self.neighbours = neighbours - {rank}


def make_router(plan: TrainingPlan, rank: int, speed: float = 1.0) -> Router[int]:
    """A device's router, initialised with the plan's paths."""
    estimates = {
        stage: (route.parts, route.usual_s / speed)
        for stage, route in initial_routes(plan, rank).items()
    }
    return begun_router(len(plan.assignment.groups), plan.routing.smoothing, rank, estimates)


class StochasticPipeline:
    """Pipeline of a device that chooses where its microbatches go, for all steps of a run.

    Parameters
    ----------
    runtime
        Runs operations.
    router
        Estimates of peers, updated during the run.
    """

    fixed_order = False

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        runtime: StageRuntime,
        router: Router[int],
    ) -> None:
        self.loss_ranks = head_ranks(plan)
        self.peers: set[int] = set()
        self._rank, self._runtime = rank, runtime
        # aggregators have no stage and run no operations
        self._idle = rank not in plan.stage_of
        if self._idle:
            return
        self._neighbourhood = Neighbourhood(plan, rank)
        self.peers = self._neighbourhood.neighbours
        self._sources = [path[0] for path in plan.schedules[0].paths]
        self._max_in_flight = plan.schedules[0].most_live()[rank]
        self._feedback = plan.routing.told
        self._message_format = MessageFormat(self._neighbourhood.last + 1)
        # guards everything below, which threads of neighbours change
        self._changed = threading.Condition()
        self._router = router
        self._request_times: dict[tuple[int, int, int], float] = {}
        self._backward: deque[RoutedMessage] = deque()
        self._forward: defaultdict[int, deque[RoutedMessage]] = defaultdict(deque)
        self._end_counts: Counter[int] = Counter()
        self._in_flight = 0
        self._step_index = 0
        self._record: StepRecord | None = None
        self._microbatch_source: MicrobatchSource | None = None
        if self._neighbourhood.stage == 0:
            self._microbatch_source = MicrobatchSource(
                plan, rank, self._start_microbatch, self._announce_end
            )

    def open(self, connections: PipelineConnections, schedule_ids: Sequence[int]) -> None:
        """See `planner.executor.runtime.pipeline.Pipeline`."""
        if self._idle:
            return
        self._sender, self._error_latch = connections.sender, connections.error_latch
        connections.error_latch.notify_on_failure(self._changed)
        self._mailbox = Mailbox(
            self._rank,
            connections.incoming,
            self._message_format,
            self._runtime.buffer,
            self._handle,
            connections.error_latch,
        )
        self._neighbours = tuple(connections.incoming)

    def run(self, index: int, schedule_id: int, record: StepRecord, on_end: EndCallback) -> None:
        """Run this device's part of a step."""
        if self._idle:
            return
        with self._changed:
            self._step_index, self._record = index, record
            if self._microbatch_source is not None:
                self._microbatch_source.begin()
        announced_end = self._neighbourhood.stage == self._neighbourhood.last
        while True:
            with self._changed:
                while (received := self._next_message()) is None:
                    self._error_latch.check()
                    all_ended = self._end_counts[index] == len(self._neighbourhood.forward_senders)
                    if all_ended and not self._forward[index]:
                        if not announced_end:
                            self._broadcast_header(
                                self._neighbourhood.next, RoutingHeader(MessageKind.END, index)
                            )
                            announced_end = True
                        if not self._in_flight and (
                            self._microbatch_source is None or self._microbatch_source.all_finished
                        ):
                            del self._end_counts[index], self._forward[index]
                            return
                    self._changed.wait()
            self._run_received(received, record)

    def finish(self) -> None:
        """After the last step: exchange last messages with all neighbours."""
        if self._idle:
            return
        self._broadcast_header(self._neighbours, RoutingHeader(MessageKind.LAST))
        self._mailbox.finish()

    def _next_message(self) -> RoutedMessage | None:
        """The message of the next operation; backward passes have priority and need no memory."""
        if self._backward:
            return self._backward.popleft()
        waiting = self._forward[self._step_index]
        if waiting and self._in_flight < self._max_in_flight:
            self._in_flight += 1
            return waiting.popleft()
        return None

    def _run_received(self, received: RoutedMessage, record: StepRecord) -> None:
        header, neighbourhood = received.header, self._neighbourhood
        if received.tensor is not None:
            kind = KINDS[header.kind]
            message = Message(kind, header.microbatch, received.source, self._rank)
            record.record_received(message, received.tensor.nbytes, received.arrived_s)
        if header.kind is MessageKind.LOSS:
            output, end_s = self._run_op("H", header, received.tensor, record)
            self._send(MessageKind.BACKWARD, header, output, header.path[-1], end_s, record)
        elif header.kind is MessageKind.BACKWARD:
            self._run_backward(header, received.tensor, record)
        else:
            output, end_s = self._run_forward(received, record)
            if neighbourhood.stage < neighbourhood.last:
                with self._changed:
                    peer = self._choose_peer(neighbourhood.stage + 1, header)
                path = _with(header.path, neighbourhood.stage + 1, peer)
                self._send(
                    MessageKind.FORWARD, replace(header, path=path), output, peer, end_s, record
                )
            elif neighbourhood.head_first:
                self._send(MessageKind.LOSS, header, output, header.path[0], end_s, record)
            else:
                self._run_op("H", header, None, record)
                self._run_backward(header, None, record)

    def _run_forward(self, received: RoutedMessage, record: StepRecord) -> tuple[Tensor, float]:
        begin_s = time.monotonic()
        output, end_s = self._run_op("F", received.header, received.tensor, record)
        answer = replace(received.header, kind=MessageKind.ANSWER, seconds=end_s - begin_s)
        self._send_header(received.source, answer)
        return output, end_s

    def _run_backward(
        self, header: RoutingHeader, received: Tensor | None, record: StepRecord
    ) -> None:
        gradient, end_s = self._run_op("B", header, received, record)
        with self._changed:
            self._in_flight -= 1
        if self._neighbourhood.stage > 0:
            before = header.path[self._neighbourhood.stage - 1]
            self._send(MessageKind.BACKWARD, header, gradient, before, end_s, record)
        else:
            self._send_header(
                self._sources[header.microbatch], replace(header, kind=MessageKind.FINISHED)
            )

    def _run_op(
        self, kind: str, header: RoutingHeader, received: Tensor | None, record: StepRecord
    ) -> tuple[Tensor, float]:
        backend = self._runtime.backend
        start = backend.record_event()
        output = self._runtime.run_op(kind, header.microbatch, received)
        # report the compute time to the peer
        start_s = backend.wait_for_event(start)
        end_s = backend.wait_for_event(backend.record_event())
        record.ops.append(OperationRecord(header.microbatch, self._rank, kind, start_s, end_s))
        return output, end_s

    def _start_microbatch(self, microbatch: int) -> None:
        """Start the next microbatch of this source."""
        header = RoutingHeader(MessageKind.START, self._step_index, microbatch)
        peer = self._choose_peer(0, header)
        path = (peer, *(UNCHOSEN,) * self._neighbourhood.last)
        self._send_header(peer, replace(header, path=path))

    def _choose_peer(self, stage: int, header: RoutingHeader) -> int:
        peer = self._router.choose(stage)
        self._request_times[header.step_index, header.microbatch, stage] = time.monotonic()
        return peer

    def _announce_end(self) -> None:
        self._broadcast_header(
            self._neighbourhood.source_devices, RoutingHeader(MessageKind.END, self._step_index)
        )

    def _handle(self, received: RoutedMessage) -> None:
        """Handle a message, possibly from this device itself."""
        header = received.header
        with self._changed:
            if header.kind in (MessageKind.START, MessageKind.FORWARD):
                self._forward[header.step_index].append(received)
            elif header.kind in (MessageKind.LOSS, MessageKind.BACKWARD):
                self._backward.append(received)
            elif header.kind is MessageKind.END:
                self._end_counts[header.step_index] += 1
            elif header.kind is MessageKind.ANSWER:
                stage = header.path.index(received.source)
                requested_s = self._request_times.pop((header.step_index, header.microbatch, stage))
                waited_s = time.monotonic() - requested_s
                response_s = header.seconds if self._feedback is RouterFeedback.WORK else waited_s
                self._router.report(received.source, max(response_s, MIN_S))
            elif self._microbatch_source is not None and self._record is not None:  # FINISHED
                self._record.routes.append((header.microbatch, header.path))
                self._microbatch_source.microbatch_finished()
            self._changed.notify_all()

    def _send(
        self,
        kind: MessageKind,
        header: RoutingHeader,
        tensor: Tensor,
        peer: int,
        end_s: float,
        record: StepRecord,
    ) -> None:
        self._sender.send(tensor, peer, self._message_format.pack(replace(header, kind=kind)))
        self._sender.mark_computed(peer, tensor.nbytes, end_s)
        message = Message(KINDS[kind], header.microbatch, self._rank, peer)
        record.record_sent(message, tensor.nbytes, end_s)

    def _send_header(self, peer: int, header: RoutingHeader) -> None:
        if peer == self._rank:
            self._handle(RoutedMessage(header, peer))
        else:
            self._sender.send_header(peer, self._message_format.pack(header))

    def _broadcast_header(self, peers: tuple[int, ...], header: RoutingHeader) -> None:
        for peer in peers:
            self._send_header(peer, header)


def _with(path: tuple[int, ...], stage: int, peer: int) -> tuple[int, ...]:
    return (*path[:stage], peer, *path[stage + 1 :])
