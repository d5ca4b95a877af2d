"""Connections between ranks: one a pair and purpose, opened before the first step.

Plain TCP, for three things that a library's send and receive do not give: a message leaves when it
is handed over, whatever the receiver does; messages of a pair arrive in the order in which they
left; and what averaging sends does not queue behind the pipeline's messages.

Streams that go both ways at the same time have a connection for each way. On a shared one news of
what has arrived travels with the data that goes back, and waits where those wait: the link that it
is news for runs dry.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.executor.ranks import Ranks
from planner.executor.store import BIND, EVERYWHERE
from planner.executor.trust import answer, ask

MAGIC = 0x504C414E
HELLO = struct.Struct("!III")
"""Magic number, purpose and rank: the first bytes on a connection."""
CONNECT_S, RANK_S = 10.0, 0.25
"""All ranks are there when connections are opened: who does not answer for so long, and so much
longer for each of them, cannot be reached."""
LOOK_S, KNOCKING = 0.02, 64
"""Between two looks whether all have come, and how many are greeted side by side."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}
"""A silent connection is asked for a sign of life after so many seconds, again after so many, so
often. No limit on what is unconfirmed: a slow receiver may hold up its sender for long."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network interface to listen on, as torch.distributed's own transports have it."""
GET_ADDRESS, OUTPUT_QUEUE = 0x8915, 0x5411
"""ioctls SIOCGIFADDR and SIOCOUTQ of Linux."""


class Purpose(enum.IntEnum):
    """What a connection carries."""

    PIPELINE = 0
    AVERAGING = 1
    LOSSES = 2
    CALIBRATION = 3
    LIFELINE = 4
    NORM = 5
    PROBE = 6
    STATE = 7
    PIPELINE_BACK = 8
    AVERAGING_BACK = 9


BACK = {
    Purpose.PIPELINE: Purpose.PIPELINE_BACK,
    Purpose.AVERAGING: Purpose.AVERAGING_BACK,
}
"""Of a stream from the lower rank to the higher, the way back."""


class Connection(socket.socket):
    """A connection that knows whose it is, and what went over it."""

    name = ""
    """Of the device at the other end."""
    sent_bytes = 0


Connections = dict[tuple[Purpose, int], Connection]
"""By purpose and the other rank."""


class Streams(NamedTuple):
    """Both ways between this rank and others.

    Attributes
    ----------
    to, of
        By rank, the connection on which it is sent to, and the one on which it sends.
    """

    to: dict[int, Connection]
    of: dict[int, Connection]


def both_ways(purpose: Purpose, others: Iterable[int]) -> set[tuple[Purpose, int]]:
    """What streams to and from other ranks need.

    Parameters
    ----------
    purpose
        One with a way back.
    others
        Ranks.

    Returns
    -------
    set
        To be asked of `connections_to`.
    """
    return {(way, other) for other in others for way in (purpose, BACK[purpose])}


def streams_of(connections: Connections, purpose: Purpose, rank: int) -> Streams:
    """The streams among open connections.

    Parameters
    ----------
    connections
        With what `both_ways` said.
    purpose
        One with a way back.
    rank
        This process.

    Returns
    -------
    Streams
        For all ranks that have such connections with this one.
    """
    to, of = Streams({}, {})
    for (way, other), connection in connections.items():
        if way in (purpose, BACK[purpose]):
            leaves = (way is purpose) is (rank < other)
            (to if leaves else of)[other] = connection
    return Streams(to, of)


class ConnectionLost(RuntimeError):
    """The other end is gone.

    Parameters
    ----------
    line
        What has happened.
    device
        Who cannot be reached; empty: whether it is that one's doing is not known.
    """

    def __init__(self, line: str, device: str = "") -> None:
        super().__init__(line)
        self.device = device


class TornError(ConnectionLost):
    """An open connection has ended, whether or not the other end lives."""


@contextmanager
def connections_to(
    ranks: Ranks, wanted: Iterable[tuple[Purpose, int]], name: str
) -> Iterator[Connections]:
    """Connect with all of ``wanted``, who must want this rank too; closed after the block.

    Lifelines are closed when all ranks have parted.

    Parameters
    ----------
    ranks
        This process among all.
    wanted
        Purpose and other rank.
    name
        Of this opening, the same on all ranks and used once.

    Yields
    ------
    Connections
        Blocking sockets.

    Raises
    ------
    ConnectionLost
        A rank cannot be reached.
    """
    connections = _open(ranks, wanted, name)
    if ranks.loss is not None:
        # who waits at one of them must not wait for ever; at a lifeline nobody does
        used = [c for (purpose, _), c in connections.items() if purpose is not Purpose.LIFELINE]
        ranks.loss.on_failure(lambda: _shut(*used))
    try:
        yield connections
    finally:
        for (purpose, _), connection in connections.items():
            if purpose is Purpose.LIFELINE:
                # closed with something unread it would be reset, and the farewell lost on its way
                ranks.held.callback(connection.close)
                continue
            _shut(connection)
            connection.close()


