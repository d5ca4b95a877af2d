"""numba where it is installed; without it, as on a bare GPU node, the same code runs as Python.

Kernels work on arrays and numbers that their caller made. Counting references to those arrays would
take 80 to 90% of their time, so it is left out: a kernel makes no array, list or text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
UNCOUNTED: dict[str, Any] = {"_nrt": False}

try:
    from numba import njit

    try:
        # not among the options that numba documents; without it kernels are slower, no different
        njit(**UNCOUNTED)(lambda: None)
        OPTIONS |= UNCOUNTED
    except KeyError:
        pass
except ImportError:

    def njit(*_: Any, **__: Any) -> Callable[[Any], Any]:  # type: ignore[no-redef]
        """Leave a function as it is."""
        return lambda function: function


kernel: Callable[[FunctionT], FunctionT] = njit(**OPTIONS)
inlined: Callable[[FunctionT], FunctionT] = njit(inline="always", **OPTIONS)
"""For what is done at every event: handing over many arrays takes longer than the work."""

__all__ = ["inlined", "kernel", "njit"]
