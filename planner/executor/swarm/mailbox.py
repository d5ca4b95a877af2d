"""Messages of devices that route microbatches, with one receiving thread per neighbour.

Reading never waits for operations, so gradients do not queue behind activations. Pending messages
are bounded by the microbatches that sources keep in flight.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from planner.executor.comm.p2p import WorkerThread
from planner.executor.comm.p2p_schedule import Message
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.swarm.routing_messages import (
    KINDS,
    MessageFormat,
    MessageKind,
    RoutingHeader,
)
from planner.executor.transport.connections import as_bytes, receive_into


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

    header: RoutingHeader
    source: int
    tensor: Tensor | None = None
    arrived_s: float = 0.0


class Mailbox:
    """Receives from all neighbours until each has sent its last message.

    Parameters
    ----------
    buffer
        Allocates memory for values.
    on_message
        Called with each message, on the thread of its source.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        message_format: MessageFormat,
        buffer: Callable[[Message], Tensor],
        on_message: Callable[[RoutedMessage], None],
        error_latch: ErrorLatch,
    ) -> None:
        self._rank, self._message_format, self._buffer = rank, message_format, buffer
        self._on_message = on_message
        self._threads = []
        for source, connection in connections.items():
            thread = WorkerThread(f"from {source}", error_latch)
            thread.submit(lambda s=source, c=connection: self._receive(s, c))  # type: ignore[misc]
            self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last message of all neighbours."""
        for thread in self._threads:
            thread.finish()

    def _receive(self, source: int, connection: socket.socket) -> None:
        encoded = bytearray(self._message_format.size)
        while True:
            receive_into(connection, memoryview(encoded))
            header = self._message_format.unpack(encoded)
            if header.kind is MessageKind.LAST:
                return
            tensor = None
            if (kind := KINDS.get(header.kind)) is not None:
                tensor = self._buffer(Message(kind, header.microbatch, source, self._rank))
                receive_into(connection, as_bytes(tensor))
            self._on_message(RoutedMessage(header, source, tensor, time.monotonic()))
