"""Processors of this machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

MAX_BUSY = 0.85
"""Share of the processors above which ranks wait for them instead of the network."""
LOOK_S = 0.3
"""Seconds for which processors are watched."""
IDLE, ALL = slice(3, 5), slice(0, 8)
"""Columns of a processor in ``/proc/stat``: idle and waiting for a disk; all but those of guests,
which others contain."""


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_warning() -> str:
    """A line if other programs keep the processors busy; empty if not."""
    busy = os.getloadavg()[0] / cores()
    if busy > MAX_BUSY:
        # the load average also counts what ran in the last minutes
        with suppress(OSError):
            busy = _busy_now()
    if busy <= MAX_BUSY:
        return ""
    return (
        f"other programs keep {min(busy, 1.0):.0%} of {cores()} processors busy, so ranks will "
        "wait for them; end other work first, or leave it processors with OMP_NUM_THREADS=1"
    )


def _busy_now() -> float:
    """Share of the processors that are busy while this process sleeps."""
    before = _ticks()
    time.sleep(LOOK_S)
    idle, total = (now - then for now, then in zip(_ticks(), before, strict=True))
    if total <= 0:  # containers may hide the processors
        raise OSError("/proc/stat does not count")
    return 1 - idle / total


def _ticks() -> tuple[int, int]:
    """Idle and all clock ticks of the processors this process may use (Linux)."""
    rows = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = [list(map(int, row[1:])) for row in rows if row[0] in own]
    return sum(sum(row[IDLE]) for row in ticks), sum(sum(row[ALL]) for row in ticks)
