"""Failure detection, and orderly shutdown: a thread that never blocks.

There are two kinds of heartbeats. Counters in the store (`heartbeat`) show that a process is alive.
Heartbeat connections, which carry one byte a second, show that two ranks reach each other; one that
closes without a shutdown message shows at once that a process has ended. Time is counted in this
thread's own short polls, so a busy machine, or a process that was stopped, is not taken for
silence.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch.distributed import DistError

from planner.executor.fault_tolerance.heartbeat import Heartbeat, publish
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, REFUSED, Shutdown
from planner.executor.transport.store import (
    STARTED_KEY,
    StoreAddress,
    StoreMissingError,
    call_with_timeout,
)
from planner.utils.refusal import Refusal
from planner.utils.text import listed

HEARTBEAT_TIMEOUT_S = 10.0
TIMEOUT_IN_LATENCIES = 25.0
"""Smallest default timeout, as a multiple of the plan's longest latency."""
TICK_S = 0.25
PING_S = 1.0
SAME_CAUSE_S = 2.5
"""Devices whose silence began within so long were lost together."""
PING, GOODBYE = b"\1", b"\0"
RECONNECT_S = 1.0
"""Timeout for reconnecting to the store."""
PUBLISH_S = 3.0
"""Timeout for writing a reason into the store; then it is printed here alone."""
EXIT_CAUSE_S = 2.0
"""A closed connection or a signal has a cause elsewhere, which may take this long to arrive."""
GRACE_S = 2.0
"""Time for the main thread to begin to leave; then the process is ended from here."""
EXIT_S = 8.0
"""Time for the main thread to leave, including notifications."""
LINGER_S = GRACE_S
"""Time that the process serving the store stays, so that others can read the reason."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _HeartbeatConnection:
    name: str
    silent_s: float = 0.0


class FailureDetector(threading.Thread):
    """Watches the store, other ranks and signals, and ends this process for one reason.

    A thread, from joining the run to leaving it. The main thread leaves by one of the ``exit_``
    methods, which return the exit code.

    Parameters
    ----------
    name
        Device of this process.
    heartbeat_timeout_s
        A longer silence ends the run.

    Attributes
    ----------
    on_rank_lost
        In an elastic run, called with the names of lost devices, the reason, and whether all
        watched devices are silent; None if a loss ends the run.
    """

    def __init__(
        self, name: str, shutdown: Shutdown, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.on_rank_lost: Callable[[Sequence[str], str, bool], None] | None = None
        self.device, self.shutdown, self.heartbeat_timeout_s = name, shutdown, heartbeat_timeout_s
        self.server = "the launcher"
        self._serves = False
        self._address: StoreAddress | None = None
        self._heartbeat: Heartbeat | None = None
        self._heartbeats: dict[socket.socket, _HeartbeatConnection] = {}
        self._lock = threading.Lock()
        self._proposed_s: float | None = None
        self._proposal = ("", FAILED)
        self._server_ended = False
        self._signal: tuple[int, float] | None = None
        self._stopped = False
        self._main_thread_exiting = False
        self._signal_reader, self._signal_writer = socket.socketpair()
        self._signal_reader.settimeout(TICK_S)
        self._signal_writer.setblocking(False)

    def start_watching(self, address: StoreAddress, *, serves: bool) -> None:
        """Start to watch the store and signals; call in the main thread."""
        self._address, self._serves = address, serves
        store = address.connect(self.heartbeat_timeout_s)
        self._heartbeat = Heartbeat(
            store, self._end_run, self._end_for_lost_store, lambda: address.connect(RECONNECT_S)
        )
        # the system writes it even while the main thread is blocked
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        self._heartbeat.start()
        self.start()

    @property
    def is_watching(self) -> bool:
        """Whether `start_watching` was called."""
        return self._heartbeat is not None

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this process, once started."""
        assert self._heartbeat is not None
        return self._heartbeat

    def set_watched_rank(self, rank: int, other: int, name: str) -> None:
        """Send heartbeats as this rank, and watch another one."""
        self.heartbeat.set_watched_rank(rank, other, lambda s: self._check_silence([name], s))

    @contextmanager
    def watching_connections(self, heartbeats: Mapping[socket.socket, str]) -> Iterator[None]:
        """Watch connections too, until the block ends."""
        with self._lock:
            self._heartbeats |= {c: _HeartbeatConnection(name) for c, name in heartbeats.items()}
        try:
            yield
        finally:
            with self._lock:
                for connection in heartbeats:
                    if self._heartbeats.pop(connection, None) is not None:
                        _send(connection, GOODBYE)

    def watch_only_connections(self, heartbeats: Collection[socket.socket]) -> None:
        """Watch only these connections."""
        with self._lock:
            for connection in self._heartbeats.keys() - set(heartbeats):
                del self._heartbeats[connection]

    def abort_run(self, reason: str, code: int = FAILED) -> None:
        """End the run: with a reason in the store for all ranks, or else here alone."""
        with self._lock:
            if self._proposed_s is not None:
                return
            self._proposed_s, self._proposal = time.monotonic(), (reason, code)
        if self._heartbeat is not None and self._heartbeat.is_alive():
            self._heartbeat.abort_run(reason)

    def exit_for_peer_error(self, reason: str) -> int:
        """End after an error of the main thread that is a consequence of something else."""
        self._main_thread_exiting = True
        if not self.shutdown.wait(EXIT_CAUSE_S):
            self.abort_run(reason)
            self.shutdown.wait(PUBLISH_S)
        return self.exit_code(reason)

    def exit_alone(self, reason: str, code: int = LEFT) -> int:
        """End alone: the others continue."""
        self._main_thread_exiting = True
        self.shutdown.request(reason, code)
        return self.exit_code()

    def exit_unless_store_lost(self, reason: str) -> int:
        """End alone, unless the store is lost for all."""
        self._main_thread_exiting = True
        answers, until = self.heartbeat.answers, time.monotonic() + self.heartbeat_timeout_s
        # try another connection to the store
        while self.heartbeat.answers < answers + 2 and time.monotonic() < until:
            if self.shutdown.wait(TICK_S):
                return self.exit_code()
        return self.exit_alone(reason)

    def exit_for_own_error(self, reason: str, code: int, *, for_all: bool = False) -> int:
        """End because of an error of this process, and notify the others.

        In an elastic run the others continue, unless the error ends the run for all. A restart
        may help then, except for input that would be refused again.
        """
        if self.on_rank_lost is not None and not for_all:
            return self.exit_alone(reason, REFUSED if code == REFUSED else LEFT)
        self._main_thread_exiting = True
        self.shutdown.request(reason, code)
        self.shutdown.print_reason()
        if self._heartbeat is not None and self._heartbeat.is_alive():
            self._heartbeat.abort_run(reason)
            self._heartbeat.join(PUBLISH_S)
        else:
            with suppress(TimeoutError):
                call_with_timeout(PUBLISH_S, lambda: _publish_reason(reason))
        return self.exit_code(reason)

    def exit_code(self, reason: str = "") -> int:
        """Last call: print the reason if there is one, and return the exit code."""
        self._main_thread_exiting = True
        self.shutdown.request(reason)
        code = self.shutdown.print_reason()
        if self._serves:
            time.sleep(LINGER_S)
        return code

    def stop_watching(self) -> None:
        """All ranks have finished: silence is no longer a failure."""
        self._stopped = True
        with self._lock:
            self._heartbeats.clear()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def run(self) -> None:
        """Watch until `stop_watching`, or until an error or the end of the run ends the process."""
        try:
            self._watch()
        except Exception as error:
            self.shutdown.request(
                f"device {self.device!r}: its failure detector failed "
                f"({type(error).__name__}: {error})"
            )
            # the main thread may be blocked
            threading.Timer(EXIT_S, self.shutdown.exit_process).start()
            raise

    def _watch(self) -> None:
        polled_s = pinged_s = running_s = time.monotonic()
        answers, silent_s = 0, 0.0
        heartbeat = self._heartbeat
        assert heartbeat is not None
        while not self._stopped:
            self._poll()
            now = time.monotonic()
            passed_s, polled_s = min(now - polled_s, 2 * TICK_S), now
            if self.shutdown.reason is not None:
                if now - running_s > (EXIT_S if self._main_thread_exiting else GRACE_S):
                    self.shutdown.exit_process()
                continue
            running_s = now
            silent_s = 0.0 if heartbeat.answers != answers else silent_s + passed_s
            answers = heartbeat.answers
            if silent_s > self.heartbeat_timeout_s:
                self._end_for_lost_store(f"has not answered for {self.heartbeat_timeout_s:g} s")
            if now - pinged_s >= PING_S:
                pinged_s = now
                self._ping()
            self._measure_silence(passed_s)
            self._handle_signal(now)
            if self._proposed_s is not None and now - self._proposed_s > PUBLISH_S:
                if self._server_ended:
                    # the same reason as on ranks that had no connection to that device
                    self._end_for_lost_store()
                else:
                    self._end_run(self._proposal[0])

    def _poll(self) -> None:
        """Wait briefly for signals and heartbeats on connections."""
        # poll connections in turn: heartbeats of many would wake this thread too often
        with suppress(TimeoutError):
            self._record_signals(self._signal_reader.recv(64))
        with self._lock:
            connections = list(self._heartbeats)
        for connection in connections:
            self._receive_heartbeat(connection)

    def _receive_heartbeat(self, connection: socket.socket) -> None:
        with self._lock:
            if (watched := self._heartbeats.get(connection)) is None:
                return
            try:
                received = connection.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            watched.silent_s = 0.0
            if not received or GOODBYE in received:
                del self._heartbeats[connection]
        if not received:
            self._server_ended |= self.server == f"device {watched.name!r}"
            self._report_lost(
                [watched.name], f"device {watched.name!r} is gone: its process has ended"
            )

    def _ping(self) -> None:
        with self._lock:
            for connection in self._heartbeats:
                _send(connection, PING)

    def _measure_silence(self, passed_s: float) -> None:
        with self._lock:
            silence_of: dict[str, float] = {}
            for watched in self._heartbeats.values():
                watched.silent_s += passed_s
                # of several connections to a device, that with the latest heartbeat counts
                shortest_s = silence_of.get(watched.name, math.inf)
                silence_of[watched.name] = min(watched.silent_s, shortest_s)
        longest_silence_s = max(silence_of.values(), default=0.0)
        # one device, a whole site that fell silent at the same time, or this device is cut off
        tolerance_s = min(SAME_CAUSE_S, self.heartbeat_timeout_s / 2)
        silent_devices = [
            name
            for name, silent_s in silence_of.items()
            if silent_s > longest_silence_s - tolerance_s
        ]
        all_silent = 1 < len(silent_devices) == len(silence_of)
        self._check_silence(silent_devices, longest_silence_s, f"to {self.device!r} ", all_silent)

    def _check_silence(
        self, names: Sequence[str], silent_s: float, toward: str = "", all_silent: bool = False
    ) -> None:
        if silent_s > self.heartbeat_timeout_s:
            self._report_lost(
                names,
                f"device {listed(names)} gave no sign of life {toward}for "
                f"{self.heartbeat_timeout_s:g} s: it is stopped or disconnected; --patience raises "
                "this limit",
                all_silent,
            )

    def _report_lost(self, names: Sequence[str], reason: str, all_silent: bool = False) -> None:
        if self.on_rank_lost is None:
            self.abort_run(reason)
        else:
            self.on_rank_lost(names, reason, all_silent)

    def _record_signals(self, numbers: bytes) -> None:
        handled = [n for n in numbers if n in SIGNALS]
        if handled and self._signal is None:
            self._signal = handled[0], time.monotonic()

    def _handle_signal(self, now: float) -> None:
        """End by a signal: a launcher ends all ranks when one has failed, which is the reason."""
        if self._signal is None:
            return
        number, received_s = self._signal
        if number == signal.SIGINT or now - received_s > EXIT_CAUSE_S:
            name = signal.Signals(number).name
            reason, code = f"device {self.device!r} was told to end ({name})", 128 + number
            if self.on_rank_lost is None:
                self.abort_run(reason, code)
            else:
                self.shutdown.request("" if number == signal.SIGINT else reason, code)

    def _end_run(self, reason: str) -> None:
        """End for a reason; not printed if this process was interrupted."""
        own_reason, code = self._proposal
        is_own = reason == own_reason
        interrupted = is_own and code == 128 + signal.SIGINT
        self.shutdown.request("" if interrupted else reason, code if is_own else FAILED)

    def _end_for_lost_store(self, problem: str = "is gone") -> None:
        self.shutdown.request(f"{self._address}, which {self.server} serves, {problem}")


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.send(data, socket.MSG_DONTWAIT)


def _publish_reason(reason: str) -> None:
    """Write a reason into the store, if possible."""
    with suppress(DistError, StoreMissingError, Refusal):
        store = StoreAddress.from_environment().connect(PUBLISH_S)
        if not store.check([STARTED_KEY]):  # else the others continue without this process
            publish(store, reason)
