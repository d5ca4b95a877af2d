"""A quantity of all ordered pairs of devices, stored by class of device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class PairTable:
    """Values of the ordered pairs of N devices of C classes, indexed like ``float[N, N]``.

    Takes the memory of ``float[C, C]``. An index is a pair of device numbers or of arrays, which
    are broadcast, as those of ``numpy.ix_`` are.

    Parameters
    ----------
    values
        ``float[C, C]``, between devices of two classes; on the diagonal between two of one.
    class_of
        ``int[N]``, class of each device; every class has one.
    own
        Value of a device and itself.

    Attributes
    ----------
    is_full
        Whether each device is a class of its own, in order.
    """

    def __init__(self, values: Floats, class_of: Sequence[int] | Ints, own: float) -> None:
        self.class_of = np.asarray(class_of, dtype=np.int64)
        self._devices = np.arange(len(self.class_of))
        self.is_full = len(values) == len(self) and np.array_equal(self.class_of, self._devices)
        if self.is_full and (values.diagonal() != own).any():
            values = values.copy()
            np.fill_diagonal(values, own)
        self.values, self.own = values, own
        self.values.setflags(write=False)

    def __len__(self) -> int:
        return len(self.class_of)

    def __getitem__(self, pair: tuple[Any, ...]) -> Any:
        source, destination = pair
        if self.is_full:
            return self.values[source, destination]
        values = self.values[self.class_of[source], self.class_of[destination]]
        is_own = self._devices[source] == self._devices[destination]
        if np.ndim(values) == 0:
            return self.own if is_own else values
        return np.where(is_own, self.own, values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.values if self.is_full else self._all(), dtype=dtype)
        return array.copy() if copy else array

    def _all(self) -> Floats:
        values = self.values[np.ix_(self.class_of, self.class_of)]
        np.fill_diagonal(values, self.own)
        values.setflags(write=False)
        return values

    @property
    def T(self) -> PairTable:
        """Values from column to row."""
        return PairTable(self.values.T, self.class_of, self.own)

    def row(self, device: int) -> Floats:
        """``float[N]``: values from a device to all."""
        return np.asarray(self[device, self._devices])

    @cached_property
    def first(self) -> Ints:
        """``int[C]``: the first device of every class."""
        return np.unique(self.class_of, return_index=True)[1]

    @cached_property
    def joins_two(self) -> NDArray[np.bool_]:
        """``bool[C, C]``: whether there are two devices of these classes."""
        return ~np.diag(np.bincount(self.class_of) == 1)

    @property
    def two_of_each(self) -> Ints:
        """Two devices of every class, or one where there is one: they have all values."""
        order = np.argsort(self.class_of, kind="stable")
        place = np.arange(len(order)) - np.searchsorted(self.class_of[order], self.class_of[order])
        return np.sort(order[place < 2])

    def between(self, devices: Sequence[int] | Ints) -> Floats:
        """``float[m, m]``: values between some devices."""
        index = np.asarray(devices, dtype=np.int64)
        return np.asarray(self[np.ix_(index, index)])

    def with_classes(self, class_of: Ints) -> PairTable:
        """The same values by other classes of devices, which can be exchanged."""
        _, first = np.unique(class_of, return_index=True)
        values = self.between(first)
        # within a class, between its first device and the last
        _, last = np.unique(class_of[::-1], return_index=True)
        last = len(class_of) - 1 - last
        values[np.diag_indices(len(first))] = self[first, last]
        return PairTable(values, class_of, self.own)

    def mean_between(self, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Mean of the known values from some devices to others; NaN if none is known."""
        (there, there_count), (here, here_count) = (
            np.unique(self.class_of[list(devices)], return_counts=True)
            for devices in (sources, targets)
        )
        pairs = np.outer(there_count, here_count)
        own = self.class_of[np.intersect1d(sources, targets)]
        np.subtract.at(pairs, (np.searchsorted(there, own), np.searchsorted(here, own)), 1)
        values = self.values[np.ix_(there, here)]
        known = (pairs > 0) & ~np.isnan(values)
        return float(np.average(values[known], weights=pairs[known])) if known.any() else np.nan

    def picked(self, devices: Sequence[int]) -> PairTable:
        """The values of some devices, in that order."""
        if self.is_full:
            return PairTable(self.between(devices), np.arange(len(devices)), self.own)
        classes, class_of = np.unique(self.class_of[list(devices)], return_inverse=True)
        return PairTable(self.values[np.ix_(classes, classes)], class_of, self.own)
