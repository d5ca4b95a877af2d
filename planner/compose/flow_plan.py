"""A layout made into a plan: its flow, paths that follow it, their order, averaging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.clock.links import Links
from planner.clock.rounds import rounds_s
from planner.compose.flow_paths import mixed_paths
from planner.compose.layout import Layout
from planner.compose.places import Floats, Ints, Places
from planner.compose.pricing import chained_s, compute_times, priced, stage_averaging
from planner.compose.request import Question
from planner.compose.shape import Shape, memory_room, sent_bytes
from planner.compose.straight import eagerly_served
from planner.lp.flow import FlowRates, SharedLines, StageFlow, solve_flow
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import Schedule, TrainingPlan
from planner.workload.compute_times import ComputeTimes
from planner.workload.costs import StageCosts, split_costs


class Nodes(NamedTuple):
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
    def of(cls, layout: Layout) -> Nodes:
        """Of all places that a stage has devices of."""
        counts = np.array(layout.counts, dtype=np.int64)
        stage, place = np.nonzero(counts)
        return cls(stage, place, counts[stage, place])

    def by_stage(self, places: Places, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """The node of every device of every stage.

        Parameters
        ----------
        places
            Whose devices they are.
        groups
            Devices of every stage, of the whole cluster.
        """
        place_of = {d: c for c, members in enumerate(places.members) for d in members}
        stages = zip(self.stage.tolist(), self.place.tolist(), strict=True)
        node = {at: v for v, at in enumerate(stages)}
        return [[node[j, place_of[d]] for d in group] for j, group in enumerate(groups)]


def flow_of(
    places: Places,
    layout: Layout,
    costs: tuple[StageCosts, ...],
    in_flight: float,
    most_held: float = math.inf,
) -> tuple[Nodes, StageFlow]:
    """The linear programme of a layout: alike devices of a stage share its work evenly.

    Parameters
    ----------
    places, layout
        Where.
    costs
        Of every stage.
    in_flight
        Microbatches that must be in flight beyond a stage, as a multiple of delay over period.
    most_held
        Microbatches that a device may hold, whatever its memory.

    Returns
    -------
    tuple[Nodes, StageFlow]
        The places of each stage, and what flows between them.
    """
    nodes = Nodes.of(layout)
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
        min(costs[j].room(places.memory_bytes[c]), most_held, 1e12)
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
    )


def _lines(places: Places, here: Ints, there: Ints, size: Floats) -> SharedLines | None:
    """Edges between sites, over the lines of both: activations one way, gradients the other."""
    if len(places.line) == 0:
        return None
    site = places.site
    edge = np.tile(np.flatnonzero(site[here] != site[there]), 2)
    half = len(edge) // 2
    line = np.concatenate([site[here[edge[:half]]], site[there[edge[half:]]]])
    return SharedLines(line, edge, size[edge] / places.line[line])


def _most_held(question: Question) -> float:
    asked = question.request.in_flight
    return math.inf if asked is None else float(asked)


def pipeline_s(question: Question, places: Places, layout: Layout, in_flight: float) -> float:
    """What the pipelines of a layout take when its flow is spread evenly over the step.

    Parameters
    ----------
    question
        What is asked, of what.
    places, layout
        Who does what.
    in_flight
        As in `flow_of`.

    Returns
    -------
    float
        Seconds; infinite where memory does not hold it.
    """
    workload = question.workload
    costs = split_costs(workload, layout.layers, len(layout.layers) - 1, layout.recompute)
    microbatches = workload.batch_samples // workload.microbatch_samples
    try:
        flow = flow_of(places, layout, costs, in_flight, _most_held(question))[1]
        rates = solve_flow(flow, microbatches)
    except ProblemError:
        return math.inf
    return microbatches * rates.period_s + rates.way_s


@dataclass(frozen=True)
class Draft:
    """A layout with paths and an order, before its steps are chained.

    Attributes
    ----------
    layout
        What it was made of.
    question
        Over the devices that take part.
    shape, assignment, times, schedule
        What a plan is made of.
    seconds
        The longest that a stage takes from its first operation to its update, from rest and with
        averaging that nothing slows down: about a step, since there is no barrier.
    slower
        ``float[V]``: by how much its flow took places for slower than they are.
    late
        ``float[V]``: when their devices were done, relative to others of the same stage.
    chained
        Whether ``seconds`` has seen a step that follows, whose messages slow averaging down.
    """

    layout: Layout
    question: Question
    shape: Shape
    assignment: AssignmentPlan
    times: ComputeTimes
    schedule: Schedule
    seconds: float
    slower: Floats
    late: Floats
    chained: bool = False

    @property
    def operations(self) -> int:
        """How many a step has: what pricing takes grows with them."""
        return sum(map(len, self.schedule.order))

    def with_next_step(self) -> Draft:
        """The same draft with the seconds that it takes where a step follows."""
        if self.chained:
            return self
        parts = (self.question, self.shape, self.assignment, self.times, self.schedule)
        return replace(self, seconds=max(self.seconds, chained_s(*parts)), chained=True)

    def plan(self) -> TrainingPlan:
        """The plan, priced on the clock."""
        return priced(self.question, self.shape, self.assignment, self.times, (self.schedule,))


def drafted(
    question: Question,
    places: Places,
    layout: Layout,
    in_flight: float,
    most_in_flight: float = math.inf,
    slower: Floats | None = None,
) -> Draft:
    """Paths that follow a layout's flow, in the order in which devices serve what comes.

    Parameters
    ----------
    question
        What is asked, of what.
    places, layout
        Who does what.
    in_flight
        Microbatches that must be in flight beyond a stage, as a multiple of delay over period.
    most_in_flight
        That may be in flight, likewise: fewer wait for each other less.
    slower
        ``float[V]``: factors on the seconds of every stage's places and of their pairs, so that
        less flows there. None: as they are.

    Returns
    -------
    Draft
        Over the devices that take part.

    Raises
    ------
    ProblemError
        Memory does not hold a stage and one microbatch.
    """
    whole, workload = question.cluster, question.workload
    chosen = layout.groups(places)
    used = sorted(d for group in chosen for d in group)
    number = {d: k for k, d in enumerate(used)}
    groups = tuple(tuple(number[d] for d in group) for group in chosen)
    cluster = whole if len(used) == len(whole) else whole.subset(used)
    shape = Shape(
        layout.layers,
        tuple(map(len, groups)),
        workload.batch_samples // workload.microbatch_samples,
        Head.LAST,
        layout.recompute,
    )
    asked = replace(question, cluster=cluster)
    room = memory_room(cluster, workload, shape, groups, question.request.in_flight)
    costs = shape.costs(workload)
    nodes, flow = flow_of(places, layout, costs, in_flight, _most_held(question))
    slower = np.ones(len(flow.stage)) if slower is None else slower
    either = np.maximum(slower[flow.source], slower[flow.target])
    flow = replace(flow, busy_s=flow.busy_s * slower, pair_s=flow.pair_s * either)
    rates = solve_flow(flow, shape.microbatches)
    node_of = nodes.by_stage(places, chosen)
    if most_in_flight < math.inf:
        # Little's law
        held = rates.from_s / rates.period_s * rates.through / nodes.devices
        for group, its_nodes in zip(groups, node_of, strict=True):
            for d, v in zip(group, its_nodes, strict=True):
                room[d] = min(room[d], max(2, math.ceil(most_in_flight * held[v])))
    starts, edges = _by_device(node_of, nodes, flow, rates)
    assignment = AssignmentPlan(groups, None)
    times = compute_times(asked, shape, assignment)
    links = Links.of(cluster)
    schedule, begin, end = eagerly_served(
        Schedule("flow", Head.LAST, mixed_paths(groups, starts, edges, shape.microbatches), ()),
        times,
        sent_bytes(costs, groups, len(cluster)),
        links,
        room,
    )
    codec = Codec(question.request.codec)
    seconds = 0.0
    late = np.ones(len(flow.stage))
    for group, its_nodes, (rounds, size) in zip(
        groups, node_of, stage_averaging(asked, shape, groups), strict=True
    ):
        averaging = rounds_s(rounds, size, links, codec)
        here, at = list(group), np.array(its_nodes)
        busy = end[here] > 0
        update = max(times.update_s[d] for d in group)
        seconds = max(seconds, end[here].max() - begin[here].min() + averaging + update)
        for v in np.unique(at[busy]):
            late[v] = end[here][at == v].mean() / end[here][busy].mean()
    parts = (layout, asked, shape, assignment, times, schedule)
    return Draft(*parts, float(seconds), slower, late)


def _by_device(
    node_of: Sequence[Sequence[int]], nodes: Nodes, flow: StageFlow, rates: FlowRates
) -> tuple[Floats, list[Floats]]:
    """Parts of the microbatches that begin on each device, and over each pair by boundary."""
    count = nodes.devices
    starts = (rates.through / count)[list(node_of[0])]
    part = np.zeros((len(count), len(count)))
    part[flow.source, flow.target] = rates.part / (count[flow.source] * count[flow.target])
    return starts, [part[np.ix_(here, there)] for here, there in pairwise(node_of)]
