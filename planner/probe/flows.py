"""Traffic of a measurement: round trips, and sustained streams.

Both ends cooperate: `round_trips` and `answer`, or `send` and `receive`. The receiver of a stream
ends it; the sender then reports how much it has sent, and the receiver reads what is still under
way, so that the next measurement finds the link idle.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.executor.transport.connections import (
    ConnectionLost,
    describe_peer,
    receive_into,
    send_all,
)

SIZE = struct.Struct("!Q")
ENOUGH = b"\1"
BLOCK_BYTES = 1 << 18
"""Bytes that a stream sends at a time."""
LOOK_S = 0.02
"""Interval of polling for messages from a receiver."""
SLICES = 5
"""Intervals of a stream whose rates are recorded separately."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second of a stream: overall, and in its slowest and fastest interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Flow:
    """Connections to another rank: one for control, and those over which a stream is spread."""

    words: socket.socket
    channels: tuple[socket.socket, ...]


def round_trips(
    connection: socket.socket, sizes: Sequence[int], most_s: float
) -> dict[int, list[float]]:
    """Send messages, and wait for the acknowledgement of each.

    Returns
    -------
    dict[int, list[float]]
        By size, round-trip seconds; sizes without time left are missing.
    """
    answers: dict[int, list[float]] = {}
    message, reply = memoryview(bytes(max(sizes, default=0))), memoryview(bytearray(1))
    began = time.perf_counter()
    for size in sizes:
        begin = time.perf_counter()
        if begin - began > most_s:
            break
        send_all(connection, memoryview(SIZE.pack(size)), message[:size])
        receive_into(connection, reply)
        answers.setdefault(size, []).append(time.perf_counter() - begin)
    send_all(connection, memoryview(SIZE.pack(0)))
    return answers


def answer(connection: socket.socket) -> None:
    """Acknowledge every message until there are no more."""
    head = memoryview(bytearray(SIZE.size))
    room = bytearray()
    while True:
        receive_into(connection, head)
        (size,) = SIZE.unpack(head)
        if size == 0:
            return
        if len(room) < size:
            room = bytearray(size)
        receive_into(connection, memoryview(room)[:size])
        send_all(connection, memoryview(ENOUGH))


def send(flows: Mapping[int, Flow]) -> None:
    """Stream to others at full speed until all have enough."""
    block = memoryview(bytes(BLOCK_BYTES))
    sent = dict.fromkeys(flows, 0)
    waiting = set(flows)
    with selectors.DefaultSelector() as ready:
        for other, flow in flows.items():
            ready.register(flow.words, selectors.EVENT_READ, other)
            for stream in flow.channels:
                _keep_little_unsent(stream)
                ready.register(stream, selectors.EVENT_WRITE, other)
        while waiting:
            for key, _ in ready.select(LOOK_S):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is flows[key.data].words:
                    receive_into(connection, memoryview(bytearray(1)))
                    ready.unregister(connection)
                    waiting.discard(key.data)
                    continue
                try:
                    sent[key.data] += connection.send(block, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise ConnectionLost(f"a stream has ended ({error})") from None
    for other, flow in flows.items():
        send_all(flow.words, memoryview(SIZE.pack(sent[other])))
    for flow in flows.values():
        # otherwise bytes of the next stream would count for this one
        receive_into(flow.words, memoryview(bytearray(1)))


def _keep_little_unsent(stream: socket.socket) -> None:
    """Limit unsent data in the sender's system, which would delay the end of a measurement."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and stream.family in (socket.AF_INET, socket.AF_INET6):
        stream.setsockopt(socket.IPPROTO_TCP, option, BLOCK_BYTES)


def receive(flows: Mapping[int, Flow], warm_s: float, seconds: float) -> Rate:
    """Receive streams, and say when there is enough."""
    buffer, received = bytearray(1 << 20), dict.fromkeys(flows, 0)
    marks: list[tuple[float, int]] = []
    with selectors.DefaultSelector() as ready:
        for other, flow in flows.items():
            for stream in flow.channels:
                ready.register(stream, selectors.EVENT_READ, other)
        next_s: float | None = None
        while len(marks) <= SLICES:
            for key, _ in ready.select():
                received[key.data] += _receive_into(key.fileobj, buffer)
            now = time.perf_counter()
            if next_s is None:
                next_s = now + warm_s
            # intervals start when bytes arrive, so a late one does not shorten the next
            if now >= next_s:
                marks.append((now, sum(received.values())))
                next_s = now + seconds / SLICES
        for flow in flows.values():
            send_all(flow.words, memoryview(ENOUGH))
        _take_rest(flows, ready, received, buffer)
        for flow in flows.values():
            send_all(flow.words, memoryview(ENOUGH))
    rates = [
        (later - earlier) / (end - start) for (start, earlier), (end, later) in pairwise(marks)
    ]
    mean_rate = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
    return Rate(mean_rate, min(rates), max(rates))


def _take_rest(
    flows: Mapping[int, Flow],
    ready: selectors.BaseSelector,
    received: dict[int, int],
    room: bytearray,
) -> None:
    """Drain data still in flight."""
    counts: dict[int, int] = {}
    headers = {other: bytearray() for other in flows}
    for other, flow in flows.items():
        ready.register(flow.words, selectors.EVENT_READ, other)
    while len(counts) < len(flows) or any(received[other] < counts[other] for other in flows):
        for key, _ in ready.select():
            other = key.data
            if key.fileobj is not flows[other].words:
                received[other] += _receive_into(key.fileobj, room)
                continue
            missing = memoryview(bytearray(SIZE.size - len(headers[other])))
            headers[other] += missing[: _receive_into(key.fileobj, missing)]
            if len(headers[other]) == SIZE.size:
                ready.unregister(key.fileobj)
                (counts[other],) = SIZE.unpack(headers[other])


def _receive_into(connection: object, room: bytearray | memoryview) -> int:
    assert isinstance(connection, socket.socket)
    try:
        size = connection.recv_into(room)
    except OSError as error:
        raise ConnectionLost(f"a stream has ended ({error})") from None
    if size == 0:
        raise ConnectionLost(f"{describe_peer(connection)} closed its connection")
    return size
