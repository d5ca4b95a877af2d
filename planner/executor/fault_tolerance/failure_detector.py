"""Failure detection, and orderly shutdown: a thread that never blocks.

There are two kinds of heartbeats. Counters in the store (`heartbeat`) show that a process is alive.
Heartbeat connections, which carry one byte a second, show that two ranks reach each other; one that
closes without a shutdown message shows at once that a process has ended. Time is counted in this
thread's own short polls, so a busy machine, or a process that was stopped, is not taken for
silence.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch.distributed import DistError

from planner.executor.fault_tolerance.heartbeat import Heartbeat, publish
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, Shutdown
from planner.executor.rendezvous.store import BEGUN, StoreAddress, StoreMissingError

HEARTBEAT_TIMEOUT_S = 10.0
LATENCIES = 25.0
"""Smallest default timeout, as a multiple of the plan's longest latency."""
TICK_S = 0.25
PING_S = 1.0
TOGETHER_S = 2.5
"""Devices whose silence began within so long were lost together."""
PING, FAREWELL = b"\1", b"\0"
RECONNECT_S = 1.0
"""Timeout for reconnecting to the store."""
PUBLISH_S = 3.0
"""Timeout for writing a reason into the store; then it is printed here alone."""
CAUSE_S = 2.0
"""A closed connection or a signal has a cause elsewhere, which may take this long to arrive."""
GRACE_S = 2.0
"""Time for the main thread to begin to leave; then the process is ended from here."""
LEAVE_S = 8.0
"""Time for the main thread to leave, including notifications."""
LINGER_S = GRACE_S
"""Time that the process serving the store stays, so that others can read the reason."""
MAX_NAMES = 8
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
    on_loss
        Called with names of lost devices, the reason, and whether no other device is heard either,
        in an elastic run; None if a loss ends the run.
    """

    def __init__(
        self, name: str, shutdown_: Shutdown, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.on_loss: Callable[[Sequence[str], str, bool], None] | None = None
        self.device, self.shutdown_, self.heartbeat_timeout_s = name, shutdown_, heartbeat_timeout_s
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
        self._over = False
        self._leaving = False
        self._wakes, self._wake = socket.socketpair()
        for end in (self._wakes, self._wake):
            end.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._wakes, selectors.EVENT_READ)

    def start_watching(self, address: StoreAddress, *, serves: bool) -> None:
        """Start to watch the store and signals; call in the main thread."""
        self._address, self._serves = address, serves
        store = address.connect(self.heartbeat_timeout_s)
        self._heartbeat = Heartbeat(
            store, self._end, self._store_gone, lambda: address.connect(RECONNECT_S)
        )
        # the system writes it even while the main thread is blocked
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        self._heartbeat.start()
        self.start()

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this process, once started."""
        assert self._heartbeat is not None
        return self._heartbeat

    def watch_rank(self, rank: int, other: int, name: str) -> None:
        """Send heartbeats as this rank, and watch another one."""
        self.heartbeat.watch_rank(rank, other, lambda s: self._judge([name], s))

    @contextmanager
    def watching(self, heartbeats: Mapping[socket.socket, str]) -> Iterator[None]:
        """Watch connections too, until the block ends."""
        with self._lock:
            self._heartbeats |= {c: _HeartbeatConnection(name) for c, name in heartbeats.items()}
        try:
            yield
        finally:
            with self._lock:
                for connection in heartbeats:
                    if self._heartbeats.pop(connection, None) is not None:
                        _send(connection, FAREWELL)

    def watch_only(self, heartbeats: Collection[socket.socket]) -> None:
        """Watch only these connections."""
        with self._lock:
            for connection in self._heartbeats.keys() - set(heartbeats):
                del self._heartbeats[connection]

    def abort_run(self, line: str, code: int = FAILED) -> None:
        """End the run: with a reason in the store for all ranks, or else here alone."""
        with self._lock:
            if self._proposed_s is not None:
                return
            self._proposed_s, self._proposal = time.monotonic(), (line, code)
        if self._heartbeat is not None and self._heartbeat.is_alive():
            self._heartbeat.abort_run(line)

    def exit_on_error(self, line: str) -> int:
        """End after an error of the main thread that is a consequence of something else."""
        self._leaving = True
        if not self.shutdown_.wait(CAUSE_S):
            self.abort_run(line)
            self.shutdown_.wait(PUBLISH_S)
        return self.exit_code(line)

    def exit_alone(self, line: str) -> int:
        """End alone: the others continue."""
        self._leaving = True
        self.shutdown_.because(line, LEFT)
        return self.exit_code()

    def exit_unless_store_lost(self, line: str) -> int:
        """End alone, unless the store is lost for all."""
        self._leaving = True
        rounds, until = self.heartbeat.rounds, time.monotonic() + self.heartbeat_timeout_s
        # try another connection to the store
        while self.heartbeat.rounds < rounds + 2 and time.monotonic() < until:
            if self.shutdown_.wait(TICK_S):
                return self.exit_code()
        return self.exit_alone(line)

    def exit_on_refusal(self, line: str, code: int) -> int:
        """End because of an error of this process, and notify the others."""
        if self.on_loss is not None:
            return self.exit_alone(line)
        self._leaving = True
        self.shutdown_.because(line, code)
        self.shutdown_.leave()
        if self._heartbeat is not None and self._heartbeat.is_alive():
            self._heartbeat.abort_run(line)
            self._heartbeat.join(PUBLISH_S)
        else:
            telling = threading.Thread(target=_tell, args=(line,), daemon=True)
            telling.start()
            telling.join(PUBLISH_S)
        return self.exit_code(line)

    def exit_code(self, line: str = "") -> int:
        """Last call: print the reason if there is one, and return the exit code."""
        self._leaving = True
        self.shutdown_.because(line)
        code = self.shutdown_.leave()
        if self._serves:
            time.sleep(LINGER_S)
        return code

    def stop_watching(self) -> None:
        """All ranks have finished: silence is no longer a failure."""
        self._over = True
        with self._lock:
            self._heartbeats.clear()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def run(self) -> None:
        """Until `stop_watching`, or until the process must end."""
        looked = pinged = ended = time.monotonic()
        rounds, silent_s = 0, 0.0
        heartbeat = self._heartbeat
        assert heartbeat is not None
        while not self._over:
            self._listen()
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * TICK_S), now
            if self.shutdown_.line is not None:
                if now - ended > (LEAVE_S if self._leaving else GRACE_S):
                    self.shutdown_.force()
                continue
            ended = now
            silent_s = 0.0 if heartbeat.rounds != rounds else silent_s + passed
            rounds = heartbeat.rounds
            if silent_s > self.heartbeat_timeout_s:
                self._store_gone(f"has not answered for {self.heartbeat_timeout_s:g} s")
            if now - pinged >= PING_S:
                pinged = now
                self._ping()
            self._count(passed)
            self._obey(now)
            if self._proposed_s is not None and now - self._proposed_s > PUBLISH_S:
                if self._server_ended:  # what those say who had no connection to it
                    self._store_gone()
                else:
                    self._end(self._proposal[0])

    def _listen(self) -> None:
        """Wait briefly for signals and heartbeats on connections."""
        # poll connections in turn: heartbeats of many would wake this thread too often
        if self._ready.select(TICK_S):
            self._take_signals(self._wakes.recv(64))
        with self._lock:
            connections = list(self._heartbeats)
        for connection in connections:
            self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
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
            if not received or FAREWELL in received:
                del self._heartbeats[connection]
        if not received:
            self._server_ended |= self.server == f"device {watched.name!r}"
            self._miss([watched.name], f"device {watched.name!r} is gone: its process has ended")

    def _ping(self) -> None:
        with self._lock:
            for connection in self._heartbeats:
                _send(connection, PING)

    def _count(self, passed_s: float) -> None:
        with self._lock:
            for line in self._heartbeats.values():
                line.silent_s += passed_s
            silent: dict[str, float] = {}
            for line in self._heartbeats.values():  # of two to one device, the one that was heard
                silent[line.name] = min(line.silent_s, silent.get(line.name, math.inf))
        longest_s = max(silent.values(), default=0.0)
        # one device, a whole site that fell silent at the same time, or this device is cut off
        apart_s = min(TOGETHER_S, self.heartbeat_timeout_s / 2)
        together = [n for n, silent_s in silent.items() if silent_s > longest_s - apart_s]
        alone = 1 < len(together) == len(silent)
        self._judge(together, longest_s, f"to {self.device!r} ", alone)

    def _judge(
        self, names: Sequence[str], silent_s: float, whom: str = "", alone: bool = False
    ) -> None:
        if silent_s > self.heartbeat_timeout_s:
            listed = ", ".join(map(repr, names[:MAX_NAMES]))
            listed += ", ..." if len(names) > MAX_NAMES else ""
            self._miss(
                names,
                f"device {listed} gave no sign of life {whom}for {self.heartbeat_timeout_s:g} s: "
                "stopped, or cut off; --patience allows for longer",
                alone,
            )

    def _miss(self, names: Sequence[str], line: str, alone: bool = False) -> None:
        if self.on_loss is None:
            self.abort_run(line)
        else:
            self.on_loss(names, line, alone)

    def _take_signals(self, numbers: bytes) -> None:
        known = [n for n in numbers if n in SIGNALS]
        if known and self._signal is None:
            self._signal = known[0], time.monotonic()

    def _obey(self, now: float) -> None:
        """End by a signal: a launcher ends all ranks when one has failed, which is the reason."""
        if self._signal is None:
            return
        number, came_s = self._signal
        if number == signal.SIGINT or now - came_s > CAUSE_S:
            name = signal.Signals(number).name
            line, code = f"device {self.device!r} was told to end ({name})", 128 + number
            if self.on_loss is None:
                self.abort_run(line, code)
            else:
                self.shutdown_.because("" if number == signal.SIGINT else line, code)

    def _end(self, reason: str) -> None:
        """End for a reason; not printed if this process was interrupted."""
        line, code = self._proposal
        own = reason == line
        silent = own and code == 128 + signal.SIGINT
        self.shutdown_.because("" if silent else reason, code if own else FAILED)

    def _store_gone(self, how: str = "is gone") -> None:
        self.shutdown_.because(f"{self._address}, which {self.server} serves, {how}")


def _send(connection: socket.socket, what: bytes) -> None:
    with suppress(OSError):
        connection.send(what, socket.MSG_DONTWAIT)


def _tell(line: str) -> None:
    """Write a reason into the store, if possible."""
    with suppress(DistError, StoreMissingError, ValueError):
        store = StoreAddress.of_environment().connect(PUBLISH_S)
        if not store.check([BEGUN]):  # else the others continue without this process
            publish(store, line)
