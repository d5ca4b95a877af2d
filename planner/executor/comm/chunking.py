"""Chunk size and window of averaging, from the plan's network.

Chunks must be small: beyond its slowest link, a round takes the time of a chunk to fill and drain.
They must not be too many: each costs messages. The window must cover the longest round-trip time,
or links idle while waiting for gathered chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.training_plan.averaging_group import AveragingGroup

CPU_PER_MESSAGE_S = 40e-6
"""Processor time of a chunk's message at one end."""
MAX_CPU_SHARE = 0.25
"""Largest share of a rank's processor time in a round for messages."""
MAX_CHUNKS = 384
MIN_BYTES = 1 << 15
"""Smallest chunk of the largest share."""
EARLY_START_FACTOR = 1.0
"""Rounds whose bytes take less than this multiple of the longest round trip start early."""
MAX_NOTIFY_DELAY = 0.05
"""Largest delay of a round by waiting until all are ready, relative to its planned time; beyond it,
members notify each other ahead. Earlier rounds compete with the last pipeline messages."""
EXTRA_CHUNKS = 8
"""Chunks beyond those in flight: being summed, queued at both ends, or on uneven links."""


@dataclass(frozen=True)
class Chunking:
    """Chunking of a group.

    Attributes
    ----------
    chunks
        Number of chunks of every share; chunks of all shares with the same number travel together.
    window
        Chunks that a member sends beyond those gathered completely.
    start_early_s
        Time after its own readiness at which a member starts even if others have not reported
        theirs; None to always wait.
    slack_s
        Time by which a round that all begin when ready ends before its planned end; None if
        notifications arrive in time.
    """

    chunks: int
    window: int
    start_early_s: float | None = None
    slack_s: float | None = None


def choose_chunking(
    group: AveragingGroup,
    vector_bytes: float,
    cluster: Cluster,
    *,
    speed: float = 1.0,
    shrink: float = 1.0,
    ranks_per_core: float = 1.0,
) -> Chunking:
    """The chunking of a group, equal on all its members."""
    if len(group.members) == 1:
        return Chunking(1, 1)
    # the number of chunks of the unscaled plan
    largest = max(group.shares) * group.width * vector_bytes * shrink
    seconds = round_s(group, vector_bytes * shrink, cluster) / speed
    delay = longest_round_trip_s(group, cluster) / speed
    messages_s = 4 * (len(group.members) - 1) * CPU_PER_MESSAGE_S * ranks_per_core
    ideal = MAX_CHUNKS * seconds / (seconds + delay)
    chunks = max(1, int(min(ideal, largest / MIN_BYTES, MAX_CPU_SHARE * seconds / messages_s)))
    in_flight = math.ceil(delay / seconds * chunks) if seconds > 0 else chunks
    saved_s, late_s = compare_with_plan_s(group, vector_bytes * shrink, cluster)
    # early data competes with messages that others need: at most one latency worth
    early = late_s > saved_s and seconds < EARLY_START_FACTOR * delay
    start_early_s = saved_s / speed if early else None
    late = late_s > MAX_NOTIFY_DELAY * planned_s(group, vector_bytes * shrink, cluster)
    window = min(chunks, 2 * in_flight + EXTRA_CHUNKS)
    return Chunking(chunks, window, start_early_s, saved_s / speed if late else None)


def round_s(group: AveragingGroup, vector_bytes: float, cluster: Cluster) -> float:
    """Seconds in which the fullest link or device carries the bytes of a round."""
    contributions, gathered = _sent(group, vector_bytes)
    return float(_seconds(contributions + gathered, group, cluster).max())


def planned_s(group: AveragingGroup, vector_bytes: float, cluster: Cluster) -> float:
    """Seconds of a round as in the plan, on otherwise idle links."""
    return round_s(group, vector_bytes, cluster) + planned_round_trip_s(group, cluster)


def round_end_s(
    group: AveragingGroup, vector_bytes: float, cluster: Cluster, begin_s: NDArray[np.float64]
) -> float:
    """End of a round whose members begin at given times, with each link's own latency.

    Contributions go first, sums follow as they are ready. A link has finished both no sooner
    than its bytes take, and the last sum no sooner than after the last contribution to its
    reducer.
    """
    latency = _latency_s(group, cluster)
    contributions, gathered = _sent(group, vector_bytes)
    phases = (contributions, gathered, contributions + gathered)
    contributions_s, gathered_s, total_s = (_seconds(sent, group, cluster) for sent in phases)
    contributes = contributions > 0
    reduced_s = np.where(contributes, begin_s[:, None] + contributions_s + latency, 0.0).max(axis=0)
    if not gathered.any():
        return float(reduced_s.max())
    first_arrival_s = np.where(contributes, begin_s[:, None] + latency, 0.0).max(axis=0)
    arrived_s = np.maximum(reduced_s[:, None], first_arrival_s[:, None] + gathered_s)
    arrived_s = np.maximum(arrived_s, begin_s[:, None] + total_s)
    return float((arrived_s + latency)[gathered > 0].max())


def compare_with_plan_s(
    group: AveragingGroup, vector_bytes: float, cluster: Cluster
) -> tuple[float, float]:
    """Compare the planned end of a round with ends of actual rounds.

    A plan counts the bytes of the fullest link and the longest round trip. Notifications of
    readiness take one more latency.

    Returns
    -------
    tuple[float, float]
        Seconds by which a round that all begin at once ends sooner, at least 0; and by which one
        that waits for notifications ends later, negative if sooner.
    """
    expected_s = planned_s(group, vector_bytes, cluster)
    notified_s = _latency_s(group, cluster).max(axis=0)
    saved_s = expected_s - round_end_s(group, vector_bytes, cluster, np.zeros(len(notified_s)))
    late_s = round_end_s(group, vector_bytes, cluster, notified_s) - expected_s
    return max(saved_s, 0.0), late_s


def _latency_s(group: AveragingGroup, cluster: Cluster) -> NDArray[np.float64]:
    """Latency between all pairs of members."""
    return np.asarray(cluster.network.latency_s[np.ix_(group.members, group.members)])


def _sent(
    group: AveragingGroup, vector_bytes: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes between all pairs of members: contributions and gathered sums."""
    share, contributes = np.array(group.shares), np.array(group.sends_contributions, dtype=float)
    receives = np.array(group.receives_sums, dtype=float)
    both = contributes[:, None] * share[None, :], share[:, None] * receives[None, :]
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
    for limits, axis in (
        (devices.site_upload_bytes_per_s, 1),
        (devices.site_download_bytes_per_s, 0),
    ):
        for site, rate in (limits or {}).items():
            inside = np.expand_dims(cluster.inside[site][members], axis)
            crossing = inside & ~inside.T
            # groups of other slices share the line
            line_s = float(sent[crossing].sum()) / group.width / rate
            seconds = np.where(crossing, np.maximum(seconds, line_s), seconds)
    return np.where(sent > 0, seconds, 0.0)


def planned_round_trip_s(group: AveragingGroup, cluster: Cluster) -> float:
    """Longest round-trip time of pairs with traffic, as in the plan."""
    latency = _latency_s(group, cluster)
    contributions, gathered = _sent(group, 1.0)
    used = contributions + gathered > 0
    return float((latency + latency.T)[used | used.T].max(initial=0.0))


def longest_round_trip_s(group: AveragingGroup, cluster: Cluster) -> float:
    """Longest round-trip time between two members."""
    latency = _latency_s(group, cluster)
    return float((latency + latency.T).max())
