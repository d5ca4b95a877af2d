"""Heartbeats in the store, and the key that aborts the run: a thread with its own connection.

Every rank increments its own counter and reads two values: whether the run was aborted, and the
counter of the next rank. So each rank is watched by one other, at constant cost for any number of
ranks. Of several lost ranks, the first always has a live predecessor.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.transport.store import StoreMissingError

ABORT, RUNNING = "abort", "running"
"""The key that aborts the run, and its value until then."""
PERIOD_S = 0.5
MAX_COUNTED_HEARTBEAT_S = 3.0
"""Largest silence counted between two polls, so that a process that was stopped itself is not
misled."""


def publish(store: Store, reason: str) -> str:
    """Write a reason, if there is none yet."""
    store.compare_set(ABORT, "", RUNNING)
    return store.compare_set(ABORT, RUNNING, reason).decode()


class _Target(NamedTuple):
    """Heartbeat key of the watched rank, and a callback for its silence in seconds."""

    key: str
    on_silence: Callable[[float], None]


class Heartbeat(threading.Thread):
    """Heartbeat of this rank, and its watch of the next one.

    Parameters
    ----------
    store
        A connection that nothing else uses.
    on_abort
        Called with the reason of an abort.
    on_store_lost
        Called when the store is lost.
    reconnect
        Opens another connection to the store; raises `StoreMissingError`.

    Attributes
    ----------
    answers
        Number of answers of the store.
    """

    def __init__(
        self,
        store: Store,
        on_abort: Callable[[str], None],
        on_store_lost: Callable[[], None],
        reconnect: Callable[[], Store],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.answers = 0
        self._store, self._on_abort, self._on_store_lost = store, on_abort, on_store_lost
        self._reconnect = reconnect
        self._own_key: str | None = None
        self._target: _Target | None = None
        self._abort_reason: str | None = None
        self._jobs: deque[Callable[[Store], None]] = deque()
        self._polled_keys: Mapping[str, Callable[[str], None]] = {}
        # a random start tells the processes of a rank that is started again apart
        self._count, self._last_seen, self._silent_s = secrets.randbits(62), "", 0.0
        self._last_target: _Target | None = None
        self._polled_s = time.monotonic()
        self._stopped = False
        self._wakeup = threading.Event()

    def set_watched_rank(self, rank: int, other: int, on_silence: Callable[[float], None]) -> None:
        """Send heartbeats, and watch another rank from its first one on."""
        self._own_key = heartbeat_key(rank)
        # one assignment: the thread must never see the key of one rank with another's callback
        self._target = _Target(heartbeat_key(other), on_silence)

    def poll(self, keys: Mapping[str, Callable[[str], None]]) -> None:
        """Poll these keys too, and no others."""
        self._polled_keys = keys

    def run_later(self, job: Callable[[Store], None]) -> None:
        """Run a job with the store soon."""
        self._jobs.append(job)
        self._wakeup.set()

    def abort_run(self, reason: str) -> None:
        """Abort the run with this reason, unless there is one already."""
        self._abort_reason = self._abort_reason or reason
        self._wakeup.set()

    def stop(self) -> None:
        """Stop heartbeats."""
        self._stopped = True
        self._wakeup.set()

    def run(self) -> None:
        """Send heartbeats until `stop`, an abort, or an unexpected error, which ends the run."""
        while True:
            answers = self.answers
            try:
                self._store.compare_set(ABORT, "", RUNNING)
                self._poll_until_stopped()
                return
            except DistError:
                if self._stopped:
                    return
            except Exception as error:
                self._on_abort(f"the heartbeat thread failed ({type(error).__name__}: {error})")
                raise
            # a connection that closes at once does not count
            if self.answers == answers or not self._try_reconnect():
                self._on_store_lost()
                return

    def _try_reconnect(self) -> bool:
        try:
            self._store = self._reconnect()
        except StoreMissingError:
            return False
        return True

    def _poll_until_stopped(self) -> None:
        while not self._stopped:
            self._do_jobs()
            target = self._target
            if self._last_target is not target:
                self._last_target, self._last_seen, self._silent_s = target, "", 0.0
            if self._abort_reason is not None:
                self._on_abort(publish(self._store, self._abort_reason))
                return
            if self._own_key is not None:
                self._count += 1
                self._store.set(self._own_key, str(self._count))
            # reading a missing key would block
            callbacks = self._polled_keys
            keys = [ABORT, *callbacks]
            if target is not None and (self._last_seen or self._store.check([target.key])):
                keys.append(target.key)
            reason, *values = [value.decode() for value in self._store.multi_get(keys)]
            polled, heartbeats = values[: len(callbacks)], values[len(callbacks) :]
            self.answers += 1
            if reason != RUNNING:
                self._on_abort(reason)
                return
            for callback, value in zip(callbacks.values(), polled, strict=True):
                callback(value)
            now = time.monotonic()
            self._silent_s += min(now - self._polled_s, MAX_COUNTED_HEARTBEAT_S)
            self._polled_s = now
            if heartbeats:
                if heartbeats[0] != self._last_seen:
                    self._last_seen, self._silent_s = heartbeats[0], 0.0
                assert target is not None
                target.on_silence(self._silent_s)
            self._wakeup.wait(PERIOD_S)
            self._wakeup.clear()

    def _do_jobs(self) -> None:
        while self._jobs:
            # remove it when done: the connection may close meanwhile
            self._jobs[0](self._store)
            self._jobs.popleft()


def heartbeats(store: Store, ranks: Sequence[int]) -> list[bytes]:
    """Last heartbeat of each rank; empty before the first one.

    Two round trips for all ranks, except while some have not sent any: silence is counted between
    polls, up to a limit, so a poll must be short.
    """
    keys = [heartbeat_key(rank) for rank in ranks]
    present = keys if store.check(keys) else [key for key in keys if store.check([key])]
    values = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [values.get(key, b"") for key in keys]


def heartbeat_key(rank: int) -> str:
    """Key of the heartbeats of a rank."""
    return f"heartbeat/{rank}"
