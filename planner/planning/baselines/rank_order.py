"""Consecutive ranks, numbered region by region: placement without a planner.

Megatron-LM and torchtitan lay the degrees of parallelism over consecutive ranks; the user decides
which one is outermost.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.network.network import Network
from planner.planning.baselines.search import (
    MAX_EVENTS,
    ORDERS,
    BaselineCandidate,
    BaselinePlan,
    SearchCounts,
    search_baselines,
)
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout import Layout
from planner.planning.problem import PlanningProblem
from planner.planning.request import OperationOrder
from planner.planning.straight.parallelism_candidates import NO_SHAPE, candidates
from planner.problems import ProblemError
from planner.training_plan.model import Routing

NEAREST_ORDERS = 10
"""Nearest-neighbour orders that are compared."""


class Outermost(enum.StrEnum):
    """The degree of parallelism that changes last over consecutive ranks."""

    PIPELINE = "pipeline"
    DATA = "data"


@dataclass(frozen=True)
class RanksByRegion:
    """The best plan for each order of ranks.

    Attributes
    ----------
    pipeline
        Stage j is ranks jP to (j + 1)P - 1, so devices that average are neighbours. None if no such
        plan fits in memory.
    data
        Pipeline p is ranks pS to (p + 1)S - 1. May be None too, but not both.
    tally
        Counts over all shapes, microbatch sizes and orders.
    """

    pipeline: BaselinePlan | None
    data: BaselinePlan | None
    tally: SearchCounts

    @property
    def best(self) -> tuple[Outermost, BaselinePlan]:
        """The faster of the two; if equal, data outermost."""
        both = ((Outermost.DATA, self.data), (Outermost.PIPELINE, self.pipeline))
        return min(
            ((kind, plan) for kind, plan in both if plan is not None),
            key=lambda item: item[1].step_s,
        )


@dataclass(frozen=True)
class OneRegion:
    """The best plan on devices of one region.

    Attributes
    ----------
    region
        The fastest region; of equal ones, the first.
    plan
        Ranks in the network's order, either degree outermost.
    tally
        Counts over all distinct regions and numbers of devices.
    of
        Number of devices in the region, some of which may be unused.
    """

    region: str
    plan: BaselinePlan
    tally: SearchCounts
    of: int

    @property
    def name(self) -> str:
        """The region, with the number of devices if not all are used."""
        few = self.plan.devices < self.of
        return f"{self.plan.devices} of {self.region}" if few else self.region


def region_order(network: Network) -> tuple[int, ...]:
    """Devices in the network's order, grouped by region.

    Returns
    -------
    tuple[int, ...]
        Regions in order of first appearance.
    """
    place = {region: k for k, region in reversed(list(enumerate(network.regions)))}
    return tuple(sorted(range(len(network)), key=lambda d: (place[network.regions[d]], d)))


def ranks_grid(order: Sequence[int], stages: int, outermost: Outermost) -> NDArray[np.int64]:
    """Device of each stage in each pipeline.

    Returns
    -------
    ndarray
        ``int[pipelines, stages]``.
    """
    ranks = np.array(order, dtype=np.int64)
    if outermost is Outermost.PIPELINE:
        return ranks.reshape(stages, -1).T
    return ranks.reshape(-1, stages)


def rank_layouts(
    order: Sequence[int], classes: DeviceClasses, layers: Mapping[int, Sequence[tuple[int, int]]]
) -> Iterator[Layout]:
    """Layouts of ranks in order, with all devices that can compute."""
    class_of = classes.class_of
    ranks = [d for d in order if d in class_of]
    for stages, ranges in layers.items():
        if len(ranks) % stages:
            continue
        for outermost in Outermost:
            counts = np.zeros((stages, len(classes)), dtype=np.int64)
            for j, column in enumerate(ranks_grid(ranks, stages, outermost).T.tolist()):
                np.add.at(counts[j], [class_of[d] for d in column], 1)
            cuts = [0, *(stop for _, stop in ranges)]
            yield Layout.of(counts.tolist(), cuts, [False] * stages)


def ranks_by_region(
    problem: PlanningProblem,
    most_events: int = MAX_EVENTS,
    over: Callable[[], bool] = lambda: False,
) -> RanksByRegion:
    """The best plan of all devices with consecutive ranks.

    Tries every number of stages that divides the devices, microbatches of the workload's size and
    powers of two times it, 1F1B and eager 1F1B. Layers are split evenly or, if devices or layers
    differ, such that the slowest stage is fastest (`planner.planning.layer_split`). Where memory
    does not hold all microbatches of a pipeline, recomputation in all stages is tried too. The head
    is tried where the request allows it. Averaging, codecs and calibration are the request's.
    """
    order = region_order(problem.cluster.network)
    trials = search_baselines(_starts(problem, order), most_events, over)
    if not trials.best:
        why = trials.refusal or NO_SHAPE
        raise ProblemError(f"no ranks by region fit these {len(order)} devices: {why}")
    pipeline, data = (trials.best.get(kind) for kind in (Outermost.PIPELINE, Outermost.DATA))
    return RanksByRegion(pipeline, data, trials.tally)


def one_region(
    problem: PlanningProblem,
    most_events: int = MAX_EVENTS,
    over: Callable[[], bool] = lambda: False,
) -> OneRegion:
    """The best plan of one region alone, as in `ranks_by_region`.

    With all its devices, and with half, a quarter and so on down to one: those with the most
    FLOP/s.
    """
    names, cluster = problem.cluster.network.regions, problem.cluster
    where: dict[str, list[int]] = {}
    for d, region in enumerate(names):
        where.setdefault(region, []).append(d)
    known: set[bytes] = set()
    starts: list[BaselineCandidate] = []
    for devices in [
        *where.values(),
        *(few for every in where.values() for few in _few(every, cluster)),
    ]:
        part = replace(problem, cluster=cluster.subset(devices))
        alike = _alike(part.cluster)
        if alike not in known:
            known.add(alike)
            ranks = range(len(devices))
            starts += (replace(start, name="region") for start in _starts(part, ranks))
    trials = search_baselines(starts, most_events, over)
    if not trials.best:
        why = trials.refusal or NO_SHAPE
        raise ProblemError(f"none of {len(where)} regions holds the model by itself: {why}")
    region = trials.starts["region"].problem.cluster.network.regions[0]
    return OneRegion(region, trials.best["region"], trials.tally, len(where[region]))


def _few(devices: Sequence[int], cluster: Cluster) -> Iterator[list[int]]:
    """Half of the devices, a quarter and so on, in the network's order."""
    fastest = sorted(devices, key=lambda d: -cluster.flops[d])
    count = len(devices) // 2
    while count:
        yield sorted(fastest[:count])
        count //= 2


