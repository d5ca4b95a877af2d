"""The key-value store of a run: its address, and connections to it.

``torchrun`` and ``planner run`` serve it and set `STORE_BY_LAUNCHER`; otherwise rank 0 serves it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.utils.refusal import Refusal

STORE_BY_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable: "True" if the launcher serves the store."""
STARTED_KEY, FINISHED_KEY = "membership/0", "membership/finished"
"""Keys of an elastic run that has started, and of one that has finished."""
BACKLOG = 2048
"""Backlog of the listening socket: all ranks connect at once."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable: number of restarts of all ranks by torchrun."""
BIND = "PLANNER_BIND"
"""Environment variable: address of this node to listen on."""
ANY_ADDRESS = ("0.0.0.0", "::")
"""Addresses that stand for all of a node."""
BIND_REMEDY = (
    f"name an address of this node with --bind, or all of them with --bind {ANY_ADDRESS[0]}"
)
ADDRESS_REMEDY = (
    "name the node of the plan's first device, this one, in MASTER_ADDR everywhere; where that is "
    "translated on the way, this node's own address with --bind"
)
"""Remedies for an address that is not of this node."""
ANSWER_S = 3.0
"""Timeout beyond PyTorch's own."""
RETRY_S, MIN_TIMEOUT_S = 0.25, 1.0
"""Interval of connection attempts, and shortest total time."""
T = TypeVar("T")


class StoreMissingError(RuntimeError):
    """Nothing answers at the address of the store."""


class PortTakenError(StoreMissingError):
    """The store cannot be served."""


@dataclass(frozen=True)
class StoreAddress:
    """Address of the store.

    Attributes
    ----------
    served_by_launcher
        Whether the launcher serves it instead of rank 0.
    attempt
        Number of the launch; each has its own keys in the store.
    bind
        Address to serve it on; empty for ``host``.
    """

    host: str
    port: int
    served_by_launcher: bool
    attempt: str = "0"
    bind: str = ""

    @classmethod
    def from_environment(cls) -> StoreAddress:
        """From the variables of ``torchrun``."""
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise Refusal(
                "MASTER_ADDR and MASTER_PORT must say where the store is, a host and a port from 1 "
                f"to 65535, found {host!r} and {port!r}; start with torchrun, or set both on every "
                "node"
            )
        served_by_launcher = os.environ.get(STORE_BY_LAUNCHER) == "True"
        bind = os.environ.get(BIND, "")
        return cls(host, int(port), served_by_launcher, os.environ.get(ATTEMPT, "0"), bind)

    def __str__(self) -> str:
        return f"the store at {self.host}:{self.port}"

    def connect(self, timeout_s: float, *, serve: bool = False) -> Store:
        """A separate connection, so that blocking calls on it block nothing else."""
        if serve:
            remedy = BIND_REMEDY if self.bind else ADDRESS_REMEDY
            host = self.bind or self.host
            store: Store = serve_store(host, self.port, timeout_s=timeout_s, remedy=remedy)
            return PrefixStore(f"planner/{self.attempt}", store)
        until = time.monotonic() + timeout_s
        # PyTorch backs off exponentially, and may wait twice its timeout
        self._wait_for_listener(until, timeout_s)
        store = self._connect_tcp_store(until, timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(f"planner/{self.attempt}", store)

    def _connect_tcp_store(self, until: float, timeout_s: float) -> TCPStore:
        """Connect where a server listens; PyTorch waits forever for one that is not a store."""
        remaining_s = max(until - time.monotonic(), MIN_TIMEOUT_S)
        remaining = timedelta(seconds=remaining_s)
        try:
            return call_with_timeout(
                remaining_s + ANSWER_S,
                lambda: TCPStore(self.host, self.port, timeout=remaining, wait_for_workers=False),
            )
        except DistError:
            raise self._missing_error(timeout_s) from None
        except TimeoutError:
            why = " as a store does: it is stopped, or something else listens there"
            raise self._missing_error(timeout_s, why) from None

    def _wait_for_listener(self, until: float, timeout_s: float) -> None:
        """Wait until a server listens."""
        while True:
            remaining = max(until - time.monotonic(), MIN_TIMEOUT_S)
            try:
                socket.create_connection((self.host, self.port), timeout=remaining).close()
            except OSError as error:
                if time.monotonic() + RETRY_S < until:
                    time.sleep(RETRY_S)
                    continue
                # host names of nodes that are starting may resolve later
                why = f" ({error.strerror})" if isinstance(error, socket.gaierror) else ""
                raise self._missing_error(timeout_s, why) from None
            return

    def _missing_error(self, timeout_s: float, why: str = "") -> StoreMissingError:
        return StoreMissingError(
            f"{self} did not answer within {timeout_s:g} s{why}; check MASTER_ADDR and "
            "MASTER_PORT, and whether the node that serves it has been started"
        )


def call_with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Call a function that may block forever; raises `TimeoutError` after some time."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    # a daemon: unlike a thread of an executor, it does not hold up the end of the process
    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def serve_store(
    host: str, port: int, *, timeout_s: float = 300.0, remedy: str = BIND_REMEDY
) -> TCPStore:
    """A store served by this process, on one address only."""
    server = _listen(host, port, remedy)
    # by default PyTorch listens on all addresses
    actual_port = server.getsockname()[1]
    try:
        return TCPStore(
            _own_server_address(server),
            actual_port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    except DistError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise PortTakenError(
            f"the store at {host}:{port} cannot be served here ({reason})"
        ) from None


def _listen(host: str, port: int, remedy: str) -> socket.socket:
    """A bound socket; names that resolve to another machine or to loopback are refused for remote
    ranks."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Refusal(f"the store's host {host!r} cannot be found ({error}); {remedy}") from None
    addresses = list(dict.fromkeys((family, str(address[0])) for family, *_, address in resolved))
    for family, address in addresses:
        if is_loopback(address) and not is_loopback(host) and host != "localhost":
            continue
        try:
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(
                    f"the store at {host}:{port} cannot be served here ({os.strerror(error.errno)})"
                ) from None
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    listed = ", ".join(address for _, address in addresses)
    raise Refusal(
        f"the store's host {host!r} ({listed}) is no address of this node that others reach; "
        f"{remedy}"
    )


def is_loopback(address: str) -> bool:
    """Whether an address is of the loopback interface; False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _own_server_address(server: socket.socket) -> str:
    """Address at which this process reaches its own server."""
    address = str(server.getsockname()[0])
    loopback = {ANY_ADDRESS[0]: "127.0.0.1", ANY_ADDRESS[1]: "::1"}
    return loopback.get(address, address)
