"""Steps of one rank: operations, averaging, update, without a global barrier."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from torch import Tensor
from torch.distributed.distributed_c10d import Store

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
from planner.executor.comm.direct import DeviceTransfers
from planner.executor.comm.p2p import Receiver, Sender
from planner.executor.comm.tcp_tuning import (
    disable_slow_start_after_idle,
    grow_windows,
    leaves_the_machine,
)
from planner.executor.fault_tolerance.commit import CommitProtocol
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.runtime.background import BackgroundTask
from planner.executor.runtime.losses import LossCollector, LossSender
from planner.executor.runtime.pipeline import run_operations, run_whole_model
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.simulated_compute import Sleeper, TimeScale
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.swarm.microbatch_queue import MicrobatchQueue
from planner.executor.swarm.ready_hint import ReadyHint
from planner.executor.swarm.stochastic_pipeline import StochasticPipeline, router_of
from planner.swarm.routing import Router
from planner.training_plan.choices import Wiring
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan, lockstep_devices

HEAD_START_S = 0.2
"""Delay of a synchronised start, beyond the latency to the farthest rank."""


class Worker:
    """One rank of a plan.

    Parameters
    ----------
    ranks
        The process group.
    compute
        Runs its operations.
    time_scale
        Scale of simulated compute; None if a model is trained.
    microbatch_queue
        If given, devices take microbatches from this queue as fast as they can until the batch is
        complete (DeDLOC, 3.1), instead of the planned ones; for plans of one stage.
    before
        The worker of the steps before, whose counts and, with the same plan, estimates continue.
    commit
        Commits steps and collects losses; None if each rank updates when its gradients are ready.
    direct
        Transfers between GPUs without the host; None for none.

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
    router
        Estimates of peers, with stochastic wiring.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: ProcessGroup,
        compute: StageRuntime,
        *,
        time_scale: TimeScale | None = None,
        microbatch_queue: Store | None = None,
        before: Worker | None = None,
        commit: CommitProtocol | None = None,
        direct: DeviceTransfers | None = None,
    ) -> None:
        if microbatch_queue is not None and len(plan.assignment.groups) > 1:
            raise PlanError(
                f"assignment.groups: own pace needs whole models, found "
                f"{len(plan.assignment.groups)} stages; plan one stage, or several with --wiring "
                "stochastic, where devices take microbatches at their own pace too"
            )
        if microbatch_queue is not None and plan.wiring is Wiring.STOCHASTIC:
            raise PlanError(
                "wiring: own pace takes microbatches from the store, found kind 'stochastic'; "
                "leave out --own-pace"
            )
        if microbatch_queue is not None and plan.sync.local_steps:
            raise PlanError(
                "sync: own pace needs gradients that are averaged every step, found every_steps "
                f"{plan.sync.every_steps}{'' if plan.sync.outer is None else ' with outer'}; leave "
                "out --own-pace"
            )
        self.plan, self.ranks, self.rank = plan, ranks, ranks.rank
        self.losses: LossCollector | None = None
        self.record: StepRecord | None = None
        self.began_s = 0.0
        self.microbatches = 0
        self.router: Router[int] | None = None
        self._part = 0
        self._sent_before: dict[int, int] = {}
        if before is not None:
            self.microbatches, self._sent_before = before.microbatches, before.sent_bytes
            self.router = before.router if before.plan is plan else None
            self._part = before._part + 1
        self._channels: dict[ChannelKind, DuplexChannels] = {}
        self._compute, self._time_scale = compute, time_scale
        self._microbatch_queue = (
            None if microbatch_queue is None else MicrobatchQueue(microbatch_queue)
        )
        self._background_averaging: BackgroundTask | None = None
        self._pending_outer_step: int | None = None
        self._beside_s = 0.0
        self._commit, self._direct = commit, direct
        self.wiring = CommPlan(
            plan, ranks.rank, time_scale, microbatch_queue is not None, tells=commit is None
        )
        # for steps that average and have a fixed order of operations
        fixed = (
            plan.wiring is Wiring.FIXED and microbatch_queue is None and not plan.sync.local_steps
        )
        ahead_s = self.wiring.averaging.ahead_s
        # transfers between GPUs need no word of readiness
        fixed &= not self.wiring.averaging.begins_here(direct)
        self._ready_hint = ReadyHint(ahead_s) if fixed and ahead_s else None

    @property
    def sent_bytes(self) -> dict[int, int]:
        """See the class."""
        found = dict(self._sent_before)
        for channels in self._channels.values():
            for other, connection in channels.to.items():
                found[other] = found.get(other, 0) + connection.sent_bytes
        return found

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
            wanted = self.wiring.connections
            if self._direct is not None:
                self._direct.connect(self._reached(self._direct))
            wanted |= {(ChannelKind.HEARTBEAT, other) for _, other in wanted}
            connections = held.enter_context(
                connections_to(self.ranks, wanted, f"steps/{self._part}")
            )
            self._channels = {way: channels_of(connections, way, self.rank) for way in BACK}
            held.enter_context(self._watched(_of(connections, ChannelKind.HEARTBEAT)))
            if any(leaves_the_machine(one) for one in connections.values()):
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
        pipeline = self._channels[ChannelKind.PIPELINE]
        ways = (self.wiring.rates(), self.wiring.round_trips_s())
        sender = Sender(pipeline.to, failure, *ways, self._compute.side, self._direct)
        expected = self.wiring.expected(walk)
        receiver = Receiver(
            pipeline.of, expected, self._compute.buffer, failure, direct=self._direct
        )
        routed = self._routed(pipeline.of, sender, failure)
        peers = AllReduceLinks(self._channels[ChannelKind.AVERAGING], failure)
        norms = _of(connections, ChannelKind.NORM)
        told = range(first, first + len(walk))
        record = StepRecord(first - 1, False, time.monotonic())  # of the steps before
        teller = self._teller(_of(connections, ChannelKind.LOSSES), told)
        if owes:
            self._finish_interrupted_outer_step(record, peers, sender)
            yield record
        if begun:
            self._begin_outer(first - 1, peers, sender)
        elif begun is None and self.plan.sync.begun(first):
            self._pending_outer_step = first - 1
        for serial, k in enumerate(walk):
            if serial <= rest:
                self._begin_together(serial)
                self.began_s = time.monotonic()
            step = serial if serial < rest else first + serial - rest
            record = self.record = StepRecord(step, serial < rest, time.monotonic())
            self._compute.begin(step, self.plan.schedules[k])
            if routed is not None:
                routed.run(serial, record)
            else:
                self._operations(record, serial, k, receiver, sender, peers)
            if self.plan.sync.local_steps:
                self._local_step(record, peers, sender)
            else:
                self._average_and_update(record, peers, sender, norms)
            self.microbatches += sum(kind == "B" for _, _, kind, _, _ in record.ops)
            if teller is not None:
                teller.tell(step, self._compute.loss() or 0.0)
            yield record
        self._end_outer(record)
        if routed is not None:
            routed.finish()
        sender.finish()
        peers.finish()
        failure.check()
        if self.losses is not None:
            self.losses.wait()

    def _reached(self, direct: DeviceTransfers) -> set[int]:
        """Ranks with which this rank exchanges data from GPU to GPU."""
        found = {other for traffic in self.wiring.traffic.values() for other in traffic.peers}
        parts = [self.wiring.within]
        if not self.plan.sync.local_steps:
            parts += [self.wiring.averaging, self.wiring.tied]
        for part in parts:
            found |= part.reached(direct)
        return found & direct.members

    def _watched(self, heartbeats: dict[int, Connection]) -> AbstractContextManager[None]:
        """Let the failure detector watch connections."""
        if self.ranks.detector is None:
            return nullcontext()
        return self.ranks.detector.over({c: self.ranks.name(r) for r, c in heartbeats.items()})

    def _before_end(self, undo: Callable[[], None]) -> None:
        if self.ranks.detector is not None:
            self.ranks.detector.shutdown_.before_end(undo)

    def _routed(
        self, pipeline: dict[int, Connection], sender: Sender, failure: ErrorLatch
    ) -> StochasticPipeline | None:
        """The stochastic pipeline; None with fixed paths."""
        if self.wiring.places is None:
            return None
        if self.router is None:
            speed = 1.0 if self._time_scale is None else self._time_scale.speed
            self.router = router_of(self.plan, self.rank, speed)
        return StochasticPipeline(
            self.plan, self.rank, self._compute, pipeline, sender, failure, self.router
        )

    def _operations(
        self,
        record: StepRecord,
        serial: int,
        k: int,
        receiver: Receiver,
        sender: Sender,
        peers: AllReduceLinks,
    ) -> None:
        schedule, ready_hint = self.plan.schedules[k], self._ready_hint

        def ended(end: float) -> None:
            if ready_hint is not None:
                ready_hint.after(end, peers.tell)

        if self._microbatch_queue is None:
            if ready_hint is not None:
                ready_hint.begin(k)
            order, traffic = schedule.order[self.rank], self.wiring.traffic[k]
            how = (self._compute, receiver, sender, serial, self.rank, record, ended)
            run_operations(order, traffic, *how)
        elif self.rank in self.plan.stage_of:
            numbers = self._microbatch_queue.of(serial, len(schedule.paths))
            run_whole_model(numbers, self._compute, self.rank, record)

    def _average_and_update(
        self,
        record: StepRecord,
        peers: AllReduceLinks,
        sender: Sender,
        norms: dict[int, Connection],
    ) -> None:
        tied = self._compute.tied_values
        gradients, direct = self._compute.gradients, self._direct
        averaging, also = self.wiring.averaging, self.wiring.tied
        # copy to the first round's memory before sending word
        gradients(here=averaging.begins_here(direct))
        told = None
        if self._ready_hint is not None:
            self._ready_hint.ready(time.monotonic())
            told = self._ready_hint.told
        rest, shared = slice(tied, None), slice(tied)
        way = (peers, sender, told, direct)
        self._average(record, averaging, lambda on: gradients(here=on)[rest], *way)
        if tied:
            way = (peers, sender, None, direct)
            self._average(record, also, lambda on: gradients(here=on)[shared], *way)
        vector = gradients()
        if self.wiring.clipping is not None:
            if self._time_scale is None:
                # tied parameters count on the first stage
                copied = tied if self.rank not in self.plan.assignment.groups[0] else 0
                record.norm = self.wiring.clipping.run(vector, norms, copied)
            else:
                # simulated compute has no gradients
                self.wiring.clipping.run(vector[:0], norms)
        if self._commit is not None:
            self._commit.commit_step(record.step, self._compute.loss())
        self._update(record)

    def _local_step(self, record: StepRecord, peers: AllReduceLinks, sender: Sender) -> None:
        """The local update and, where due, averaging and outer step.

        In two-frequency averaging, with the averaged gradient of the region.
        """
        sync = self.plan.sync
        if self.wiring.within.peers:
            gradients, within, direct = self._compute.gradients, self.wiring.within, self._direct
            gradients(here=within.begins_here(direct))
            way = (peers, sender, None, direct)
            self._average(record, within, lambda on: gradients(here=on), *way)
        if self._commit is not None:
            self._commit.commit_step(record.step, self._compute.loss())
        self._update(record)
        self._end_outer(record)
        if sync.due(record.step):
            self._compute.leave()
            # steps from an idle system are measured one by one
            if sync.delayed and not record.rest:
                self._begin_outer(record.step, peers, sender)
            else:
                self._average_pseudo_gradients(record, peers, sender)
        record.end_s = time.monotonic()

    def _pseudo_gradient(self, step: int) -> Tensor:
        """The pseudo-gradient for the outer step after a step."""
        samples = None
        if self._commit is not None:
            # of the remaining devices, which the plan does not know
            told = self.ranks.all_gather(f"samples/{step}", str(self._compute.samples()))
            stage = self.plan.stage_of.get(self.rank)
            group = () if stage is None else self.plan.assignment.groups[stage]
            # the first of the devices that act as one reports
            speak = {lockstep_devices(self.plan, d)[0] for d in group}
            samples = sum(int(told[d]) for d in speak)
        return self._compute.pseudo_gradient(samples)

    def _average_pseudo_gradients(
        self, record: StepRecord, peers: AllReduceLinks, sender: Sender
    ) -> None:
        """Average the pseudo-gradients and apply the outer step."""
        change = self._pseudo_gradient(record.step)
        self._average(record, self.wiring.averaging, lambda on: change, peers, sender)
        self._take_outer(record.step)
        record.end_s = time.monotonic()

    def _begin_outer(self, step: int, peers: AllReduceLinks, sender: Sender) -> None:
        """Start averaging while the next step computes."""
        vector = self._pseudo_gradient(step)
        self._pending_outer_step = step
        if self.wiring.averaging.peers:
            self._beside_s = time.monotonic()
            averaging = self.wiring.averaging
            self._background_averaging = BackgroundTask(
                lambda: averaging.run(lambda on: vector, peers, sender)
            )

    def _end_outer(self, record: StepRecord) -> None:
        """Apply an outer step whose averaging an earlier step has started.

        After a checkpoint its mean is known.
        """
        if self._pending_outer_step is None:
            return
        if self._background_averaging is not None:
            end = self._background_averaging.wait()
            record.ops.append((-1, self.rank, "A", self._beside_s, end))
            self._background_averaging = None
        self._take_outer(self._pending_outer_step)
        self._pending_outer_step = None

    def _take_outer(self, step: int) -> None:
        if self._commit is not None:
            self._commit.commit_outer_step(step)
        self._compute.outer_step()

    def _finish_interrupted_outer_step(
        self, record: StepRecord, peers: AllReduceLinks, sender: Sender
    ) -> None:
        """Apply the outer step that a lost device interrupted."""
        if self.plan.sync.delayed:
            self._begin_outer(record.step - 1, peers, sender)
            self._end_outer(record)
        else:
            self._average_pseudo_gradients(record, peers, sender)
        record.end_s = time.monotonic()

    def settle(self) -> None:
        """Wait for averaging in the background."""
        if self._background_averaging is not None:
            self._background_averaging.wait()

    def _average(
        self,
        record: StepRecord,
        averaging: StageAverager,
        values: Callable[[bool | None], Tensor],
        peers: AllReduceLinks,
        sender: Sender,
        told: Collection[int] | None = None,
        direct: DeviceTransfers | None = None,
    ) -> None:
        if averaging.peers:
            ready = time.monotonic()
            end = averaging.run(values, peers, sender, told, direct, self._compute.side)
            record.ops.append((-1, self.rank, "A", ready, end))

    def _update(self, record: StepRecord) -> None:
        update = time.monotonic()
        self._compute.update()
        record.end_s = time.monotonic()
        record.ops.append((-1, self.rank, "U", update, record.end_s))

    def _begin_together(self, serial: int) -> None:
        """Barrier; with simulated compute on one machine, start at a common time."""
        name = f"begin/{self._part}/{serial}"
        self.ranks.barrier(name)
        if self._time_scale is not None:
            store = self.ranks.store
            if self.rank == 0:
                # far enough ahead for all ranks to read it
                way = self.plan.cluster.network.latency_s
                longest = float((3 * way[0] + 2 * way[:, 0]).max()) / self._time_scale.speed
                moment = time.monotonic() + longest + HEAD_START_S
                store.set(f"{name}/moment", repr(moment))
            Sleeper().until(float(store.get(f"{name}/moment")))

    def _teller(
        self, connections: dict[int, Connection], steps: range
    ) -> LossCollector | LossSender | None:
        """Loss collector on rank 0, loss sender on others."""
        tellers = self.wiring.tellers
        if self._commit is not None:
            return None
        if self.rank == 0 and tellers:
            self.losses = LossCollector(connections, 0 in tellers, steps)
        if self.rank not in tellers:
            return None
        return self.losses or LossSender(connections[0])


def _of(connections: Connections, purpose: ChannelKind) -> dict[int, Connection]:
    return {other: c for (what, other), c in connections.items() if what is purpose}
