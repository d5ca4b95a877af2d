"""A plan as arrays: operations, messages and averaging rounds, as the compiled clock reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.clock.links import MOST_SHARED, NONE, Floats, Ints, Links
from planner.training_plan.model import AveragingGroup, Schedule, TrainingPlan
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload

KINDS = ("B", "H", "F")
"""Kinds of operations by number, the most urgent first."""


class Pairs(NamedTuple):
    """The ordered pairs that messages of the pipeline use.

    Attributes
    ----------
    source, destination
        ``int[P]``.
    latency_s, bandwidth
        ``float[P]``; bytes per second of the pair itself.
    most
        ``float[P]``: the pair's bandwidth within the capacities that it shares.
    shared
        ``int[P, 4]``: numbers of these resources, -1 for none.
    capacity
        ``float[R]``.
    first
        ``int[R + 1]``: where the resource's pairs begin in a list of all.
    """

    source: Ints
    destination: Ints
    latency_s: Floats
    bandwidth: Floats
    most: Floats
    shared: Ints
    capacity: Floats
    first: Ints


class Work(NamedTuple):
    """Operations of all schedules; those of schedule k come after those of k - 1.

    Attributes
    ----------
    device, kind, microbatch
        ``int[O]``; kinds by their place in `KINDS`.
    seconds
        ``float[O]``.
    after
        ``int[O]``: the next operation of the microbatch, -1 at its end.
    pair
        ``int[O]``: the pair over which the result goes there, -1: the same device does both.
    size
        ``float[O]``: bytes of that message.
    begins
        ``bool[O]``: first of its microbatch.
    order
        ``int[O]``: operations by schedule and device, in the order in which it does them.
    first
        ``int[K * N + 1]``: where the operations of schedule k on device d begin in ``order``.
    update_s
        ``float[N]``.
    """

    device: Ints
    kind: Ints
    microbatch: Ints
    seconds: Floats
    after: Ints
    pair: Ints
    size: Floats
    begins: NDArray[np.bool_]
    order: Ints
    first: Ints
    update_s: Floats


class Rounds(NamedTuple):
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
        ``int[G]``.
    round
        ``int[G]``: 0 for a first round.
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


class Program(NamedTuple):
    """All that the clock needs to know of a plan."""

    pairs: Pairs
    work: Work
    rounds: Rounds


def compile_plan(plan: TrainingPlan, links: Links, workload: Workload) -> Program:
    """The arrays of a plan on given links.

    Parameters
    ----------
    plan
        What runs.
    links
        Where.
    workload
        What is trained.

    Returns
    -------
    Program
        Its schedules in the plan's order.
    """
    sent = message_bytes(plan, workload)
    pairs, work = compile_schedules(plan.schedules, plan.compute_times, sent, links)
    gradient = workload.gradient_bytes(plan.stage_layers, plan.head_stage)
    wire = [size * plan.codec.wire_ratio for size in gradient]
    return Program(pairs, work, _rounds(plan.averaging, wire, links, pairs))


def message_bytes(plan: TrainingPlan, workload: Workload) -> Floats:
    """Bytes of the activations that each device's stage gives for a microbatch.

    Parameters
    ----------
    plan
        What runs.
    workload
        What is trained.

    Returns
    -------
    ndarray
        ``float[N]``; 0 where a device holds no stage.
    """
    sent = np.zeros(len(plan.cluster))
    sizes = [workload.stage(*part).output_bytes for part in plan.stage_layers]
    for d, j in plan.stage_of.items():
        sent[d] = sizes[j] * workload.microbatch_samples
    return sent


def compile_schedules(
    schedules: Sequence[Schedule], times: ComputeTimes, sent: Floats, links: Links
) -> tuple[Pairs, Work]:
    """The arrays of some schedules.

    Parameters
    ----------
    schedules
        Paths, and orders unless the clock is to choose them.
    times
        Seconds of every device on its stage.
    sent
        ``float[N]``: bytes of a microbatch's activations after each device's stage.
    links
        Where.

    Returns
    -------
    tuple[Pairs, Work]
        Messages' pairs, and operations.
    """
    n = len(links)
    cost = times.operation_s
    seconds = [
        np.asarray(column) + cost for column in (times.backward_s, times.head_s, times.forward_s)
    ]
    parts = [_chains(s) for s in schedules]
    orders = [_orders(s, p, n) for s, p in zip(schedules, parts, strict=True)]
    kind = np.concatenate([p.kind for p in parts])
    device = np.concatenate([p.device for p in parts])
    starts = np.cumsum([0, *(len(p.kind) for p in parts)])
    after = np.concatenate(
        [
            np.where(p.last, NONE, np.arange(1, len(p.kind) + 1) + at)
            for p, at in zip(parts, starts, strict=False)
        ]
    )
    target = device[np.maximum(after, 0)]
    travels = (after != NONE) & (target != device)
    codes, index = np.unique((device * n + target)[travels], return_inverse=True)
    pair = np.full(len(kind), NONE)
    pair[travels] = index
    # a gradient has the size of the activations it belongs to, which its receiver gave
    owner = np.where(kind[np.maximum(after, 0)] == KINDS.index("B"), target, device)
    work = Work(
        device,
        kind,
        np.concatenate([p.microbatch for p in parts]),
        np.select([kind == k for k in range(3)], [column[device] for column in seconds]),
        after,
        pair,
        np.where(travels, sent[owner], 0.0),
        np.concatenate([p.begins for p in parts]),
        np.concatenate([o.ops + at for o, at in zip(orders, starts, strict=False)]),
        np.concatenate([[0], np.cumsum(np.concatenate([o.counts for o in orders]))]),
        np.asarray(times.update_s, dtype=np.float64),
    )
    return _pairs(codes // n, codes % n, links), work


class _Chains(NamedTuple):
    """Operations of one schedule, microbatch by microbatch in their order of dependence."""

    device: Ints
    kind: Ints
    microbatch: Ints
    begins: NDArray[np.bool_]
    last: NDArray[np.bool_]


def _chains(schedule: Schedule) -> _Chains:
    lengths = np.array([len(path) for path in schedule.paths], dtype=np.int64)
    flat = [d for b, path in enumerate(schedule.paths) for d in _visits(schedule, b, path)]
    total = 2 * lengths + 1
    ends = np.cumsum(total)
    microbatch = np.repeat(np.arange(len(lengths)), total)
    place = np.arange(int(total.sum())) - np.repeat(ends - total, total)
    length = lengths[microbatch]
    kind = np.select([place < length, place == length], [KINDS.index("F"), KINDS.index("H")], 0)
    return _Chains(
        np.array(flat, dtype=np.int64), kind, microbatch, place == 0, place == 2 * length
    )


def _visits(schedule: Schedule, b: int, path: tuple[int, ...]) -> list[int]:
    return [*path, schedule.head_device(b), *reversed(path)]


class _Orders(NamedTuple):
    """Operations of one schedule by device, by their numbers in `_Chains`; how many each has."""

    ops: Ints
    counts: Ints


def _orders(schedule: Schedule, chains: _Chains, n: int) -> _Orders:
    """Without a planned order, any that has each device's operations together."""
    if not schedule.order:
        return _Orders(
            np.argsort(chains.device, kind="stable"), np.bincount(chains.device, minlength=n)
        )
    first, number = 0, []
    places = []
    for path in schedule.paths:
        places.append({d: k for k, d in enumerate(path)})
        number.append(first)
        first += 2 * len(path) + 1
    ops = []
    for d, row in enumerate(schedule.order):
        for kind, b in row:
            length = len(places[b])
            place = length if kind == "H" else places[b][d]
            ops.append(number[b] + (2 * length - place if kind == "B" else place))
    counts = [len(row) for row in schedule.order]
    return _Orders(np.array(ops, dtype=np.int64), np.array(counts, dtype=np.int64))


