"""Chunk size and window of averaging, from the plan's network.

Chunks must be small: beyond its slowest link, a round takes the time of a chunk to fill and drain.
They must not be too many: each costs messages. The window must cover the longest round-trip time,
or links idle while waiting for returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.training_plan.averaging_group import AveragingGroup

MESSAGE_S = 40e-6
"""Processor time of a chunk's message at one end."""
BUSY = 0.25
"""Largest share of a rank's processor time in a round for messages."""
MAX_CHUNKS = 384
MIN_BYTES = 1 << 15
"""Smallest chunk of the largest share."""
EARLY = 1.0
"""Rounds whose bytes take less than this multiple of the longest round trip start early."""
TOLD = 0.05
"""Largest delay of a round by waiting for word from all, relative to its planned time; beyond it,
word is sent ahead. A round that starts sooner competes with the last pipeline messages."""
SLACK = 8
"""Chunks beyond those in flight: being summed, queued at both ends, or on uneven links."""


@dataclass(frozen=True)
class Chunking:
    """Chunking of a group.

    Attributes
    ----------
    chunks
        Number of chunks of every share; chunks of all shares with the same number travel together.
    window
        Chunks that a member sends beyond those returned completely.
    early_s
        Time after its own readiness at which a member starts without word from all others; None to
        always wait.
    spare_s
        Time by which a round that all begin when ready ends before its planned end; None if word
        that all are ready arrives in time.
    """

    chunks: int
    window: int
    early_s: float | None = None
    spare_s: float | None = None


def chunking_of(
    group: AveragingGroup,
    vector_bytes: float,
    cluster: Cluster,
    *,
    speed: float = 1.0,
    shrink: float = 1.0,
    crowd: float = 1.0,
) -> Chunking:
    """The chunking of a group, equal on all its members."""
    if len(group.members) == 1:
        return Chunking(1, 1)
    # the number of chunks of the unscaled plan
    largest = max(group.shares) * group.width * vector_bytes * shrink
    seconds = round_s(group, vector_bytes * shrink, cluster) / speed
    delay = longest_round_trip_s(group, cluster) / speed
    messages_s = 4 * (len(group.members) - 1) * MESSAGE_S * crowd
    ideal = MAX_CHUNKS * seconds / (seconds + delay)
    chunks = max(1, int(min(ideal, largest / MIN_BYTES, BUSY * seconds / messages_s)))
    in_flight = math.ceil(delay / seconds * chunks) if seconds > 0 else chunks
    spared_s, late_s = against_plan_s(group, vector_bytes * shrink, cluster)
    # early data competes with messages that others need: at most one latency worth
    early = late_s > spared_s and seconds < EARLY * delay
    early_s = spared_s / speed if early else None
    late = late_s > TOLD * planned_s(group, vector_bytes * shrink, cluster)
    window = min(chunks, 2 * in_flight + SLACK)
    return Chunking(chunks, window, early_s, spared_s / speed if late else None)


def round_s(group: AveragingGroup, vector_bytes: float, cluster: Cluster) -> float:
    """Seconds in which the fullest link or device carries the bytes of a round."""
    there, back = _sent(group, vector_bytes)
    return float(_seconds(there + back, group, cluster).max())


def planned_s(group: AveragingGroup, vector_bytes: float, cluster: Cluster) -> float:
    """Seconds of a round as in the plan, on otherwise idle links."""
    return round_s(group, vector_bytes, cluster) + return_s(group, cluster)


def ends_s(
    group: AveragingGroup, vector_bytes: float, cluster: Cluster, begins_s: NDArray[np.float64]
) -> float:
    """End of a round whose members begin at given times, with each link's own latency.

    Contributions go first, returns follow as sums are ready. A link has finished both no sooner
    than its bytes take, and the last return no sooner than after the last contribution to its
    reducer.
    """
    latency = _latency_s(group, cluster)
    there, back = _sent(group, vector_bytes)
    there_s, back_s, both_s = (
        _seconds(sent, group, cluster) for sent in (there, back, there + back)
    )
    gives = there > 0
    summed_s = np.where(gives, begins_s[:, None] + there_s + latency, 0.0).max(axis=0)
    if not back.any():
        return float(summed_s.max())
    first_s = np.where(gives, begins_s[:, None] + latency, 0.0).max(axis=0)
    left_s = np.maximum(summed_s[:, None], first_s[:, None] + back_s)
    left_s = np.maximum(left_s, begins_s[:, None] + both_s)
    return float((left_s + latency)[back > 0].max())


def against_plan_s(
    group: AveragingGroup, vector_bytes: float, cluster: Cluster
) -> tuple[float, float]:
    """Difference between a round that all begin at once, or with word, and the planned one.

    A plan counts the bytes of the fullest link and the longest round trip. Word that all are ready
    takes one more latency.

    Returns
    -------
    tuple[float, float]
        Seconds: how much sooner, at least 0; how much later with word, negative if sooner.
    """
    wanted_s = planned_s(group, vector_bytes, cluster)
    told_s = _latency_s(group, cluster).max(axis=0)
    spared_s = wanted_s - ends_s(group, vector_bytes, cluster, np.zeros(len(told_s)))
    late_s = ends_s(group, vector_bytes, cluster, told_s) - wanted_s
    return max(spared_s, 0.0), late_s


def _latency_s(group: AveragingGroup, cluster: Cluster) -> NDArray[np.float64]:
    """Latency between all pairs of members."""
    return np.asarray(cluster.network.latency_s[np.ix_(group.members, group.members)])


def _sent(
    group: AveragingGroup, vector_bytes: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes between all pairs of members: contributions and returns."""
    share, gives = np.array(group.shares), np.array(group.sends_contributions, dtype=float)
    gets = np.array(group.receives_sums, dtype=float)
    both = gives[:, None] * share[None, :], share[:, None] * gets[None, :]
    for sent in both:
        sent *= vector_bytes * group.width
        np.fill_diagonal(sent, 0.0)
    return both


def _seconds(
    sent: NDArray[np.float64], group: AveragingGroup, cluster: Cluster
) -> NDArray[np.float64]:
    """Seconds of each pair with traffic, on its link and on shared limits."""
    members = np.array(group.members)
    pairs = cluster.network.bandwidth_bytes_per_s
    up, down = device_limits(cluster)
    seconds = sent / pairs[np.ix_(members, members)]
    seconds = np.maximum(seconds, (sent.sum(axis=1) / up[members])[:, None])
    seconds = np.maximum(seconds, (sent.sum(axis=0) / down[members])[None, :])
    devices = cluster.devices
    at = np.array(devices.sites or ("",) * len(cluster))[members]
    for lines, axis in (
        (devices.site_upload_bytes_per_s, 1),
        (devices.site_download_bytes_per_s, 0),
    ):
        for site, rate in (lines or {}).items():
            inside = np.expand_dims(at == site, axis)
            crossing = inside & ~inside.T
            # groups of other slices share the line
            over = float(sent[crossing].sum()) / group.width / rate
            seconds = np.where(crossing, np.maximum(seconds, over), seconds)
    return np.where(sent > 0, seconds, 0.0)


def return_s(group: AveragingGroup, cluster: Cluster) -> float:
    """Longest round-trip time of pairs with traffic, as in the plan."""
    latency = _latency_s(group, cluster)
    there, back = _sent(group, 1.0)
    used = there + back > 0
    return float((latency + latency.T)[used | used.T].max(initial=0.0))


def longest_round_trip_s(group: AveragingGroup, cluster: Cluster) -> float:
    """Longest round-trip time between two members."""
    latency = _latency_s(group, cluster)
    return float((latency + latency.T).max())
