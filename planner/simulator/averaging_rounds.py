"""Averaging rounds: bytes over each resource, and duration on an idle network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.simulator.pairs import Pairs
from planner.simulator.resources import NONE, Floats, Ints, LinkResources
from planner.simulator.round_traffic import RoundTraffic
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
    parts = [(_ints([]), _ints([]), np.zeros(0))]
    for rounds, size in zip(averaging, vector_bytes, strict=True):
        for group in (group for groups in rounds for group in groups):
            parts.append(RoundTraffic.of(group, size, codec).of_pairs())
    sources, destinations, sizes = map(np.concatenate, zip(*parts, strict=True))
    return sources, destinations, sizes


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
    place = np.full(n, NONE)
    pair_s: list[float] = []
    round_trips_s: list[float] = []
    resource_bytes: list[dict[int, float]] = []
    pair_bytes: list[dict[int, float]] = []
    for g, (stage, _, group) in enumerate(flat):
        for d in group.members:
            if not (updates_shards and group.phase is Phase.SPREAD):
                device_groups[d].append(g)
        traffic = RoundTraffic.of(group, vector_bytes[stage], codec)
        place[traffic.members] = np.arange(len(traffic.members))
        sender, receiver = place[pairs.source], place[pairs.destination]
        used = np.flatnonzero((sender != NONE) & (receiver != NONE))
        sender, receiver = sender[used], receiver[used]
        place[traffic.members] = NONE
        alone_s, longest_s = traffic.slowest_pair(links, (sender, receiver))
        pair_s.append(alone_s)
        round_trips_s.append(longest_s)
        sent = traffic.bytes_between(sender, receiver)
        pair_bytes.append(dict(zip(used.tolist(), sent.tolist(), strict=True)))
        resource_bytes.append(_shared_needs(traffic, links))
    size = [len(g.members) for _, _, g in flat]
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


def _round(
    group: AveragingGroup, vector_bytes: float, links: LinkResources, codec: Codec
) -> tuple[float, dict[int, float]]:
    """Seconds of a round on otherwise idle links, and its seconds on each shared resource."""
    if len(group.members) == 1:
        return 0.0, {}
    traffic = RoundTraffic.of(group, vector_bytes, codec)
    over = {
        r: size / float(links.capacity_bytes_per_s[r])
        for r, size in _shared_needs(traffic, links).items()
    }
    alone_s, longest_s = traffic.slowest_pair(links)
    return max([alone_s, *over.values()]) + longest_s, over


def _shared_needs(traffic: RoundTraffic, links: LinkResources) -> dict[int, float]:
    """Bytes of a round over each shared resource."""
    n, members = len(links), traffic.members
    need = dict(zip(members.tolist(), traffic.sent().tolist(), strict=True))
    need |= dict(zip((n + members).tolist(), traffic.received().tolist(), strict=True))
    sites = links.sites_of[members]
    for k in range(links.sites):
        at_site = (sites == k).any(axis=1)
        need[2 * n + k] = traffic.leaving(at_site)
        need[2 * n + links.sites + k] = traffic.leaving(~at_site)
    return {r: size for r, size in need.items() if size > 0}


def _ints(values: object) -> Ints:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def _ends(lists: Sequence[Sequence[int] | dict[int, float]]) -> Ints:
    return np.cumsum([0, *(len(part) for part in lists)]).astype(np.int64)
