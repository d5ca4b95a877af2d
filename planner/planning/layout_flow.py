"""Flow of microbatches through a layout, as a linear program over device classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.lp.flow import SharedLines, StageFlow, solve_flow
from planner.planning.device_classes import DeviceClasses, Floats, Ints
from planner.planning.layout import Layout
from planner.planning.request import PlanningProblem
from planner.problems import ProblemError
from planner.workload.costs import StageCosts, split_costs

SPARE, LACK = 1.6, 0.2
"""A pair that is busy most of the period makes messages wait for each other: each should have time
for so many times its messages, and what the worst lacks counts like so much of a longer period. On
the simulator pipelines of six layouts took 0.94 to 1.02 times as long with it."""


ANY = 1e12
"""So many microbatches are no limit."""


class FlowNodes(NamedTuple):
    """The places of every stage, one after the other.

    Attributes
    ----------
    stage, place, devices
        ``int[V]``: which stage, which place, how many of its devices.
    """

    stage: Ints
    place: Ints
    devices: Ints

    @classmethod
    def of(cls, layout: Layout) -> FlowNodes:
        """Of all places that a stage has devices of."""
        counts = np.array(layout.counts, dtype=np.int64)
        stage, place = np.nonzero(counts)
        return cls(stage, place, counts[stage, place])

    def by_stage(self, places: DeviceClasses, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """The node of every device of every stage."""
        place_of = {d: c for c, members in enumerate(places.members) for d in members}
        stages = zip(self.stage.tolist(), self.place.tolist(), strict=True)
        node = {at: v for v, at in enumerate(stages)}
        return [[node[j, place_of[d]] for d in group] for j, group in enumerate(groups)]


def flow_of(
    places: DeviceClasses,
    layout: Layout,
    costs: tuple[StageCosts, ...],
    in_flight: float,
    most_held: float = math.inf,
) -> tuple[FlowNodes, StageFlow]:
    """The linear program of a layout: alike devices of a stage share its work evenly.

    Returns
    -------
    tuple[Nodes, StageFlow]
        The places of each stage, and what flows between them.
    """
    nodes = FlowNodes.of(layout)
    stage, place, count = nodes
    out = np.array([cost.output_bytes for cost in costs])
    out[-1] = 0.0
    sent = out + np.concatenate([[0.0], out[:-1]])
    own = np.array([costs[j].busy_s(places.flops[c]) for j, c in zip(stage, place, strict=True)])
    busy = np.maximum(own, sent[stage] / places.capacity[place]) / count
    pairs = [
        (u, v) for u in range(len(stage)) for v in np.flatnonzero(stage == stage[u] + 1).tolist()
    ]
    source, target = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    here, there = place[source], place[target]
    size = out[stage[source]]
    both = size / places.bandwidth[here, there] + size / places.bandwidth[there, here]
    held = [
        min(costs[j].room(places.memory_bytes[c]), most_held, ANY)
        for j, c in zip(stage, place, strict=True)
    ]
    return nodes, StageFlow(
        stage,
        busy,
        own,
        source,
        target,
        size / places.slower[here, there] / (count[source] * count[target]),
        places.there_and_back_s[here, there] + both,
        count * np.array(held, dtype=float),
        in_flight,
        _lines(places, here, there, size),
        SPARE,
        LACK,
    )


def _lines(places: DeviceClasses, here: Ints, there: Ints, size: Floats) -> SharedLines | None:
    """Edges between sites, over the lines of both: activations one way, gradients the other."""
    if len(places.line) == 0:
        return None
    site = places.site
    edge = np.tile(np.flatnonzero(site[here] != site[there]), 2)
    half = len(edge) // 2
    line = np.concatenate([site[here[edge[:half]]], site[there[edge[half:]]]])
    return SharedLines(line, edge, size[edge] / places.line[line])


def most_held(problem: PlanningProblem) -> float:
    """Microbatches that a device may hold as asked, infinite for any."""
    asked = problem.request.in_flight
    return math.inf if asked is None else float(asked)


def pipeline_s(
    problem: PlanningProblem, places: DeviceClasses, layout: Layout, in_flight: float
) -> float:
    """What the pipelines of a layout take when its flow is spread evenly over the step."""
    workload = problem.workload
    costs = split_costs(workload, layout.layers, len(layout.layers) - 1, layout.recompute)
    microbatches = workload.batch_samples // workload.microbatch_samples
    try:
        flow = flow_of(places, layout, costs, in_flight, most_held(problem))[1]
        rates = solve_flow(flow, microbatches)
    except ProblemError:
        return math.inf
    return microbatches * rates.period_s + rates.round_trip_s
