"""Ranks of a plan on this machine: started, listened to and ended by this process.

Unless told where else ranks meet, it serves their store, so that the loss of any rank leaves the
others one to read the reason from.
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

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.ending import FAILED, LEFT, PREFIX, REFUSED
from planner.executor.process import STARTER
from planner.executor.pulse import publish
from planner.executor.store import BEGUN, OVER, SERVED, StoreAddress, StoreMissingError, served

HOST = "127.0.0.1"
TICK_S = 0.2
END_S = 5.0
"""After the first rank has failed the others end by themselves; then they are killed."""
CONNECT_S = 10.0


@dataclass
class _Rank:
    name: str
    process: subprocess.Popen[bytes]
    begun: dict[int, bytes] = field(default_factory=dict)
    """By descriptor, what has come of a line."""
    restarts: int = 0


def run_local(
    command: Sequence[str],
    names: Sequence[str],
    environment: dict[str, str],
    told: Callable[[str], None],
    said: Callable[[str], None],
    *,
    restarts: int | None = None,
    address: StoreAddress | None = None,
    who: str = "planner run",
) -> tuple[int, str | None]:
    """Run a process a device to their end.

    Parameters
    ----------
    command
        Of every process.
    names
        Of the devices.
    environment
        All of its variables, but those that tell a rank who and where it is.
    told
        Takes lines of the ranks' standard output.
    said
        Takes lines of their standard error; the reason of a failure comes once.
    restarts
        How often a device's process that was lost is started again while the others go on; None:
        they do not go on, and end.
    address
        Where ranks of other machines too meet; None: these are all, and meet here.
    who
        Says that a device is started again.

    Returns
    -------
    code : int
        0, `FAILED`, `REFUSED` where a rank was given what cannot be used, or `LEFT` where others
        go on and none of these does.
    reason : str or None
        Why the run has failed.
    """
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
    run = _Run(ranks, meet, told, said, started, restarts, who)
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
            for stream in _streams(rank):
                stream.close()


def _streams(rank: _Rank) -> tuple[IO[bytes], IO[bytes]]:
    """What it says, and what it says when something is wrong."""
    out, error = rank.process.stdout, rank.process.stderr
    assert out is not None and error is not None
    return out, error


class _Run:
    """Ranks that run: what they say, and how they end."""

    def __init__(
        self,
        ranks: Sequence[_Rank],
        address: StoreAddress,
        told: Callable[[str], None],
        said: Callable[[str], None],
        started: Callable[[int], subprocess.Popen[bytes]],
        restarts: int | None,
        who: str,
    ) -> None:
        self._ranks, self._address, self._told, self._said = ranks, address, told, said
        self._started, self._restarts, self._who = started, restarts, who
        self._begun_once = False
        self._reason: str | None = None
        self._killed: str | None = None
        self._store: Store | None = None

    def follow(self) -> tuple[int, str | None]:
        """Until all have ended; returns exit code and reason."""
        failed_s: float | None = None
        with selectors.DefaultSelector() as ready:
            for rank in self._ranks:
                for stream in _streams(rank):
                    ready.register(stream, selectors.EVENT_READ, rank)
            while ready.get_map():
                for key, _ in ready.select(TICK_S):
                    if not self._read(key.data, key.fd):
                        ready.unregister(key.fileobj)
                        self._start_again(ready, key.data)
                failed = [rank for rank in self._ranks if self._ends_all(rank)]
                for rank in failed:
                    self._tell_of(rank)
                if failed and failed_s is None:
                    failed_s = time.monotonic()
                if failed_s is not None and time.monotonic() - failed_s > END_S:
                    for rank in self._ranks:
                        rank.process.kill()
        codes = [rank.process.wait() for rank in self._ranks]
        # where others go on, the run is done when any has done all of it
        if not any(codes) or (self._restarts is not None and 0 in codes):
            return 0, None
        if self._begun_once and all(map(_lost, codes)) and self._reason is None:
            return LEFT, None
        for rank in self._ranks:
            self._tell_of(rank)
        if self._reason is None:
            self._reason = self._killed or "a rank has failed and said nothing"
            self._said(PREFIX + self._reason)
        return REFUSED if REFUSED in codes else FAILED, self._reason

    def _ends_all(self, rank: _Rank) -> bool:
        """Whether a rank has ended in a way that others must not outlive for long."""
        if not (code := rank.process.poll()):
            return False
        if self._restarts is not None and self._begun():
            # one that was started again and is refused costs itself alone
            return code in (FAILED, REFUSED) and not rank.restarts
        return True

    def _begun(self) -> bool:
        """Whether the others can go on without a rank, since steps have begun."""
        self._begun_once = self._begun_once or self._has(BEGUN)
        return self._begun_once

    def _has(self, key: str) -> bool:
        """Whether the ranks' store has it; a store that is gone has nothing."""
        with suppress(DistError, StoreMissingError):
            self._store = self._store or self._address.connect(CONNECT_S)
            return self._store.check([key])
        return False

    def _start_again(self, ready: selectors.BaseSelector, rank: _Rank) -> None:
        """A rank that was lost comes back, if it may, once all that it said has been read."""
        if self._restarts is None or any(key.data is rank for key in ready.get_map().values()):
            return
        code = rank.process.wait()
        if (
            not _lost(code)
            or rank.restarts == self._restarts
            or not self._begun()
            or self._has(OVER)
        ):
            return
        for stream in _streams(rank):
            stream.close()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        self._said(f"{self._who}: device {rank.name!r} has ended {how} and is started again")
        rank.restarts += 1
        rank.begun.clear()
        rank.process = self._started(self._ranks.index(rank))
        for stream in _streams(rank):
            ready.register(stream, selectors.EVENT_READ, rank)

    def interrupt(self) -> None:
        """Let all put things back and end."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGINT)
        until = time.monotonic() + END_S
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def _read(self, rank: _Rank, descriptor: int) -> bool:
        """Take what has come; returns whether more may."""
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
            elif self._reason is None or (
                self._restarts is not None and text != PREFIX + self._reason
            ):
                self._reason = text.removeprefix(PREFIX)
                self._said(text)
        return bool(data)

    def _tell_of(self, rank: _Rank) -> None:
        """Others cannot know by which signal a rank has ended."""
        code = rank.process.returncode
        if code is None or code >= 0 or self._killed is not None or self._reason is not None:
            return
        name = signal.Signals(-code).name
        self._killed = f"device {rank.name!r} was ended by {name}" + (
            "; see whether memory ran out" if name == "SIGKILL" else ""
        )
        with suppress(DistError, RuntimeError):
            publish(self._address.connect(CONNECT_S), self._killed)


def _lost(code: int) -> bool:
    """Whether the others go on without whoever ended so, if they can."""
    return code == LEFT or code < 0


def threads(ranks: int, processors: int, *, alone: bool = True) -> dict[str, str]:
    """The environment, with processors shared among ranks.

    Parameters
    ----------
    ranks
        How many there are.
    processors
        Of this machine.
    alone
        Whether there are no others elsewhere.

    Returns
    -------
    dict[str, str]
        Variables for `run_local`.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, processors // ranks)))
    if (
        alone and sys.platform == "linux"
    ):  # else a host name may be looked for that nobody can resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
