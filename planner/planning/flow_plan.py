"""From a layout to a candidate plan: flow, paths, order and averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.lp.flow import FlowRates, StageFlow, solve_flow
from planner.planning.cost import ObjectiveFunction
from planner.planning.device_classes import DeviceClasses, Floats
from planner.planning.device_flow import Spread, device_flow
from planner.planning.evaluation import chained_step_s, compute_times, evaluated, stage_averaging
from planner.planning.flow_paths import mixed_paths
from planner.planning.layout import Layout
from planner.planning.layout_flow import FlowNodes, flow_of, most_held
from planner.planning.request import PlanningProblem
from planner.planning.shape import Shape, memory_room, sent_bytes
from planner.planning.straight import eagerly_served
from planner.problems.answers import AssignmentPlan
from planner.simulator.averaging_rounds import rounds_s
from planner.simulator.resources import LinkResources
from planner.simulator.traffic import averaged_bytes
from planner.training_plan.averaging_group import within
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.compute_times import ComputeTimes


@dataclass(frozen=True)
class LayoutContext:
    """A layout with all that its drafts have in common.

    Attributes
    ----------
    problem
        Restricted to the devices that take part.
    shape, assignment, times
        What a plan is made of.
    room
        Microbatches that each device can hold.
    nodes, flow
        The layout's programme.
    node_of
        Per stage, the node of each of its devices.
    merit, usd_per_byte, averaging_usd
        What is least; ``float[N, N]`` of messages, and what a step's averaging costs in the mean,
        where dollars count.
    averaging_s, within_s, update_s
        Per stage, seconds of its averaging when nothing slows it down; of what of it is every
        step's, on two frequencies; and its longest update.
    """

    layout: Layout
    problem: PlanningProblem
    shape: Shape
    assignment: AssignmentPlan
    times: ComputeTimes
    room: Mapping[int, int]
    links: LinkResources
    nodes: FlowNodes
    flow: StageFlow
    node_of: tuple[tuple[int, ...], ...]
    merit: ObjectiveFunction
    usd_per_byte: Floats
    averaging_usd: float
    averaging_s: tuple[float, ...]
    within_s: tuple[float, ...]
    update_s: tuple[float, ...]
    _rates: dict[bytes, FlowRates] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, problem: PlanningProblem, places: DeviceClasses, layout: Layout, in_flight: float
    ) -> LayoutContext:
        """Of the devices that take part."""
        whole, workload = problem.cluster, problem.workload
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
        asked = replace(problem, cluster=cluster)
        room = memory_room(cluster, workload, shape, groups, problem.request.in_flight)
        costs = shape.costs(workload)
        nodes, flow = flow_of(places, layout, costs, in_flight, most_held(problem))
        assignment = AssignmentPlan(groups, None)
        times, links = compute_times(asked, shape, assignment), LinkResources.of(cluster)
        codec = Codec(problem.request.codec)
        averaging = stage_averaging(asked, shape, groups)
        averaging_s, within_s = (
            tuple(rounds_s(part(rounds), size, links, codec) for rounds, size in averaging)
            for part in (tuple, within)
        )
        merit, paid = ObjectiveFunction.of(problem.request), np.zeros((len(cluster), len(cluster)))
        averaging_usd = 0.0
        if merit.by_cost:
            paid = problem.request.prices.usd_per_byte(cluster.network)
            sent = averaged_bytes(averaging, codec, len(cluster), problem.request.sync_every)
            averaging_usd = float((paid * sent).sum())
        update_s = tuple(max(times.update_s[d] for d in group) for group in groups)
        node_of = tuple(map(tuple, nodes.by_stage(places, chosen)))
        parts = (asked, shape, assignment, times, room, links, nodes, flow, node_of)
        usd = (merit, paid, averaging_usd)
        return cls(layout, *parts, *usd, averaging_s, within_s, update_s)

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """Those that these stages can have; the one that is mostly the best comes first."""
        alike = len({len(group) for group in self.assignment.groups}) == 1
        rarely = self.problem.request.sync_every > 1
        first = Spread.FEW if rarely or self.flow.lines is not None else Spread.EVEN
        rest = (one for one in Spread if one is not first and (alike or one is not Spread.PAIRED))
        return first, *rest

    def draft(
        self,
        most_in_flight: float = math.inf,
        slower: Floats | None = None,
        spread: Spread = Spread.EVEN,
    ) -> CandidatePlan:
        """Paths that follow the flow, in the order in which devices serve what comes.

        Parameters
        ----------
        slower
            ``float[V]``: factors on the seconds of every stage's places and of their pairs, so that
            less flows there. None: as they are.
        """
        groups, shape = self.assignment.groups, self.shape
        slower = np.ones(len(self.flow.stage)) if slower is None else slower
        rates = self._spread_by(slower)
        room = self.room
        if most_in_flight < math.inf:
            # Little's law
            held = rates.remaining_s / rates.period_s * rates.node_share / self.nodes.devices
            most = np.maximum(2, np.ceil(most_in_flight * held)).tolist()
            room = {
                d: min(room[d], int(most[v]))
                for group, its_nodes in zip(groups, self.node_of, strict=True)
                for d, v in zip(group, its_nodes, strict=True)
            }
        starts, edges = device_flow(self.node_of, self.nodes, self.flow, rates, spread)
        paths = mixed_paths(groups, starts, edges, shape.microbatches)
        sent = sent_bytes(shape.costs(self.problem.workload), groups, len(self.links))
        unordered = Schedule("flow", Head.LAST, paths, ())
        schedule, begin, end = eagerly_served(unordered, self.times, sent, self.links, room)
        took, late = [], np.ones(len(self.flow.stage))
        for group, its_nodes in zip(groups, self.node_of, strict=True):
            here, at = list(group), np.array(its_nodes)
            busy = end[here] > 0
            took.append(end[here].max() - begin[here].min())
            for v in np.unique(at[busy]):
                late[v] = end[here][at == v].mean() / end[here][busy].mean()
        alone = np.array(took) + self.update_s
        sync = self.problem.request.sync
        ends = alone + self.averaging_s[: len(alone)]
        # what first and last stage share comes after their own
        shared_s = sum(self.averaging_s[len(ends) :])
        averages = max(ends.max(), ends[[0, -1]].max() + shared_s)
        alone = alone + self.within_s[: len(alone)]
        if sync.delayed:
            averages = max(alone.max(), averages - alone.max())
        seconds = sync.mean_s(alone.max(), averages)
        usd = self._messages_usd(paths)
        return CandidatePlan(self, schedule, float(seconds), slower, late, spread, usd)

    def _messages_usd(self, paths: Sequence[Sequence[int]]) -> float:
        """What messages cost, where dollars count: activations there and gradients back."""
        if not self.merit.by_cost:
            return 0.0
        through, both = np.array(paths), self.usd_per_byte + self.usd_per_byte.T
        costs = self.shape.costs(self.problem.workload)
        found = self.averaging_usd
        for j, cost in enumerate(costs[:-1]):
            found += cost.output_bytes * float(both[through[:, j], through[:, j + 1]].sum())
        return found

    def _spread_by(self, slower: Floats) -> FlowRates:
        """The flow where places are so much slower."""
        key = slower.tobytes()
        if key not in self._rates:
            flow = self.flow
            either = np.maximum(slower[flow.source], slower[flow.target])
            flow = replace(flow, busy_s=flow.busy_s * slower, pair_s=flow.pair_s * either)
            self._rates[key] = solve_flow(flow, self.shape.microbatches)
        return self._rates[key]


@dataclass(frozen=True)
class CandidatePlan:
    """A layout with paths and an order, before its steps are chained.

    Attributes
    ----------
    prepared
        What it was made of.
    seconds
        The longest that a stage takes from its first operation to its update, from rest and with
        averaging that nothing slows down: about a step, since there is no barrier. In the mean,
        where one step in several averages.
    slower
        ``float[V]``: by how much its flow took places for slower than they are.
    late
        ``float[V]``: when their devices were done, relative to others of the same stage.
    spread
        Over which pairs of devices its flow went.
    messages_usd
        What messages of a step cost, where dollars count.
    chained
        Whether ``seconds`` has seen a step that follows, whose messages slow averaging down.
    """

    prepared: LayoutContext
    schedule: Schedule
    seconds: float
    slower: Floats
    late: Floats
    spread: Spread
    messages_usd: float = 0.0
    chained: bool = False

    @property
    def value(self) -> float:
        """What is to be least: seconds, or dollars."""
        p = self.prepared
        return p.merit.value(p.problem.cluster, self.seconds, self.messages_usd)

    @property
    def layout(self) -> Layout:
        """Who does what."""
        return self.prepared.layout

    def without_idle(self) -> Layout:
        """The layout without devices to which no microbatch goes."""
        counts = [list(row) for row in self.layout.counts]
        through = {d for path in self.schedule.paths for d in path}
        nodes, p = self.prepared.nodes, self.prepared
        for j, (group, its_nodes) in enumerate(zip(p.assignment.groups, p.node_of, strict=True)):
            for d, v in zip(group, its_nodes, strict=True):
                counts[j][int(nodes.place[v])] -= d not in through
        return replace(self.layout, counts=tuple(map(tuple, counts)))

    @property
    def operations(self) -> int:
        """How many a step has: what pricing takes grows with them."""
        return sum(map(len, self.schedule.order))

    def with_next_step(self) -> CandidatePlan:
        """The same draft with the seconds that it takes where a step follows."""
        if self.chained:
            return self
        p = self.prepared
        with_next = chained_step_s(p.problem, p.shape, p.assignment, p.times, self.schedule)
        return replace(self, seconds=max(self.seconds, with_next), chained=True)

    def plan(self) -> TrainingPlan:
        """The plan, priced in the simulator."""
        p = self.prepared
        return evaluated(p.problem, p.shape, p.assignment, p.times, (self.schedule,))
