"""SAILOR as a planner: stages within regions, least estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.network.pair_table import PairTable
from planner.planning.baselines.rank_order import unconstrained
from planner.planning.baselines.search import (
    MAX_REFUSED,
    ORDERS,
    BaselineCandidate,
    BaselinePlan,
    search_baselines,
)
from planner.planning.problem import PlanningProblem
from planner.planning.straight.parallelism_candidates import NO_SHAPE
from planner.problems import ProblemError
from planner.workload.costs import StageCosts, split_costs

MAX_REGIONS = 12
"""Largest number of regions of which all subsets are tried."""
MAX_STAGES = 24

Floats = NDArray[np.float64]
Grid = NDArray[np.int64]


@dataclass(frozen=True)
class SailorRule:
    """The plan of SAILOR's rule, evaluated in the simulator.

    Attributes
    ----------
    plan
        With the least estimate among those that fit in memory.
    estimated_s
        The rule's estimate.
    regions
        Number of regions used.
    """

    plan: BaselinePlan
    estimated_s: float
    regions: int


def sailor_rule(problem: PlanningProblem) -> SailorRule:
    """Straight pipelines, each of whose stages averages within one region.

    Reimplemented from the paper and its published planner, for nodes of one GPU. For every subset
    of regions, the order whose narrowest link is widest; along it, stages with the same number of
    devices and equal layers, each in one region, continuing in the next region when too few devices
    are left. The estimate adds compute and messages of all stages, the slowest stage with its
    message for every further microbatch, and the slowest ring. All numbers of stages up to
    `MAX_STAGES`; microbatches of the workload's size. Beyond `MAX_REGIONS` regions, only chains
    to the region with the widest link, from each region. Added here: evaluation, the order of
    operations (the faster of 1F1B and eager 1F1B), and layers that follow heterogeneous devices.

    References
    ----------
    F. Strati et al., "Sailor: Automating Distributed Training over Dynamic, Heterogeneous, and
    Geo-distributed Clusters" (SOSP 2025), section 4; planner at https://github.com/eth-easl/sailor.
    """
    cluster = problem.cluster
    names = list(dict.fromkeys(cluster.network.regions))
    able = np.flatnonzero(np.asarray(cluster.devices.can_compute)).tolist()
    region_of = cluster.network.regions
    # the fastest of a region first
    members = [
        sorted((d for d in able if region_of[d] == name), key=lambda d: -cluster.flops[d])
        for name in names
    ]
    members = [inside for inside in members if inside]
    costs = _costs(problem)
    estimates: dict[tuple[tuple[int, ...], ...], float] = {}
    for order in _orders([inside[0] for inside in members], cluster.network.bandwidth_table):
        for grid in _grids([members[r] for r in order], costs, problem):
            key = tuple(map(tuple, grid.tolist()))
            if key not in estimates:
                estimates[key] = _estimate_s(grid, costs[len(grid[0])], problem)
    refusals: list[str] = []
    for key in sorted(estimates, key=lambda key: estimates[key])[:MAX_REFUSED]:
        grid = np.array(key, dtype=np.int64)
        chosen = search_baselines(_starts(problem, grid))
        if chosen.best:
            regions = len({region_of[d] for d in grid.ravel().tolist()})
            return SailorRule(chosen.best["sailor"], estimates[key], regions)
        refusals.append(chosen.refusal)
    raise ProblemError(f"no shape of SAILOR's rule fits: {refusals[0] if refusals else NO_SHAPE}")


def _costs(problem: PlanningProblem) -> dict[int, tuple[StageCosts, ...]]:
    """Costs of equal splits, by number of stages."""
    workload = problem.workload
    most = min(MAX_STAGES, len(workload.layers))
    return {s: split_costs(workload, workload.even_split(s), s - 1) for s in range(1, most + 1)}


def _orders(first: Sequence[int], bandwidth: PairTable) -> Iterator[tuple[int, ...]]:
    """Subsets of regions, each in the order whose narrowest link is widest."""
    count = len(first)
    wide = np.minimum(bandwidth.between(first), bandwidth.T.between(first))
    if count > MAX_REGIONS:
        yield from _chains(wide)
        return
    # by set and last region, the widest order
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (1 << r, r): (math.inf, (r,)) for r in range(count)
    }
    for chosen in range(1, 1 << count):
        inside = [r for r in range(count) if chosen >> r & 1]
        ends = [best[chosen, last] for last in inside]
        yield max(ends, key=lambda end: end[0])[1]
        for last in inside:
            narrowest, order = best[chosen, last]
            for r in range(count):
                if not chosen >> r & 1:
                    key = (chosen | 1 << r, r)
                    width = min(narrowest, float(wide[last, r]))
                    if key not in best or width > best[key][0]:
                        best[key] = (width, (*order, r))


def _chains(wide: Floats) -> Iterator[tuple[int, ...]]:
    for begin in range(len(wide)):
        chain = [begin]
        while len(chain) < min(len(wide), MAX_STAGES):
            remaining = [r for r in range(len(wide)) if r not in chain]
            yield tuple(chain)
            chain.append(max(remaining, key=lambda r: float(wide[chain[-1], r])))
        yield tuple(chain)


def _grids(
    members: Sequence[Sequence[int]],
    costs: dict[int, tuple[StageCosts, ...]],
    problem: PlanningProblem,
) -> Iterator[Grid]:
    """Stages along an order that use all its regions, by devices per stage and number of stages."""
    cluster, workload = problem.cluster, problem.workload
    microbatches = workload.batch_samples // workload.microbatch_samples
    for wide in range(1, max(map(len, members)) + 1):
        rows = [
            inside[k * wide : (k + 1) * wide]
            for inside in members
            for k in range(len(inside) // wide)
        ]
        before = sum(len(inside) // wide for inside in members[:-1])
        if wide > microbatches:
            continue
        for stages in range(before + 1, min(len(rows), max(costs)) + 1):
            chosen = rows[:stages]
            pairs = zip(chosen, costs[stages], strict=True)
            if all(cost.room(cluster.memory_bytes[d]) >= 1 for row, cost in pairs for d in row):
                yield np.array(chosen, dtype=np.int64).T


def _estimate_s(grid: Grid, costs: Sequence[StageCosts], problem: PlanningProblem) -> float:
    """1F1B by its slowest stage, plus the slowest averaging."""
    network, workload = problem.cluster.network, problem.workload
    latency, bandwidth = network.latency_table, network.bandwidth_table
    pipelines, stages = grid.shape
    rounds = -(-workload.batch_samples // (workload.microbatch_samples * pipelines))
    every, slowest, sync = 0.0, 0.0, 0.0
    for j, cost in enumerate(costs):
        own = cost.busy_s(float(problem.cluster.flops[grid[:, j]].min()))
        there = 0.0
        if j + 1 < stages:
            stage, next_stage = grid[:, j], grid[:, j + 1]
            there = max(
                float((latency[u, v] + cost.output_bytes / bandwidth[u, v]).max())
                for u, v in ((stage, next_stage), (next_stage, stage))
            )
        every += own + 2 * there
        slowest = max(slowest, own + there)
        if pipelines > 1:
            pick = np.ix_(grid[:, j], grid[:, j])
            off = ~np.eye(pipelines, dtype=bool)
            narrow = bandwidth[pick][off].min()
            far = latency[pick][off].max()
            each = cost.gradient_bytes / pipelines / narrow + far
            sync = max(sync, float(2 * (pipelines - 1) * each))
    return float(every + (rounds - 1) * slowest + sync)


def _starts(problem: PlanningProblem, grid: Grid) -> list[BaselineCandidate]:
    """The placement on the devices used, in both orders of operations."""
    used = sorted(grid.ravel().tolist())
    number = np.full(len(problem.cluster), -1)
    number[used] = np.arange(len(used))
    part = unconstrained(replace(problem, cluster=problem.cluster.subset(used)))
    own = problem.workload.microbatch_samples
    return [
        BaselineCandidate(
            "sailor",
            replace(
                part,
                request=part.request.replace(
                    stages=grid.shape[1], microbatch_samples=own, schedule=order
                ),
            ),
            number[grid],
        )
        for order in ORDERS
    ]
