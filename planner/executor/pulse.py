"""Signs of life in the store, and the key that ends all: a thread with a connection of its own.

Every rank counts up its own number and reads two things: whether somebody ended the run, and the
number of the next rank. So each rank is watched by one other, and a round costs the same whatever
the number of ranks. Somebody alive always has the first of those that are gone as its next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

ABORT, RUNNING = "abort", "running"
"""The key that ends all, and what it holds until somebody writes a reason."""
PERIOD_S = 0.5
MOST_CREDIT_S = 3.0
"""Of silence between two looks: who was stopped itself must not take that for others' silence."""


def publish(store: Store, line: str) -> str:
    """Write a reason, if nobody did before.

    Parameters
    ----------
    store
        Shared by all ranks.
    line
        The reason.

    Returns
    -------
    str
        The reason that counts.
    """
    store.compare_set(ABORT, "", RUNNING)
    return store.compare_set(ABORT, RUNNING, line).decode()


class Pulse(threading.Thread):
    """This rank's signs of life, and its look at the next rank's.

    Parameters
    ----------
    store
        A connection that nobody else uses.
    ended
        Takes the reason that somebody wrote.
    lost
        Called when the store is gone.

    Attributes
    ----------
    rounds
        How often the store has answered.
    """

    def __init__(
        self, store: Store, ended: Callable[[str], None], lost: Callable[[], None]
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self.rounds = 0
        self._store, self._ended, self._lost = store, ended, lost
        self._beat: str | None = None
        self._next: tuple[str, Callable[[float], None]] | None = None
        self._line: str | None = None
        self._stopped = False
        self._look = threading.Event()

    def beat(self, rank: int) -> None:
        """Give signs of life as this rank."""
        self._beat = _key(rank)

    def watch(self, rank: int, silent: Callable[[float], None]) -> None:
        """Look after a rank.

        Parameters
        ----------
        rank
            Which; it is there.
        silent
            Takes the seconds since its last sign of life, at every look.
        """
        self._next = _key(rank), silent

    def propose(self, line: str) -> None:
        """End the run for this reason, unless there is one already."""
        self._line = self._line or line
        self._look.set()

    def stop(self) -> None:
        """No more signs of life."""
        self._stopped = True
        self._look.set()

    def run(self) -> None:
        """Until `stop`, or until there is a reason to end."""
        try:
            self._store.compare_set(ABORT, "", RUNNING)
            self._rounds()
        except DistError:
            if not self._stopped:
                self._lost()

    def _rounds(self) -> None:
        count, seen, silent_s, looked = 0, b"", 0.0, time.monotonic()
        while not self._stopped:
            if self._line is not None:
                self._ended(publish(self._store, self._line))
                return
            if self._beat is not None:
                count += 1
                self._store.set(self._beat, str(count))
            watched = self._next
            keys = [ABORT] if watched is None else [ABORT, watched[0]]
            reason, *beats = self._store.multi_get(keys)
            self.rounds += 1
            if reason.decode() != RUNNING:
                self._ended(reason.decode())
                return
            now = time.monotonic()
            silent_s += min(now - looked, MOST_CREDIT_S)
            looked = now
            if watched is not None:
                if beats[0] != seen:
                    seen, silent_s = beats[0], 0.0
                watched[1](silent_s)
            self._look.wait(PERIOD_S)
            self._look.clear()


def _key(rank: int) -> str:
    return f"beat/{rank}"