def _shut(*connections: socket.socket) -> None:
    """Wake whoever waits there, on both ends."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _open(ranks: Ranks, wanted: Iterable[tuple[Purpose, int]], name: str) -> Connections:
    asked = sorted(set(wanted))
    higher = [(purpose, other) for purpose, other in asked if other > ranks.rank]
    limit_s = CONNECT_S + RANK_S * ranks.world
    with _listen(own_address(), len(asked) + 1) as server:
        host, port = server.getsockname()[:2]
        addresses = ranks.share(f"{name}/address", f"{host} {port}")
        if ranks.loss is not None:
            ranks.loss.on_failure(lambda: _shut(server))
        found: Connections = {}

        def connect(asked: tuple[Purpose, int]) -> None:
            purpose, other = asked
            found[purpose, other] = _connect(addresses[other], purpose, ranks, other, name)

        try:
            with ThreadPoolExecutor(max_workers=max(1, min(64, len(higher)))) as pool:
                opened = pool.map(connect, higher)
                lower = set(asked) - set(higher)
                door = Door(server, ranks, lower, name)
                try:
                    door.open(limit_s)
                except OSError as error:
                    missing = min((other for _, other in lower - set(door.found)), default=0)
                    raise ConnectionLost(
                        f"device {ranks.name(missing)!r} did not connect to "
                        f"{ranks.name(ranks.rank)!r} within {limit_s:g} s ({error}{door.refused})",
                        ranks.name(missing),
                    ) from None
                finally:
                    found |= door.found
                deque(opened, maxlen=0)
        except BaseException:
            # the others' ends must not look as if this process had gone
            for connection in found.values():
                ranks.held.callback(connection.close)
            raise
    for (_, other), connection in found.items():
        connection.name = ranks.name(other)
    return found


def own_address() -> str:
    """The address at which other ranks reach this process: the one it reaches the store from."""
    bind = os.environ.get(BIND, "")
    if bind and bind not in EVERYWHERE:
        return bind
    name = os.environ.get(INTERFACE)
    if name and sys.platform == "linux":
        import fcntl

        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), GET_ADDRESS, asked)[20:24])
    target = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    for family, kind, _, _, address in socket.getaddrinfo(*target, type=socket.SOCK_DGRAM):
        # connecting a datagram socket sends nothing, it only chooses the way
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def send_all(connection: socket.socket, *parts: memoryview) -> None:
    """Send all bytes of ``parts``, one after the other.

    Parameters
    ----------
    connection
        Where to.
    parts
        Views of bytes.

    Raises
    ------
    TornError
        The other end is gone.
    """
    try:
        for part in parts:
            connection.sendall(part)
            _count(connection, len(part))
    except OSError as error:
        raise TornError(f"{named(connection)} is gone ({error})", _device(connection)) from None


def send_now(connection: socket.socket, *parts: memoryview) -> list[memoryview]:
    """Send what the connection takes without waiting.

    Parameters
    ----------
    connection
        Where to.
    parts
        Views of bytes.

    Returns
    -------
    list[memoryview]
        What is left.

    Raises
    ------
    TornError
        The other end is gone.
    """
    try:
        sent = connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        _count(connection, sent)
    except BlockingIOError:
        sent = 0
    except OSError as error:
        raise TornError(f"{named(connection)} is gone ({error})", _device(connection)) from None
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(sent - len(part), 0)
    return left


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view`` with what arrives next.

    Parameters
    ----------
    connection
        Where from.
    view
        Writable bytes.

    Raises
    ------
    TornError
        The other end is gone.
    """
    try:
        while len(view):
            # waiting in the kernel for all of it costs one call and no interpreter time
            size = connection.recv_into(view, 0, socket.MSG_WAITALL)
            if size == 0:
                raise TornError(f"{named(connection)} closed its connection", _device(connection))
            view = view[size:]
    except OSError as error:
        raise TornError(f"{named(connection)} is gone ({error})", _device(connection)) from None


