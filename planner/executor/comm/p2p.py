"""P2P messages of the pipeline, sent when handed over and timed when they arrive.

One thread per peer and direction: neither end waits for the other, and the time of arrival is not
that of the request. Early messages wait in the receiver's memory, up to `EARLY_BYTES` (beyond that,
only those that the next operation needs); then senders block.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from planner.executor.comm.connections import as_bytes, receive_into, send_all, unacknowledged_bytes
from planner.executor.comm.device_backend import HOST, DeviceBackend
from planner.executor.comm.p2p_schedule import Message, P2PSchedule
from planner.executor.fault_tolerance.error_latch import ErrorLatch

EARLY_BYTES, PIECE_BYTES = 1 << 30, 1 << 20

Job = Callable[[], None]


class WorkerThread(threading.Thread):
    """A thread that runs jobs in order.

    Parameters
    ----------
    name
        Name of the thread.
    failure
        Receives the error of a job; all threads that share it then stop.
    """

    def __init__(self, name: str, failure: ErrorLatch) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._failure = failure
        # after an error no job will run
        failure.on_failure(lambda: self._jobs.put(None))
        self.start()

    def submit(self, job: Job) -> None:
        """Run a job after all submitted before."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until all jobs are done; no more may be submitted."""
        self._jobs.put(None)
        self.join()

    def run(self) -> None:
        """Run jobs until `finish`."""
        while self._next():
            pass

    def _next(self) -> bool:
        # release a job and its memory before waiting for the next one
        job = self._jobs.get()
        if job is None:
            return False
        try:
            job()
        except Exception as error:
            self._failure(error)
            return False
        return True


class Sender:
    """Sends to other devices, to each in the order of `send`.

    Parameters
    ----------
    rates
        By destination, bytes per second of the link in the plan.
    round_trips_s
        By destination, time until data is acknowledged; None for 0.
    backend
        Backend of the device.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        failure: ErrorLatch,
        rates: Mapping[int, float],
        round_trips_s: Mapping[int, float] | None = None,
        backend: DeviceBackend = HOST,
    ) -> None:
        self._backend = backend
        self._connections, self._rates = connections, rates
        self._round_trips_s = round_trips_s or dict.fromkeys(connections, 0.0)
        self._leaves_s = dict.fromkeys(connections, 0.0)
        self._given = dict.fromkeys(connections, 0)
        self._taken = dict.fromkeys(connections, 0)
        self._lanes = {d: WorkerThread(f"to {d}", failure) for d in connections}

    def send(self, tensor: Tensor, destination: int, header: bytes = b"") -> None:
        """Hand a message over; returns at once."""
        connection = self._connections[destination]
        self._given[destination] += tensor.nbytes
        ready = self._backend.to_host(tensor)

        def job() -> None:
            values = as_bytes(ready())
            send_all(connection, memoryview(header))
            for start in range(0, len(values), PIECE_BYTES):
                piece = values[start : start + PIECE_BYTES]
                send_all(connection, piece)
                self._taken[destination] += len(piece)

        self._lanes[destination].submit(job)

    def made(self, destination: int, size: int, end_s: float) -> None:
        """A message that was handed over has been computed."""
        begin = max(end_s, self._leaves_s[destination])
        self._leaves_s[destination] = begin + size / self._rates[destination]

    def tell(self, destination: int, note: bytes) -> None:
        """Send a few bytes after all messages handed over before; returns at once."""
        connection = self._connections[destination]
        self._lanes[destination].submit(lambda: send_all(connection, memoryview(note)))

    def in_flight(self, upload_bytes_per_s: float) -> tuple[float, float]:
        """Data that is being sent or not known to have arrived.

        Returns
        -------
        tuple[float, float]
            Bytes, and the time on the monotonic clock by which they arrive at the plan's rates.
        """
        now = time.monotonic()
        behind = {d: self._behind(d) for d in self._connections}
        rates = {d: self._rates[d] for d, size in behind.items() if size}
        # part of the unacknowledged data has left, and it or its acknowledgement is in flight
        share = min(1.0, upload_bytes_per_s / sum(rates.values())) if rates else 1.0
        left = {
            d: max(
                (self._leaves_s[d] - now) * rate,
                behind[d] - share * rate * self._round_trips_s[d],
                0.0,
            )
            for d, rate in rates.items()
        }
        longest = max((size / rates[d] for d, size in left.items()), default=0.0)
        return sum(left.values()), now + longest

    def finish(self) -> None:
        """Wait until everything is in the system's buffers."""
        for lane in self._lanes.values():
            lane.finish()

    def _behind(self, destination: int) -> int:
        """Bytes handed over and not known to have arrived."""
        waiting = self._given[destination] - self._taken[destination]
        return waiting + unacknowledged_bytes(self._connections[destination])


