"""Random numbers for compiled code: splitmix64, one 64-bit word of state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.search.compiled import kernel

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11, _S32 = (np.uint64(k) for k in (30, 27, 31, 11, 32))
_UNIT = 1.0 / 9007199254740992.0  # 2 ** -53


@kernel
def next_word(state: NDArray[np.uint64]) -> Any:
    """Next 64 random bits; ``state`` has one element."""
    state[0] += _STEP
    return mixed(state[0])


@kernel
def mixed(z: Any) -> Any:
    """Another word for every 64-bit word, without visible pattern; 0 for 0."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@kernel
def next_unit(state: NDArray[np.uint64]) -> Any:
    """Uniform in [0, 1)."""
    return (next_word(state) >> _S11) * _UNIT


@kernel
def next_below(state: NDArray[np.uint64], n: int) -> Any:
    """Uniform in 0..n-1 for n below 2 ** 32.

    Parameters
    ----------
    state
        ``uint64[1]``, updated in place.
    """
    return np.int64(((next_word(state) >> _S32) * np.uint64(n)) >> _S32)
