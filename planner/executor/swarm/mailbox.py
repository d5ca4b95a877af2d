"""Messages of devices that route microbatches, with one receiving thread per neighbour.

Reading never waits for operations, so gradients do not queue behind activations. Pending messages
are bounded by what microbatch sources keep in flight.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from planner.executor.comm.connections import as_bytes, receive_into
from planner.executor.comm.p2p import WorkerThread
from planner.executor.comm.p2p_schedule import Message
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.swarm.routing_messages import (
    KINDS,
    MessageFormat,
    MessageKind,
    RoutingMessage,
)


@dataclass(frozen=True)
class RoutedMessage:
    """A message that has arrived.

    Attributes
    ----------
    tensor
        Values in host memory; None for a header alone.
    arrived_s
        Arrival of its last byte on the monotonic clock.
    """

    note: RoutingMessage
    source: int
    tensor: Tensor | None = None
    arrived_s: float = 0.0


class Mailbox:
    """Receives from all neighbours until each has sent its last message.

    Parameters
    ----------
    buffer
        Allocates memory for values.
    taken
        Called with each message, on the thread of its source.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        form: MessageFormat,
        buffer: Callable[[Message], Tensor],
        taken: Callable[[RoutedMessage], None],
        failure: ErrorLatch,
    ) -> None:
        self._rank, self._form, self._buffer, self._taken = rank, form, buffer, taken
        self._lanes = []
        for source, connection in connections.items():
            lane = WorkerThread(f"from {source}", failure)
            lane.submit(lambda s=source, c=connection: self._receive(s, c))  # type: ignore[misc]
            self._lanes.append(lane)

    def finish(self) -> None:
        """Wait for the last message of all neighbours."""
        for lane in self._lanes:
            lane.finish()

    def _receive(self, source: int, connection: socket.socket) -> None:
        header = bytearray(self._form.size)
        while True:
            receive_into(connection, memoryview(header))
            note = self._form.unpack(header)
            if note.word is MessageKind.LAST:
                return
            tensor = None
            if (kind := KINDS.get(note.word)) is not None:
                tensor = self._buffer(Message(kind, note.microbatch, source, self._rank))
                receive_into(connection, as_bytes(tensor))
            self._taken(RoutedMessage(note, source, tensor, time.monotonic()))