def unacknowledged_bytes(connection: socket.socket) -> int:
    """What the other end's system has not confirmed; 0 where this system does not tell.

    Parameters
    ----------
    connection
        Whose.

    Returns
    -------
    int
        Bytes.
    """
    if sys.platform != "linux":
        return 0
    import fcntl

    waiting: bytes = fcntl.ioctl(connection.fileno(), OUTPUT_QUEUE, bytes(4))
    return int.from_bytes(waiting, sys.byteorder)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU.

    Parameters
    ----------
    tensor
        Any type and shape.

    Returns
    -------
    memoryview
        Its bytes; what is written there is in the tensor.
    """
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array.data


def _listen(host: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def _connect(address: str, purpose: Purpose, ranks: Ranks, other: int, name: str) -> Connection:
    host, port = address.split()
    limit_s = CONNECT_S + RANK_S * ranks.world
    try:
        connection = socket.create_connection((host, int(port)), timeout=limit_s)
        connection.sendall(HELLO.pack(MAGIC, purpose, ranks.rank))
        about = f"{name} {int(purpose)}"
        ends = (ranks.name(ranks.rank), ranks.name(other), about)
        known = ranks.secret is None or ask(connection, ranks.secret, *ends)
    except OSError as error:
        raise ConnectionLost(
            f"device {ranks.name(other)!r} cannot be reached from {ranks.name(ranks.rank)!r} at "
            f"{host} ({error}); name the interface of each node in {INTERFACE}, and let ranks open "
            "connections to one another",
            ranks.name(other),
        ) from None
    if not known:
        connection.close()
        raise ConnectionLost(
            f"who answers for device {ranks.name(other)!r} at {host} does not know the secret that "
            f"device {ranks.name(ranks.rank)!r} has; see who else reaches the store",
            ranks.name(other),
        )
    return _ready(connection)


class Door:
    """Takes in those that are waited for, once each; whoever else knocks is sent away.

    Parameters
    ----------
    server
        That listens.
    ranks
        This process among all.
    wanted
        Who is waited for.
    name
        Of this opening.

    Attributes
    ----------
    found
        Who has come.
    """

    def __init__(
        self, server: socket.socket, ranks: Ranks, wanted: set[tuple[Purpose, int]], name: str
    ) -> None:
        self.found: Connections = {}
        self._server, self._ranks, self._name = server, ranks, name
        self._wanted = {(int(purpose), other): (purpose, other) for purpose, other in wanted}
        self._lock = threading.Lock()
        self._sent_away = 0
        self._last = ""

    @property
    def refused(self) -> str:
        """What is said of those that were sent away."""
        if not self._sent_away:
            return ""
        return f"; {self._sent_away} others were refused, the last from {self._last}"

    def open(self, limit_s: float) -> None:
        """Wait until all have been `found`.

        Parameters
        ----------
        limit_s
            At most so long.

        Raises
        ------
        OSError
            Not all came in time, or the server was shut.
        """
        until = time.monotonic() + limit_s
        # side by side: one that is slow, or says nothing, holds up none of the others
        pool = ThreadPoolExecutor(max_workers=KNOCKING)
        try:
            while len(self.found) < len(self._wanted):
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
                self._server.settimeout(LOOK_S)
                with suppress(TimeoutError):
                    connection, address = self._server.accept()
                    pool.submit(self._greet, connection, str(address[0]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _greet(self, connection: socket.socket, address: str) -> None:
        connection.settimeout(CONNECT_S)
        try:
            asked = self._asked(connection)
        except OSError:
            asked = None
        with self._lock:
            if asked is not None and asked not in self.found:
                self.found[asked] = _ready(connection)
                return
            self._sent_away, self._last = self._sent_away + 1, address
        connection.close()

    def _asked(self, connection: socket.socket) -> tuple[Purpose, int] | None:
        """What a connection is for, if it is wanted and whoever it is knows the secret."""
        greeting = connection.recv(HELLO.size, socket.MSG_WAITALL)
        if len(greeting) < HELLO.size:
            return None
        magic, purpose, rank = HELLO.unpack(greeting)
        asked, ranks = self._wanted.get((purpose, rank)), self._ranks
        if magic != MAGIC or asked is None:
            return None
        ends = (ranks.name(rank), ranks.name(ranks.rank), f"{self._name} {purpose}")
        known = ranks.secret is None or answer(connection, ranks.secret, *ends)
        return asked if known else None


def _ready(opened: socket.socket) -> Connection:
    connection = Connection(fileno=opened.detach())
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # a host that vanished is noticed after a few minutes; systems by themselves ask after two hours
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _count(connection: socket.socket, size: int) -> None:
    if isinstance(connection, Connection):
        connection.sent_bytes += size


def _device(connection: socket.socket) -> str:
    return getattr(connection, "name", Connection.name)


def named(connection: socket.socket) -> str:
    """Who is at the other end, for a line.

    Parameters
    ----------
    connection
        Whose.

    Returns
    -------
    str
        With the device's name, where it is known.
    """
    name = _device(connection)
    return f"device {name!r}" if name else "another rank"
