"""Bytes that the members of an averaging group send each other in a round."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulator.resources import Floats, Ints, LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec


class RoundTraffic(NamedTuple):
    """Traffic of a round: member i sends ``gives[i] share[k] + share[i] gets[k]`` to member k.

    Member i sends member k the share that k reduces, and receives k's result unless i is an
    aggregator. A round may consist of one of the two phases only, on a slice of the vector. Sums
    over members need no array of all pairs, which large groups would fill memory with.

    Attributes
    ----------
    members
        ``int[m]``, devices; methods number members by their place here.
    share
        ``float[m]``: parts of the vector that the members reduce.
    gives, gets
        ``float[m]``: 1 for members that send contributions, and that receive results.
    size
        Bytes on the wire of the slice of the vector.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2:
    a_ik = c_i r_k, g_ki = r_k; here g_ki = 0 where i is an aggregator.
    """

    members: Ints
    share: Floats
    gives: Floats
    gets: Floats
    size: float

    @classmethod
    def of(
        cls, group: AveragingGroup, vector_bytes: float, codec: Codec = Codec.NONE
    ) -> RoundTraffic:
        """The traffic of a group that averages a vector of so many bytes."""
        return cls(
            np.array(group.members, dtype=np.int64),
            np.array(group.shares, dtype=np.float64),
            np.array(group.sends_contributions, dtype=np.float64),
            np.array(group.receives_sums, dtype=np.float64),
            vector_bytes * group.width * group.wire_ratio(codec),
        )

    def bytes_between(self, source: Ints, target: Ints) -> Floats:
        """Bytes from members to others, in the common shape of both."""
        parts = self.gives[source] * self.share[target] + self.share[source] * self.gets[target]
        return np.asarray(parts * self.size)

    def of_pairs(self) -> tuple[Ints, Ints, Floats]:
        """Senders, receivers and bytes of all pairs of devices that send something."""
        place = np.arange(len(self.members))
        sent = self.bytes_between(place[:, None], place[None, :])
        np.fill_diagonal(sent, 0.0)
        i, k = np.nonzero(sent)
        return self.members[i], self.members[k], sent[i, k]

    def sent(self) -> Floats:
        """``float[m]``: bytes that each member sends."""
        return np.asarray(
            (self.gives * _others(self.share) + self.share * _others(self.gets)) * self.size
        )

    def received(self) -> Floats:
        """``float[m]``: bytes that each member receives."""
        return np.asarray(
            (_others(self.gives) * self.share + _others(self.share) * self.gets) * self.size
        )

    def leaving(self, inside: NDArray[np.bool_]) -> float:
        """Bytes from some members to all others."""
        given = self.gives[inside].sum() * self.share[~inside].sum()
        returned = self.share[inside].sum() * self.gets[~inside].sum()
        return float((given + returned) * self.size)

    def slowest_pair(
        self, links: LinkResources, without: tuple[Ints, Ints] | None = None
    ) -> tuple[float, float]:
        """Most seconds of a pair's bytes on its own link, and the longest round trip.

        Parameters
        ----------
        without
            Senders and receivers of pairs that do not count for the former.
        """
        class_of = links.latency_s.class_of[self.members].tolist()
        columns = (class_of, self.share.tolist(), self.gives.tolist(), self.gets.tolist())
        # members that differ in none of these have the same links and the same traffic
        number: dict[tuple[float, ...], int] = {}
        kind_of = np.array(
            [number.setdefault(row, len(number)) for row in zip(*columns, strict=True)]
        )
        first, count = np.unique(kind_of, return_index=True, return_counts=True)[1:]
        pairs = np.outer(count, count) - np.diag(count)
        classes = np.array(class_of)[first]
        grid = np.ix_(classes, classes)
        sent = self.bytes_between(first[:, None], first[None, :])
        latency = links.latency_s.values[grid]
        is_used = self._replace(size=1.0).bytes_between(first[:, None], first[None, :]) > 0
        is_used = (is_used | is_used.T) & (pairs > 0)
        if without is not None:
            np.subtract.at(pairs, (kind_of[without[0]], kind_of[without[1]]), 1)
        alone_s = (sent / links.bandwidth_bytes_per_s.values[grid])[pairs > 0]
        return (
            float(alone_s.max(initial=0.0)),
            float((latency + latency.T)[is_used].max(initial=0.0)),
        )


def _others(values: Floats) -> Floats:
    """Sums over all members but one."""
    return np.asarray(values.sum() - values)
