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
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from planner.executor.elastic.store_monitor import CONNECT_S, POLL_S, StoreMonitor
from planner.executor.fault_tolerance.heartbeat import publish
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, PREFIX, REFUSED
from planner.executor.launch.process import LAUNCHER_PID
from planner.executor.rendezvous.store import (
    STORE_BY_LAUNCHER,
    StoreAddress,
    call_with_timeout,
    serve_store,
)

HOST = "127.0.0.1"
TICK_S = 0.2
SIGNALLED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of ranks that ended by a signal to do so, and are not restarted."""
RESTART_DELAY_S = 1.0
"""Delay from the end of a rank to its first restart."""
EXIT_TIMEOUT_S = 5.0
"""After a rank has failed, the others have this long to end by themselves; then they are killed."""


@dataclass
class _Rank:
    name: str
    process: subprocess.Popen[bytes]
    partial_lines: dict[int, bytes] = field(default_factory=dict)
    """By descriptor, an incomplete line."""
    restarts: int = 0
    ended_s: float | None = None
    """When its end was noticed, on the monotonic clock."""


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
    """Run one process per device to their end."""
    store = serve_store(HOST, 0) if address is None else None
    store_address = StoreAddress(HOST, store.port, True) if store is not None else address
    assert store_address is not None
    store_environment = {
        "MASTER_ADDR": store_address.host,
        "MASTER_PORT": str(store_address.port),
        STORE_BY_LAUNCHER: "True",
    }
    store_environment[LAUNCHER_PID] = str(os.getpid())
    if store is not None:
        store_environment["WORLD_SIZE"] = str(len(names))

    def start_process(local: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | store_environment | {"LOCAL_RANK": str(local)},
        )

    ranks: list[_Rank] = []
    own_monitor = (
        StoreMonitor(store_address, len(names))
        if restarts is not None and monitor is None
        else None
    )
    monitor = monitor or own_monitor
    has_other_nodes = monitor is not None and len(names) < monitor.ranks
    run = _Run(
        ranks,
        store_address,
        write_line,
        write_error,
        start_process,
        restarts,
        program,
        monitor,
        has_other_nodes=has_other_nodes,
    )
    try:
        for local, name in enumerate(names):
            ranks.append(_Rank(name, start_process(local)))
        return run.follow()
    except BaseException:
        run.interrupt()
        raise
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
            for stream in _output_streams(rank):
                stream.close()
        if own_monitor is not None:
            own_monitor.stop()


def _output_streams(rank: _Rank) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard output and standard error."""
    out, error = rank.process.stdout, rank.process.stderr
    assert out is not None and error is not None
    return out, error


