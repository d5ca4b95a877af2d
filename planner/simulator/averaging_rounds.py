"""Averaging rounds: bytes over each resource, and duration on an idle network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.simulator.pairs import Pairs
from planner.simulator.resources import NONE, Floats, Ints, LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec


class AveragingRounds(NamedTuple):
    """Averaging groups, of all stages and rounds.

    Attributes
    ----------
    size
        ``int[G]``: members of each group.
    of_first, of
        Groups of each device in the order of its rounds; ``of_first`` is ``int[N + 1]``.
    return_s
        ``float[G]``: the longest latency there and back.
    pair_s
        ``float[G]``: bytes over bandwidth of the slowest pair that carries no pipeline messages.
    need_first, resource, need
        Per group, the shared resources it uses and its bytes over each.
    pair_first, pair, pair_need
        Per group, those of its pairs that carry pipeline messages too, and its bytes over each.
    stage
        ``int[G]``: which vector, stages' first; one more than there are for the group in which all
        wait for the norm.
    round
        ``int[G]``: 0 for a first round.
    norm, tellers
        That group, or `NONE`, and how many tell a part. It sends next to nothing, and each member
        is done with it by itself.
    tells_s, told_s
        ``float[N]``: the way of a device's sum of squares to who adds them up, negative for those
        that tell none; and the way of the whole sum from there.
    """

    size: Ints
    of_first: Ints
    of: Ints
    return_s: Floats
    pair_s: Floats
    need_first: Ints
    resource: Ints
    need: Floats
    pair_first: Ints
    pair: Ints
    pair_need: Floats
    stage: Ints
    round: Ints
    norm: int
    tellers: int
    tells_s: Floats
    told_s: Floats


def group_bytes(group: AveragingGroup, vector_bytes: float, codec: Codec = Codec.NONE) -> Floats:
    """Bytes that every member sends every other in a round.

    Member i gives member k the share that k sums, and gets back its sum unless it is an aggregator.
    A round may do one part of that only, with a slice of the vector.

    Returns
    -------
    ndarray
        ``float[m, m]``, by place in the group; nothing on the diagonal.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2:
    a_ik = c_i r_k, g_ki = r_k; here g_ki = 0 where i is an aggregator.
    """
    share, gives = np.array(group.shares), np.array(group.gives, dtype=float)
    gets = np.array(group.gets, dtype=float)
    size = vector_bytes * group.width * group.codec(codec).wire_ratio
    sent = (gives[:, None] * share[None, :] + share[:, None] * gets[None, :]) * size
    np.fill_diagonal(sent, 0.0)
    return np.asarray(sent)


def bytes_between(
    averaging: Sequence[Sequence[Sequence[AveragingGroup]]],
    vector_bytes: Sequence[float],
    codec: Codec,
) -> tuple[Ints, Ints, Floats]:
    """Bytes that averaging sends from device to device, all rounds together.

    Returns
    -------
    tuple[ndarray, ndarray, ndarray]
        Senders, receivers and sizes; of a pair once for each of its groups.
    """
    sources, destinations, sizes = [_ints([])], [_ints([])], [np.zeros(0)]
    for rounds, size in zip(averaging, vector_bytes, strict=True):
        for group in (group for groups in rounds for group in groups):
            sent = group_bytes(group, size, codec)
            i, j = np.nonzero(sent)
            members = _ints(group.members)
            sources.append(members[i])
            destinations.append(members[j])
            sizes.append(sent[i, j])
    return np.concatenate(sources), np.concatenate(destinations), np.concatenate(sizes)


def return_s(group: AveragingGroup, links: LinkResources) -> float:
    """The longest latency there and back of a round."""
    index = np.array(group.members)
    latency = links.latency_s[np.ix_(index, index)]
    used = group_bytes(group, 1.0) > 0
    return float((latency + latency.T)[used | used.T].max(initial=0.0))


def round_s(
    group: AveragingGroup, vector_bytes: float, links: LinkResources, codec: Codec = Codec.NONE
) -> float:
    """Seconds of a round on links that carry nothing else."""
    return _round(group, vector_bytes, links, codec)[0]


def rounds_s(
    averaging: Sequence[Sequence[AveragingGroup]],
    vector_bytes: float,
    links: LinkResources,
    codec: Codec = Codec.NONE,
) -> float:
    """Seconds of a stage's rounds, one after the other, on links that carry nothing else."""
    total = 0.0
    for groups in averaging:
        busy: dict[int, float] = {}
        longest = 0.0
        for group in groups:
            seconds, over = _round(group, vector_bytes, links, codec)
            longest = max(longest, seconds)
            for r, used_s in over.items():
                # devices have their own up- and downlinks in one group of a round only
                busy[r] = busy.get(r, 0.0) + used_s
        total += max(longest, max(busy.values(), default=0.0))
    return total


