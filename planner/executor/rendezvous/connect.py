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

from planner.executor.rendezvous.address import INTERFACE, own_address
from planner.executor.rendezvous.auth import (
    authenticate_client,
    authenticate_server,
    receive_at_most,
)
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.transport.connections import (
    ChannelKind,
    Connection,
    ConnectionLost,
    Connections,
)

MAGIC = 0x504C414E
HELLO = struct.Struct("!III")
"""Magic number, kind and rank: the first bytes on a connection."""
CONNECT_S, RANK_S = 10.0, 0.25
"""Timeout for connecting, plus so much per rank: all ranks are present when connections are opened,
so one that does not answer is unreachable."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
ACCEPT_POLL_S, ACCEPT_THREADS = 0.02, 64
"""Interval of polling, and number of connections accepted in parallel."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}
"""TCP keep-alive: idle seconds, interval and count. There is no limit on unacknowledged data: a
slow receiver may block its sender for long."""
UNIX_SOCKETS = "PLANNER_UNIX_SOCKETS"
"""Environment variable; 0 lets ranks of one machine connect by TCP like all others."""
UNIX_BUFFER_BYTES = 1 << 22
"""Requested buffer between two ranks of one machine."""


@contextmanager
def connections_to(
    ranks: RankGroup, keys: Iterable[tuple[ChannelKind, int]], name: str
) -> Iterator[Connections]:
    """Context with a connection for each kind and rank in ``keys``; a collective call.

    The other rank must request the same connection. Heartbeat connections stay open until the end
    of the run.
    """
    connections = _open(ranks, keys, name)
    # wake threads that wait on a connection; none waits on heartbeat connections
    data_connections = [
        c for (kind, _), c in connections.items() if kind is not ChannelKind.HEARTBEAT
    ]
    try:
        with ranks.on_rank_lost(lambda: _shut(*data_connections)):
            yield connections
    finally:
        for (kind, _), connection in connections.items():
            if kind is ChannelKind.HEARTBEAT:
                # read pending data first: closing resets the connection and loses the last message
                ranks.resources.callback(connection.close)
                continue
            _shut(connection)
            connection.close()


def _shut(*connections: socket.socket) -> None:
    """Shut connections down, which wakes the threads that wait on either end."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _open(ranks: RankGroup, requested: Iterable[tuple[ChannelKind, int]], name: str) -> Connections:
    """Connect to higher ranks and accept connections of lower ones."""
    keys = sorted(set(requested))
    keys_to_connect = [(kind, other) for kind, other in keys if other > ranks.rank]
    keys_to_accept = set(keys) - set(keys_to_connect)
    timeout_s = CONNECT_S + RANK_S * ranks.world_size
    with ExitStack() as sockets:
        servers, address = _listen(ranks.address or own_address(), len(keys) + 1)
        for server in servers:
            sockets.enter_context(server)
        addresses = ranks.all_gather(f"{name}/address", address)
        sockets.enter_context(ranks.on_rank_lost(lambda: _shut(*servers)))
        connections: Connections = {}

        def connect(key: tuple[ChannelKind, int]) -> None:
            kind, other = key
            ends = (address, addresses[other])
            connections[kind, other] = _connect(*ends, kind, ranks, other, name)

        try:
            with ThreadPoolExecutor(max_workers=max(1, min(64, len(keys_to_connect)))) as pool:
                connecting = pool.map(connect, keys_to_connect)
                listener = Listener(servers, ranks, keys_to_accept, name)
                try:
                    listener.accept_all(timeout_s)
                except OSError as error:
                    missing_keys = keys_to_accept - set(listener.accepted)
                    missing = min((other for _, other in missing_keys), default=0)
                    raise ConnectionLost(
                        f"device {ranks.name(missing)!r} did not connect to "
                        f"{ranks.name(ranks.rank)!r} within {timeout_s:g} s "
                        f"({error}{listener.rejections})",
                        ranks.name(missing),
                    ) from None
                finally:
                    connections |= listener.accepted
                deque(connecting, maxlen=0)
        except BaseException:
            # keep connections open: closing them would look like the loss of this process
            for connection in connections.values():
                ranks.resources.callback(connection.close)
            raise
    for (_, other), connection in connections.items():
        connection.name = ranks.name(other)
    return connections


def _listen(host: str, backlog: int) -> tuple[list[socket.socket], str]:
    """Listening sockets, and their addresses for others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    servers = [socket.create_server((host, 0), family=family, backlog=backlog)]
    parts = [str(word) for word in servers[0].getsockname()[:2]]
    if _unix_sockets_allowed():
        name = f"planner-{secrets.token_hex(16)}"
        with suppress(OSError), ExitStack() as held:
            unix = held.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind("\0" + name)
            unix.listen(backlog)
            servers.append(unix)
            parts.append(name)
            held.pop_all()
    return servers, " ".join(parts)