class _Run:
    """Running ranks."""

    def __init__(
        self,
        ranks: Sequence[_Rank],
        address: StoreAddress,
        write_line: Callable[[str], None],
        write_error: Callable[[str], None],
        start_process: Callable[[int], subprocess.Popen[bytes]],
        restarts: int | None,
        program: str,
        monitor: StoreMonitor | None,
        *,
        has_other_nodes: bool,
    ) -> None:
        self._ranks, self._address, self._write_line, self._write_error = (
            ranks,
            address,
            write_line,
            write_error,
        )
        self._start_process, self._program = start_process, program
        self._restarts = -1 if restarts is None else restarts
        # only if the others continue without a rank
        self._monitor = monitor if restarts is not None else None
        self._has_other_nodes = has_other_nodes
        self._reason: str | None = None
        self._killed_by: str | None = None

    def follow(self) -> tuple[int, str | None]:
        """Follow all ranks to their end; returns exit code and reason."""
        failed_s: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                for stream in _output_streams(rank):
                    selector.register(stream, selectors.EVENT_READ, rank)
            while selector.get_map() or any(self._may_restart(rank) for rank in self._ranks):
                for key, _ in selector.select(TICK_S) if selector.get_map() else ():
                    if not self._read(key.data, key.fd):
                        selector.unregister(key.fileobj)
                if not selector.get_map():
                    time.sleep(TICK_S)
                for rank in self._ranks:
                    if rank.ended_s is None and rank.process.poll() is not None:
                        rank.ended_s = time.monotonic()
                for rank in self._ranks:
                    if (
                        self._may_restart(rank)
                        and self._restart_delay_passed(rank)
                        and self._polled_since_exit(rank)
                    ):
                        self._restart(selector, rank)
                failed = [rank for rank in self._ranks if self._ends_run(rank)]
                for rank in failed:
                    self._publish_signal(rank)
                if failed and failed_s is None:
                    failed_s = time.monotonic()
                if failed_s is not None and time.monotonic() - failed_s > EXIT_TIMEOUT_S:
                    for rank in self._ranks:
                        rank.process.kill()
        return self._exit_status([rank.process.wait() for rank in self._ranks])

    def _exit_status(self, codes: Sequence[int]) -> tuple[int, str | None]:
        """Exit code and reason after all have ended."""
        # in an elastic run, the run is done when any rank has finished
        if not any(codes) or (self._monitor is not None and 0 in codes):
            return 0, None
        for rank in self._ranks:
            rank.ended_s = rank.ended_s or time.monotonic()
        while self._monitor is not None and not all(map(self._polled_since_exit, self._ranks)):
            time.sleep(TICK_S)
        if self._has_other_nodes and self._run_continues() and REFUSED not in codes:
            return LEFT, None
        for rank in self._ranks:
            self._publish_signal(rank)
        if self._reason is None:
            self._reason = self._killed_by or "a rank has failed and said nothing"
            self._write_error(PREFIX + self._reason)
        return REFUSED if REFUSED in codes else FAILED, self._reason

    def _run_continues(self) -> bool:
        """Whether the run continues without lost ranks, by the store's last answer."""
        monitor = self._monitor
        return (
            monitor is not None
            and monitor.started
            and not monitor.aborted
            and self._store_answers()
        )

    def _store_answers(self) -> bool:
        """Whether the store has answered recently."""
        assert self._monitor is not None
        return time.monotonic() - self._monitor.answered_s < CONNECT_S

    def _polled_since_exit(self, rank: _Rank) -> bool:
        """Whether the store was polled since a rank ended, or answers no more."""
        assert self._monitor is not None and rank.ended_s is not None
        timed_out = time.monotonic() - rank.ended_s > CONNECT_S + POLL_S
        return timed_out or self._monitor.polled_since(rank.ended_s)

    def _restart_delay_passed(self, rank: _Rank) -> bool:
        """Whether enough time has passed since a rank ended; longer after each restart."""
        assert rank.ended_s is not None
        return time.monotonic() - rank.ended_s > RESTART_DELAY_S * (1 << rank.restarts)

    def _ends_run(self, rank: _Rank) -> bool:
        """Whether the end of a rank must end the others soon."""
        if rank.ended_s is None or not (code := rank.process.returncode):
            return False
        if self._monitor is None:
            return True
        if not self._polled_since_exit(rank):
            return False
        if not self._run_continues():
            return True
        # a restarted rank that is refused affects only itself
        return code == REFUSED and not rank.restarts

    def _may_restart(self, rank: _Rank) -> bool:
        """Whether a rank that has ended may be restarted."""
        if self._monitor is None or rank.ended_s is None or rank.restarts >= self._restarts:
            return False
        if rank.process.returncode in (0, REFUSED, *SIGNALLED_CODES):
            return False
        if not self._has_other_nodes and all(other.ended_s is not None for other in self._ranks):
            return False  # no rank is left to continue the run
        # do not wait once the run is known to have ended
        return not self._polled_since_exit(rank) or (
            self._run_continues() and not self._monitor.finished
        )

    def _restart(self, selector: selectors.BaseSelector, rank: _Rank) -> None:
        """Restart a lost rank, after all of its output has been read."""
        if any(key.data is rank for key in selector.get_map().values()):
            return
        code = rank.process.returncode
        for stream in _output_streams(rank):
            stream.close()
        cause = f"was ended by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        self._write_error(f"{self._program}: restarting device {rank.name!r}, which {cause}")
        rank.restarts += 1
        rank.partial_lines.clear()
        rank.ended_s = None
        rank.process = self._start_process(self._ranks.index(rank))
        for stream in _output_streams(rank):
            selector.register(stream, selectors.EVENT_READ, rank)

    def interrupt(self) -> None:
        """Let all ranks clean up and end."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGINT)
        until = time.monotonic() + EXIT_TIMEOUT_S
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def _read(self, rank: _Rank, descriptor: int) -> bool:
        """Read available output; returns whether more may follow."""
        data = os.read(descriptor, 1 << 16)
        *lines, incomplete = (rank.partial_lines.get(descriptor, b"") + data).split(b"\n")
        if not data and incomplete:
            lines.append(incomplete)
        rank.partial_lines[descriptor] = incomplete
        assert rank.process.stdout is not None
        is_stdout = descriptor == rank.process.stdout.fileno()
        for line in lines:
            text = line.decode(errors="replace")
            if is_stdout:
                self._write_line(text)
            elif not text.startswith(PREFIX):
                self._write_error(text)
            elif self._reason is None or (
                self._monitor is not None and text != PREFIX + self._reason
            ):
                self._reason = text.removeprefix(PREFIX)
                self._write_error(text)
        return bool(data)

    def _publish_signal(self, rank: _Rank) -> None:
        """Publish the signal that ended a rank, which only its parent process knows."""
        code = rank.process.returncode
        if code is None or code >= 0 or self._killed_by is not None or self._reason is not None:
            return
        name = _signal(-code)
        self._killed_by = f"device {rank.name!r} was ended by {name}" + (
            "; see whether memory ran out" if name == "SIGKILL" else ""
        )
        line = self._killed_by
        with suppress(RuntimeError):  # the store may be gone
            call_with_timeout(CONNECT_S, lambda: publish(self._address.connect(CONNECT_S), line))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def threads(ranks: int, processors: int, *, single_machine: bool = True) -> dict[str, str]:
    """Environment that divides the processors among ranks."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, processors // ranks)))
    if (
        single_machine and sys.platform == "linux"
    ):  # otherwise Gloo looks up the host name, which may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
