"""From a layout to a candidate plan: flow, paths, order of operations and averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.lp.flow import FlowRates, StageFlow, solve_flow
from planner.planning.cost import PlanObjective
from planner.planning.evaluation import (
    compute_times,
    evaluated,
    stage_averaging,
    two_step_estimate_s,
)
from planner.planning.joint.device_classes import DeviceClasses, Floats
from planner.planning.joint.device_flow import PairSpread, device_flow
from planner.planning.joint.flow_paths import interleaved_paths
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_estimate import IN_FLIGHT
from planner.planning.joint.layout_flow import FlowNodes, flow_of, in_flight_limit
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, memory_room, sent_bytes
from planner.planning.straight.schedules import eagerly_served
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
    """A layout with all that its candidates have in common.

    Attributes
    ----------
    problem
        Restricted to the devices of the layout.
    shape, assignment, times
        Shape, groups of devices and compute times.
    room
        Microbatches in flight that fit on each device.
    nodes, flow
        The layout's linear program.
    node_of
        Per stage, the node of each of its devices.
    objective, usd_per_byte, averaging_usd
        What to minimise; by cost, ``float[N, N]`` prices of traffic and mean dollars per step of
        averaging.
    averaging_s, within_s, update_s
        Per stage, seconds of averaging alone, of its part that is repeated in every step with two
        frequencies, and of the longest update.
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
    objective: PlanObjective
    usd_per_byte: Floats
    averaging_usd: float
    averaging_s: tuple[float, ...]
    within_s: tuple[float, ...]
    update_s: tuple[float, ...]
    _rates: dict[bytes, FlowRates] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, problem: PlanningProblem, classes: DeviceClasses, layout: Layout) -> LayoutContext:
        """Restrict the problem to the devices of a layout."""
        full_cluster, workload = problem.cluster, problem.workload
        stage_devices = layout.groups(classes)
        used = sorted(d for group in stage_devices for d in group)
        index_of = {d: k for k, d in enumerate(used)}
        groups = tuple(tuple(index_of[d] for d in group) for group in stage_devices)
        cluster = full_cluster if len(used) == len(full_cluster) else full_cluster.subset(used)
        shape = Shape(
            layout.layers,
            tuple(map(len, groups)),
            workload.batch_samples // workload.microbatch_samples,
            Head.LAST,
            layout.recompute,
        )
        variant = replace(problem, cluster=cluster)
        room = memory_room(cluster, workload, shape, groups, problem.request.in_flight)
        costs = shape.costs(workload)
        nodes, flow = flow_of(classes, layout, costs, IN_FLIGHT, in_flight_limit(problem))
        assignment = AssignmentPlan(groups, None)
        times, links = compute_times(variant, shape, assignment), LinkResources.of(cluster)
        codec = Codec(problem.request.codec)
        averaging = stage_averaging(variant, shape, groups)
        averaging_s, within_s = (
            tuple(rounds_s(select(rounds), size, links, codec) for rounds, size in averaging)
            for select in (tuple, within)
        )
        objective = PlanObjective.of(problem.request)
        usd_per_byte, averaging_usd = np.zeros((len(cluster), len(cluster))), 0.0
        if objective.by_cost:
            usd_per_byte = problem.request.prices.usd_per_byte(cluster.network)
            averaged = averaged_bytes(averaging, codec, len(cluster), problem.request.sync_every)
            averaging_usd = float((usd_per_byte * averaged).sum())
        update_s = tuple(max(times.update_s[d] for d in group) for group in groups)
        node_of = tuple(map(tuple, nodes.by_stage(classes, stage_devices)))
        return cls(
            layout=layout,
            problem=variant,
            shape=shape,
            assignment=assignment,
            times=times,
            room=room,
            links=links,
            nodes=nodes,
            flow=flow,
            node_of=node_of,
            objective=objective,
            usd_per_byte=usd_per_byte,
            averaging_usd=averaging_usd,
            averaging_s=averaging_s,
            within_s=within_s,
            update_s=update_s,
        )

    @property
    def spreads(self) -> tuple[PairSpread, ...]:
        """Possible distributions over pairs; the one that is usually best comes first."""
        equal_stages = len({len(group) for group in self.assignment.groups}) == 1
        averages_rarely = self.problem.request.sync_every > 1
        first = (
            PairSpread.FEW if averages_rarely or self.flow.lines is not None else PairSpread.EVEN
        )
        others = (
            spread
            for spread in PairSpread
            if spread is not first and (equal_stages or spread is not PairSpread.PAIRED)
        )
        return first, *others

    def build(
        self,
        max_in_flight_ratio: float = math.inf,
        slowdown: Floats | None = None,
        spread: PairSpread = PairSpread.EVEN,
    ) -> CandidatePlan:
        """Paths that follow the flow, in the order in which devices serve what arrives.

        Parameters
        ----------
        max_in_flight_ratio
            Limit on microbatches in flight, as a multiple of what Little's law requires.
        slowdown
            ``float[V]``: factors on the compute and transfer times of nodes, which direct flow away
            from them. None: 1.
        """
        groups, shape = self.assignment.groups, self.shape
        slowdown = np.ones(len(self.flow.stage)) if slowdown is None else slowdown
        rates = self._spread_by(slowdown)
        live_limit = self.room
        if max_in_flight_ratio < math.inf:
            # Little's law
            in_flight = rates.remaining_s / rates.period_s * rates.node_share / self.nodes.devices
            max_live = np.maximum(2, np.ceil(max_in_flight_ratio * in_flight)).tolist()
            live_limit = {
                d: min(live_limit[d], int(max_live[v]))
                for group, its_nodes in zip(groups, self.node_of, strict=True)
                for d, v in zip(group, its_nodes, strict=True)
            }
        starts, edges = device_flow(self.node_of, self.nodes, self.flow, rates, spread)
        paths = interleaved_paths(groups, starts, edges, shape.microbatches)
        activation_bytes = sent_bytes(shape.costs(self.problem.workload), groups, len(self.links))
        unordered = Schedule("flow", Head.LAST, paths, ())
        schedule, begin, end = eagerly_served(
            unordered, self.times, activation_bytes, self.links, live_limit
        )
        busy_s, lateness = [], np.ones(len(self.flow.stage))
        for group, its_nodes in zip(groups, self.node_of, strict=True):
            members, node = list(group), np.array(its_nodes)
            ends_s = end[members]
            busy = ends_s > 0
            busy_s.append(ends_s.max() - begin[members].min())
            for v in np.unique(node[busy]):
                lateness[v] = ends_s[node == v].mean() / ends_s[busy].mean()
        without_averaging_s = np.array(busy_s) + self.update_s
        sync = self.problem.request.sync
        ends = without_averaging_s + self.averaging_s[: len(without_averaging_s)]
        # tied parameters are averaged after the rest
        shared_s = sum(self.averaging_s[len(ends) :])
        averages = max(ends.max(), ends[[0, -1]].max() + shared_s)
        without_averaging_s = without_averaging_s + self.within_s[: len(without_averaging_s)]
        if sync.delayed:
            averages = max(without_averaging_s.max(), averages - without_averaging_s.max())
        seconds = sync.mean_s(without_averaging_s.max(), averages)
        usd = self._messages_usd(paths)
        return CandidatePlan(self, schedule, float(seconds), slowdown, lateness, spread, usd)

    def _messages_usd(self, paths: Sequence[Sequence[int]]) -> float:
        """Dollars of a step for messages; 0 if the objective is time."""
        if not self.objective.by_cost:
            return 0.0
        devices, round_trip_usd = np.array(paths), self.usd_per_byte + self.usd_per_byte.T
        costs = self.shape.costs(self.problem.workload)
        usd = self.averaging_usd
        for j, cost in enumerate(costs[:-1]):
            usd += cost.output_bytes * float(round_trip_usd[devices[:, j], devices[:, j + 1]].sum())
        return usd

    def _spread_by(self, slowdown: Floats) -> FlowRates:
        """The flow with slowdowns of nodes."""
        key = slowdown.tobytes()
        if key not in self._rates:
            flow = self.flow
            either = np.maximum(slowdown[flow.source], slowdown[flow.target])
            flow = replace(flow, busy_s=flow.busy_s * slowdown, pair_s=flow.pair_s * either)
            self._rates[key] = solve_flow(flow, self.shape.microbatches)
        return self._rates[key]


