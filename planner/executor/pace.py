"""How finely an averaging is cut and how much of it is on the way, from the plan's network.

Chunks must be small: what a round takes beyond its fullest link is a chunk's time to fill and to
drain. They must not be many: each costs messages. And what is on the way must cover the longest way
there and back, or links stand idle waiting for returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.training_plan.model import AveragingGroup

MESSAGE_S = 40e-6
"""Processor time of a chunk's message at one end."""
BUSY = 0.25
"""Of a rank's processor time in a round, what messages may cost."""
MOST_CHUNKS = 384
LEAST_BYTES = 1 << 15
"""Of a chunk of the largest share."""
EARLY = 0.25
"""Of the longest way there and back: a round that can be over sooner than it is planned by less
than that begins before word from all is there, which takes half that way."""
SLACK = 8
"""Chunks beyond those under way: summed, queued at both ends, and for links that run unevenly."""


@dataclass(frozen=True)
class Pace:
    """How a group averages.

    Attributes
    ----------
    chunks
        Of every share; all shares' chunks of one number travel together.
    window
        Chunks that a member contributes beyond those that it got back whole.
    early_s
        After its own readiness, when a member contributes before it knows that all others are
        ready; None: it waits until it does.
    """

    chunks: int
    window: int
    early_s: float | None = None


def pace_of(
    group: AveragingGroup,
    vector_bytes: float,
    cluster: Cluster,
    *,
    speed: float = 1.0,
    shrink: float = 1.0,
    crowd: float = 1.0,
) -> Pace:
    """The pace of a group, the same for all its members.

    Parameters
    ----------
    group
        Who averages.
    vector_bytes
        As they travel.
    cluster
        The plan's devices.
    speed, shrink
        All times and all bytes of the cluster are divided by them.
    crowd
        Ranks that share a processor.

    Returns
    -------
    Pace
        Chunks and window.
    """
    if len(group.members) == 1:
        return Pace(1, 1)
    # as many chunks as the plan has without shrinking
    largest = max(group.shares) * group.width * vector_bytes * shrink
    seconds = round_s(group, vector_bytes * shrink, cluster) / speed
    delay = longest_round_trip_s(group, cluster) / speed
    messages_s = 4 * (len(group.members) - 1) * MESSAGE_S * crowd
    wanted = MOST_CHUNKS * seconds / (seconds + delay)
    chunks = max(1, int(min(wanted, largest / LEAST_BYTES, BUSY * seconds / messages_s)))
    under_way = math.ceil(delay / seconds * chunks) if seconds > 0 else chunks
    spare = spare_s(group, vector_bytes * shrink, cluster) / speed
    early_s = spare if spare < EARLY * delay else None
    return Pace(chunks, min(chunks, 2 * under_way + SLACK), early_s)


def round_s(group: AveragingGroup, vector_bytes: float, cluster: Cluster) -> float:
    """Seconds in which the fullest link or device carries a round's bytes.

    Parameters
    ----------
    group
        Who averages.
    vector_bytes
        As they travel.
    cluster
        The plan's devices.

    Returns
    -------
    float
        At least.
    """
    there, back = _sent(group, vector_bytes)
    return _fullest_s(there + back, group, cluster)


def spare_s(group: AveragingGroup, vector_bytes: float, cluster: Cluster) -> float:
    """By how much a round that all begin at once is over sooner than it is planned.

    A plan counts the fullest link's bytes and the way there and back. Returns follow contributions
    a way later; where these fill the same link until then, a round takes the bytes and one way, as
    it does where there are either only.

    Parameters
    ----------
    group
        Who averages.
    vector_bytes
        As they travel.
    cluster
        The plan's devices.

    Returns
    -------
    float
        Seconds, at most half the longest way there and back.
    """
    there, back = _sent(group, vector_bytes)
    way = longest_round_trip_s(group, cluster) / 2
    if not there.any() or not back.any():
        return way
    one_way = max(_fullest_s(sent, group, cluster) for sent in (there, back))
    return min(_fullest_s(there + back, group, cluster) - one_way, way)


def _sent(
    group: AveragingGroup, vector_bytes: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes from each member to each other: contributions, and returns of its own share."""
    share, gives = np.array(group.shares), np.array(group.gives, dtype=float)
    gets = np.array(group.gets, dtype=float)
    found = gives[:, None] * share[None, :], share[:, None] * gets[None, :]
    for sent in found:
        sent *= vector_bytes * group.width
        np.fill_diagonal(sent, 0.0)
    return found


def _fullest_s(sent: NDArray[np.float64], group: AveragingGroup, cluster: Cluster) -> float:
    members = np.array(group.members)
    pairs = cluster.network.bandwidth_bytes_per_s
    up, down = device_limits(cluster)
    return max(
        _lines_s(sent / group.width, members, cluster),
        float((sent / pairs[np.ix_(members, members)]).max()),
        float((sent.sum(axis=1) / up[members]).max()),
        float((sent.sum(axis=0) / down[members]).max()),
    )


def _lines_s(sent: NDArray[np.float64], members: NDArray[np.int64], cluster: Cluster) -> float:
    """The same of sites' lines, which groups of other slices use at the same time."""
    devices = cluster.devices
    at = np.array(devices.sites or ("",) * len(cluster))[members]
    longest = 0.0
    for lines, there in (
        (devices.site_upload_bytes_per_s, sent),
        (devices.site_download_bytes_per_s, sent.T),
    ):
        for site, rate in (lines or {}).items():
            longest = max(longest, float(there[at == site][:, at != site].sum()) / rate)
    return longest


def longest_round_trip_s(group: AveragingGroup, cluster: Cluster) -> float:
    """Seconds of the longest way between two members, there and back.

    Parameters
    ----------
    group
        Who averages.
    cluster
        The plan's devices.

    Returns
    -------
    float
        Of latencies alone.
    """
    members = list(group.members)
    latency = cluster.network.latency_s[np.ix_(members, members)]
    both = np.where(np.eye(len(members), dtype=bool), 0.0, latency + latency.T)
    return float(both.max())
