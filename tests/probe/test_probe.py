"""Links are measured pair by pair, each once, and a probe goes on where it was."""

from __future__ import annotations

import json
import socket
import threading
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from planner.network.probe_log import ALL, LinkFinding, ProbeLog  # noqa: E402
from planner.probe.flows import Flow, Rate, answer, receive, round_trips, send  # noqa: E402
from planner.probe.measure import Half, link_of  # noqa: E402
from planner.probe.rounds import disjoint_rounds  # noqa: E402
from tests.executor.forks import Done, run_ranks  # noqa: E402

NAMES = ("a", "b", "c")
PACE = ("--seconds", "0.1", "--warm", "0.05", "--messages", "0.1")


@given(st.integers(2, 17), st.randoms(use_true_random=False))
def test_every_pair_is_in_one_round_with_others_that_share_no_device(
    n: int, random: object
) -> None:
    """As few rounds as there can be, and only pairs that are wanted."""
    pairs = list(combinations(range(n), 2))
    rounds = disjoint_rounds(n, pairs)
    assert sorted(pair for one in rounds for pair in one) == pairs
    assert len(rounds) == n - 1 + n % 2
    for one in rounds:
        devices = [d for pair in one for d in pair]
        assert len(set(devices)) == len(devices)
    some = [pair for pair in pairs if random.random() < 0.3]  # type: ignore[attr-defined]
    assert sorted(pair for one in disjoint_rounds(n, some) for pair in one) == some


def test_round_trips_of_all_sizes() -> None:
    """Every message gets a word back; none is sent after the time."""
    here, there = socket.socketpair()
    replier = threading.Thread(target=answer, args=(there,))
    replier.start()
    found = round_trips(here, [1, 1, 1000, 500_000], 60.0)
    assert {size: len(took) for size, took in found.items()} == {1: 2, 1000: 1, 500_000: 1}
    replier.join()
    replier = threading.Thread(target=answer, args=(there,))
    replier.start()
    assert round_trips(here, [1, 1], -1.0) == {}
    replier.join()


def test_a_stream_is_taken_to_its_last_byte() -> None:
    """Two after each other over the same connections, from two senders and two flows each."""
    ends = [[socket.socketpair() for _ in range(3)] for _ in range(2)]
    sides = [
        {k: Flow(pairs[0][side], (pairs[1][side], pairs[2][side])) for k, pairs in enumerate(ends)}
        for side in (0, 1)
    ]
    for _ in range(2):
        senders = [threading.Thread(target=send, args=({k: sides[0][k]},)) for k in range(2)]
        for sender in senders:
            sender.start()
        rate = receive(sides[1], 0.01, 0.05)
        for sender in senders:
            sender.join()
        assert 0 < rate.low <= rate.mean <= rate.high
        for pairs in ends:
            for pair in pairs:
                pair[1].setblocking(False)
                with pytest.raises(BlockingIOError):
                    pair[1].recv(1)
                pair[1].setblocking(True)


def probe(log: Path, *more: str, names: tuple[str, ...] = NAMES) -> Done:
    """All ranks of one node."""
    words = (str(log), "--devices", *names, *PACE, *more)
    return run_ranks(len(names), "planner.probe.__main__", *words)


def test_all_is_measured_and_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    """A log without its last lines and with half a line goes on; other options are refused."""
    log = tmp_path / "log.jsonl"
    done = probe(log)
    assert done.code == 0, done.error
    found = ProbeLog.load(log)
    ends = {(a, b) for a in NAMES for b in NAMES if a != b}
    ends |= {(a, ALL) for a in NAMES} | {(ALL, a) for a in NAMES}
    assert set(found.findings) == ends
    assert found.names == NAMES
    for one in found.findings.values():
        assert set(one.rates) == ({1} if ALL in one.ends else {1, 2})
        assert (one.round_trips_s is None) is (ALL in one.ends)
    network = found.network()
    assert network.ids == NAMES and (network.latency_s >= 0).all()

    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-3]) + lines[-3][:40])
    done = probe(log)
    assert done.code == 0, done.error
    again = log.read_text().splitlines(keepends=True)
    assert again[:-3] == lines[:-3] and len(again) == len(lines)
    assert set(ProbeLog.load(log).findings) == ends
    assert "3 of 3 rounds" in done.error

    # with another device, lines carry more: they are measured again, pairs are not
    done = probe(log, names=(*NAMES, "d"))
    assert done.code == 0 and "11 of 11 rounds" in done.error, done.error
    more = ProbeLog.load(log)
    assert more.names == (*NAMES, "d") and more.findings["a", "b"] == found.findings["a", "b"]
    assert {one.peers for ends, one in more.findings.items() if ALL in ends} == {3}
    again = log.read_text().splitlines(keepends=True)

    done = probe(log, "--seconds", "0.2")
    assert done.code != 0 and "give the same options" in done.error
    assert log.read_text() == "".join(again)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "a"), "claimed by two processes"),
        (("a",), "two devices at least"),
        (("a", "*"), "not for devices"),
    ],
)
def test_what_cannot_be_probed_is_one_line(
    names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """And no log is begun."""
    done = probe(tmp_path / "log.jsonl", names=names)
    assert done.code != 0 and said in done.error
    assert not (tmp_path / "log.jsonl").exists()


def test_rates_are_added_over_peers() -> None:
    """A line's rate is that of all who share it."""
    from planner.probe.measure import line_of

    found = line_of("a", True, [Rate(1.0, 0.5, 2.0), Rate(3.0, 2.5, 4.0)], 2)
    assert found.ends == ("a", ALL) and found.rates == {1: (4.0, 3.0, 6.0)}
    assert json.loads(found.to_line())["round_trips_s"] is None


def test_a_machine_that_was_busy_is_written_as_it_is_read() -> None:
    """Where the smallest messages came back last, no time of a larger one is below 0."""
    trips = {1: [0.05, 0.06, 0.07], 1024: [0.01, 0.02, 0.03], 4096: [0.02, 0.03, 0.04]}
    found = link_of("a", "b", Half({}, trips), Half({1: Rate(2e6, 1e6, 3e6)}, {}))
    assert found.messages_s == pytest.approx({1024: 0.015, 4096: 0.025})
    assert LinkFinding.of_line(found.to_line()) == found
