"""numba where it is installed; without it, as on a bare GPU node, the same code runs as Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from numba import njit
except ImportError:

    def njit(  # type: ignore[no-redef]
        *_: Any, **__: Any
    ) -> Callable[[Any], Any]:
        """Leave a function as it is."""
        return lambda function: function


__all__ = ["njit"]
