"""Starts the ranks of a plan on this machine, reads their output and ends them.

Unless the store is elsewhere, this process serves it, so that after the loss of any rank the others
can read the reason.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from torch.distributed import DistError

from planner.executor.elastic.store_monitor import CONNECT_S, MONITOR_POLL_S, StoreMonitor
from planner.executor.fault_tolerance.heartbeat import publish
from planner.executor.fault_tolerance.shutdown import FAILED, HINT, LEFT, PREFIX, REFUSED
from planner.executor.launch.process import LAUNCHER_PID, is_stopped
from planner.executor.transport.store import (
    STORE_BY_LAUNCHER,
    StoreAddress,
    StoreMissingError,
    serve_store,
)

HOST = "127.0.0.1"
TICK_S = 0.2
SIGNALLED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of ranks that ended by a signal to do so, and are not restarted."""
RESTART_DELAY_S = 1.0
"""Delay from the end of a rank to its first restart."""
PUBLISH_S = 1.0
"""Longest wait at the end until the signal that killed a rank is in the store."""
EXIT_TIMEOUT_S = 5.0
"""After a rank has failed, the others have this long to end by themselves; then they are killed."""


@dataclass
class _Rank:
    """Process of a rank.

    Attributes
    ----------
    local
        Number among the ranks of this machine.
    partial_lines
        Incomplete last line of output, by descriptor.
    ended_s
        When its end was noticed, on the monotonic clock.
    """

    name: str
    local: int
    process: subprocess.Popen[bytes]
    partial_lines: dict[int, bytes] = field(default_factory=dict)
    restarts: int = 0
    ended_s: float | None = None

    @property
    def output(self) -> tuple[IO[bytes], IO[bytes]]:
        """Standard output and standard error."""
        out, error = self.process.stdout, self.process.stderr
        assert out is not None and error is not None
        return out, error


def run_local(
    command: Sequence[str],
    names: Sequence[str],
    environment: dict[str, str],
    write_line: Callable[[str], None],
    write_error: Callable[[str], None],
    *,
    restarts: int | None = None,
    monitor: StoreMonitor | None = None,
    address: StoreAddress | None = None,
    program: str = "planner run",
) -> tuple[int, str | None]:
    """Run one process per device until all have ended.

    Parameters
    ----------
    write_line, write_error
        Called with each line of standard output, and of standard error.
    restarts
        Restarts of each device in an elastic run; None if a lost rank ends the run.
    monitor
        Monitor of the store; by default one is created for an elastic run.
    address
        Address of the store; None to serve it.
    program
        Name in messages.

    Returns
    -------
    tuple[int, str | None]
        Exit code, and the reason of a failure.
    """
    if address is None:
        store = serve_store(HOST, 0)
        address = StoreAddress(HOST, store.port, served_by_launcher=True)
        environment = environment | {"WORLD_SIZE": str(len(names))}
    environment = environment | {
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
        STORE_BY_LAUNCHER: "True",
        LAUNCHER_PID: str(os.getpid()),
    }
    own_monitor = None
    if restarts is None:
        monitor = None
    elif monitor is None:
        own_monitor = monitor = StoreMonitor(address, len(names))
    run = _LocalRun(
        command, environment, address, write_line, write_error, program, monitor, restarts or 0
    )
    try:
        for local, name in enumerate(names):
            run.ranks.append(_Rank(name, local, run.start_process(local)))
        return run.follow()
    except BaseException as error:
        # the other nodes print which signal it was
        run.interrupt(signal.SIGTERM if isinstance(error, SystemExit) else signal.SIGINT)
        raise
    finally:
        run.kill()
        if own_monitor is not None:
            own_monitor.stop()


