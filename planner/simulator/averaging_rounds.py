"""Averaging rounds: bytes over each resource, and duration on an idle network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from planner.simulator.pairs import Pairs
from planner.simulator.resources import NONE, Floats, Ints, LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec, Phase


class AveragingRounds(NamedTuple):
    """Averaging groups of all stages and rounds, as arrays.

    Attributes
    ----------
    size
        ``int[G]``: members of each group.
    device_ptr, device_groups
        Groups of each device in round order: device d's are
        ``device_groups[device_ptr[d] : device_ptr[d + 1]]``.
    round_trip_s
        ``float[G]``: the longest round-trip latency between members.
    pair_s
        ``float[G]``: bytes / bandwidth of the slowest pair that carries no pipeline messages.
    resource_ptr, resource, resource_bytes
        Per group (compressed rows), the shared resources it uses and its bytes over each.
    pair_ptr, pair, pair_bytes
        Per group (compressed rows), its pairs that also carry pipeline messages, and its bytes over
        each.
    stage
        ``int[G]``: index of the averaged vector (stages first); one past the last for the group
        that exchanges the gradient norm.
    round
        ``int[G]``: index of the round, from 0.
    norm, num_norm_senders
        Group that exchanges the gradient norm, or `NONE`, and how many members send a part. Its
        bytes are neglected, and each member leaves it as soon as it knows the norm.
    norm_send_s, norm_receive_s
        ``float[N]``: latency of a device's sum of squares to the device that adds them up, negative
        for devices that send none; and latency of the total back to the device.
    """

    size: Ints
    device_ptr: Ints
    device_groups: Ints
    round_trip_s: Floats
    pair_s: Floats
    resource_ptr: Ints
    resource: Ints
    resource_bytes: Floats
    pair_ptr: Ints
    pair: Ints
    pair_bytes: Floats
    stage: Ints
    round: Ints
    norm: int
    num_norm_senders: int
    norm_send_s: Floats
    norm_receive_s: Floats


def group_bytes(group: AveragingGroup, vector_bytes: float, codec: Codec = Codec.NONE) -> Floats:
    """Bytes that each member sends to each other member in a round.

    Member i sends member k the share that k reduces, and receives k's result unless i is an
    aggregator. A round may consist of one of the two phases only, on a slice of the vector.

    Returns
    -------
    ndarray
        ``float[m, m]``, by index in the group; 0 on the diagonal.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2:
    a_ik = c_i r_k, g_ki = r_k; here g_ki = 0 where i is an aggregator.
    """
    share, gives = np.array(group.shares), np.array(group.sends_contributions, dtype=float)
    gets = np.array(group.receives_sums, dtype=float)
    size = vector_bytes * group.width * group.wire_ratio(codec)
    sent = (gives[:, None] * share[None, :] + share[:, None] * gets[None, :]) * size
    np.fill_diagonal(sent, 0.0)
    return np.asarray(sent)


def group_traffic(
    group: AveragingGroup, vector_bytes: float, codec: Codec
) -> tuple[Ints, Ints, Floats]:
    """Senders, receivers and bytes of a round, of all pairs that send something."""
    sent, members = group_bytes(group, vector_bytes, codec), _ints(group.members)
    i, j = np.nonzero(sent)
    return members[i], members[j], sent[i, j]


def bytes_between(
    averaging: Sequence[Sequence[Sequence[AveragingGroup]]],
    vector_bytes: Sequence[float],
    codec: Codec,
) -> tuple[Ints, Ints, Floats]:
    """Bytes that averaging sends between devices, over all rounds.

    Returns
    -------
    tuple[ndarray, ndarray, ndarray]
        Senders, receivers and bytes; a pair occurs once per group.
    """
    sources, destinations, sizes = [_ints([])], [_ints([])], [np.zeros(0)]
    for rounds, size in zip(averaging, vector_bytes, strict=True):
        for group in (group for groups in rounds for group in groups):
            senders, receivers, sent = group_traffic(group, size, codec)
            sources.append(senders)
            destinations.append(receivers)
            sizes.append(sent)
    return np.concatenate(sources), np.concatenate(destinations), np.concatenate(sizes)


def round_trip_s(group: AveragingGroup, links: LinkResources) -> float:
    """The longest round-trip latency of a round."""
    index = np.array(group.members)
    latency = links.latency_s.between(index)
    used = group_bytes(group, 1.0) > 0
    return float((latency + latency.T)[used | used.T].max(initial=0.0))


def round_s(
    group: AveragingGroup, vector_bytes: float, links: LinkResources, codec: Codec = Codec.NONE
) -> float:
    """Seconds of a round on otherwise idle links."""
    return _round(group, vector_bytes, links, codec)[0]


def rounds_s(
    averaging: Sequence[Sequence[AveragingGroup]],
    vector_bytes: float,
    links: LinkResources,
    codec: Codec = Codec.NONE,
) -> float:
    """Seconds of a stage's rounds, one after the other, on otherwise idle links."""
    total = 0.0
    for groups in averaging:
        busy: dict[int, float] = {}
        longest = 0.0
        for group in groups:
            seconds, over = _round(group, vector_bytes, links, codec)
            longest = max(longest, seconds)
            for r, used_s in over.items():
                # groups of a round share sites' links only: a device is in one group
                busy[r] = busy.get(r, 0.0) + used_s
        total += max(longest, max(busy.values(), default=0.0))
    return total


