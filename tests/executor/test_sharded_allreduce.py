"""A round of averaging between threads of one process, over pairs of sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.executor.comm.averaging_connections import AveragingConnections  # noqa: E402
from planner.executor.comm.chunking import Chunking  # noqa: E402
from planner.executor.comm.codec import WireFormat  # noqa: E402
from planner.executor.comm.sharded_allreduce import ShardedAllReduce  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.transport.connections import Connection, ConnectionLost, DuplexChannels  # noqa: E402
from planner.training_plan.averaging_group import AveragingGroup  # noqa: E402
from tests.executor.codec_error import error_bound  # noqa: E402


class Members:
    """``n`` ranks, each connected with each."""

    def __init__(self, n: int) -> None:
        self.channels = [DuplexChannels({}, {}) for _ in range(n)]
        for i, j in permutations(range(n), 2):
            ends = [Connection(fileno=end.detach()) for end in socket.socketpair()]
            self.channels[i].outgoing[j], self.channels[j].incoming[i] = ends
        self.peers = [AveragingConnections(channels, ErrorLatch()) for channels in self.channels]

    def all_do(self, work: Callable[[int], float]) -> list[float]:
        """``work`` of every rank, at the same time."""
        with ThreadPoolExecutor(max_workers=len(self.peers)) as pool:
            return list(pool.map(work, range(len(self.peers)), timeout=60))

    def close(self) -> None:
        """Let go of threads and sockets."""
        for peers in self.peers:
            peers.finish()
        for to, of in self.channels:
            for connection in (*to.values(), *of.values()):
                connection.close()


def averaged(
    vectors: list[Tensor], group: AveragingGroup, chunking: Chunking, wire: WireFormat, scale: float
) -> list[Tensor]:
    """Two rounds' worth of threads, one round: what every member has afterwards."""
    members = Members(len(vectors))
    found = [v.clone() for v in vectors]

    def work(rank: int) -> float:
        return ShardedAllReduce(
            found[rank], group, rank, members.peers[rank], wire, chunking, scale
        ).run()

    members.all_do(work)
    members.close()
    return found


@settings(max_examples=60)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=4).filter(
        lambda m: sum(share for share, _ in m) > 0 and any(gives for _, gives in m)
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([None, 0.0, 0.01]),
    st.sampled_from(list(WireFormat)),
    st.sampled_from([1.0, 0.5]),
)
def test_all_members_get_the_same_sum(
    values: int,
    members: list[tuple[int, bool]],
    chunks: int,
    window: int,
    start_early_s: float | None,
    wire: WireFormat,
    scale: float,
) -> None:
    """Any shares, contributors, chunks and windows; tiny shares leave some chunks empty."""
    total = sum(share for share, _ in members)
    group = AveragingGroup(
        tuple(range(len(members))),
        tuple(share / total for share, _ in members),
        tuple(gives for _, gives in members),
    )
    generator = torch.Generator().manual_seed(values)
    vectors = [torch.randn(values, generator=generator) for _ in members]
    chunking = Chunking(chunks, min(window, chunks), start_early_s)
    found = averaged(vectors, group, chunking, wire, scale)
    given = [v for v, gives in zip(vectors, group.contributes, strict=True) if gives]
    exact = scale * torch.stack(given).sum(0)
    for vector in found:
        assert vector.numpy().tobytes() == found[0].numpy().tobytes()
    if wire is WireFormat.FP32:
        np.testing.assert_allclose(found[0], exact, atol=1e-5, rtol=0)
    else:
        # each contribution and the sum are coded, in blocks that end with their chunk
        largest = [torch.full_like(v, float(v.abs().max())) for v in (*given, *found)]
        worst = sum(float(error_bound(v, wire).max()) for v in largest)
        assert float((found[0] - exact).abs().max()) <= worst + 1e-5


def test_the_sum_does_not_depend_on_who_is_first() -> None:
    """Bit for bit the same, ten times over: the order of adding is fixed."""
    vectors = [torch.randn(5000, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    group = AveragingGroup.equal((0, 1, 2, 3))
    results = {
        averaged(vectors, group, Chunking(7, 3), WireFormat.FP32, 1.0)[0].numpy().tobytes()
        for _ in range(10)
    }
    assert len(results) == 1


def test_nothing_leaves_before_all_are_ready() -> None:
    """A member that is ready sends word, and no more."""
    members = Members(2)
    vector = torch.ones(100_000)
    group = AveragingGroup.equal((0, 1))
    with ThreadPoolExecutor(max_workers=1) as pool:
        exchange = ShardedAllReduce(
            vector, group, 0, members.peers[0], WireFormat.FP32, Chunking(4, 4)
        )
        running = pool.submit(exchange.run)
        to, of = members.channels[1]
        word = of[0].recv(1 << 20)
        assert len(word) == 4
        of[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            of[0].recv(1)
        to[0].close()
        with pytest.raises(ConnectionLost, match=r"closed its connection|is gone"):
            running.result(timeout=60)


def test_memory_is_bounded_by_the_window() -> None:
    """A reducer holds no more contributions than windows of its members, round after round."""
    members = Members(3)
    group = AveragingGroup((0, 1, 2), (1.0, 0.0, 0.0), (True, True, True))
    chunking = Chunking(50, 2)

    def work(rank: int) -> float:
        vector = torch.full((50_000,), 1.0)
        end = 0.0
        for _ in range(3):
            end = ShardedAllReduce(
                vector, group, rank, members.peers[rank], WireFormat.FP32, chunking
            ).run()
        assert bool((vector == 27.0).all())
        return end

    members.all_do(work)
    memory = members.peers[0].buffer_pool(4 * 1000)
    assert 1 <= len(memory._free) <= 2 * chunking.window
    members.close()