@dataclass(frozen=True)
class ReceivedMessage:
    """A message that has arrived.

    Attributes
    ----------
    tensor
        Its content.
    arrived_s
        Arrival of its last byte on the monotonic clock.
    """

    message: Message
    tensor: Tensor
    arrived_s: float


class ExpectedMessage(NamedTuple):
    """An expected message: number of its step, and what it is."""

    serial: int
    message: Message


def expected_messages(
    traffic: Sequence[P2PSchedule],
) -> dict[int, Iterator[ExpectedMessage]]:
    """By source, its messages to this rank in steps with these schedules, in order."""

    def messages(source: int) -> Iterator[ExpectedMessage]:
        for serial, step in enumerate(traffic):
            for message in step.incoming.get(source, ()):
                yield ExpectedMessage(serial, message)

    return {source: messages(source) for step in traffic for source in step.incoming}


class Receiver:
    """Receives from other devices.

    Parameters
    ----------
    expected
        By source, its messages in order of sending.
    buffer
        Allocates memory for a message.
    early_bytes
        Limit on messages that wait for their operation.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        expected: Mapping[int, Iterable[ExpectedMessage]],
        buffer: Callable[[Message], Tensor],
        failure: ErrorLatch,
        early_bytes: int = EARLY_BYTES,
    ) -> None:
        self._buffer, self._failure, self._early = buffer, failure, early_bytes
        self._changed = threading.Condition()
        self._arrived: dict[ExpectedMessage, ReceivedMessage] = {}
        self._held = 0
        self._wanted: ExpectedMessage | None = None
        failure.on_failure(self._wake)
        for source, messages in expected.items():
            lane = WorkerThread(f"from {source}", failure)
            lane.submit(lambda c=connections[source], m=messages: self._receive(c, m))  # type: ignore[misc]

    def has(self, serial: int, message: Message) -> bool:
        """Whether a message has arrived."""
        return ExpectedMessage(serial, message) in self._arrived

    def take(self, serial: int, message: Message) -> ReceivedMessage:
        """Wait for a message and return it."""
        wanted = ExpectedMessage(serial, message)
        with self._changed:
            if wanted not in self._arrived:
                self._wanted = wanted
                self._changed.notify_all()
                while wanted not in self._arrived:
                    self._failure.check()
                    self._changed.wait()
                self._wanted = None
            arrival = self._arrived.pop(wanted)
            self._held -= arrival.tensor.nbytes
            if self._held + arrival.tensor.nbytes > self._early:
                self._changed.notify_all()
        return arrival

    def _receive(self, connection: socket.socket, messages: Iterable[ExpectedMessage]) -> None:
        for expected in messages:
            tensor = self._buffer(expected.message)
            self._wait_for_room(expected.message.source)
            receive_into(connection, as_bytes(tensor))
            arrived = time.monotonic()
            with self._changed:
                self._arrived[expected] = ReceivedMessage(expected.message, tensor, arrived)
                self._held += tensor.nbytes
                if self._wanted == expected:
                    self._changed.notify_all()

    def _wait_for_room(self, source: int) -> None:
        with self._changed:
            # a required message may be queued behind others
            while self._held > self._early and not (
                self._wanted is not None and self._wanted.message.source == source
            ):
                self._failure.check()
                self._changed.wait()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
