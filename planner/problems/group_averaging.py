"""Averaging in an arrangement: one round of equal shares over the devices of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.problems.error import ProblemError
from planner.utils.validate import numbers

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class GroupAveraging:
    """Averaging time of every stage over the devices that hold it.

    In a group of m that averages v bytes every pair carries 2 v / m in each direction, and every
    device sends and receives 2 v (m - 1) / m. A round takes the longest of these times plus the
    longest round-trip latency; 0 in a group of one.

    Attributes
    ----------
    vector_bytes
        ``float[stages]``, bytes on the wire.
    pair_s_per_byte
        ``float[N, N]``, of the slower direction; the diagonal is 0.
    line_s_per_byte
        ``float[N]``, of the slower of a device's upload and download.
    away_s
        ``float[N, N]``, round-trip latency; the diagonal is 0.
    """

    vector_bytes: Floats
    pair_s_per_byte: Floats
    line_s_per_byte: Floats
    away_s: Floats

    def __post_init__(self) -> None:
        n = len(self.line_s_per_byte)
        for name, shape in (
            ("vector_bytes", (len(self.vector_bytes),)),
            ("pair_s_per_byte", (n, n)),
            ("line_s_per_byte", (n,)),
            ("away_s", (n, n)),
        ):
            array = numbers(getattr(self, name))
            if array.shape != shape or not (np.isfinite(array) & (array >= 0)).all():
                raise ProblemError(
                    f"{name} must be {' x '.join(map(str, shape))} finite numbers >= 0, found "
                    f"shape {array.shape}; correct them"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, cluster: Cluster, vector_bytes: Sequence[float], every: int = 1) -> GroupAveraging:
        """Averaging on a cluster; sites' limits count as limits of pairs."""
        network = cluster.limited_network()
        same = np.eye(len(cluster), dtype=bool)
        rate = np.where(same, np.inf, network.bandwidth_bytes_per_s)
        latency = np.where(same, 0.0, network.latency_s)
        up, down = device_limits(cluster)
        return cls(
            np.asarray(vector_bytes, dtype=np.float64),
            1.0 / np.minimum(rate, rate.T) / every,
            1.0 / np.minimum(up, down) / every,
            (latency + latency.T) / every,
        )
