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
        return self._parts(source, target) * self.size

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
        class_of = links.latency_s.class_of[self.members]
        columns = (class_of, self.share, self.gives, self.gets)
        # members that differ in none of these have the same links and the same traffic
        number: dict[tuple[float, ...], int] = {}
        kind_of: list[int] = []
        some: list[int] = []
        for member, row in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            kind = number.setdefault(row, len(number))
            kind_of.append(kind)
            if kind == len(some):
                some.append(member)
        count = np.bincount(kind_of)
        pairs = count[:, None] * count
        np.fill_diagonal(pairs, count * (count - 1))
        source, target = np.ix_(some, some)
        classes = class_of[source], class_of[target]
        parts, latency = self._parts(source, target), links.latency_s.values[classes]
        is_used = (parts > 0) & (pairs > 0)
        longest_s = (latency + latency.T)[is_used | is_used.T].max(initial=0.0)
        if without is not None:
            kinds = np.array(kind_of)
            np.subtract.at(pairs, (kinds[without[0]], kinds[without[1]]), 1)
        alone_s = parts * self.size / links.bandwidth_bytes_per_s.values[classes]
        return float(alone_s[pairs > 0].max(initial=0.0)), float(longest_s)

    def _parts(self, source: Ints, target: Ints) -> Floats:
        """Parts of the vector between members."""
        return np.asarray(
            self.gives[source] * self.share[target] + self.share[source] * self.gets[target]
        )


def _others(values: Floats) -> Floats:
    """Sums over all members but one."""
    return np.asarray(values.sum() - values)