def compile_rounds(
    averaging: Sequence[Sequence[Sequence[AveragingGroup]]],
    vector_bytes: Sequence[float],
    codec: Codec,
    links: LinkResources,
    pairs: Pairs,
    awaits_norm: Sequence[int] = (),
    tells_norm: Sequence[int] = (),
) -> AveragingRounds:
    """The arrays of a plan's averaging."""
    n = len(links)
    flat = [
        (stage, r, group)
        for stage, rounds in enumerate(averaging)
        for r, groups in enumerate(rounds)
        for group in groups
    ]
    of: list[list[int]] = [[] for _ in range(n)]
    number = np.full((n, n), NONE)
    number[pairs.source, pairs.destination] = np.arange(len(pairs.source))
    pair_s: list[float] = []
    needs: list[dict[int, float]] = []
    own: list[dict[int, float]] = []
    for g, (stage, _, group) in enumerate(flat):
        for d in group.members:
            of[d].append(g)
        index = np.array(group.members)
        sent = group_bytes(group, vector_bytes[stage], codec)
        used = number[np.ix_(index, index)]
        alone = sent / links.bandwidth_bytes_per_s[np.ix_(index, index)]
        pair_s.append(float(alone[used == NONE].max(initial=0.0)))
        own.append(dict(zip(used[used != NONE].tolist(), sent[used != NONE].tolist(), strict=True)))
        needs.append(_shared_needs(index, sent, links))
    size = [len(g.members) for _, _, g in flat]
    back_s = [return_s(g, links) for _, _, g in flat]
    places = [(stage, r) for stage, r, _ in flat]
    norm, tells_s, told_s = NONE, np.full(n, -1.0), np.zeros(n)
    if awaits_norm:
        norm, adds = len(flat), awaits_norm[0]
        for d in awaits_norm:
            of[d].append(norm)
            told_s[d] = links.latency_s[adds, d] if d != adds else 0.0
        for d in tells_norm:
            tells_s[d] = links.latency_s[d, adds]
        tells_s[adds] = 0.0  # who adds must be there too
        size.append(len(awaits_norm))
        back_s.append(0.0)
        # not a first round: how long stages average is not its business
        places.append((len(averaging), 1))
        pair_s.append(0.0)
        needs.append({})
        own.append({})
    return AveragingRounds(
        _ints(size),
        _ends(of),
        _ints(g for groups in of for g in groups),
        np.array(back_s, dtype=np.float64),
        np.array(pair_s, dtype=np.float64),
        _ends(needs),
        _ints(r for need in needs for r in need),
        np.array([size for need in needs for size in need.values()], dtype=np.float64),
        _ends(own),
        _ints(p for busy in own for p in busy),
        np.array([size for busy in own for size in busy.values()], dtype=np.float64),
        _ints(stage for stage, _ in places),
        _ints(r for _, r in places),
        norm,
        int((tells_s >= 0).sum()),
        tells_s,
        told_s,
    )


def _round(
    group: AveragingGroup, vector_bytes: float, links: LinkResources, codec: Codec
) -> tuple[float, dict[int, float]]:
    """Seconds of a round on links that carry nothing else, and those over each shared resource."""
    if len(group.members) == 1:
        return 0.0, {}
    index = np.array(group.members)
    sent = group_bytes(group, vector_bytes, codec)
    over = {
        r: size / float(links.capacity_bytes_per_s[r])
        for r, size in _shared_needs(index, sent, links).items()
    }
    alone = float((sent / links.bandwidth_bytes_per_s[np.ix_(index, index)]).max())
    return max([alone, *over.values()]) + return_s(group, links), over


def _shared_needs(members: Ints, sent: Floats, links: LinkResources) -> dict[int, float]:
    """Bytes of a round over each of the resources that pairs share."""
    n = len(links)
    need = dict(zip(members.tolist(), sent.sum(axis=1).tolist(), strict=True))
    need |= dict(zip((n + members).tolist(), sent.sum(axis=0).tolist(), strict=True))
    site = links.site_of[members]
    for k in range(links.sites):
        here = site == k
        need[2 * n + k] = float(sent[np.ix_(here, ~here)].sum())
        need[2 * n + links.sites + k] = float(sent[np.ix_(~here, here)].sum())
    return {r: size for r, size in need.items() if size > 0}


def _ints(values: object) -> Ints:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def _ends(lists: Sequence[Sequence[int] | dict[int, float]]) -> Ints:
    return np.cumsum([0, *(len(one) for one in lists)]).astype(np.int64)
