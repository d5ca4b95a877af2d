"""The pipeline's messages: one order a pair, no waiting at either end."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.executor.comm.p2p import ExpectedMessage, Receiver, Sender  # noqa: E402
from planner.executor.comm.p2p_schedule import Message, P2PSchedule  # noqa: E402
from planner.executor.comm.tcp_tuning import (  # noqa: E402
    disable_slow_start_after_idle,
    uses_network,
)
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.rendezvous.connect import _configure  # noqa: E402
from planner.executor.transport.connections import Connection, ConnectionLost, ConnectionReset  # noqa: E402
from tests.conftest import make_plan, tiny_workload  # noqa: E402

SIZE = 1 << 16


def messages(count: int, source: int = 1) -> list[ExpectedMessage]:
    """F of so many microbatches, from a source to rank 0."""
    return [ExpectedMessage(0, Message("F", b, source, 0)) for b in range(count)]


def receiver(
    ends: dict[int, socket.socket],
    expected: dict[int, list[ExpectedMessage]],
    max_early_bytes: int = 1 << 30,
) -> Receiver:
    """Rank 0's."""

    def room(message: Message, *, own: bool = False) -> Tensor:
        made: Tensor = torch.empty(SIZE, dtype=torch.uint8)
        return made

    return Receiver(ends, expected, room, ErrorLatch(), max_early_bytes)


def test_both_ends_know_one_order() -> None:
    """What a receiver expects is what the sender's operations make, in their order."""
    plan = make_plan([[0, 1, 2], [3, 4, 5]], workload=tiny_workload(batch_samples=8), head="first")
    schedule = plan.schedules[0]
    traffic = [P2PSchedule(schedule, d) for d in range(6)]
    seen = 0
    for receiver in range(6):
        for source, expected in traffic[receiver].incoming.items():
            made = [traffic[source].sends.get(op) for op in schedule.order[source]]
            assert expected == [m for m in made if m is not None and m.destination == receiver]
            assert all(traffic[receiver].needs[m.operation] == m for m in expected)
            seen += len(expected)
    hops = sum(
        a[1] != b[1]
        for k in range(len(schedule.paths))
        for a, b in zip(schedule.chain(k), schedule.chain(k)[1:], strict=False)
    )
    assert seen == hops > 0


def test_messages_arrive_whole_in_order_and_when_they_came() -> None:
    """Sent long before they are asked for: sending returns at once, arrival is noted by itself."""
    here, there = socket.socketpair()
    sender = Sender({0: there}, ErrorLatch(), {0: 1e9})
    for b in range(20):
        sender.send(torch.full((SIZE,), b, dtype=torch.uint8), 0)
    box = receiver({1: here}, {1: messages(20)})
    sender.finish()
    last = box.receive(0, messages(20)[19].message)
    asked = time.monotonic()
    for expected in messages(19):
        arrival = box.receive(0, expected.message)
        assert bool((arrival.tensor == expected.message.microbatch).all())
        assert arrival.arrived_s <= last.arrived_s <= asked


def test_early_messages_are_bounded_and_never_block_what_is_needed() -> None:
    """With room for two: the device first needs the last message of 1, then all of 2."""
    ends = {source: socket.socketpair() for source in (1, 2)}
    expected = {source: messages(10, source) for source in (1, 2)}
    box = receiver({s: pair[0] for s, pair in ends.items()}, expected, max_early_bytes=2 * SIZE)
    sender = Sender({s: pair[1] for s, pair in ends.items()}, ErrorLatch(), {1: 1e9, 2: 1e9})
    for _ in range(10):
        for source in (1, 2):
            sender.send(torch.zeros(SIZE, dtype=torch.uint8), source)
    box.receive(0, expected[1][9].message)
    for source in (2, 1):
        for message in expected[source][: 10 if source == 2 else 9]:
            box.receive(0, message.message)
    sender.finish()


def test_a_source_that_is_gone_is_one_clear_error() -> None:
    """Raised where the operation waits."""
    here, there = socket.socketpair()
    box = receiver({1: here}, {1: messages(2)})
    there.close()
    with pytest.raises(ConnectionLost, match="closed its connection"):
        box.receive(0, messages(2)[0].message)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no such option")
