"""Connections of a rank for averaging, with one thread per direction."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.executor.comm.p2p import WorkerThread
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.transport.connections import DuplexChannels, send_all, send_nowait

HEADER = struct.Struct("!I")
"""Header of a chunk: its number, with the flag `GATHERED` in the all-gather phase."""
GATHERED = 1 << 31
READY = (1 << 32) - 1
"""In place of a chunk: the member's gradients are ready."""
EMPTY = memoryview(b"")


class SendQueue:
    """Queue to one member: sends without blocking what fits into the buffer, the rest in a thread.

    Parameters
    ----------
    error_latch
        Fails with the first error of the thread.
    """

    def __init__(self, connection: socket.socket, name: str, error_latch: ErrorLatch) -> None:
        self._connection = connection
        self._thread = WorkerThread(name, error_latch)
        self._lock = threading.Lock()
        self._waiting = 0

    def send(self, header: int, message: memoryview) -> None:
        """Send a chunk after everything queued before."""
        left = [memoryview(HEADER.pack(header)), message]
        with self._lock:
            if not self._waiting:
                left = send_nowait(self._connection, *left)
            if left:
                self._submit(partial(send_all, self._connection, *left))

    def send_encoded(self, header: int, encode: Callable[[], memoryview]) -> None:
        """As `send`, for a chunk that the thread encodes first."""

        def job() -> None:
            send_all(self._connection, memoryview(HEADER.pack(header)), encode())

        with self._lock:
            self._submit(job)

    def run_after(self, callback: Callable[[], None]) -> None:
        """Call back when everything queued so far has been sent."""
        self._thread.submit(callback)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._thread.finish()

    def _submit(self, job: Callable[[], None]) -> None:
        self._waiting += 1

        def run_and_count() -> None:
            job()
            with self._lock:
                self._waiting -= 1

        self._thread.submit(run_and_count)


class BufferPool:
    """Reusable buffers, as many as are needed at a time."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._free: list[NDArray[np.uint8]] = []

    def acquire(self) -> NDArray[np.uint8]:
        """Get a buffer."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self.length, np.uint8)

    def release(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer."""
        self._free.append(buffer)


class AveragingConnections:
    """A rank's connections for averaging, with one thread per direction.

    Parameters
    ----------
    error_latch
        Fails with the first error of any thread.

    Attributes
    ----------
    send_queues, receivers
        By rank, the send queue to it, and the thread that receives from it.
    changed
        Condition that guards the counters of all threads.
    """

    def __init__(self, channels: DuplexChannels, error_latch: ErrorLatch) -> None:
        self.incoming = channels.incoming
        self.error_latch = error_latch
        self.changed = threading.Condition()
        self.error_latch.notify_on_failure(self.changed)
        self.send_queues = {
            d: SendQueue(connection, f"averaging to {d}", self.error_latch)
            for d, connection in channels.outgoing.items()
        }
        self.receivers = {
            d: WorkerThread(f"averaging from {d}", self.error_latch) for d in channels.incoming
        }
        self._buffer_pool = BufferPool(0)

    def buffer_pool(self, length: int) -> BufferPool:
        """The pool of buffers for contributions; a new one if their length has changed."""
        if self._buffer_pool.length != length:
            self._buffer_pool = BufferPool(length)
        return self._buffer_pool

    def notify_ready(self, rank: int) -> None:
        """Notify a rank that this one will be ready for its next round when the message arrives."""
        self.send_queues[rank].send(READY, EMPTY)

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for a condition, or until a time has passed; raises errors of the threads."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.error_latch.error is not None or predicate(), timeout_s
            )
        self.error_latch.check()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for queue in self.send_queues.values():
            queue.finish()
        for receiver in self.receivers.values():
            receiver.finish()
