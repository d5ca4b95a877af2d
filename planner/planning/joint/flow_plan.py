"""From a layout to a candidate: flow, paths, order of operations and averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.lp.flow import FlowRates, StageFlow, solve_flow
from planner.planning.cost import PlanObjective, pair_prices
from planner.planning.evaluation import compute_times, stage_averaging
from planner.planning.joint.candidate import CandidatePlan, CandidateSpec
from planner.planning.joint.device_classes import DeviceClasses, Floats
from planner.planning.joint.device_flow import PairSpread, device_flow
from planner.planning.joint.flow_paths import interleaved_paths
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_flow import IN_FLIGHT, FlowNodes, flow_of, in_flight_limit
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, memory_room, sent_bytes
from planner.planning.straight.schedules import eager_run
from planner.problems.answers import AssignmentPlan
from planner.simulator.averaging_rounds import rounds_s
from planner.simulator.resources import LinkResources
from planner.simulator.run import Run
from planner.simulator.traffic import averaged_bytes
from planner.training_plan.averaging_group import within
from planner.training_plan.choices import Codec
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
    objective, averaging_usd
        What to minimise; by cost, mean dollars per step of averaging.
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
            layout.head,
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
        averaging_usd = 0.0
        if objective.by_cost:
            *ends, averaged = averaged_bytes(averaging, codec, problem.request.sync_every)
            usd_per_byte = pair_prices(problem.request.prices, cluster, *ends)
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
            averaging_usd=averaging_usd,
            averaging_s=averaging_s,
            within_s=within_s,
            update_s=update_s,
        )

    @property
    def spreads(self) -> tuple[PairSpread, ...]:
        """Possible distributions over pairs; the one that is usually best comes first."""
        equal_stages = len({len(group) for group in self.assignment.groups}) == 1
        first = PairSpread.FEW
        single = bool((self.nodes.devices == 1).all())  # many pairs and few are then the same
        others = (
            spread
            for spread in PairSpread
            if spread is not first and (equal_stages if spread is PairSpread.PAIRED else not single)
        )
        return first, *others

    def completed(self, spec: CandidateSpec) -> CandidateSpec:
        """The specification with the spread and slowdowns that it leaves open.

        A spread that this layout does not allow is left open, too.
        """
        slowdown = spec.slowdown or (1.0,) * len(self.flow.stage)
        spread = spec.spread if spec.spread in self.spreads else self.spreads[0]
        return replace(spec, spread=spread, slowdown=slowdown)

    def serve(self, spec: CandidateSpec) -> ServedFlow:
        """Paths that follow the flow, in the order in which devices serve what arrives."""
        assert spec.spread is not None
        groups, shape = self.assignment.groups, self.shape
        rates = self._spread_by(np.array(spec.slowdown))
        live_limit = self.room
        if spec.max_in_flight_ratio < math.inf:
            # Little's law
            in_flight = rates.remaining_s / rates.period_s * rates.node_share / self.nodes.devices
            max_live = np.maximum(2, np.ceil(spec.max_in_flight_ratio * in_flight)).tolist()
            live_limit = {
                d: min(live_limit[d], int(max_live[v]))
                for group, its_nodes in zip(groups, self.node_of, strict=True)
                for d, v in zip(group, its_nodes, strict=True)
            }
        starts, edges = device_flow(self.node_of, self.nodes, self.flow, rates, spec.spread)
        paths = interleaved_paths(groups, starts, edges, shape.microbatches)
        activation_bytes = sent_bytes(shape.costs(self.problem.workload), groups, len(self.links))
        unordered = Schedule("flow", shape.head, paths, ())
        run = eager_run(unordered, self.times, activation_bytes, self.links, live_limit)
        return ServedFlow(unordered, run)

    def candidate(self, spec: CandidateSpec, served: ServedFlow) -> CandidatePlan:
        """What the search needs to know of a served flow."""
        groups = self.assignment.groups
        begin, end = served.busy(len(self.links))
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
        by_cost, cluster = self.objective.by_cost, self.problem.cluster
        return CandidatePlan(
            spec,
            tuple(spread for spread in self.spreads if spread is not spec.spread),
            float(sync.mean_s(without_averaging_s.max(), averages)),
            lateness,
            len(cluster),
            len(served.run.operations.device),
            self._used_layout(end),
            self.objective,
            self.objective.usd_per_s(cluster) if by_cost else 0.0,
            self._messages_usd(served.unordered.paths),
        )

    def _used_layout(self, end: Floats) -> Layout:
        """The layout without devices that get no microbatch."""
        if end.all():
            return self.layout
        counts = [list(row) for row in self.layout.counts]
        for j, (group, its_nodes) in enumerate(
            zip(self.assignment.groups, self.node_of, strict=True)
        ):
            for d, v in zip(group, its_nodes, strict=True):
                counts[j][int(self.nodes.device_class[v])] -= end[d] == 0
        return replace(self.layout, counts=tuple(map(tuple, counts)))

    def _messages_usd(self, paths: Sequence[Sequence[int]]) -> float:
        """Dollars of a step for messages; 0 if the objective is time."""
        if not self.objective.by_cost:
            return 0.0
        devices, costs = np.array(paths), self.shape.costs(self.problem.workload)
        prices, cluster = self.problem.request.prices, self.problem.cluster
        usd = self.averaging_usd
        for j, cost in enumerate(costs if self.layout.returns else costs[:-1]):
            ends = devices[:, j], devices[:, (j + 1) % len(costs)]
            for source, destination in (ends, ends[::-1]):
                usd_per_byte = pair_prices(prices, cluster, source, destination)
                usd += cost.output_bytes * float(usd_per_byte.sum())
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
class ServedFlow:
    """Paths of a flow, and the simulated step from which their order is taken.

    Attributes
    ----------
    unordered
        The paths.
    run
        One step from an idle system.
    """

    unordered: Schedule
    run: Run

    def schedule(self) -> Schedule:
        """Paths and order."""
        return replace(self.unordered, order=self.run.order())

    def busy(self, devices: int) -> tuple[Floats, Floats]:
        """Start and end of each device; end 0 of those without microbatches."""
        device, times = self.run.operations.device, self.run.times
        begin, end = np.full(devices, np.inf), np.zeros(devices)
        np.minimum.at(begin, device, times.begin[0])
        np.maximum.at(end, device, times.end[0])
        return begin, end
