"""Devices of a plan as threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable

from planner.executor.fault_tolerance.error_latch import ErrorLatch

LONG_S = 60
"""Nothing here takes as long, on a busy machine either."""


def all_run(
    run: Callable[[int], None],
    devices: int,
    ends: Iterable[socket.socket],
    failure: ErrorLatch,
) -> None:
    """Run every device to its end, and close what they were connected by.

    Parameters
    ----------
    run
        What a device does.
    devices
        N.
    ends
        Sockets.
    failure
        Of all.
    """
    threads = [threading.Thread(target=run, args=(d,), daemon=True) for d in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    failure.check()
    for end in ends:
        end.close()
