"""Connections of a rank for averaging, with one thread per direction."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.executor.comm.connections import DuplexChannels, send_all, send_nowait
from planner.executor.comm.p2p import WorkerThread
from planner.executor.fault_tolerance.error_latch import ErrorLatch

HEAD = struct.Struct("!I")
"""Header of a chunk: its number, with flag `RETURN` for a sum."""
RETURN = 1 << 31
READY = (1 << 32) - 1
"""In place of a chunk: the member's gradients are ready."""
NOTHING = memoryview(b"")


class SendQueue:
    """Queue to one member: sends at once what the connection takes, the rest by a thread.

    Parameters
    ----------
    failure
        Receives errors.
    """

    def __init__(self, connection: socket.socket, name: str, failure: ErrorLatch) -> None:
        self._connection = connection
        self._lane = WorkerThread(name, failure)
        self._lock = threading.Lock()
        self._waiting = 0

    def send(self, word: int, message: memoryview) -> None:
        """Send a chunk after everything queued before."""
        left = [memoryview(HEAD.pack(word)), message]
        with self._lock:
            if not self._waiting:
                left = send_nowait(self._connection, *left)
            if left:
                self._later(partial(send_all, self._connection, *left))

    def send_made(self, word: int, make: Callable[[], memoryview]) -> None:
        """The same for a chunk that the thread makes first."""

        def job() -> None:
            send_all(self._connection, memoryview(HEAD.pack(word)), make())

        with self._lock:
            self._later(job)

    def do(self, job: Callable[[socket.socket], None]) -> None:
        """Run a job on the thread, after everything queued before."""
        with self._lock:
            self._later(partial(job, self._connection))

    def after_all(self, callback: Callable[[], None]) -> None:
        """Call back when everything queued so far has been sent."""
        self._lane.submit(callback)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._lane.finish()

    def _later(self, job: Callable[[], None]) -> None:
        self._waiting += 1

        def one_less() -> None:
            job()
            with self._lock:
                self._waiting -= 1

        self._lane.submit(one_less)


class BufferPool:
    """Reusable buffers, as many as are needed at a time."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._spare: list[NDArray[np.uint8]] = []

    def take(self) -> NDArray[np.uint8]:
        """Get a buffer."""
        try:
            return self._spare.pop()
        except IndexError:
            return np.empty(self.length, np.uint8)

    def give_back(self, piece: NDArray[np.uint8]) -> None:
        """Return a buffer."""
        self._spare.append(piece)


class AllReduceLinks:
    """A rank's connections for averaging, with one thread per direction.

    Parameters
    ----------
    failure
        Receives errors of all threads.

    Attributes
    ----------
    to, of
        By rank, the send queue to it, and the thread that receives from it.
    changed
        Condition that guards what threads count.
    """

    def __init__(self, channels: DuplexChannels, failure: ErrorLatch) -> None:
        self.incoming = channels.of
        self.failure = failure
        self.changed = threading.Condition()
        self.failure.on_failure(self._wake)
        self.to = {
            d: SendQueue(connection, f"averaging to {d}", self.failure)
            for d, connection in channels.to.items()
        }
        self.of = {d: WorkerThread(f"averaging from {d}", self.failure) for d in channels.of}
        self._memory = BufferPool(0)

    def memory(self, length: int) -> BufferPool:
        """Buffer pool for contributions, reused while their length stays the same."""
        if self._memory.length != length:
            self._memory = BufferPool(length)
        return self._memory

    def tell(self, rank: int) -> None:
        """Send word that this rank is ready for its next round, or will be when it arrives."""
        self.to[rank].send(READY, NOTHING)

    def wait_until(self, done: Callable[[], bool], most_s: float | None = None) -> None:
        """Wait for the threads; raises their errors."""
        until = None if most_s is None else time.monotonic() + most_s
        with self.changed:
            while self.failure.error is None and not done():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0.0:
                    break
                self.changed.wait(left)
        self.failure.check()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for queue in self.to.values():
            queue.finish()
        for lane in self.of.values():
            lane.finish()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
