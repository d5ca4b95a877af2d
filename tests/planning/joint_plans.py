"""Random tiny clusters and workloads, and random plans on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.averaging.hierarchical import hierarchical_rounds
from planner.planning.averaging.two_frequency import two_frequency_rounds
from planner.planning.joint.mean_bound import mean_bound
from planner.problems.answers import AssignmentPlan
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging
from planner.training_plan.choices import Codec, Head, Phase
from planner.training_plan.model import Predicted, TrainingPlan
from planner.training_plan.schedule import Operation, Schedule
from planner.workload.calibration import Calibration
from planner.workload.compute_times import ComputeTimes
from planner.workload.costs import split_costs
from planner.workload.layers import Layer
from planner.workload.workload import Workload

Groups = tuple[tuple[int, ...], ...]
Layers = tuple[tuple[int, int], ...]


def mean_bound_s(
    cluster: Cluster, workload: Workload, wire_ratio: float = 1.0, **terms: Any
) -> float:
    """Return the bound on the mean; infinite if no devices suffice."""
    bound = mean_bound(cluster, workload, wire_ratio, **terms)
    return math.inf if bound is None else bound.value


HASTE = ("forward", "backward", "any")
"""What a device takes up first, where it can choose."""


def tiny_cluster(n: int, rng: np.random.Generator, in_sites: float = 0.3) -> Cluster:
    """Devices, alike or not, with limits, stated or not, on links that are slow or fast.

    ``in_sites``: how likely two sites' lines are shared.
    """
    scale = 10.0 ** rng.uniform(-1, 1.5)
    rate = rng.uniform(0.3, 1.0, (n, n)) * 100 * scale
    latency = rng.uniform(0.0, 0.2, (n, n)) * rng.integers(0, 2)
    unlike = rng.random() < 0.6
    spread = rng.uniform(0.3, 1.0, (3, n)) if unlike else np.ones((3, n))
    limits = rng.integers(0, 2, 2)
    sites = [f"site {k}" for k in rng.integers(0, 2, n)] if rng.random() < in_sites else None
    line = {sites[0]: 60 * scale} if sites else None
    within = None
    if sites and sites[0] != sites[-1] and rate[0, 0] < 60 * scale:
        # a line around the first site's; the last site is outside
        within, line = {sites[0]: "around"}, {sites[0]: 60 * scale, "around": 40 * scale}
    devices = Devices(
        flops=100.0 * spread[0],
        memory_bytes=float(rng.choice([150.0, 400.0, 1e6])),
        upload_bytes_per_s=100 * scale * spread[1] if limits[0] else None,
        download_bytes_per_s=100 * scale * spread[2] if limits[1] else None,
        sites=sites,
        site_upload_bytes_per_s=line,
        site_download_bytes_per_s=line,
        site_within=within,
    )
    return Cluster(Network(latency, rate), devices)


def tiny_model(layers: int, count: int, rng: np.random.Generator) -> Workload:
    """Layers of different sizes; ``count`` samples a step, each a microbatch.

    The head of some shares half of the stem.
    """

    def layer(name: str) -> Layer:
        figures = rng.uniform(0.2, 1.0, 3) * [30.0, 20.0, 40.0]
        return Layer(name, int(rng.integers(0, 8)), *figures.tolist())

    stem, *inner, head = (layer(f"layer {k}") for k in range(layers + 2))
    shared = stem.parameters // 2 if head.parameters % 2 else 0
    return Workload("tiny", stem, tuple(inner), head, count, tied_parameters=shared)


def layouts(n: int, layers: int) -> Iterator[tuple[Groups, Layers]]:
    """Return every assignment of contiguous layers to disjoint groups of some devices."""
    for stages in range(1, min(n, layers) + 1):
        for stage_of in product(range(-1, stages), repeat=n):
            groups = tuple(tuple(d for d in range(n) if stage_of[d] == j) for j in range(stages))
            if all(groups):
                for cuts in combinations(range(1, layers), stages - 1):
                    ends = (0, *cuts, layers)
                    yield groups, tuple(pairwise(ends))


def recomputed_layers(layers: Layers, rng: np.random.Generator) -> tuple[int, ...]:
    """Random numbers of layers that stages recompute; most recompute none."""
    return tuple(
        int(rng.integers(1, stop - start + 1)) if rng.random() < 0.4 else 0
        for start, stop in layers
    )


def whole_plan(
    cluster: Cluster,
    workload: Workload,
    groups: Groups,
    layers: Layers,
    rng: np.random.Generator,
    *,
    recompute: tuple[int, ...] = (),
    codec: Codec = Codec.NONE,
    tied: bool = True,
    levels: bool = True,
    two_frequency: bool = False,
    measured: Calibration | None = None,
    head: Head = Head.LAST,
) -> TrainingPlan | None:
    """A plan with random wiring, order and shares; None where memory does not hold it.

    ``tied``: first and last stage average what they share.
    ``levels``: stages may average in two. ``two_frequency``: all do so within regions and between.
    ``measured``: what operations take, if not their FLOPs.
    """
    if min(map(len, groups)) < workload.optimizer_shards:
        return None
    used = sorted(d for group in groups for d in group)
    place = {d: k for k, d in enumerate(used)}
    part = cluster.subset(used)
    groups = tuple(tuple(place[d] for d in group) for group in groups)
    again = recompute or (0,) * len(groups)
    costs = split_costs(workload, layers, head.stage(len(groups)), again)
    room = {
        d: costs[j].room(float(part.memory_bytes[d]))
        for j, group in enumerate(groups)
        for d in group
    }
    if min(room.values()) < 1:
        return None
    count = workload.batch_samples // workload.microbatch_samples
    paths = tuple(_path(groups, b, rng) for b in range(count))
    order = _order(paths, head, len(used), room, str(rng.choice(HASTE)), rng)
    if order is None:
        return None
    held = (groups, layers, again)
    plan = TrainingPlan(
        cluster=part,
        network_name="tiny",
        workload=workload,
        seed=0,
        compute_times=ComputeTimes.from_flops(part, workload, *held)
        if measured is None
        else measured.compute_times(part.network.ids, workload, *held),
        assignment=AssignmentPlan.of_groups(groups),
        stage_layers=layers,
        schedules=(Schedule("any", head, paths, order),),
        averaging=tuple(
            _on_two_clocks(part, group, rng)
            if two_frequency
            else _rounds(part, group, rng, levels, workload, start)
            for group, (start, _) in zip(groups, layers, strict=True)
        ),
        predicted=Predicted(0.0, 0.0, 0.0),
        certificates={},
        recompute=again,
        left_out=tuple(cluster.network.ids[d] for d in range(len(cluster)) if d not in place),
        codec=codec,
    )
    if tied and plan.must_average_tied and not two_frequency:
        shared = _rounds(part, plan.averaged_by(len(groups)), rng, levels, workload, 0)
        plan = plan.replace(averaging=(*plan.averaging, shared))
    return plan.replace(predicted=simulate_cycle(plan)[0])


def _path(groups: Groups, b: int, rng: np.random.Generator) -> tuple[int, ...]:
    if rng.random() < 0.5:
        return tuple(group[b % len(group)] for group in groups)
    return tuple(int(rng.choice(group)) for group in groups)


def _rounds(
    cluster: Cluster,
    group: tuple[int, ...],
    rng: np.random.Generator,
    levels: bool,
    workload: Workload,
    start: int,
) -> StageAveraging:
    several = hierarchical_rounds(cluster, group) if levels and rng.random() < 0.5 else []
    two = several[int(rng.integers(len(several)))] if several else None
    limit, dtype = 1 / workload.optimizer_shards, workload.spread_dtype(start)
    if limit == 1:
        return two or ((_group(group, rng),),)
    if two is not None and max(two[-1][0].shares) <= limit:
        return (*two[:-1], tuple(replace(each, dtype=dtype) for each in two[-1]))
    owners = _group(group, rng)
    # from equal shares towards these, as far as the limit allows
    equal = 1 / len(group)
    excess = max(owners.shares) - equal
    part = min(1.0, (limit - equal) / excess) if excess > 0 else 0.0
    shares = tuple(min(equal + part * (x - equal), limit) for x in owners.shares)
    reduce = replace(owners, shares=shares, phase=Phase.REDUCE)
    return (reduce,), (replace(reduce, phase=Phase.SPREAD, dtype=dtype),)


def _on_two_clocks(
    cluster: Cluster, group: tuple[int, ...], rng: np.random.Generator
) -> tuple[tuple[AveragingGroup, ...], ...]:
    return two_frequency_rounds(cluster, group, lambda who, _: _group(who, rng), 1.0, Codec.NONE)


def _group(members: tuple[int, ...], rng: np.random.Generator) -> AveragingGroup:
    shares = rng.dirichlet(np.ones(len(members))) if rng.random() < 0.7 else None
    if shares is None:
        return AveragingGroup.equal(members)
    shares /= shares.sum()
    return AveragingGroup(members, tuple(shares.tolist()), (True,) * len(members))


def _order(
    paths: Groups, head: Head, n: int, room: dict[int, float], haste: str, rng: np.random.Generator
) -> tuple[tuple[Operation, ...], ...] | None:
    """Return a feasible sequence of operations and each device's part of it."""
    chains = [
        [
            *(("F", d) for d in path),
            ("H", path[head.stage(len(path))]),
            *(("B", d) for d in reversed(path)),
        ]
        for path in paths
    ]
    done, live = [0] * len(chains), [0] * n
    order: list[list[Operation]] = [[] for _ in range(n)]
    while True:
        ready = [
            (*chains[b][k], b)
            for b, k in enumerate(done)
            if k < len(chains[b])
            and (chains[b][k][0] != "F" or live[chains[b][k][1]] < room[chains[b][k][1]])
        ]
        if not ready:
            break
        first = {"forward": "F", "backward": "B", "any": ""}[haste]
        kind, d, b = min(ready, key=lambda op: (op[0] != first, rng.random()))
        live[d] += {"F": 1, "H": 0, "B": -1}[kind]
        order[d].append((kind, b))
        done[b] += 1
    complete = all(k == len(chain) for k, chain in zip(done, chains, strict=True))
    return tuple(map(tuple, order)) if complete else None
