"""HiGHS as SciPy brings it, kept quiet."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def milp(*args: Any, **kwargs: Any) -> Any:
    """``scipy.optimize.milp`` without the debugging line that HiGHS prints for some MILPs.

    The line goes to the process's standard output whatever ``disp`` says, where it would break
    JSON that a caller prints there.
    """
    from scipy.optimize import milp as solve

    with _quiet():
        return solve(*args, **kwargs)


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