@dataclass
class _LocalRun:
    """Running ranks.

    Attributes
    ----------
    monitor
        Monitor of the store of an elastic run; None if a lost rank ends the run.
    max_restarts
        Restarts of each device.
    """

    command: Sequence[str]
    environment: dict[str, str]
    address: StoreAddress
    write_line: Callable[[str], None]
    write_error: Callable[[str], None]
    program: str
    monitor: StoreMonitor | None
    max_restarts: int
    ranks: list[_Rank] = field(default_factory=list)
    _reason: str | None = None
    _killed_by: str | None = None
    _publisher: threading.Thread | None = None

    @property
    def _spans_nodes(self) -> bool:
        return self.monitor is not None and len(self.ranks) < self.monitor.ranks

    def start_process(self, local: int) -> subprocess.Popen[bytes]:
        """Start the process of a rank."""
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment | {"LOCAL_RANK": str(local)},
        )

    def kill(self) -> None:
        """Kill all ranks that still run, and release their resources."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            for stream in rank.output:
                stream.close()

    def follow(self) -> tuple[int, str | None]:
        """Follow all ranks to their end; returns exit code and reason."""
        failed_s: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                for stream in rank.output:
                    selector.register(stream, selectors.EVENT_READ, rank)
            while any(r.ended_s is None or self._may_restart(r) for r in self.ranks):
                if not selector.get_map():
                    time.sleep(TICK_S)
                for key, _ in selector.select(TICK_S) if selector.get_map() else ():
                    if not self._read(key.data, key.fd):
                        selector.unregister(key.fileobj)
                for rank in self.ranks:
                    if rank.ended_s is None and rank.process.poll() is not None:
                        rank.ended_s = time.monotonic()
                        self._close_output(selector, rank)
                for rank in self.ranks:
                    if (
                        self._may_restart(rank)
                        and self._restart_delay_passed(rank)
                        and self._polled_since_exit(rank)
                    ):
                        self._restart(selector, rank)
                self._end_stopped()
                failed = [rank for rank in self.ranks if self._ends_run(rank)]
                for rank in failed:
                    self._publish_signal(rank)
                if failed and failed_s is None:
                    failed_s = time.monotonic()
                if failed_s is not None and time.monotonic() - failed_s > EXIT_TIMEOUT_S:
                    for rank in self.ranks:
                        rank.process.kill()
        return self._exit_status([rank.process.wait() for rank in self.ranks])

    def _exit_status(self, codes: Sequence[int]) -> tuple[int, str | None]:
        """Exit code and reason after all have ended."""
        # in an elastic run, the run is done when any rank has finished
        if not any(codes) or (self.monitor is not None and 0 in codes):
            return 0, None
        for rank in self.ranks:
            rank.ended_s = rank.ended_s or time.monotonic()
        while self.monitor is not None and not all(map(self._polled_since_exit, self.ranks)):
            time.sleep(TICK_S)
        if self._spans_nodes and self._run_continues() and REFUSED not in codes:
            return LEFT, None
        for rank in self.ranks:
            self._publish_signal(rank)
        if self._publisher is not None:
            self._publisher.join(PUBLISH_S)
        if self._reason is None:
            self._reason = self._killed_by or "a rank exited without an error message"
            self.write_error(PREFIX + self._reason)
        return REFUSED if REFUSED in codes else FAILED, self._reason

    def _run_continues(self) -> bool:
        """Whether the run continues without lost ranks, by the store's last answer."""
        monitor = self.monitor
        return (
            monitor is not None
            and monitor.started
            and not monitor.aborted
            and self._store_answers()
        )

    def _store_answers(self) -> bool:
        """Whether the store has answered recently."""
        assert self.monitor is not None
        return time.monotonic() - self.monitor.answered_s < CONNECT_S

    def _polled_since_exit(self, rank: _Rank) -> bool:
        """Whether the store was polled since a rank ended, or answers no more."""
        assert self.monitor is not None and rank.ended_s is not None
        timed_out = time.monotonic() - rank.ended_s > CONNECT_S + MONITOR_POLL_S
        return timed_out or self.monitor.polled_since(rank.ended_s)

    def _end_stopped(self) -> None:
        """End ranks that are stopped when all others are done; they were lost, and never end."""
        if self.monitor is None or not self.monitor.finished:
            return
        running = [rank for rank in self.ranks if rank.ended_s is None]
        if all(is_stopped(rank.process.pid) for rank in running):
            for rank in running:
                self.write_error(f"{self.program}: ending device {rank.name!r}, which is stopped")
                rank.process.kill()

    def _restart_delay_passed(self, rank: _Rank) -> bool:
        """Whether enough time has passed since a rank ended; longer after each restart."""
        assert rank.ended_s is not None
        return time.monotonic() - rank.ended_s > RESTART_DELAY_S * (1 << rank.restarts)

    def _ends_run(self, rank: _Rank) -> bool:
        """Whether the end of a rank must end the others soon."""
        if rank.ended_s is None or not rank.process.returncode:
            return False
        if self.monitor is None:
            return True
        # while the run continues, a rank that is lost or refused affects only itself
        return self._polled_since_exit(rank) and not self._run_continues()

    def _may_restart(self, rank: _Rank) -> bool:
        """Whether a rank that has ended may be restarted."""
        if self.monitor is None or rank.ended_s is None or rank.restarts >= self.max_restarts:
            return False
        if rank.process.returncode in (0, REFUSED, *SIGNALLED_CODES):
            return False
        if not self._spans_nodes and all(other.ended_s is not None for other in self.ranks):
            return False  # no rank is left to continue the run
        # do not wait once the run is known to have ended
        return not self._polled_since_exit(rank) or (
            self._run_continues() and not self.monitor.finished
        )

    def _restart(self, selector: selectors.BaseSelector, rank: _Rank) -> None:
        """Restart a lost rank."""
        code = rank.process.returncode
        cause = f"was ended by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        self.write_error(f"{self.program}: restarting device {rank.name!r}, which {cause}")
        rank.restarts += 1
        rank.partial_lines.clear()
        rank.ended_s = None
        rank.process = self.start_process(rank.local)
        for stream in rank.output:
            selector.register(stream, selectors.EVENT_READ, rank)

    def _close_output(self, selector: selectors.BaseSelector, rank: _Rank) -> None:
        """Read what a rank that has ended left in its pipes, and close them.

        Does not wait for the end of a pipe, which a child of the rank may hold open.
        """
        for stream in rank.output:
            if stream in selector.get_map():
                descriptor = stream.fileno()
                os.set_blocking(descriptor, False)
                with suppress(BlockingIOError):
                    self._read(rank, descriptor)
                if incomplete := rank.partial_lines.pop(descriptor, b""):
                    self._write(rank, descriptor, incomplete)
                selector.unregister(stream)
            stream.close()

    def interrupt(self, number: signal.Signals) -> None:
        """Let all ranks clean up and end."""
        for rank in self.ranks:
            rank.process.send_signal(number)
        until = time.monotonic() + EXIT_TIMEOUT_S
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def _read(self, rank: _Rank, descriptor: int) -> bool:
        """Read available output; returns whether more may follow."""
        data = os.read(descriptor, 1 << 16)
        *lines, incomplete = (rank.partial_lines.get(descriptor, b"") + data).split(b"\n")
        if not data and incomplete:
            lines.append(incomplete)
            incomplete = b""
        rank.partial_lines[descriptor] = incomplete
        for line in lines:
            self._write(rank, descriptor, line)
        return bool(data)

    def _write(self, rank: _Rank, descriptor: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if descriptor == rank.output[0].fileno():
            self.write_line(text)
            return
        if not text.startswith(PREFIX):
            self.write_error(text)
            return
        reason = text.removeprefix(PREFIX)
        # ranks may know of different checkpoints to continue from
        known = self._reason is not None and _without_hint(reason) == _without_hint(self._reason)
        if self._reason is None or (self.monitor is not None and not known):
            self._reason = reason
            self.write_error(text)

    def _publish_signal(self, rank: _Rank) -> None:
        """Publish the signal that ended a rank, which only its parent process knows."""
        code = rank.process.returncode
        if code is None or code >= 0 or self._killed_by is not None or self._reason is not None:
            return
        name = _signal(-code)
        self._killed_by = f"device {rank.name!r} was ended by {name}" + (
            "; see whether memory ran out" if name == "SIGKILL" else ""
        )
        # in a thread: a store that answers no more must not hold up the end
        self._publisher = threading.Thread(
            target=self._publish, args=(self._killed_by,), daemon=True
        )
        self._publisher.start()

    def _publish(self, line: str) -> None:
        with suppress(DistError, StoreMissingError):
            publish(self.address.connect(CONNECT_S), line)


def _without_hint(reason: str) -> str:
    return reason.partition(HINT)[0]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def local_environment() -> dict[str, str]:
    """Environment of ranks that are all on this machine."""
    environment = dict(os.environ)
    if sys.platform == "linux":  # otherwise Gloo looks up the host name, which may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