def test_a_host_that_vanished_is_noticed_within_minutes() -> None:
    """From the last byte to the error; systems by themselves take two hours and more."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        _configure(socket.create_connection(server.getsockname())) as connection,
    ):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + every * count <= 300


def test_what_is_still_leaving_follows_the_plans_rate() -> None:
    """64 KiB at 1 MB/s take 66 ms; what has arrived counts no more where the system tells."""
    sender = Sender({0: socket.socketpair()[0]}, ErrorLatch(), {0: 1e6})
    assert sender.in_flight(1e6)[0] == 0
    before = time.monotonic()
    sender.send(torch.zeros(SIZE, dtype=torch.uint8), 0)
    sender.mark_computed(0, SIZE, before)
    assert sender._expected_sent_s[0] == before + SIZE / 1e6
    size, until = sender.in_flight(1e6)
    assert size <= SIZE and until <= time.monotonic() + SIZE / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not tell what is confirmed")
def test_what_is_behind_the_plans_rate_is_still_leaving() -> None:
    """Two ways share an upload, so that each is slower than by itself; nobody reads here."""
    values = 1 << 22
    ends = [socket.socketpair() for _ in range(2)]
    ways = {d: ends[d][0] for d in range(2)}
    sender = Sender(ways, ErrorLatch(), {0: 1e9, 1: 1e9}, {0: 1e-3, 1: 1e-3})
    for d in ways:
        sender.send(torch.zeros(values, dtype=torch.uint8), d)
        sender.mark_computed(d, values, time.monotonic())
    time.sleep(0.05)
    # by its own rate each has left
    assert all(leaves < time.monotonic() for leaves in sender._expected_sent_s.values())
    size, until = sender.in_flight(1e9)
    # but for what is on its way while news of it comes: a millisecond of each at half the rate
    assert size == pytest.approx(2 * (values - 0.5e6), rel=0.3)
    assert until - time.monotonic() <= 1.3 * values / 1e9
    for here, there in ends:
        here.close()
        there.close()


HOLDS = (
    "import sys; from pathlib import Path\n"
    "from planner.executor.comm.tcp_tuning import disable_slow_start_after_idle\n"
    "for _ in range(2): disable_slow_start_after_idle(Path(sys.argv[1]))\n"
    "print(Path(sys.argv[1]).read_text(), flush=True); sys.stdin.read()\n"
)
"""A rank that keeps slow start off until its input ends."""


def holds(file: Path) -> subprocess.Popen[str]:
    """A process that has switched slow start off, or found it off."""
    rank = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None and rank.stdout.readline() == "0\n"
    return rank


def wait_for_setting(file: Path, text: str) -> None:
    """The process that puts it back outlives the ranks."""
    until = time.monotonic() + 60.0
    while file.read_text() != text and time.monotonic() < until:
        time.sleep(0.01)
    assert file.read_text() == text


@pytest.mark.parametrize("killed", [False, True])
def test_slow_start_is_switched_off_and_put_back(killed: bool, tmp_path: Path) -> None:
    """Only where it was on, said in one line, and until the last rank has ended, or is killed."""
    file = tmp_path / "setting"
    file.write_text("1\n")
    first, second = holds(file), holds(file)
    # whoever has switched it off ends first
    said = []
    for rank in (first, second):
        if killed:
            rank.kill()
        said.append(rank.communicate()[1])
        assert rank.returncode == (-signal.SIGKILL if killed else 0)
        if rank is first:
            time.sleep(0.3)
            assert file.read_text() == "0\n"
    wait_for_setting(file, "1\n")
    assert [line.count("\n") for line in said] == [1, 0]
    # the next run, and one where it is off anyway
    holds(file).communicate()
    wait_for_setting(file, "1\n")
    file.write_text("0\n")
    assert holds(file).communicate()[1] == ""
    time.sleep(0.3)
    assert file.read_text() == "0\n"


def test_slow_start_of_another_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to set, and nothing to say."""
    disable_slow_start_after_idle(tmp_path / "another system")
    assert capsys.readouterr().err == ""


def test_a_peer_that_has_gone_is_a_lost_connection() -> None:
    """Also before the first message, where the system only says that there is no connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Connection(fileno=socket.create_connection(server.getsockname()).detach())
        there, _ = server.accept()
    assert not uses_network(here)
    here.name = "b"
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    until = time.monotonic() + 10
    with pytest.raises(ConnectionReset, match="device 'b' is gone") as lost:
        while time.monotonic() < until:
            uses_network(here)
            time.sleep(0.01)
    assert lost.value.device == "b"
    here.close()
