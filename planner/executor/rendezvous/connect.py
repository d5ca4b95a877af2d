"""Opens connections between ranks: listening, accepting, and the choice of transport.

Ranks of one user at the same address of one machine connect by a Unix socket. Its name belongs to
the network namespace, as the address does, so ranks in separate namespaces use the network between
them. Where a Unix socket fails for any reason, they use TCP.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from planner.executor.comm.connections import ChannelKind, Connection, ConnectionLost, Connections
from planner.executor.rendezvous.address import INTERFACE, own_address
from planner.executor.rendezvous.auth import authenticate_client, authenticate_server
from planner.executor.rendezvous.process_group import ProcessGroup

MAGIC = 0x504C414E
HELLO = struct.Struct("!III")
"""Magic number, kind and rank: the first bytes on a connection."""
CONNECT_S, RANK_S = 10.0, 0.25
"""Timeout for connecting, plus so much per rank: all ranks are present when connections are opened,
so one that does not answer is unreachable."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
LOOK_S, KNOCKING = 0.02, 64
"""Interval of polling, and number of connections accepted in parallel."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}
"""TCP keep-alive: idle seconds, interval and count. There is no limit on unacknowledged data: a
slow receiver may block its sender for long."""
NEAR = "PLANNER_UNIX_SOCKETS"
"""Environment variable; 0 lets ranks of one machine connect by TCP like all others."""
NEAR_BYTES = 1 << 22
"""Requested buffer between two ranks of one machine."""


@contextmanager
def connections_to(
    ranks: ProcessGroup, wanted: Iterable[tuple[ChannelKind, int]], name: str
) -> Iterator[Connections]:
    """Connect with all of ``wanted``, which must want this rank too; closed after the block.

    Heartbeat connections are closed when all ranks have left.
    """
    connections = _open(ranks, wanted, name)
    if ranks.loss is not None:
        # wake threads that wait on a connection; none waits on heartbeat connections
        used = [c for (kind, _), c in connections.items() if kind is not ChannelKind.HEARTBEAT]
        ranks.loss.on_failure(lambda: _shut(*used))
    try:
        yield connections
    finally:
        for (purpose, _), connection in connections.items():
            if purpose is ChannelKind.HEARTBEAT:
                # read pending data first: closing resets the connection and loses the last message
                ranks.held.callback(connection.close)
                continue
            _shut(connection)
            connection.close()


def _shut(*connections: socket.socket) -> None:
    """Wake threads that wait on both ends."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _open(
    ranks: ProcessGroup, requested: Iterable[tuple[ChannelKind, int]], name: str
) -> Connections:
    channels = sorted(set(requested))
    higher = [(purpose, other) for purpose, other in channels if other > ranks.rank]
    limit_s = CONNECT_S + RANK_S * ranks.world
    with ExitStack() as sockets:
        servers, address = _listen(ranks.address or own_address(), len(channels) + 1)
        for server in servers:
            sockets.enter_context(server)
        addresses = ranks.all_gather(f"{name}/address", address)
        if ranks.loss is not None:
            ranks.loss.on_failure(lambda: _shut(*servers))
        connections: Connections = {}

        def connect(channels: tuple[ChannelKind, int]) -> None:
            purpose, other = channels
            ends = (address, addresses[other])
            connections[purpose, other] = _connect(*ends, purpose, ranks, other, name)

        try:
            with ThreadPoolExecutor(max_workers=max(1, min(64, len(higher)))) as pool:
                opened = pool.map(connect, higher)
                lower = set(channels) - set(higher)
                listener = Listener(servers, ranks, lower, name)
                try:
                    listener.open(limit_s)
                except OSError as error:
                    missing = min((other for _, other in lower - set(listener.found)), default=0)
                    raise ConnectionLost(
                        f"device {ranks.name(missing)!r} did not connect to "
                        f"{ranks.name(ranks.rank)!r} within {limit_s:g} s "
                        f"({error}{listener.refused})",
                        ranks.name(missing),
                    ) from None
                finally:
                    connections |= listener.found
                deque(opened, maxlen=0)
        except BaseException:
            # keep connections open, or this process would look lost
            for connection in connections.values():
                ranks.held.callback(connection.close)
            raise
    for (_, other), connection in connections.items():
        connection.name = ranks.name(other)
    return connections


