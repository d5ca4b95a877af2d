"""SciPy's HiGHS without its output on stdout, and interruptible by Ctrl-C."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

POLL_S = 0.05
LOCK = Lock()
"""Standard output is shared by the process: only one solve at a time may redirect it."""

FIRST_POLL_S = 0.005
"""First polling interval: most programs are solved in less."""


def milp(*args: Any, **kwargs: Any) -> Any:
    """``scipy.optimize.milp`` without the debugging line that HiGHS prints for some MILPs.

    HiGHS prints the line to standard output regardless of ``disp``, which would corrupt JSON output
    of a command. HiGHS cannot be stopped from outside: a `KeyboardInterrupt` is raised immediately,
    and the solve continues in a daemon thread until its own limits.
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
        wait_s = FIRST_POLL_S
        while True:
            try:
                return outcome.result(timeout=wait_s)
            except FutureTimeout:
                wait_s = POLL_S


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirect file descriptor 1 to the null device, flushing C's buffer before and after.

    HiGHS prints there itself. What other threads of the process print meanwhile is lost, too.
    """
    try:
        saved_stdout = os.dup(1)
    except OSError:
        # no standard output to redirect
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        _flush()
        os.dup2(null, 1)
        yield
    finally:
        _flush()
        os.dup2(saved_stdout, 1)
        os.close(null)
        os.close(saved_stdout)


def _flush() -> None:
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)