def _connect_socket(own_endpoint: str, peer_endpoint: str, timeout_s: float) -> socket.socket:
    """Connect to a peer, by Unix socket if possible."""
    host, port, *unix = peer_endpoint.split()
    if unix and host == own_endpoint.split()[0] and _unix_sockets_allowed():
        # the address may belong to another namespace or machine, the backlog may be full, or the
        # system may forbid it
        with suppress(OSError), ExitStack() as held:
            opened = held.enter_context(socket.socket(socket.AF_UNIX))
            opened.settimeout(timeout_s)
            opened.connect("\0" + unix[0])
            if _same_user(opened):
                held.pop_all()
                return opened
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def _unix_sockets_allowed() -> bool:
    return sys.platform == "linux" and os.environ.get(UNIX_SOCKETS, "1") != "0"


def _same_user(connection: socket.socket) -> bool:
    """Whether this process's user owns the other end too; both ends agree."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _connect(
    own_endpoint: str,
    peer_endpoint: str,
    kind: ChannelKind,
    ranks: RankGroup,
    other: int,
    name: str,
) -> Connection:
    host = peer_endpoint.split()[0]
    try:
        connection = _connect_socket(
            own_endpoint, peer_endpoint, CONNECT_S + RANK_S * ranks.world_size
        )
        connection.sendall(HELLO.pack(MAGIC, kind, ranks.rank))
        about = f"{name} {int(kind)}"
        ends = (ranks.name(ranks.rank), ranks.name(other), about)
        authenticated = ranks.secret is None or authenticate_client(connection, ranks.secret, *ends)
    except OSError as error:
        raise ConnectionLost(
            f"device {ranks.name(other)!r} cannot be reached from {ranks.name(ranks.rank)!r} at "
            f"{host} ({error}); name the interface of each node in {INTERFACE}, and let ranks open "
            "connections to one another",
            ranks.name(other),
        ) from None
    if not authenticated:
        connection.close()
        raise ConnectionLost(
            f"the process that answers as device {ranks.name(other)!r} at {host} does not have the "
            f"secret of device {ranks.name(ranks.rank)!r}; check which processes reach the store",
            ranks.name(other),
        )
    return _configure(connection)


class Listener:
    """Accepts each expected connection once; others are rejected.

    Parameters
    ----------
    ranks
        The rank group.
    keys
        Connections to wait for.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket],
        ranks: RankGroup,
        keys: set[tuple[ChannelKind, int]],
        name: str,
    ) -> None:
        self.accepted: Connections = {}
        self._servers, self._ranks, self._name = servers, ranks, name
        self._expected = {(int(kind), other): (kind, other) for kind, other in keys}
        self._lock = threading.Lock()
        self._rejected_count = 0
        self._last_rejected = ""

    @property
    def rejections(self) -> str:
        """Description of rejected connections."""
        if not self._rejected_count:
            return ""
        return f"; {self._rejected_count} others were refused, the last from {self._last_rejected}"

    def accept_all(self, timeout_s: float) -> None:
        """Accept until all are `accepted`."""
        until = time.monotonic() + timeout_s
        # in parallel, so that slow or silent peers do not delay the others
        pool = ThreadPoolExecutor(max_workers=ACCEPT_THREADS)
        try:
            with selectors.DefaultSelector() as selector:
                for server in self._servers:
                    server.setblocking(False)
                    selector.register(server, selectors.EVENT_READ, server)
                while len(self.accepted) < len(self._expected):
                    if time.monotonic() > until:
                        raise TimeoutError("timed out")
                    for key, _ in selector.select(ACCEPT_POLL_S):
                        try:
                            connection, address = key.data.accept()
                        except (BlockingIOError, ConnectionAbortedError):
                            continue  # the peer has closed already
                        if connection.family == socket.AF_UNIX and not _same_user(connection):
                            self._reject(connection, "another user of this machine")
                            continue
                        pool.submit(self._handshake, connection, address)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _handshake(self, connection: socket.socket, address: Any) -> None:
        connection.settimeout(CONNECT_S)
        try:
            channel = self._identify(connection)
        except OSError:
            channel = None
        with self._lock:
            if channel is not None and channel not in self.accepted:
                self.accepted[channel] = _configure(connection)
                return
        unix = connection.family == socket.AF_UNIX
        self._reject(connection, "this machine" if unix else str(address[0]))

    def _reject(self, connection: socket.socket, origin: str) -> None:
        with self._lock:
            self._last_rejected = origin
            self._rejected_count += 1
        connection.close()

    def _identify(self, connection: socket.socket) -> tuple[ChannelKind, int] | None:
        """Kind and rank of a connection, if it is expected and authenticated."""
        hello = receive_at_most(connection, HELLO.size)
        if len(hello) < HELLO.size:
            return None
        magic, kind, rank = HELLO.unpack(hello)
        channel, ranks = self._expected.get((kind, rank)), self._ranks
        if magic != MAGIC or channel is None:
            return None
        ends = (ranks.name(rank), ranks.name(ranks.rank), f"{self._name} {kind}")
        authenticated = ranks.secret is None or authenticate_server(connection, ranks.secret, *ends)
        return channel if authenticated else None


def _configure(opened: socket.socket) -> Connection:
    connection = Connection(fileno=opened.detach())
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # the system may allow less
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        return connection
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # detect a vanished host after minutes; the default is two hours
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
