"""HiGHS as SciPy brings it: kept quiet, and left when Ctrl-C is pressed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

POLL_S = 0.05
LOCK = Lock()
"""Standard output belongs to the whole process: one solve at a time may turn it off."""

AT_ONCE_S = 0.005
"""Most programmes are solved in less, before anybody could interrupt them."""


def milp(*args: Any, **kwargs: Any) -> Any:
    """``scipy.optimize.milp`` without the debugging line that HiGHS prints for some MILPs.

    The line goes to the process's standard output whatever ``disp`` says, where it would break
    JSON that a caller prints there. HiGHS cannot be stopped from outside: a `KeyboardInterrupt` is
    raised at once, and the solve runs out by its own limits in the background.
    """
    from scipy.optimize import milp as solve

    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(solve(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)

    with LOCK, _quiet():
        Thread(target=work, daemon=True).start()
        wait_s = AT_ONCE_S
        while True:
            try:
                return outcome.result(timeout=wait_s)
            except NotYet:
                wait_s = POLL_S


@contextmanager
def _quiet() -> Iterator[None]:
    """Send file descriptor 1 to the null device; C's own buffer is flushed on both sides."""
    try:
        kept = os.dup(1)
    except OSError:
        # no standard output, nothing to keep clean
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        _flush()
        os.dup2(null, 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(null)
        os.close(kept)


def _flush() -> None:
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)