def nearest_orders(problem: PlanningProblem, count: int) -> list[tuple[int, ...]]:
    """Nearest-neighbour orders of the devices from several starts."""
    network, workload = problem.cluster.network, problem.workload
    size = workload.layers[0].output_bytes * workload.microbatch_samples
    way_s = network.latency_s + size / network.bandwidth_bytes_per_s
    both_s = way_s + way_s.T
    np.fill_diagonal(both_s, np.inf)
    orders = []
    for first in np.linspace(0, len(network), count, endpoint=False).astype(int).tolist():
        distance_s, order = both_s.copy(), [first]
        while len(order) < len(network):
            distance_s[:, order[-1]] = np.inf
            order.append(int(np.argmin(distance_s[order[-1]])))
        orders.append(tuple(order))
    return list(dict.fromkeys(orders))


def ranks_by_neighbour(
    problem: PlanningProblem, most_events: int = MAX_EVENTS
) -> tuple[BaselinePlan, SearchCounts]:
    """The best of several `nearest_orders`, otherwise as `ranks_by_region`.

    Returns
    -------
    tuple[BaselinePlan, SearchCounts]
        The best plan, and counts.
    """
    starts = (
        replace(start, name="nearest")
        for order in nearest_orders(problem, NEAREST_ORDERS)
        for start in _starts(problem, order)
    )
    trials = search_baselines(starts, most_events)
    if not trials.best:
        raise ProblemError(f"no ranks by neighbour fit: {trials.refusal or NO_SHAPE}")
    return trials.best["nearest"], trials.tally


def unconstrained(problem: PlanningProblem) -> PlanningProblem:
    """The problem with shape, order and paths left open."""
    request = problem.request.replace(
        wiring=None,
        routing=Routing(),
        stages="auto",
        pipelines=None,
        stage_sizes=None,
        stage_layers=None,
        path_stages=None,
        full_every=None,
        max_swaps=None,
        schedule=OperationOrder.EAGER_1F1B,
        in_flight=None,
    )
    return replace(problem, request=request)


def _starts(problem: PlanningProblem, ranks: Sequence[int]) -> Iterator[BaselineCandidate]:
    """Every shape, microbatch size, order and head that devices and batch allow."""
    in_flight = problem.request.in_flight
    fixed = unconstrained(problem)
    variants = [
        replace(variant, request=variant.request.replace(head=head))
        for variant in candidates(fixed)
        for head in problem.heads[: 1 if variant.request.stages == 1 else None]
    ]
    for variant in variants:
        stages = variant.request.stages
        assert isinstance(stages, int)
        for order in ORDERS:
            # 1F1B fixes the number of microbatches in flight: that of the stages
            max_live = in_flight if order is OperationOrder.EAGER_1F1B else None
            if max_live is None and stages > (in_flight or stages):
                continue
            ordered = variant.request.replace(schedule=order, in_flight=max_live)
            for kind in Outermost:
                grid = ranks_grid(ranks, stages, kind)
                yield BaselineCandidate(kind, replace(variant, request=ordered), grid)


def _alike(cluster: Cluster) -> bytes:
    """A key that is equal for clusters which differ in names only."""
    network, devices = cluster.network, cluster.devices
    arrays = (
        network.latency_table.class_of,
        network.latency_table.values,
        network.bandwidth_table.values,
        cluster.flops,
        cluster.memory_bytes,
        cluster.upload_bytes_per_s,
        cluster.download_bytes_per_s,
        devices.can_compute,
        devices.can_aggregate,
    )
    sites = (
        devices.sites,
        devices.site_upload_bytes_per_s,
        devices.site_download_bytes_per_s,
        devices.site_within,
    )
    parts = [b"" if a is None else np.asarray(a).tobytes() for a in arrays]
    return b"|".join([*parts, str(len(cluster)).encode(), repr(sites).encode()])
