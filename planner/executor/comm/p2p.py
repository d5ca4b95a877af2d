"""P2P messages of the pipeline: queued by the sender, timestamped when they arrive.

One thread per peer and direction: neither end waits for the other, and the time of arrival is not
that of the request. Early messages wait in the receiver's memory, up to `MAX_EARLY_BYTES`; beyond
that, only those that the next operation needs are read, and senders block.
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

from planner.executor.comm.device_backend import HOST, DeviceBackend
from planner.executor.comm.p2p_schedule import Message, P2PSchedule
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.transport.connections import (
    as_bytes,
    receive_into,
    send_all,
    unacknowledged_bytes,
)

MAX_EARLY_BYTES, CHUNK_BYTES = 1 << 30, 1 << 20

Job = Callable[[], None]


class WorkerThread(threading.Thread):
    """A thread that runs jobs in order.

    Parameters
    ----------
    name
        Name of the thread.
    error_latch
        Receives the error of a job; all threads that share it then stop.
    """

    def __init__(self, name: str, error_latch: ErrorLatch) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._error_latch = error_latch
        # after an error no job will run
        error_latch.on_failure(lambda: self._jobs.put(None))
        self.start()
        error_latch.add_thread(self)

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
            self._error_latch.fail(error)
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
        error_latch: ErrorLatch,
        rates: Mapping[int, float],
        round_trips_s: Mapping[int, float] | None = None,
        backend: DeviceBackend = HOST,
    ) -> None:
        self._backend = backend
        self._connections, self._rates = connections, rates
        self._round_trips_s = round_trips_s or dict.fromkeys(connections, 0.0)
        self._expected_sent_s = dict.fromkeys(connections, 0.0)
        self._queued_bytes = dict.fromkeys(connections, 0)
        self._sent_bytes = dict.fromkeys(connections, 0)
        self._threads = {d: WorkerThread(f"to {d}", error_latch) for d in connections}

    def send(self, tensor: Tensor, destination: int, header: bytes = b"") -> None:
        """Queue a message after the operations that compute it; returns at once."""
        connection = self._connections[destination]
        self._queued_bytes[destination] += tensor.nbytes
        ready = self._backend.to_host(tensor)

        def job() -> None:
            values = as_bytes(ready())
            send_all(connection, memoryview(header))
            for start in range(0, len(values), CHUNK_BYTES):
                chunk = values[start : start + CHUNK_BYTES]
                send_all(connection, chunk)
                self._sent_bytes[destination] += len(chunk)

        self._threads[destination].submit(job)

    def mark_computed(self, destination: int, size: int, end_s: float) -> None:
        """Record when a queued message was computed, for `in_flight`."""
        begin = max(end_s, self._expected_sent_s[destination])
        self._expected_sent_s[destination] = begin + size / self._rates[destination]

    def send_header(self, destination: int, header: bytes) -> None:
        """Queue a header without a tensor; returns at once."""
        connection = self._connections[destination]
        self._threads[destination].submit(lambda: send_all(connection, memoryview(header)))

    def in_flight(self, upload_bytes_per_s: float) -> tuple[float, float]:
        """Estimate data that has not arrived.

        Returns
        -------
        tuple[float, float]
            Bytes, and the time on the monotonic clock by which they arrive at the plan's rates.
        """
        now = time.monotonic()
        unacknowledged = {d: self._unacknowledged(d) for d in self._connections}
        rates = {d: self._rates[d] for d, size in unacknowledged.items() if size}
        # part of the unacknowledged data has left, and it or its acknowledgement is in flight
        share = min(1.0, upload_bytes_per_s / sum(rates.values())) if rates else 1.0
        remaining = {
            d: max(
                (self._expected_sent_s[d] - now) * rate,
                unacknowledged[d] - share * rate * self._round_trips_s[d],
                0.0,
            )
            for d, rate in rates.items()
        }
        longest = max((size / rates[d] for d, size in remaining.items()), default=0.0)
        return sum(remaining.values()), now + longest

    def finish(self) -> None:
        """Wait until all messages are in the buffers of the operating system."""
        for thread in self._threads.values():
            thread.finish()

    def _unacknowledged(self, destination: int) -> int:
        """Bytes queued or not acknowledged."""
        queued = self._queued_bytes[destination] - self._sent_bytes[destination]
        return queued + unacknowledged_bytes(self._connections[destination])


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
    """An expected message, and the index of its step."""

    step_index: int
    message: Message


def expected_messages(
    schedules: Sequence[P2PSchedule],
) -> dict[int, Iterator[ExpectedMessage]]:
    """By source, its messages to this rank in steps with these schedules, in order."""

    def messages(source: int) -> Iterator[ExpectedMessage]:
        for step_index, schedule in enumerate(schedules):
            for message in schedule.incoming.get(source, ()):
                yield ExpectedMessage(step_index, message)

    return {source: messages(source) for schedule in schedules for source in schedule.incoming}


class Receiver:
    """Receives from other devices.

    Parameters
    ----------
    expected
        By source, its messages in order of sending.
    buffer
        Allocates memory for a message.
    max_early_bytes
        Limit on messages that wait for their operation.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        expected: Mapping[int, Iterable[ExpectedMessage]],
        buffer: Callable[[Message], Tensor],
        error_latch: ErrorLatch,
        max_early_bytes: int = MAX_EARLY_BYTES,
    ) -> None:
        self._buffer, self._error_latch = buffer, error_latch
        self._max_early_bytes = max_early_bytes
        self._changed = threading.Condition()
        self._arrived: dict[ExpectedMessage, ReceivedMessage] = {}
        self._early_bytes = 0
        self._awaited: ExpectedMessage | None = None
        error_latch.notify_on_failure(self._changed)
        for source, messages in expected.items():
            thread = WorkerThread(f"from {source}", error_latch)
            thread.submit(lambda c=connections[source], m=messages: self._receive(c, m))  # type: ignore[misc]

    def has_arrived(self, step_index: int, message: Message) -> bool:
        """Whether a message has arrived."""
        return ExpectedMessage(step_index, message) in self._arrived

    def receive(self, step_index: int, message: Message) -> ReceivedMessage:
        """Wait for a message and return it."""
        awaited = ExpectedMessage(step_index, message)
        with self._changed:
            if awaited not in self._arrived:
                self._awaited = awaited
                self._changed.notify_all()
                while awaited not in self._arrived:
                    self._error_latch.check()
                    self._changed.wait()
                self._awaited = None
            received = self._arrived.pop(awaited)
            self._early_bytes -= received.tensor.nbytes
            if self._early_bytes + received.tensor.nbytes > self._max_early_bytes:
                self._changed.notify_all()
        return received

    def _receive(self, connection: socket.socket, messages: Iterable[ExpectedMessage]) -> None:
        for expected in messages:
            self._wait_for_space(expected.message.source)
            tensor = self._buffer(expected.message)
            receive_into(connection, as_bytes(tensor))
            arrived = time.monotonic()
            with self._changed:
                self._arrived[expected] = ReceivedMessage(expected.message, tensor, arrived)
                self._early_bytes += tensor.nbytes
                if self._awaited == expected:
                    self._changed.notify_all()

    def _wait_for_space(self, source: int) -> None:
        with self._changed:
            # a required message may be queued behind others
            while self._early_bytes > self._max_early_bytes and not (
                self._awaited is not None and self._awaited.message.source == source
            ):
                self._error_latch.check()
                self._changed.wait()
