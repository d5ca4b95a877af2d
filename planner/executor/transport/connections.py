"""Connections between ranks: one per pair and purpose.

Plain sockets, for three properties that send and receive of a library lack: a message leaves when
it is handed over, regardless of the receiver; messages of a pair arrive in order of sending; and
averaging does not queue behind pipeline messages.

Traffic in both directions at the same time uses one connection per direction. On a shared one,
acknowledgements travel with the data in the opposite direction and wait where it waits, which would
stall the link.
"""

from __future__ import annotations

import enum
import errno
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIOCOUTQ = 0x5411
"""Linux ioctl request: bytes of a socket that the peer has not acknowledged."""


class ChannelKind(enum.IntEnum):
    """Purpose of a connection."""

    PIPELINE = 0
    AVERAGING = 1
    LOSSES = 2
    HEARTBEAT = 4
    NORM = 5
    PROBE = 6
    STATE = 7
    PIPELINE_REVERSE = 8
    AVERAGING_REVERSE = 9


REVERSE = {
    ChannelKind.PIPELINE: ChannelKind.PIPELINE_REVERSE,
    ChannelKind.AVERAGING: ChannelKind.AVERAGING_REVERSE,
}
"""Kind of the opposite direction, for a channel from the lower rank to the higher."""


class Connection(socket.socket):
    """A connection with the name of its peer, and byte counts."""

    name = ""
    """Device at the other end."""
    sent_bytes = 0


Connections = dict[tuple[ChannelKind, int], Connection]
"""By kind and peer."""


class DuplexChannels(NamedTuple):
    """Channels in both directions between this rank and others.

    Attributes
    ----------
    outgoing, incoming
        By rank, the connection for sending and the one for receiving.
    """

    outgoing: dict[int, Connection]
    incoming: dict[int, Connection]


def duplex_keys(kind: ChannelKind, others: Iterable[int]) -> set[tuple[ChannelKind, int]]:
    """Connections needed for channels in both directions."""
    return {(key, other) for other in others for key in (kind, REVERSE[kind])}


def duplex_channels(connections: Connections, kind: ChannelKind, rank: int) -> DuplexChannels:
    """The channels among open connections."""
    channels = DuplexChannels({}, {})
    for (key, other), connection in connections.items():
        if key in (kind, REVERSE[kind]):
            is_outgoing = (key is kind) is (rank < other)
            (channels.outgoing if is_outgoing else channels.incoming)[other] = connection
    return channels


class ConnectionLost(RuntimeError):
    """The other end is lost.

    Parameters
    ----------
    device
        The unreachable device; empty if it is not known whether that one failed.
    """

    def __init__(self, line: str, device: str = "") -> None:
        super().__init__(line)
        self.device = device


NETWORK_ERRORS = {
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE),
    *(errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
}
"""Error numbers of connections that are lost."""


def is_network_error(error: OSError) -> bool:
    """Whether an error is the loss of a connection, and not one of a file."""
    return error.filename is None and error.errno in NETWORK_ERRORS


class ConnectionReset(ConnectionLost):
    """An open connection has closed, whether or not the other end is alive."""


def send_all(connection: socket.socket, *parts: memoryview) -> None:
    """Send all bytes of ``parts`` in order."""
    try:
        for part in parts:
            connection.sendall(part)
            count_sent(connection, len(part))
    except OSError as error:
        raise ConnectionReset(
            f"{describe_peer(connection)} is gone ({error})", peer_name(connection)
        ) from None


def send_nowait(connection: socket.socket, *parts: memoryview) -> list[memoryview]:
    """Send as many bytes as fit into the buffer; returns the parts that remain."""
    try:
        sent = connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        count_sent(connection, sent)
    except BlockingIOError:
        sent = 0
    except OSError as error:
        raise ConnectionReset(
            f"{describe_peer(connection)} is gone ({error})", peer_name(connection)
        ) from None
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(sent - len(part), 0)
    return left


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view`` with the next bytes."""
    try:
        while len(view):
            # waiting in the kernel for all of it costs one call and no interpreter time
            size = connection.recv_into(view, 0, socket.MSG_WAITALL)
            if size == 0:
                raise ConnectionReset(
                    f"{describe_peer(connection)} closed its connection", peer_name(connection)
                )
            view = view[size:]
    except OSError as error:
        raise ConnectionReset(
            f"{describe_peer(connection)} is gone ({error})", peer_name(connection)
        ) from None


def unacknowledged_bytes(connection: socket.socket) -> int:
    """Bytes not acknowledged by the peer's system; 0 where unknown.

    For a Unix socket, the memory of unread data, slightly more than its bytes.
    """
    if sys.platform != "linux":
        return 0
    import fcntl

    queued: bytes = fcntl.ioctl(connection.fileno(), SIOCOUTQ, bytes(4))
    return int.from_bytes(queued, sys.byteorder)


def as_bytes(tensor: Tensor) -> memoryview:
    """Memory of a contiguous CPU tensor."""
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array.data


def count_sent(connection: socket.socket, size: int) -> None:
    """Count bytes sent to the peer by any means."""
    if isinstance(connection, Connection):
        connection.sent_bytes += size


def peer_name(connection: socket.socket) -> str:
    """Name of the device at the other end; empty if unknown."""
    return getattr(connection, "name", Connection.name)


def describe_peer(connection: socket.socket) -> str:
    """The peer, for a message."""
    name = peer_name(connection)
    return f"device {name!r}" if name else "another rank"
