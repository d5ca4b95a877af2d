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

from planner.executor.elastic.store_monitor import CONNECT_S, LOOK_S, StoreMonitor
from planner.executor.fault_tolerance.heartbeat import publish
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, PREFIX, REFUSED
from planner.executor.launch.process import STARTER
from planner.executor.rendezvous.store import SERVED, StoreAddress, call_with_timeout, served

HOST = "127.0.0.1"
TICK_S = 0.2
TOLD = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of ranks that were told to end, and are not restarted."""
REST_S = 1.0
"""Delay from the end of a rank to its first restart."""
END_S = 5.0
"""After a rank has failed, the others have this long to end by themselves; then they are killed."""


@dataclass
class _Rank:
    name: str
    process: subprocess.Popen[bytes]
    begun: dict[int, bytes] = field(default_factory=dict)
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
    view: StoreMonitor | None = None,
    address: StoreAddress | None = None,
    who: str = "planner run",
) -> tuple[int, str | None]:
    """Run one process per device to their end."""
    store = served(HOST, 0) if address is None else None
    meet = StoreAddress(HOST, store.port, True) if store is not None else address
    assert meet is not None
    where = {"MASTER_ADDR": meet.host, "MASTER_PORT": str(meet.port), SERVED: "True"}
    where[STARTER] = str(os.getpid())
    if store is not None:
        where["WORLD_SIZE"] = str(len(names))

    def started(local: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | where | {"LOCAL_RANK": str(local)},
        )

    ranks: list[_Rank] = []
    own = StoreMonitor(meet, len(names)) if restarts is not None and view is None else None
    view = view or own
    others = view is not None and len(names) < view.ranks
    run = _Run(ranks, meet, write_line, write_error, started, restarts, who, view, others=others)
    try:
        for local, name in enumerate(names):
            ranks.append(_Rank(name, started(local)))
        return run.follow()
    except BaseException:
        run.interrupt()
        raise
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
            for stream in _channels(rank):
                stream.close()
        if own is not None:
            own.stop()


def _channels(rank: _Rank) -> tuple[IO[bytes], IO[bytes]]:
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
        started: Callable[[int], subprocess.Popen[bytes]],
        restarts: int | None,
        who: str,
        view: StoreMonitor | None,
        *,
        others: bool,
    ) -> None:
        self._ranks, self._address, self._told, self._said = ranks, address, write_line, write_error
        self._started, self._who = started, who
        self._restarts = -1 if restarts is None else restarts
        # only if the others continue without a rank
        self._view = view if restarts is not None else None
        self._others = others
        self._reason: str | None = None
        self._killed: str | None = None

    def follow(self) -> tuple[int, str | None]:
        """Follow all ranks to their end; returns exit code and reason."""
        failed_s: float | None = None
        with selectors.DefaultSelector() as ready:
            for rank in self._ranks:
                for stream in _channels(rank):
                    ready.register(stream, selectors.EVENT_READ, rank)
            while ready.get_map() or any(self._may_return(rank) for rank in self._ranks):
                for key, _ in ready.select(TICK_S) if ready.get_map() else ():
                    if not self._read(key.data, key.fd):
                        ready.unregister(key.fileobj)
                if not ready.get_map():
                    time.sleep(TICK_S)
                for rank in self._ranks:
                    if rank.ended_s is None and rank.process.poll() is not None:
                        rank.ended_s = time.monotonic()
                for rank in self._ranks:
                    if self._may_return(rank) and self._rested(rank) and self._knows(rank):
                        self._start_again(ready, rank)
                failed = [rank for rank in self._ranks if self._ends_all(rank)]
                for rank in failed:
                    self._tell_of(rank)
                if failed and failed_s is None:
                    failed_s = time.monotonic()
                if failed_s is not None and time.monotonic() - failed_s > END_S:
                    for rank in self._ranks:
                        rank.process.kill()
        return self._ended([rank.process.wait() for rank in self._ranks])

    def _ended(self, codes: Sequence[int]) -> tuple[int, str | None]:
        """Exit code and reason after all have ended."""
        # in an elastic run, the run is done when any rank has finished
        if not any(codes) or (self._view is not None and 0 in codes):
            return 0, None
        for rank in self._ranks:
            rank.ended_s = rank.ended_s or time.monotonic()
        while self._view is not None and not all(map(self._knows, self._ranks)):
            time.sleep(TICK_S)
        if self._others and self._goes_on() and REFUSED not in codes:
            return LEFT, None
        for rank in self._ranks:
            self._tell_of(rank)
        if self._reason is None:
            self._reason = self._killed or "a rank has failed and said nothing"
            self._said(PREFIX + self._reason)
        return REFUSED if REFUSED in codes else FAILED, self._reason

    def _goes_on(self) -> bool:
        """Whether the run continues without lost ranks, by the store's last answer."""
        view = self._view
        return view is not None and view.begun and not view.ended and self._answers()

    def _answers(self) -> bool:
        """Whether the store has answered recently."""
        assert self._view is not None
        return time.monotonic() - self._view.answered_s < CONNECT_S

    def _knows(self, rank: _Rank) -> bool:
        """Whether the store was polled since a rank ended, or answers no more."""
        assert self._view is not None and rank.ended_s is not None
        late = time.monotonic() - rank.ended_s > CONNECT_S + LOOK_S
        return late or self._view.knows(rank.ended_s)

    def _rested(self, rank: _Rank) -> bool:
        """Whether enough time has passed since a rank ended; longer after each restart."""
        assert rank.ended_s is not None
        return time.monotonic() - rank.ended_s > REST_S * (1 << rank.restarts)

    def _ends_all(self, rank: _Rank) -> bool:
        """Whether the end of a rank must end the others soon."""
        if rank.ended_s is None or not (code := rank.process.returncode):
            return False
        if self._view is None:
            return True
        if not self._knows(rank):
            return False
        if not self._goes_on():
            return True
        # a restarted rank that is refused affects only itself
        return code == REFUSED and not rank.restarts

    def _may_return(self, rank: _Rank) -> bool:
        """Whether a rank that has ended may be restarted."""
        if self._view is None or rank.ended_s is None or rank.restarts >= self._restarts:
            return False
        if rank.process.returncode in (0, REFUSED, *TOLD):
            return False
        if not self._others and all(other.ended_s is not None for other in self._ranks):
            return False  # nobody is left to go on
        # do not wait once the run is known to have ended
        return not self._knows(rank) or (self._goes_on() and not self._view.over)

    def _start_again(self, ready: selectors.BaseSelector, rank: _Rank) -> None:
        """Restart a lost rank, after all of its output has been read."""
        if any(key.data is rank for key in ready.get_map().values()):
            return
        code = rank.process.returncode
        for stream in _channels(rank):
            stream.close()
        cause = f"was ended by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        self._said(f"{self._who}: restarting device {rank.name!r}, which {cause}")
        rank.restarts += 1
        rank.begun.clear()
        rank.ended_s = None
        rank.process = self._started(self._ranks.index(rank))
        for stream in _channels(rank):
            ready.register(stream, selectors.EVENT_READ, rank)

    def interrupt(self) -> None:
        """Let all ranks clean up and end."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGINT)
        until = time.monotonic() + END_S
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def _read(self, rank: _Rank, descriptor: int) -> bool:
        """Read available output; returns whether more may follow."""
        data = os.read(descriptor, 1 << 16)
        *lines, rest = (rank.begun.get(descriptor, b"") + data).split(b"\n")
        if not data and rest:
            lines.append(rest)
        rank.begun[descriptor] = rest
        assert rank.process.stdout is not None
        standard = descriptor == rank.process.stdout.fileno()
        for line in lines:
            text = line.decode(errors="replace")
            if standard:
                self._told(text)
            elif not text.startswith(PREFIX):
                self._said(text)
            elif self._reason is None or (self._view is not None and text != PREFIX + self._reason):
                self._reason = text.removeprefix(PREFIX)
                self._said(text)
        return bool(data)

    def _tell_of(self, rank: _Rank) -> None:
        """Publish the signal by which a rank ended, which others cannot know."""
        code = rank.process.returncode
        if code is None or code >= 0 or self._killed is not None or self._reason is not None:
            return
        name = _signal(-code)
        self._killed = f"device {rank.name!r} was ended by {name}" + (
            "; see whether memory ran out" if name == "SIGKILL" else ""
        )
        line = self._killed
        with suppress(RuntimeError):  # no store any more: nobody to tell
            call_with_timeout(CONNECT_S, lambda: publish(self._address.connect(CONNECT_S), line))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def threads(ranks: int, processors: int, *, alone: bool = True) -> dict[str, str]:
    """Environment that divides the processors among ranks."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, processors // ranks)))
    if (
        alone and sys.platform == "linux"
    ):  # else a host name may be looked for that nobody can resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