def _pairs(source: Ints, destination: Ints, links: Links) -> Pairs:
    shared = np.full((len(source), MOST_SHARED), NONE)
    for p, (i, j) in enumerate(zip(source.tolist(), destination.tolist(), strict=True)):
        found = links.shared(i, j)
        shared[p, : len(found)] = found
    bandwidth = links.bandwidth_bytes_per_s[source, destination]
    capacity = links.capacity_bytes_per_s
    limits = np.where(shared == NONE, np.inf, capacity[np.maximum(shared, 0)])
    users = np.bincount(shared[shared != NONE], minlength=len(capacity))
    return Pairs(
        source,
        destination,
        links.latency_s[source, destination],
        bandwidth,
        np.minimum(bandwidth, limits.min(axis=1, initial=np.inf)),
        shared,
        capacity,
        np.concatenate([[0], np.cumsum(users)]),
    )


def group_bytes(group: AveragingGroup, vector_bytes: float) -> Floats:
    """Bytes that every member sends every other in a round.

    Member i gives member k the share that k sums, and gets back the sum of it.

    Parameters
    ----------
    group
        The round's group.
    vector_bytes
        Of the whole vector on the wire.

    Returns
    -------
    ndarray
        ``float[m, m]``, by place in the group; nothing on the diagonal.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2:
    a_ik = c_i r_k, g_ki = r_k.
    """
    share, gives = np.array(group.shares), np.array(group.contributes, dtype=float)
    sent = (gives[:, None] * share[None, :] + share[:, None]) * vector_bytes
    np.fill_diagonal(sent, 0.0)
    return np.asarray(sent)


def return_s(group: AveragingGroup, links: Links) -> float:
    """The longest latency there and back of a round.

    Parameters
    ----------
    group
        The round's group.
    links
        Where.

    Returns
    -------
    float
        Seconds, over all pairs of a member and another that sums something.
    """
    index = np.array(group.members)
    latency = links.latency_s[np.ix_(index, index)]
    both = latency + latency.T
    sums = np.array(group.shares) > 0
    used = ~np.eye(len(index), dtype=bool) & (sums[:, None] | sums[None, :])
    return float(both[used].max(initial=0.0))


def _rounds(
    averaging: Sequence[Sequence[Sequence[AveragingGroup]]],
    wire_bytes: Sequence[float],
    links: Links,
    pairs: Pairs,
) -> Rounds:
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
        sent = group_bytes(group, wire_bytes[stage])
        used = number[np.ix_(index, index)]
        alone = sent / links.bandwidth_bytes_per_s[np.ix_(index, index)]
        pair_s.append(float(alone[used == NONE].max(initial=0.0)))
        own.append(dict(zip(used[used != NONE].tolist(), sent[used != NONE].tolist(), strict=True)))
        needs.append(_shared_needs(index, sent, links))
    return Rounds(
        _ints(len(g.members) for _, _, g in flat),
        _ends(of),
        _ints(g for groups in of for g in groups),
        np.array([return_s(g, links) for _, _, g in flat], dtype=np.float64),
        np.array(pair_s, dtype=np.float64),
        _ends(needs),
        _ints(r for need in needs for r in need),
        np.array([size for need in needs for size in need.values()], dtype=np.float64),
        _ends(own),
        _ints(p for busy in own for p in busy),
        np.array([size for busy in own for size in busy.values()], dtype=np.float64),
        _ints(stage for stage, _, _ in flat),
        _ints(r for _, r, _ in flat),
    )


def _shared_needs(members: Ints, sent: Floats, links: Links) -> dict[int, float]:
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
