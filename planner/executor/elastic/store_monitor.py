"""The launcher's view of the store, which never blocks the launcher."""

from __future__ import annotations

import threading
import time

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.fault_tolerance.heartbeat import ABORT, RUNNING, heartbeats
from planner.executor.rendezvous.rank_group import ALL_LEFT_KEY
from planner.executor.transport.store import (
    FINISHED_KEY,
    STARTED_KEY,
    StoreAddress,
    StoreMissingError,
)

MONITOR_POLL_S, CONNECT_S = 0.5, 10.0
"""Interval of polling, and timeout of a connection."""


class StoreMonitor(threading.Thread):
    """Polls the store over its own connection, which may block.

    Parameters
    ----------
    address
        Address of the store.
    ranks
        Number of ranks.

    Attributes
    ----------
    started, finished
        Whether an elastic run has started, and whether all steps are done.
    aborted
        Whether the run was aborted.
    answered_s
        Time of the last answered poll on the monotonic clock; 0 for none.
    heartbeat_change_s
        Time of the last change of heartbeats, or of the first poll.
    """

    def __init__(self, address: StoreAddress, ranks: int) -> None:
        super().__init__(name="store view", daemon=True)
        self.started = self.finished = self.aborted = False
        self.answered_s, self.heartbeat_change_s = 0.0, time.monotonic()
        self._address, self.ranks = address, ranks
        self._last_heartbeats: list[bytes] = []
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Poll the store until `stop`, or as long as the process lives."""
        while not self._stopped.is_set():
            try:
                store = self._address.connect(CONNECT_S)
                while not self._stopped.wait(MONITOR_POLL_S):
                    self._poll(store)
            except (DistError, StoreMissingError, OSError):
                self._stopped.wait(MONITOR_POLL_S)

    def stop(self) -> None:
        """Stop polling; waits for a pending poll, with a timeout."""
        self._stopped.set()
        self.join(CONNECT_S)

    def polled_since(self, since_s: float) -> bool:
        """Whether its data are newer than a given time."""
        return self.answered_s > since_s

    def _poll(self, store: Store) -> None:
        begin_s = time.monotonic()
        self.started = self.started or store.check([STARTED_KEY])
        self.finished = self.finished or store.check([FINISHED_KEY]) or store.check([ALL_LEFT_KEY])
        self.aborted = store.check([ABORT]) and store.get(ABORT).decode() not in ("", RUNNING)
        counters = heartbeats(store, range(self.ranks))
        if counters != self._last_heartbeats:
            self._last_heartbeats, self.heartbeat_change_s = counters, time.monotonic()
        self.answered_s = begin_s
