"""Connections between ranks: one a pair and purpose.

Plain streams, for three things that a library's send and receive do not give: a message leaves when
it is handed over, whatever the receiver does; messages of a pair arrive in the order in which they
left; and what averaging sends does not queue behind the pipeline's messages.

Streams that go both ways at the same time have a connection for each way. On a shared one news of
what has arrived travels with the data that goes back, and waits where those wait: the link that it
is news for runs dry.
"""

from __future__ import annotations

import enum
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

OUTPUT_QUEUE = 0x5411
"""ioctl SIOCOUTQ of Linux."""


class ChannelKind(enum.IntEnum):
    """What a connection carries."""

    PIPELINE = 0
    AVERAGING = 1
    LOSSES = 2
    LIFELINE = 4
    NORM = 5
    PROBE = 6
    STATE = 7
    PIPELINE_BACK = 8
    AVERAGING_BACK = 9


BACK = {
    ChannelKind.PIPELINE: ChannelKind.PIPELINE_BACK,
    ChannelKind.AVERAGING: ChannelKind.AVERAGING_BACK,
}
"""Of a stream from the lower rank to the higher, the way back."""


class Connection(socket.socket):
    """A connection that knows whose it is, and what went over it."""

    name = ""
    """Of the device at the other end."""
    sent_bytes = 0


Connections = dict[tuple[ChannelKind, int], Connection]
"""By purpose and the other rank."""


class DuplexChannels(NamedTuple):
    """Both ways between this rank and others.

    Attributes
    ----------
    to, of
        By rank, the connection on which it is sent to, and the one on which it sends.
    """

    to: dict[int, Connection]
    of: dict[int, Connection]


def duplex_of(purpose: ChannelKind, others: Iterable[int]) -> set[tuple[ChannelKind, int]]:
    """What streams to and from other ranks need."""
    return {(way, other) for other in others for way in (purpose, BACK[purpose])}


def channels_of(connections: Connections, purpose: ChannelKind, rank: int) -> DuplexChannels:
    """The streams among open connections."""
    to, of = DuplexChannels({}, {})
    for (way, other), connection in connections.items():
        if way in (purpose, BACK[purpose]):
            leaves = (way is purpose) is (rank < other)
            (to if leaves else of)[other] = connection
    return DuplexChannels(to, of)


class ConnectionLost(RuntimeError):
    """The other end is gone.

    Parameters
    ----------
    device
        Who cannot be reached; empty: whether it is that one's doing is not known.
    """

    def __init__(self, line: str, device: str = "") -> None:
        super().__init__(line)
        self.device = device


class ConnectionReset(ConnectionLost):
    """An open connection has ended, whether or not the other end lives."""


def send_all(connection: socket.socket, *parts: memoryview) -> None:
    """Send all bytes of ``parts``, one after the other."""
    try:
        for part in parts:
            connection.sendall(part)
            count_sent(connection, len(part))
    except OSError as error:
        raise ConnectionReset(
            f"{named(connection)} is gone ({error})", device_of(connection)
        ) from None


def send_nowait(connection: socket.socket, *parts: memoryview) -> list[memoryview]:
    """Send what the connection takes without waiting."""
    try:
        sent = connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        count_sent(connection, sent)
    except BlockingIOError:
        sent = 0
    except OSError as error:
        raise ConnectionReset(
            f"{named(connection)} is gone ({error})", device_of(connection)
        ) from None
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(sent - len(part), 0)
    return left


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view`` with what arrives next."""
    try:
        while len(view):
            # waiting in the kernel for all of it costs one call and no interpreter time
            size = connection.recv_into(view, 0, socket.MSG_WAITALL)
            if size == 0:
                raise ConnectionReset(
                    f"{named(connection)} closed its connection", device_of(connection)
                )
            view = view[size:]
    except OSError as error:
        raise ConnectionReset(
            f"{named(connection)} is gone ({error})", device_of(connection)
        ) from None


def unacknowledged_bytes(connection: socket.socket) -> int:
    """What the other end's system has not confirmed; 0 where this system does not tell.

    Of a Unix socket: the memory of what the other end has not read, somewhat more than its bytes.
    """
    if sys.platform != "linux":
        return 0
    import fcntl

    waiting: bytes = fcntl.ioctl(connection.fileno(), OUTPUT_QUEUE, bytes(4))
    return int.from_bytes(waiting, sys.byteorder)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array.data


def count_sent(connection: socket.socket, size: int) -> None:
    """Count what went to the other end, by whatever way."""
    if isinstance(connection, Connection):
        connection.sent_bytes += size


def device_of(connection: socket.socket) -> str:
    """The name of the device at the other end; empty: it is not known."""
    return getattr(connection, "name", Connection.name)


def named(connection: socket.socket) -> str:
    """Who is at the other end, for a line."""
    name = device_of(connection)
    return f"device {name!r}" if name else "another rank"
