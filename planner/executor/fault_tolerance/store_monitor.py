"""The ranks' store as whoever started them sees it, which never waits for it."""

from __future__ import annotations

import threading
import time

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.fault_tolerance.heartbeat import ABORT, RUNNING, heartbeats
from planner.executor.rendezvous.store import BEGUN, OVER, StoreAddress, StoreMissingError

LOOK_S, CONNECT_S = 0.5, 10.0
"""Between two looks, and for a connection."""


class StoreMonitor(threading.Thread):
    """Asks again and again, by a connection of its own, which may block for ever.

    Parameters
    ----------
    address
        Where the store is, or will be.
    ranks
        How many there are.

    Attributes
    ----------
    begun, over
        Whether steps have begun that go on without a lost device; whether all are done.
    ended
        Whether somebody has ended the run for all.
    answered_s
        When the last question that was answered was asked, monotonic clock; 0: none was.
    stirred_s
        When signs of life of ranks were seen to change, or the first were looked for.
    """

    def __init__(self, address: StoreAddress, ranks: int) -> None:
        super().__init__(name="store view", daemon=True)
        self.begun = self.over = self.ended = False
        self.answered_s, self.stirred_s = 0.0, time.monotonic()
        self._address, self.ranks = address, ranks
        self._seen: list[bytes] = []
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Until `stop`, or as long as the process lives."""
        while not self._stopped.is_set():
            try:
                store = self._address.connect(CONNECT_S)
                while not self._stopped.wait(LOOK_S):
                    self._look(store)
            except (DistError, StoreMissingError, OSError):
                self._stopped.wait(LOOK_S)

    def stop(self) -> None:
        """Ask no more; waits for a question under way, but not for ever."""
        self._stopped.set()
        self.join(CONNECT_S)

    def knows(self, since_s: float) -> bool:
        """Whether what it says was asked for after a moment."""
        return self.answered_s > since_s

    def _look(self, store: Store) -> None:
        asked = time.monotonic()
        self.begun = self.begun or store.check([BEGUN])
        self.over = self.over or store.check([OVER]) or store.check(["parted/all"])
        self.ended = store.check([ABORT]) and store.get(ABORT).decode() not in ("", RUNNING)
        found = heartbeats(store, range(self.ranks))
        if found != self._seen:
            self._seen, self.stirred_s = found, time.monotonic()
        self.answered_s = asked
