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
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from planner.executor.comm.p2p_schedule import Message
from planner.executor.runtime.pipeline import PipelineLinks, head_ranks
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.swarm.mailbox import Mailbox, RoutedMessage
from planner.executor.swarm.microbatch_source import MicrobatchSource
from planner.executor.swarm.routing_messages import (
    KINDS,
    NOBODY,
    MessageFormat,
    MessageKind,
    RoutingMessage,
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
    trainers
        Devices of the first stage.
    choosers
        Devices that may send it F.
    head_first
        Whether head and loss are at the start of a path instead of its end.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        groups = plan.assignment.groups
        self.stage, self.last = plan.stage_of[rank], len(groups) - 1
        self.trainers = groups[0]
        self.next = groups[self.stage + 1] if self.stage < self.last else ()
        self.choosers = groups[max(self.stage - 1, 0)]
        self.head_first = plan.schedules[0].head is Head.FIRST and self.last > 0
        near = {*self.choosers, *self.next}
        if self.head_first:
            near |= set(groups[-1]) if self.stage == 0 else set()
            near |= set(groups[0]) if self.stage == self.last else set()
        self._neighbours = near - {rank}

    @property
    def neighbours(self) -> set[int]:
        """Devices with which it may exchange messages."""
        return self._neighbours


def router_of(plan: TrainingPlan, rank: int, speed: float = 1.0) -> Router[int]:
    """A device's router, initialised with the plan's paths."""
    begin = {s: (b.parts, b.usual_s / speed) for s, b in initial_routes(plan, rank).items()}
    return begun_router(len(plan.assignment.groups), plan.routing.smoothing, rank, begin)


class StochasticPipeline:
    """A device that routes microbatches, for all steps of a run.

    Parameters
    ----------
    compute
        Runs operations.
    router
        Estimates of peers, updated during the run.
    """

    fixed_order = False

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        compute: StageRuntime,
        router: Router[int],
    ) -> None:
        self.loss_ranks = head_ranks(plan)
        self.peers: set[int] = set()
        self._rank, self._compute = rank, compute
        # aggregators have no stage and run no operations
        self._idle = rank not in plan.stage_of
        if self._idle:
            return
        self._places = Neighbourhood(plan, rank)
        self.peers = self._places.neighbours
        self._starts = [path[0] for path in plan.schedules[0].paths]
        self._room = plan.schedules[0].most_live()[rank]
        self._told = plan.routing.told
        self._form = MessageFormat(self._places.last + 1)
        # guards everything below, which threads of neighbours change
        self._changed = threading.Condition()
        self._router = router
        self._asked: dict[tuple[int, int, int], float] = {}
        self._backward: deque[RoutedMessage] = deque()
        self._forward: defaultdict[int, deque[RoutedMessage]] = defaultdict(deque)
        self._ends: Counter[int] = Counter()
        self._held = 0
        self._serial = 0
        self._record: StepRecord | None = None
        self._trainer: MicrobatchSource | None = None
        if self._places.stage == 0:
            self._trainer = MicrobatchSource(plan, rank, self._ask, self._end_choosing)

    def open(self, links: PipelineLinks, walk: Sequence[int]) -> None:
        """See `planner.executor.runtime.pipeline.Pipeline`."""
        if self._idle:
            return
        self._sender, self._failure = links.sender, links.failure
        links.failure.on_failure(self._wake)
        self._mailbox = Mailbox(
            self._rank,
            links.incoming,
            self._form,
            self._compute.buffer,
            self._take,
            links.failure,
        )
        self._neighbours = tuple(links.incoming)

    def run(self, serial: int, k: int, record: StepRecord, ended: Callable[[float], None]) -> None:
        """Run this device's part of a step."""
        if self._idle:
            return
        with self._changed:
            self._serial, self._record = serial, record
            if self._trainer is not None:
                self._trainer.begin()
        told_end = self._places.stage == self._places.last
        while True:
            with self._changed:
                while (mail := self._next()) is None:
                    self._failure.check()
                    all_asked = self._ends[serial] == len(self._places.choosers)
                    if all_asked and not self._forward[serial]:
                        if not told_end:
                            self._tell_all(
                                self._places.next, RoutingMessage(MessageKind.END, serial)
                            )
                            told_end = True
                        if not self._held and (self._trainer is None or self._trainer.done):
                            del self._ends[serial], self._forward[serial]
                            return
                    self._changed.wait()
            self._do(mail, record)

    def finish(self) -> None:
        """After the last step: exchange last messages with all neighbours."""
        if self._idle:
            return
        self._tell_all(self._neighbours, RoutingMessage(MessageKind.LAST))
        self._mailbox.finish()

    def _next(self) -> RoutedMessage | None:
        """The next operation; backward passes come first and need no memory."""
        if self._backward:
            return self._backward.popleft()
        waiting = self._forward[self._serial]
        if waiting and self._held < self._room:
            self._held += 1
            return waiting.popleft()
        return None

    def _do(self, mail: RoutedMessage, record: StepRecord) -> None:
        note, places = mail.note, self._places
        if mail.tensor is not None:
            kind = KINDS[note.word]
            message = Message(kind, note.microbatch, mail.source, self._rank)
            record.received(message, mail.tensor.nbytes, mail.arrived_s)
        if note.word is MessageKind.LOSS:
            output, end_s = self._operate("H", note, mail.tensor, record)
            self._send(MessageKind.BACKWARD, note, output, note.path[-1], end_s, record)
        elif note.word is MessageKind.BACKWARD:
            self._go_back(note, mail.tensor, record)
        else:
            output, end_s = self._go_forward(mail, record)
            if places.stage < places.last:
                with self._changed:
                    peer = self._choose(places.stage + 1, note)
                path = _with(note.path, places.stage + 1, peer)
                self._send(
                    MessageKind.FORWARD, replace(note, path=path), output, peer, end_s, record
                )
            elif places.head_first:
                self._send(MessageKind.LOSS, note, output, note.path[0], end_s, record)
            else:
                self._operate("H", note, None, record)
                self._go_back(note, None, record)

    def _go_forward(self, mail: RoutedMessage, record: StepRecord) -> tuple[Tensor, float]:
        begin_s = time.monotonic()
        output, end_s = self._operate("F", mail.note, mail.tensor, record)
        answer = replace(mail.note, word=MessageKind.ANSWER, seconds=end_s - begin_s)
        self._tell(mail.source, answer)
        return output, end_s

    def _go_back(self, note: RoutingMessage, received: Tensor | None, record: StepRecord) -> None:
        gradient, end_s = self._operate("B", note, received, record)
        with self._changed:
            self._held -= 1
        if self._places.stage > 0:
            before = note.path[self._places.stage - 1]
            self._send(MessageKind.BACKWARD, note, gradient, before, end_s, record)
        else:
            self._tell(self._starts[note.microbatch], replace(note, word=MessageKind.FINISHED))

    def _operate(
        self, kind: str, note: RoutingMessage, received: Tensor | None, record: StepRecord
    ) -> tuple[Tensor, float]:
        backend = self._compute.backend
        start = backend.mark()
        output = self._compute.run_op(kind, note.microbatch, received)
        # report the compute time to the peer
        start_s, end_s = backend.wait_time_s(start), backend.wait_time_s(backend.mark())
        record.ops.append((note.microbatch, self._rank, kind, start_s, end_s))
        return output, end_s

    def _ask(self, microbatch: int) -> None:
        """Start the next microbatch of this source."""
        note = RoutingMessage(MessageKind.START, self._serial, microbatch)
        peer = self._choose(0, note)
        path = (peer, *(NOBODY,) * self._places.last)
        self._tell(peer, replace(note, path=path))

    def _choose(self, stage: int, note: RoutingMessage) -> int:
        peer = self._router.choose(stage)
        self._asked[note.serial, note.microbatch, stage] = time.monotonic()
        return peer

    def _end_choosing(self) -> None:
        self._tell_all(self._places.trainers, RoutingMessage(MessageKind.END, self._serial))

    def _take(self, mail: RoutedMessage) -> None:
        """Handle a message, possibly from this device itself."""
        note = mail.note
        with self._changed:
            if note.word in (MessageKind.START, MessageKind.FORWARD):
                self._forward[note.serial].append(mail)
            elif note.word in (MessageKind.LOSS, MessageKind.BACKWARD):
                self._backward.append(mail)
            elif note.word is MessageKind.END:
                self._ends[note.serial] += 1
            elif note.word is MessageKind.ANSWER:
                stage = note.path.index(mail.source)
                asked_s = self._asked.pop((note.serial, note.microbatch, stage))
                waited_s = time.monotonic() - asked_s
                told_s = note.seconds if self._told is RouterFeedback.WORK else waited_s
                self._router.report(mail.source, max(told_s, MIN_S))
            elif self._trainer is not None and self._record is not None:  # FINISHED
                self._record.routes.append((note.microbatch, note.path))
                self._trainer.finished()
            self._changed.notify_all()

    def _send(
        self,
        word: MessageKind,
        note: RoutingMessage,
        tensor: Tensor,
        peer: int,
        end_s: float,
        record: StepRecord,
    ) -> None:
        self._sender.send(tensor, peer, self._form.pack(replace(note, word=word)))
        self._sender.made(peer, tensor.nbytes, end_s)
        message = Message(KINDS[word], note.microbatch, self._rank, peer)
        record.sent(message, tensor.nbytes, end_s)

    def _tell(self, peer: int, note: RoutingMessage) -> None:
        if peer == self._rank:
            self._take(RoutedMessage(note, peer))
        else:
            self._sender.tell(peer, self._form.pack(note))

    def _tell_all(self, peers: tuple[int, ...], note: RoutingMessage) -> None:
        for peer in peers:
            self._tell(peer, note)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _with(path: tuple[int, ...], stage: int, peer: int) -> tuple[int, ...]:
    return (*path[:stage], peer, *path[stage + 1 :])
