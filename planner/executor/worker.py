"""One rank's steps: operations, averaging, update, one after the other and no barrier between."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence

from torch.distributed.distributed_c10d import Store

from planner.executor.averaging import Averaging
from planner.executor.compute import Compute
from planner.executor.connections import Connections, Purpose, close_all, open_connections
from planner.executor.exchange import Peers
from planner.executor.imposed import Imposed, sleep_until
from planner.executor.losses import Losses, LossSender
from planner.executor.messages import Traffic
from planner.executor.pace import pace_of
from planner.executor.pipeline import run_alone, run_operations
from planner.executor.ranks import Ranks
from planner.executor.records import StepRecord
from planner.executor.transport import Expected, Failure, Inbox, Outbox
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan

HEAD_START_S = 0.2
"""From the agreement on a moment to it, beyond the way to the farthest rank."""


class Worker:
    """One rank of a plan.

    Parameters
    ----------
    plan
        The plan.
    ranks
        This process among all.
    compute
        What its operations do.
    imposed
        What an imposed run divides the plan's times and bytes by; None: a model is trained.
    tickets
        If given, devices take microbatches from this store as fast as they can until the batch is
        complete (DeDLOC, 3.1), instead of those the plan expects them to do. Only for plans of one
        stage, whose microbatches any device can do alone.

    Raises
    ------
    PlanError
        Own pace for a plan of several stages.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: Ranks,
        compute: Compute,
        *,
        imposed: Imposed | None = None,
        tickets: Store | None = None,
    ) -> None:
        if tickets is not None and len(plan.assignment.groups) > 1:
            raise PlanError(
                f"assignment.groups: own pace needs whole models, found "
                f"{len(plan.assignment.groups)} stages; plan one stage"
            )
        self.plan, self.ranks, self.compute, self.tickets = plan, ranks, compute, tickets
        self.rank = ranks.rank
        self.imposed = imposed
        self.traffic = [Traffic(s, self.rank) for s in plan.schedules]
        self.averaging = self._averaging()
        self.losses: Losses | None = None
        self.began_s = 0.0

    def steps(self, count: int, rest: int = 0) -> Iterator[StepRecord]:
        """Train; yields after every step.

        Parameters
        ----------
        count
            Steps that chain, each beginning when the one before has ended.
        rest
            Steps before them that all ranks begin together.

        Yields
        ------
        StepRecord
            What this rank did.

        Raises
        ------
        ConnectionLost
            Another rank is gone.
        """
        connections = open_connections(self.ranks, self._wanted(), "steps")
        cycle = self.plan.cycle
        walk = [cycle[t % len(cycle)] for t in (*range(rest), *range(count))]
        try:
            failure = Failure()
            pipeline = _of(connections, Purpose.PIPELINE)
            outbox = Outbox(pipeline, failure)
            inbox = Inbox(pipeline, self._expected(walk), self.compute.buffer, failure)
            peers = Peers(_of(connections, Purpose.AVERAGING))
            tell = self._tell(_of(connections, Purpose.LOSSES), count)
            for serial, k in enumerate(walk):
                step = serial if serial < rest else serial - rest
                if serial <= rest:
                    self._begin_together(serial)
                    self.began_s = time.monotonic()
                record = StepRecord(step, serial < rest, time.monotonic())
                self._step(record, serial, k, inbox, outbox, peers)
                if tell is not None:
                    tell(step, self.compute.loss() or 0.0)
                yield record
            outbox.finish()
            peers.finish()
            if self.losses is not None:
                self.losses.wait()
            # nobody leaves while others still listen to it
            self.ranks.meet("done")
        finally:
            close_all(connections)

    def _step(
        self,
        record: StepRecord,
        serial: int,
        k: int,
        inbox: Inbox,
        outbox: Outbox,
        peers: Peers,
    ) -> None:
        schedule = self.plan.schedules[k]
        self.compute.begin(record.step, schedule)
        if self.tickets is None:
            order, traffic = schedule.order[self.rank], self.traffic[k]
            run_operations(order, traffic, self.compute, inbox, outbox, serial, self.rank, record)
        else:
            numbers = self._take_tickets(self.tickets, serial, len(schedule.paths))
            run_alone(numbers, self.compute, self.rank, record)
        ready = time.monotonic()
        if self.averaging.peers and (record.step + 1) % self.plan.sync.every_steps == 0:
            end = self.averaging.run(self.compute.gradients(), peers)
            record.ops.append((-1, self.rank, "A", ready, end))
        update = time.monotonic()
        self.compute.update()
        record.end_s = time.monotonic()
        record.ops.append((-1, self.rank, "U", update, record.end_s))

    def _begin_together(self, serial: int) -> None:
        """Wait for all ranks; in an imposed run, on one machine, for one moment of its clock."""
        name = f"begin/{serial}"
        self.ranks.meet(name)
        if self.imposed is not None:
            if self.rank == 0:
                farthest = float(self.plan.cluster.network.latency_s[0].max())
                # told that all are here, a rank asks for the moment and is answered
                way = 3 * farthest / self.imposed.speed
                self.ranks.store.set(f"{name}/moment", repr(time.monotonic() + way + HEAD_START_S))
            sleep_until(float(self.ranks.store.get(f"{name}/moment")))

    def _averaging(self) -> Averaging:
        plan, rank, imposed = self.plan, self.rank, self.imposed or Imposed()
        stage = plan.stage_of[rank]
        rounds = [next(g for g in groups if rank in g.members) for groups in plan.averaging[stage]]
        gradient = plan.workload.gradient_bytes(plan.stage_layers, plan.head_stage)[stage]
        wire = gradient * plan.codec.wire_ratio / imposed.shrink
        paces = [
            pace_of(g, wire, plan.cluster, speed=imposed.speed, shrink=imposed.shrink)
            for g in rounds
        ]
        return Averaging(rank, rounds, paces, len(plan.assignment.groups[stage]), plan.codec)

    def _wanted(self) -> set[tuple[Purpose, int]]:
        """The connections that this rank needs, used schedules alone."""
        wanted = {
            (Purpose.PIPELINE, d) for k in set(self.plan.cycle) for d in self.traffic[k].peers
        }
        wanted |= {(Purpose.AVERAGING, d) for d in self.averaging.peers}
        tellers = self._tellers()
        if self.rank == 0:
            wanted |= {(Purpose.LOSSES, d) for d in tellers if d != 0}
        elif self.rank in tellers:
            wanted.add((Purpose.LOSSES, 0))
        return wanted

    def _tellers(self) -> set[int]:
        """Ranks that have losses."""
        if self.imposed is not None:
            return set()
        if self.tickets is not None:
            return set(range(self.ranks.world))
        schedules = [self.plan.schedules[k] for k in set(self.plan.cycle)]
        return {s.head_device(b) for s in schedules for b in range(len(s.paths))}

    def _expected(self, walk: Sequence[int]) -> dict[int, Iterator[Expected]]:
        """By source, what it sends to this rank in all steps."""
        used = [self.traffic[k] for k in set(walk)]

        def messages(source: int) -> Iterator[Expected]:
            for serial, k in enumerate(walk):
                for message in self.traffic[k].incoming.get(source, ()):
                    yield Expected(serial, message)

        if self.tickets is not None:
            return {}
        return {source: messages(source) for source in set().union(*(t.incoming for t in used))}

    def _tell(
        self, connections: dict[int, socket.socket], steps: int
    ) -> Callable[[int, float], None] | None:
        """Where this rank's losses go: rank 0 keeps them, the others send theirs there."""
        tellers = self._tellers()
        if self.rank == 0 and tellers:
            self.losses = Losses(connections, 0 in tellers, steps)
        if self.rank not in tellers:
            return None
        return self.losses.tell if self.losses is not None else LossSender(connections[0]).tell

    def _take_tickets(self, tickets: Store, serial: int, microbatches: int) -> Iterator[int]:
        """Microbatches of a step that nobody else takes."""
        while (ticket := tickets.add(f"tickets/{serial}", 1)) <= microbatches:
            yield ticket - 1


def _of(connections: Connections, purpose: Purpose) -> dict[int, socket.socket]:
    return {other: c for (what, other), c in connections.items() if what is purpose}