@dataclass(frozen=True)
class CandidatePlan:
    """A layout with paths and an order of operations.

    Attributes
    ----------
    context
        What it was built from.
    seconds
        Estimated step: the longest time of a stage from its first operation to its update, from an
        idle system, with undisturbed averaging. A mean if one step in several averages.
    slowdown
        ``float[V]``: assumed slowdown of each node.
    lateness
        ``float[V]``: mean end of a node's operations, relative to its stage.
    spread
        Distribution of the flow over pairs of devices.
    messages_usd
        Dollars of a step for messages, if the objective is cost.
    two_steps
        Whether ``seconds`` includes a next step, whose messages slow averaging down.
    """

    context: LayoutContext
    schedule: Schedule
    seconds: float
    slowdown: Floats
    lateness: Floats
    spread: PairSpread
    messages_usd: float = 0.0
    two_steps: bool = False

    @property
    def value(self) -> float:
        """Seconds or dollars, whichever is minimised."""
        context = self.context
        return context.objective.value(context.problem.cluster, self.seconds, self.messages_usd)

    @property
    def layout(self) -> Layout:
        """The layout it was built from."""
        return self.context.layout

    def without_idle(self) -> Layout:
        """The layout without devices that get no microbatch."""
        counts = [list(row) for row in self.layout.counts]
        through = {d for path in self.schedule.paths for d in path}
        context, nodes = self.context, self.context.nodes
        for j, (group, its_nodes) in enumerate(
            zip(context.assignment.groups, context.node_of, strict=True)
        ):
            for d, v in zip(group, its_nodes, strict=True):
                counts[j][int(nodes.device_class[v])] -= d not in through
        return replace(self.layout, counts=tuple(map(tuple, counts)))

    @property
    def operations(self) -> int:
        """Operations of a step, which determine the cost of simulation."""
        return sum(map(len, self.schedule.order))

    def with_next_step(self) -> CandidatePlan:
        """The same candidate, simulated with a next step."""
        if self.two_steps:
            return self
        context = self.context
        with_next = two_step_estimate_s(
            context.problem, context.shape, context.assignment, context.times, self.schedule
        )
        return replace(self, seconds=max(self.seconds, with_next), two_steps=True)

    def plan(self) -> TrainingPlan:
        """The plan with its simulated times."""
        context = self.context
        return evaluated(
            context.problem, context.shape, context.assignment, context.times, (self.schedule,)
        )
