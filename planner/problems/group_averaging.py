"""What averaging adds to an arrangement: one round of equal shares over the devices of a stage."""

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
    """Averaging of every stage over whatever devices hold it.

    In a group of m that averages v bytes every pair carries 2 v / m in each direction, and every
    device sends and receives 2 v (m - 1) / m; the fullest of these takes its time, and then the
    longest way there and back. A group of one takes none.

    Attributes
    ----------
    vector_bytes
        ``float[stages]``, on the wire.
    pair_s_per_byte
        ``float[N, N]``, of the slower direction; the diagonal is 0.
    line_s_per_byte
        ``float[N]``, of the slower of a device's upload and download.
    away_s
        ``float[N, N]``, latency there and back; the diagonal is 0.
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
        """On a cluster, whose sites' lines count as limits of pairs."""
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
