"""Losses sent to rank 0: asynchronously, so known about a step late."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress

from planner.executor.transport.connections import ConnectionLost, receive_into, send_all

MESSAGE = struct.Struct("!Qd")
"""Step and loss."""


class LossSender:
    """Sends the losses of this rank to rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def report(self, step: int, loss: float) -> None:
        """Send a loss; 16 bytes fit into the socket's buffer unless the connection is stalled."""
        send_all(self._connection, memoryview(MESSAGE.pack(step, loss)))


class LossCollector:
    """Losses of all steps on rank 0.

    Parameters
    ----------
    connections
        To the other ranks that have losses.
    has_own
        Whether rank 0 has losses too.
    steps
        Steps whose losses are expected from each.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], has_own: bool, steps: range
    ) -> None:
        self._ranks = sorted({*connections, *([0] if has_own else [])})
        self.steps = steps
        self._by_step: dict[int, dict[int, float]] = {step: {} for step in steps}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._listen, args=(r, c, len(steps)), daemon=True)
            for r, c in connections.items()
        ]
        for thread in self._threads:
            thread.start()

    def report(self, step: int, loss: float, rank: int = 0) -> None:
        """Record a loss."""
        with self._lock:
            self._by_step[step][rank] = loss

    def loss(self, step: int) -> float | None:
        """The total loss of a step; None if parts are missing."""
        with self._lock:
            by_rank = dict(self._by_step[step])
        if not self._ranks or len(by_rank) < len(self._ranks):
            return None
        return sum(by_rank[r] for r in self._ranks)

    def latest_known_step(self, step: int) -> int | None:
        """The last step up to this one whose loss is known."""
        known = range(step, self.steps.start - 1, -1)
        return next((t for t in known if self.loss(t) is not None), None)

    def wait(self) -> None:
        """Wait until all are known, or their senders are lost."""
        for thread in self._threads:
            thread.join()

    def _listen(self, rank: int, connection: socket.socket, steps: int) -> None:
        message = memoryview(bytearray(MESSAGE.size))
        # lost ranks are detected by their neighbours
        with suppress(ConnectionLost):
            for _ in range(steps):
                receive_into(connection, message)
                step, loss = MESSAGE.unpack(message)
                self.report(step, loss, rank)
