"""Flow of microbatches through a layout, as a linear program over device classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.lp.flow import SharedLines, StageFlow, solve_flow
from planner.planning.joint.device_classes import DeviceClasses, Floats, Ints
from planner.planning.joint.layout import Layout
from planner.planning.problem import PlanningProblem
from planner.problems import ProblemError
from planner.workload.costs import StageCosts, split_costs

LINK_HEADROOM, HEADROOM_PENALTY = 1.6, 0.2
"""Messages queue on a link that is busy for most of the period. Every pair should have capacity for
this multiple of its messages; the largest shortfall, in periods, is penalised with this weight. In
the simulator, pipelines of six layouts took 0.94 to 1.02 times as long with it as without."""

IN_FLIGHT = 2.0
"""Microbatches in flight beyond a stage, as a multiple of rate times delay (Little's law). In the
simulator they queue; below about 2, pipelines run dry. See docs/explanation/joint-search.md."""

UNLIMITED = 1e12
"""A number of microbatches in flight that is no limit."""


class FlowNodes(NamedTuple):
    """Nodes of the flow: one for every stage and device class that holds it.

    Attributes
    ----------
    stage, device_class, devices
        ``int[V]``: stage, device class and number of devices of each node.
    """

    stage: Ints
    device_class: Ints
    devices: Ints

    @classmethod
    def of(cls, layout: Layout) -> FlowNodes:
        """Nodes of a layout."""
        counts = np.array(layout.counts, dtype=np.int64)
        stage, device_class = np.nonzero(counts)
        return cls(stage, device_class, counts[stage, device_class])

    def by_stage(self, classes: DeviceClasses, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """The node of every device of every stage."""
        keys = zip(self.stage.tolist(), self.device_class.tolist(), strict=True)
        node_of = {key: v for v, key in enumerate(keys)}
        return [[node_of[j, classes.class_of[d]] for d in group] for j, group in enumerate(groups)]


def flow_of(
    classes: DeviceClasses,
    layout: Layout,
    costs: tuple[StageCosts, ...],
    in_flight: float,
    max_in_flight: float = math.inf,
) -> tuple[FlowNodes, StageFlow]:
    """The linear program of a layout; devices of a class share the work of a stage evenly.

    With the head on the first stage, edges lead there from the last one, as if a microbatch could
    return to any device of the first stage.

    Returns
    -------
    tuple[FlowNodes, StageFlow]
        Nodes, and the edges between them with their limits.
    """
    nodes = FlowNodes.of(layout)
    stage, device_class, num_devices = nodes
    returns, stages = layout.returns, len(costs)
    output_bytes = np.array([cost.output_bytes for cost in costs])
    if not returns:
        output_bytes[-1] = 0.0
    sent_bytes = output_bytes + np.roll(output_bytes, 1)
    compute_s = np.array(
        [costs[j].busy_s(classes.flops_per_s[c]) for j, c in zip(stage, device_class, strict=True)]
    )
    busy_s = np.maximum(compute_s, sent_bytes[stage] / classes.capacity[device_class]) / num_devices
    pairs = [
        (u, v)
        for u in range(len(stage))
        if returns or stage[u] < stages - 1
        for v in np.flatnonzero(stage == (stage[u] + 1) % stages).tolist()
    ]
    source, target = (np.array([pair[k] for pair in pairs], dtype=np.int64) for k in (0, 1))
    source_class, target_class = device_class[source], device_class[target]
    message_bytes = output_bytes[stage[source]]
    transfer_s = (
        message_bytes / classes.bandwidth[source_class, target_class]
        + message_bytes / classes.bandwidth[target_class, source_class]
    )
    # of two stages, messages to the head and back use the same pairs as the others
    pair_messages = 2 if returns and stages == 2 else 1
    delay_s = classes.rtt_s[source_class, target_class] + transfer_s
    if returns:
        # after the last stage comes the head, on the way of a microbatch
        head_s = np.where(stage == 0, costs[0].head_flops, 0.0) / classes.flops_per_s[device_class]
        compute_s = compute_s - head_s
        delay_s = delay_s + np.where(stage[target] == 0, head_s[target], 0.0)
    max_live = [
        min(costs[j].room(classes.memory_bytes[c]), max_in_flight, UNLIMITED)
        for j, c in zip(stage, device_class, strict=True)
    ]
    return nodes, StageFlow(
        stage,
        busy_s,
        compute_s,
        source,
        target,
        pair_messages
        * message_bytes
        / classes.pair_bandwidth[source_class, target_class]
        / (num_devices[source] * num_devices[target]),
        delay_s,
        num_devices * np.array(max_live, dtype=float),
        in_flight,
        _lines(classes, source_class, target_class, message_bytes),
        LINK_HEADROOM,
        HEADROOM_PENALTY,
    )


def _lines(classes: DeviceClasses, source: Ints, target: Ints, size: Floats) -> SharedLines | None:
    """Edges between sites use the lines of both: for activations and for their gradients."""
    if len(classes.site_bandwidth) == 0:
        return None
    used, edges = [], []
    for ends, others in ((source, target), (target, source)):
        for line in classes.sites[ends].T:
            # lines of sites that one end is in and the other is not
            crosses = (line >= 0) & (classes.sites[others] != line[:, None]).all(axis=1)
            edges.append(np.flatnonzero(crosses))
            used.append(line[crosses])
    line, edge = np.concatenate(used), np.concatenate(edges)
    return SharedLines(line, edge, size[edge] / classes.site_bandwidth[line])


def in_flight_limit(problem: PlanningProblem) -> float:
    """The requested limit on microbatches in flight per device; infinite if there is none."""
    in_flight = problem.request.in_flight
    return math.inf if in_flight is None else float(in_flight)


def pipeline_s(
    problem: PlanningProblem, classes: DeviceClasses, layout: Layout, in_flight: float
) -> float:
    """Seconds of the pipelines of a layout with a steady flow; infinite if memory is too small."""
    workload = problem.workload
    costs = split_costs(workload, layout.layers, layout.head_stage, layout.recompute)
    microbatches = workload.batch_samples // workload.microbatch_samples
    try:
        flow = flow_of(classes, layout, costs, in_flight, in_flight_limit(problem))[1]
        rates = solve_flow(flow, microbatches)
    except ProblemError:
        return math.inf
    return microbatches * rates.period_s + rates.round_trip_s
