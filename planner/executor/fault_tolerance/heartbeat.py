"""Heartbeats in the store, and the key that aborts the run: a thread with its own connection.

Every rank increments its own counter and reads two values: whether the run was aborted, and the
counter of the next rank. So each rank is watched by one other, at constant cost for any number of
ranks. Of several lost ranks, the first always has a live predecessor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.rendezvous.store import StoreMissingError

ABORT, RUNNING = "abort", "running"
"""The key that aborts the run, and its value until then."""
PERIOD_S = 0.5
MAX_CREDIT_S = 3.0
"""Largest silence counted between two polls, so that a process that was stopped itself is not
misled."""


def publish(store: Store, line: str) -> str:
    """Write a reason, if there is none yet."""
    store.compare_set(ABORT, "", RUNNING)
    return store.compare_set(ABORT, RUNNING, line).decode()


class Heartbeat(threading.Thread):
    """Heartbeat of this rank, and its watch of the next one.

    Parameters
    ----------
    store
        A connection that nothing else uses.
    ended
        Called with the reason of an abort.
    lost
        Called when the store is lost.
    again
        Opens another connection to the store; raises `StoreMissingError`.

    Attributes
    ----------
    rounds
        Number of answers of the store.
    """

    def __init__(
        self,
        store: Store,
        ended: Callable[[str], None],
        lost: Callable[[], None],
        again: Callable[[], Store],
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self.rounds = 0
        self._store, self._ended, self._lost, self._again = store, ended, lost, again
        self._own: str | None = None
        self._next: str | None = None
        self._silent: Callable[[float], None] = lambda silent_s: None
        self._line: str | None = None
        self._jobs: SimpleQueue[Callable[[Store], None]] = SimpleQueue()
        self._job: Callable[[Store], None] | None = None
        self._heeded: Mapping[str, Callable[[str], None]] = {}
        self._count, self._seen, self._silent_s = 0, "", 0.0
        self._watched: str | None = None
        self._looked = time.monotonic()
        self._stopped = False
        self._look = threading.Event()

    def look_after(self, rank: int, other: int, silent: Callable[[float], None]) -> None:
        """Send heartbeats, and watch another rank from its first one on."""
        self._silent, self._next, self._own = silent, heartbeat_key(other), heartbeat_key(rank)

    def poll(self, keys: Mapping[str, Callable[[str], None]]) -> None:
        """Poll these keys too, and no others."""
        self._heeded = keys

    def later(self, job: Callable[[Store], None]) -> None:
        """Run a job with the store soon."""
        self._jobs.put(job)
        self._look.set()

    def propose(self, line: str) -> None:
        """Abort the run with this reason, unless there is one already."""
        self._line = self._line or line
        self._look.set()

    def stop(self) -> None:
        """Stop heartbeats."""
        self._stopped = True
        self._look.set()

    def run(self) -> None:
        """Until `stop` or an abort."""
        while True:
            rounds = self.rounds
            try:
                self._store.compare_set(ABORT, "", RUNNING)
                self._rounds()
                return
            except DistError:
                if self._stopped:
                    return
            # a connection that closes at once does not count
            if self.rounds == rounds or not self._connected():
                self._lost()
                return

    def _connected(self) -> bool:
        try:
            self._store = self._again()
        except StoreMissingError:
            return False
        return True

    def _rounds(self) -> None:
        while not self._stopped:
            self._do_jobs()
            if self._watched != self._next:
                self._watched, self._seen, self._silent_s = self._next, "", 0.0
            if self._line is not None:
                self._ended(publish(self._store, self._line))
                return
            if self._own is not None:
                self._count += 1
                self._store.set(self._own, str(self._count))
            # reading a missing key would block
            heeded = self._heeded
            keys = [ABORT, *heeded]
            watched = self._watched
            if watched is not None and (self._seen or self._store.check([watched])):
                keys.append(watched)
            reason, *said = [value.decode() for value in self._store.multi_get(keys)]
            told, heartbeats = said[: len(heeded)], said[len(heeded) :]
            self.rounds += 1
            if reason != RUNNING:
                self._ended(reason)
                return
            for heed, value in zip(heeded.values(), told, strict=True):
                heed(value)
            now = time.monotonic()
            self._silent_s += min(now - self._looked, MAX_CREDIT_S)
            self._looked = now
            if heartbeats:
                if heartbeats[0] != self._seen:
                    self._seen, self._silent_s = heartbeats[0], 0.0
                self._silent(self._silent_s)
            self._look.wait(PERIOD_S)
            self._look.clear()

    def _do_jobs(self) -> None:
        while True:
            if self._job is None:
                try:
                    self._job = self._jobs.get_nowait()
                except Empty:
                    return
            # remove it when done: the connection may close meanwhile
            self._job(self._store)
            self._job = None


def heartbeats(store: Store, ranks: Sequence[int]) -> list[bytes]:
    """Last heartbeat of each rank."""
    keys = [heartbeat_key(rank) for rank in ranks]
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def heartbeat_key(rank: int) -> str:
    """Key of the heartbeats of a rank."""
    return f"heartbeat/{rank}"