def compile_rounds(
    averaging: Sequence[Sequence[Sequence[AveragingGroup]]],
    vector_bytes: Sequence[float],
    codec: Codec,
    links: LinkResources,
    pairs: Pairs,
    norm_devices: Sequence[int] = (),
    norm_reporters: Sequence[int] = (),
    *,
    updates_shards: bool = False,
) -> AveragingRounds:
    """Compile a plan's averaging to arrays.

    With ``updates_shards`` what is spread are parameters that depend on the gradient norm.
    """
    n = len(links)
    flat = [
        (stage, r, group)
        for stage, rounds in enumerate(averaging)
        for r, groups in enumerate(rounds)
        for group in groups
    ]
    device_groups: list[list[int]] = [[] for _ in range(n)]
    number_of = _pair_numbers(pairs, n)
    pair_s: list[float] = []
    resource_bytes: list[dict[int, float]] = []
    pair_bytes: list[dict[int, float]] = []
    for g, (stage, _, group) in enumerate(flat):
        for d in group.members:
            if not (updates_shards and group.phase is Phase.SPREAD):
                device_groups[d].append(g)
        index = np.array(group.members)
        sent = group_bytes(group, vector_bytes[stage], codec)
        used = number_of(index)
        alone_s = sent / links.bandwidth_bytes_per_s.between(index)
        pair_s.append(float(alone_s[used == NONE].max(initial=0.0)))
        pair_bytes.append(
            dict(zip(used[used != NONE].tolist(), sent[used != NONE].tolist(), strict=True))
        )
        resource_bytes.append(_shared_needs(index, sent, links))
    size = [len(g.members) for _, _, g in flat]
    round_trips_s = [round_trip_s(g, links) for _, _, g in flat]
    stage_rounds = [(stage, r) for stage, r, _ in flat]
    norm, norm_send_s, norm_receive_s = NONE, np.full(n, -1.0), np.zeros(n)
    if norm_devices:
        norm, adds = len(flat), norm_devices[0]
        for d in norm_devices:
            device_groups[d].append(norm)
            norm_receive_s[d] = links.latency_s[adds, d] if d != adds else 0.0
        for d in norm_reporters:
            norm_send_s[d] = links.latency_s[d, adds]
        norm_send_s[adds] = 0.0  # the adding device must have joined too
        size.append(len(norm_devices))
        round_trips_s.append(0.0)
        # any round but 0: stages' averaging times count from their first rounds
        stage_rounds.append((len(averaging), 1))
        pair_s.append(0.0)
        resource_bytes.append({})
        pair_bytes.append({})
    for g, (_, _, group) in enumerate(flat if updates_shards else ()):
        # what the norm clips is spread after it is known
        for d in group.members if group.phase is Phase.SPREAD else ():
            device_groups[d].append(g)
    return AveragingRounds(
        _ints(size),
        _ends(device_groups),
        _ints(g for groups in device_groups for g in groups),
        np.array(round_trips_s, dtype=np.float64),
        np.array(pair_s, dtype=np.float64),
        _ends(resource_bytes),
        _ints(r for needed_bytes in resource_bytes for r in needed_bytes),
        np.array(
            [size for needed_bytes in resource_bytes for size in needed_bytes.values()],
            dtype=np.float64,
        ),
        _ends(pair_bytes),
        _ints(p for busy in pair_bytes for p in busy),
        np.array([size for busy in pair_bytes for size in busy.values()], dtype=np.float64),
        _ints(stage for stage, _ in stage_rounds),
        _ints(r for _, r in stage_rounds),
        norm,
        int((norm_send_s >= 0).sum()),
        norm_send_s,
        norm_receive_s,
    )


def _pair_numbers(pairs: Pairs, devices: int) -> Callable[[Ints], Ints]:
    """A function from m devices to ``int[m, m]``: numbers of the pairs among them, or NONE."""
    codes = pairs.source * devices + pairs.destination
    by_code = np.argsort(codes)
    codes = np.append(codes[by_code], NONE)

    def number_of(members: Ints) -> Ints:
        if len(by_code) == 0:
            return np.full((len(members), len(members)), NONE)
        wanted = members[:, None] * devices + members[None, :]
        place = np.searchsorted(codes[:-1], wanted)
        known = codes[place] == wanted
        return np.where(known, np.append(by_code, NONE)[place], NONE)

    return number_of


def _round(
    group: AveragingGroup, vector_bytes: float, links: LinkResources, codec: Codec
) -> tuple[float, dict[int, float]]:
    """Seconds of a round on otherwise idle links, and its seconds on each shared resource."""
    if len(group.members) == 1:
        return 0.0, {}
    index = np.array(group.members)
    sent = group_bytes(group, vector_bytes, codec)
    over = {
        r: size / float(links.capacity_bytes_per_s[r])
        for r, size in _shared_needs(index, sent, links).items()
    }
    alone = float((sent / links.bandwidth_bytes_per_s.between(index)).max())
    return max([alone, *over.values()]) + round_trip_s(group, links), over


def _shared_needs(members: Ints, sent: Floats, links: LinkResources) -> dict[int, float]:
    """Bytes of a round over each shared resource."""
    n = len(links)
    need = dict(zip(members.tolist(), sent.sum(axis=1).tolist(), strict=True))
    need |= dict(zip((n + members).tolist(), sent.sum(axis=0).tolist(), strict=True))
    sites = links.sites_of[members]
    for k in range(links.sites):
        at_site = (sites == k).any(axis=1)
        need[2 * n + k] = float(sent[np.ix_(at_site, ~at_site)].sum())
        need[2 * n + links.sites + k] = float(sent[np.ix_(~at_site, at_site)].sum())
    return {r: size for r, size in need.items() if size > 0}


def _ints(values: object) -> Ints:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def _ends(lists: Sequence[Sequence[int] | dict[int, float]]) -> Ints:
    return np.cumsum([0, *(len(part) for part in lists)]).astype(np.int64)