def _listen(host: str, backlog: int) -> tuple[list[socket.socket], str]:
    """Listening sockets, and their addresses for others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    servers = [socket.create_server((host, 0), family=family, backlog=backlog)]
    words = [str(word) for word in servers[0].getsockname()[:2]]
    if _near_allowed():
        name = f"planner-{secrets.token_hex(16)}"
        with suppress(OSError), ExitStack() as held:
            near = held.enter_context(socket.socket(socket.AF_UNIX))
            near.bind("\0" + name)
            near.listen(backlog)
            servers.append(near)
            words.append(name)
            held.pop_all()
    return servers, " ".join(words)


def _reach(own: str, others: str, limit_s: float) -> socket.socket:
    """Connect to a peer, by Unix socket if possible."""
    host, port, *near = others.split()
    if near and host == own.split()[0] and _near_allowed():
        # the address may belong to another namespace or machine, the backlog may be full, or the
        # system may forbid it
        with suppress(OSError), ExitStack() as held:
            opened = held.enter_context(socket.socket(socket.AF_UNIX))
            opened.settimeout(limit_s)
            opened.connect("\0" + near[0])
            if _same_user(opened):
                held.pop_all()
                return opened
    return socket.create_connection((host, int(port)), timeout=limit_s)


def _near_allowed() -> bool:
    return sys.platform == "linux" and os.environ.get(NEAR, "1") != "0"


def _same_user(connection: socket.socket) -> bool:
    """Whether this process's user owns the other end too; both ends agree."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _connect(
    own: str, others: str, purpose: ChannelKind, ranks: ProcessGroup, other: int, name: str
) -> Connection:
    host = others.split()[0]
    try:
        connection = _reach(own, others, CONNECT_S + RANK_S * ranks.world)
        connection.sendall(HELLO.pack(MAGIC, purpose, ranks.rank))
        about = f"{name} {int(purpose)}"
        ends = (ranks.name(ranks.rank), ranks.name(other), about)
        known = ranks.secret is None or authenticate_client(connection, ranks.secret, *ends)
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


class Listener:
    """Accepts each wanted connection once; others are rejected.

    Parameters
    ----------
    ranks
        The process group.
    wanted
        Connections to wait for.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket],
        ranks: ProcessGroup,
        wanted: set[tuple[ChannelKind, int]],
        name: str,
    ) -> None:
        self.found: Connections = {}
        self._servers, self._ranks, self._name = servers, ranks, name
        self._wanted = {(int(purpose), other): (purpose, other) for purpose, other in wanted}
        self._lock = threading.Lock()
        self._sent_away = 0
        self._last = ""

    @property
    def refused(self) -> str:
        """Description of rejected connections."""
        if not self._sent_away:
            return ""
        return f"; {self._sent_away} others were refused, the last from {self._last}"

    def open(self, limit_s: float) -> None:
        """Accept until all are `found`."""
        until = time.monotonic() + limit_s
        # in parallel, so that slow or silent peers do not delay the others
        pool = ThreadPoolExecutor(max_workers=KNOCKING)
        try:
            with selectors.DefaultSelector() as knocks:
                for server in self._servers:
                    server.setblocking(False)
                    knocks.register(server, selectors.EVENT_READ, server)
                while len(self.found) < len(self._wanted):
                    if time.monotonic() > until:
                        raise TimeoutError("timed out")
                    for key, _ in knocks.select(LOOK_S):
                        # the peer may have closed already
                        with suppress(BlockingIOError):
                            connection, address = key.data.accept()
                            if connection.family == socket.AF_UNIX and not _same_user(connection):
                                self._send_away(connection, "another user of this machine")
                                continue
                            pool.submit(self._greet, connection, address)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _greet(self, connection: socket.socket, address: Any) -> None:
        connection.settimeout(CONNECT_S)
        try:
            channel = self._asked(connection)
        except OSError:
            channel = None
        with self._lock:
            if channel is not None and channel not in self.found:
                self.found[channel] = _ready(connection)
                return
        near = connection.family == socket.AF_UNIX
        self._send_away(connection, "this machine" if near else str(address[0]))

    def _send_away(self, connection: socket.socket, whence: str) -> None:
        with self._lock:
            self._last = whence
            self._sent_away += 1
        connection.close()

    def _asked(self, connection: socket.socket) -> tuple[ChannelKind, int] | None:
        """Kind and rank of a connection, if it is wanted and authenticated."""
        greeting = connection.recv(HELLO.size, socket.MSG_WAITALL)
        if len(greeting) < HELLO.size:
            return None
        magic, purpose, rank = HELLO.unpack(greeting)
        channel, ranks = self._wanted.get((purpose, rank)), self._ranks
        if magic != MAGIC or channel is None:
            return None
        ends = (ranks.name(rank), ranks.name(ranks.rank), f"{self._name} {purpose}")
        known = ranks.secret is None or authenticate_server(connection, ranks.secret, *ends)
        return channel if known else None


def _ready(opened: socket.socket) -> Connection:
    connection = Connection(fileno=opened.detach())
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # the system may allow less
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES)
        return connection
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # detect a vanished host after minutes; the default is two hours
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
