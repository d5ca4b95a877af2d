"""Devices that route, as threads of this process: steps end, rooms are kept, parts follow speed."""

from __future__ import annotations

import socket
import time
from collections import Counter
from typing import Any

import pytest

from planner.swarm.routing import NoPeer
from planner.training_plan.choices import RouterFeedback
from planner.training_plan.initial_routes import initial_routes
from planner.training_plan.model import Routing, TrainingPlan
from tests.conftest import make_plan, tiny_workload
from tests.training_plan.test_training_plan import with_paths

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.executor.comm.device_backend import HOST  # noqa: E402
from planner.executor.comm.p2p import Sender  # noqa: E402
from planner.executor.comm.p2p_schedule import Message  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.runtime.pipeline import PipelineConnections  # noqa: E402
from planner.executor.runtime.records import StepRecord  # noqa: E402
from planner.executor.swarm.routing_messages import MessageFormat, MessageKind, RoutingHeader  # noqa: E402
from planner.executor.swarm.stochastic_pipeline import (  # noqa: E402
    Neighbourhood,
    StochasticPipeline,
    make_router,
)
from tests.executor.devices import all_run  # noqa: E402

GRID = [[0, 1, 2], [3, 4, 5]]


class Slow:
    """Operations that take their time, or next to none; what is held is counted."""

    backend = HOST

    def __init__(self, forward_s: float) -> None:
        self.held = self.most = 0
        self._forward_s = forward_s

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Sleep; hold from F to B."""
        time.sleep(self._forward_s * {"F": 1, "H": 0, "B": 2}[kind])
        self.held += {"F": 1, "H": 0, "B": -1}[kind]
        self.most = max(self.most, self.held)
        made: Tensor = torch.zeros(8, dtype=torch.uint8)
        return made

    def buffer(self, message: Message) -> Tensor:
        """Of any message."""
        room: Tensor = torch.empty(8, dtype=torch.uint8)
        return room


def play(plan: TrainingPlan, steps: int, forward_s: list[float]) -> tuple[list[Any], list[Slow]]:
    """Records by device and step, and what computed."""
    n = len(plan.cluster)
    ends: dict[tuple[int, int], socket.socket] = {}
    for i in range(n):
        for j in Neighbourhood(plan, i).neighbours:
            if (i, j) not in ends:
                ends[i, j], ends[j, i] = socket.socketpair()
    computes = [Slow(s) for s in forward_s]
    records: list[list[StepRecord]] = [[] for _ in range(n)]
    error_latch = ErrorLatch()

    def run(d: int) -> None:
        mine = {j: c for (i, j), c in ends.items() if i == d}
        sender = Sender(mine, error_latch, dict.fromkeys(mine, 1e9))
        routed = StochasticPipeline(plan, d, computes[d], make_router(plan, d))  # type: ignore[arg-type]
        routed.open(PipelineConnections(mine, sender, error_latch), [0] * steps)  # type: ignore[arg-type]
        for serial in range(steps):
            records[d].append(StepRecord(serial, False))
            routed.run(serial, 0, records[d][-1], lambda end: None)
        routed.finish()
        sender.finish()

    all_run(run, n, ends.values(), error_latch)
    return records, computes


@pytest.mark.parametrize("head", ["last", "first"])
def test_every_microbatch_is_done_once_within_the_room(head: str) -> None:
    """Many steps of little room, so that requests wait when all have said that they are done."""
    plan = make_plan(GRID, head=head, schedule="1f1b", workload=tiny_workload(batch_samples=12))
    plan = plan.replace(wiring="stochastic")
    room = plan.schedules[0].most_live()
    assert max(room) < 6
    records, computes = play(plan, 60, [0.0] * 6)
    for serial in range(60):
        for kind in "FB":
            done = Counter(
                (b, plan.stage_of[d])
                for own in records
                for b, d, k, _, _ in own[serial].ops
                if k == kind
            )
            assert set(done) == {(b, stage) for b in range(12) for stage in range(3)}
            assert set(done.values()) == {1}
        taken = dict(route for own in records for route in own[serial].routes)
        assert set(taken) == set(range(12))
        for own in records:
            for b, d, _, _, _ in own[serial].ops:
                assert d in taken[b] or (head == "first" and d == taken[b][0])
    for d, compute in enumerate(computes):
        assert 0 < compute.most <= room[d] and compute.held == 0


def test_parts_follow_speed_where_work_is_told() -> None:
    """A device of the middle stage is slowed to a third: it gets much less than the planned half.

    A quarter, where this machine has time for all.
    """
    plan = make_plan(GRID, workload=tiny_workload(batch_samples=24))
    plan = plan.replace(wiring="stochastic", routing=Routing(told=RouterFeedback.WORK))
    slow = [0.001, 0.004, 0.001, 0.001, 0.012, 0.001]
    records, _ = play(plan, 12, slow)
    counts = [sum(k == "F" for r in records[d][4:] for _, _, k, _, _ in r.ops) for d in range(6)]
    assert 0.1 < counts[4] / (counts[1] + counts[4]) < 0.4


def test_the_plans_parts_are_kept_without_smoothing() -> None:
    """Three quarters of the microbatches go where the plan has them go, whatever it takes."""
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=8))
    paths = plan.schedules[0].paths
    plan = with_paths(plan, tuple((path[0], 1 if b < 6 else 3) for b, path in enumerate(paths)))
    plan = plan.replace(wiring="stochastic", routing=Routing(0.0))
    records, _ = play(plan, 10, [0.0, 0.002, 0.0, 0.0])
    counts = [sum(k == "F" for r in records[d] for _, _, k, _, _ in r.ops) for d in (1, 3)]
    assert counts[0] / sum(counts) == pytest.approx(0.75, abs=0.03)


def test_a_router_begins_at_the_plans_parts_and_bans() -> None:
    """Pair by pair, and others are tried; who is banned is chosen no more."""
    plan = make_plan(GRID, workload=tiny_workload(batch_samples=9)).replace(wiring="stochastic")
    router = make_router(plan, 2)
    # five of nine go from 0 to 1 to 2; device 1 sends all of its own there
    assert router.estimates_s(0) == router.estimates_s(1) == {}
    router = make_router(plan, 1)
    assert router.shares(2) == pytest.approx({2: 5 / 5.5, 5: 0.5 / 5.5})
    router.ban(2)
    assert {router.choose(2) for _ in range(5)} == {5}
    router.ban(5)
    with pytest.raises(NoPeer):
        router.choose(2)
    trainer = make_router(plan, 3)
    assert trainer.shares(0) == pytest.approx({3: 4 / 4.5, 0: 0.5 / 4.5})
    kept = make_router(plan.replace(routing=Routing(0.0)), 3)
    assert kept.shares(0) == {3: 1.0} and kept.shares(1) == {4: 1.0}
    # an answer takes the way there and back, work does not
    worked = make_router(plan.replace(routing=Routing(told=RouterFeedback.WORK)), 1)
    assert worked.shares(2) == pytest.approx({2: 5 / 5.5, 5: 0.5 / 5.5})
    network = plan.cluster.network
    way = float(network.latency_s[1, 2] + network.latency_s[2, 1])
    more = (
        initial_routes(plan, 1)[2].usual_s
        - sum(plan.compute_times.forward_s[d] for d in (2, 5)) / 2
    )
    assert more > way


def test_notes_are_read_as_they_were_written() -> None:
    """Of fixed size; a path that has no peers yet is filled up."""
    form = MessageFormat(3)
    for header in (
        RoutingHeader(MessageKind.ANSWER, 7, 4000, (3, 1, -1), 0.25),
        RoutingHeader(MessageKind.END, 2, 0, (-1,) * 3),
    ):
        data = form.pack(header)
        assert len(data) == form.size and form.unpack(data) == header
    assert form.unpack(form.pack(RoutingHeader(MessageKind.LAST))).path == (-1, -1, -1)
