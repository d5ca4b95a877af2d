"""Recomputes step times from the definition of the step-time model.

A device runs one operation at a time in the plan's order. An ordered pair sends one message at a
time; the sending pairs share up- and downlinks of devices and sites max-min fairly. An averaging
round begins with its last member and takes the time of its most loaded link, including queued
pipeline messages, plus the longest round-trip latency; later messages keep their rates and slow the
round down. There is no barrier between steps.

This module compiles a plan to arrays; `planner.checker.event_loop` simulates them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.checker.plan_network import (
    averaged_bytes,
    averaged_parts,
    fastest_of_rows,
    mean_links,
    sites_around,
)
from planner.network.cluster import Cluster, Devices
from planner.network.dtype import Dtype
from planner.network.network import Network
from planner.training_plan.choices import Head, Phase
from planner.training_plan.model import TrainingPlan

if TYPE_CHECKING:
    from planner.checker.event_loop import CheckerLinks, CheckerOperations, CheckerRounds, RunTimes

Floats = NDArray[np.float64]
NOTHING = -1


class StepTimes(NamedTuple):
    """Recomputed times: means over the cycle on an idle system, and the third pass's step."""

    pipeline_s: float
    averaging_s: float
    step_s: float


def simulated_times(plan: TrainingPlan) -> StepTimes | None:
    """Simulated times of a plan; None on a deadlock."""
    simulation = _StepSimulation(plan)
    idle_runs = {k: simulation.run([k], True) for k in set(plan.cycle)}
    cycle_steps = len(plan.cycle)
    three_passes = [*plan.cycle, *plan.cycle, *plan.cycle, plan.cycle[0]]
    if any(times is None for times in idle_runs.values()):
        return None
    runs, interval = [idle_runs[k] for k in plan.cycle], plan.sync.every_steps
    if plan.sync.delayed:
        num_averaging = 2 if interval > 1 else 1
        step = _delayed_step_s(simulation, num_averaging)
    else:
        num_averaging, several_run = 1, simulation.run(three_passes, True)
        step = None if several_run is None else _third_pass_s(several_run, cycle_steps)
    if step is None:
        return None
    if interval > num_averaging:
        local_run = _without_global_averaging(simulation).run(three_passes, True)
        assert local_run is not None
        step = (
            num_averaging * step
            + (interval - num_averaging) * _third_pass_s(local_run, cycle_steps)
        ) / interval
    return StepTimes(
        math.fsum(float(run.pipeline_end_s[0]) for run in runs if run) / cycle_steps,
        math.fsum(simulation.longest_averaging_s(run) for run in runs if run) / cycle_steps,
        step,
    )


def paths_makespan_s(plan: TrainingPlan) -> float | None:
    """Mean makespan over the cycle in the path solver's model; None on a deadlock.

    In that model links have no contention, both directions of a link are averaged, and every
    message has the size of the largest layer output.
    """
    away, rate = mean_links(plan)
    np.fill_diagonal(away, 0.0)
    np.fill_diagonal(rate, 1.0)
    total_rate = float(rate.sum())
    cluster = Cluster(
        Network(away, rate),
        Devices(plan.cluster.flops, plan.cluster.memory_bytes, total_rate, total_rate),
    )
    w = plan.workload
    largest = max(layer.output_bytes for layer in w.layers)
    uniform = w.replace(layers=tuple(replace(layer, output_bytes=largest) for layer in w.layers))
    times = replace(plan.compute_times, operation_s=0.0, message_s=0.0)
    simulation = _StepSimulation(
        plan.replace(cluster=cluster, workload=uniform, compute_times=times)
    )
    makespans: dict[int, float] = {}
    for k in set(plan.cycle):
        run = simulation.run([k], False)
        if run is None:
            return None
        makespans[k] = float(run.pipeline_end_s[0])
    return math.fsum(makespans[k] for k in plan.cycle) / len(plan.cycle)


def _without_global_averaging(simulation: _StepSimulation) -> _StepSimulation:
    """The plan of the steps without global averaging: they average within groups or not at all."""
    inner = tuple(
        tuple(groups for groups in rounds if {group.phase for group in groups} == {Phase.WITHIN})
        for rounds in simulation.plan.averaging
    )
    return _StepSimulation(simulation.plan.replace(averaging=inner))


def _third_pass_s(run: RunTimes, cycle_steps: int) -> float:
    """Mean time between step ends in the last of three passes; one more step follows."""
    ends = run.step_end
    return float(ends[3 * cycle_steps - 1] - ends[2 * cycle_steps - 1]) / cycle_steps


def _delayed_step_s(simulation: _StepSimulation, num_averaging: int) -> float | None:
    """Mean step if all steps, or every other one, average while the next step runs.

    Measured over the fourth to sixth pass; one more step follows.
    """
    cycle = simulation.plan.cycle
    period = len(cycle) if len(cycle) % num_averaging == 0 else num_averaging * len(cycle)
    schedules = [cycle[t % len(cycle)] for t in range(6 * period + 1)]
    run = simulation.run(
        schedules, [num_averaging == 1 or t % 2 == 1 for t in range(len(schedules))]
    )
    if run is None:
        return None
    return float(run.step_end[6 * period - 1] - run.step_end[3 * period - 1]) / (3 * period)


class _StepSimulation:
    """A plan compiled to operations, links and rounds, ready to be simulated."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan, self.n = plan, len(plan.cluster)
        self.rate = plan.cluster.network.bandwidth_table
        self.latency = plan.cluster.network.latency_table
        self.sites_around = sites_around(plan.cluster.devices, self.n)
        self.line_of: dict[tuple[str, int | str], int] = {}
        self.capacity: list[float] = []
        self._lines()
        self.groups = [
            (stage, r, group)
            for stage, rounds in enumerate(plan.averaging)
            for r, groups in enumerate(rounds)
            for group in groups
        ]
        self.pairs: dict[tuple[int, int], int] = {}
        self.operations = self._operations()
        self.links = self._links()
        self.rounds = self._rounds()

    def run(self, steps: Sequence[int], averages: bool | Sequence[bool]) -> RunTimes | None:
        """Simulate steps on an initially idle system; None on a deadlock."""
        from planner.checker.event_loop import RunTimes, run  # importing numba is slow

        g = len(self.rounds.size)
        times = RunTimes(
            np.zeros(len(steps)),
            np.zeros(g),
            np.zeros(g),
            np.zeros(1),
            np.zeros(self.n, dtype=np.int64),
        )
        schedules = np.array(steps, dtype=np.int64)
        delayed = self.plan.sync.delayed
        averages_by_step = np.full(len(steps), averages)
        run(self.operations, self.links, self.rounds, schedules, averages_by_step, times, delayed)
        return times if (times.finished_steps == len(steps)).all() else None

    def longest_averaging_s(self, run: RunTimes) -> float:
        """The longest averaging of a stage, from its first round's begin to its last round's end.

        Includes the averaging of a matrix that the first and last stage share.
        """
        ends: dict[int, float] = {}
        begins: list[tuple[int, float]] = []
        # the last group may exchange the gradient norm, so lengths may differ
        for (stage, r, _), begin, end in zip(
            self.groups, run.round_begin.tolist(), run.round_end.tolist(), strict=False
        ):
            ends[stage] = max(ends.get(stage, 0.0), end)
            begins += [(stage, begin)] if r == 0 else []
        last = len(self.plan.stage_layers)
        if self.plan.workload.optimizer_shards > 1 and last in ends:
            # the parameters of the shared matrix are spread at the end of both stages
            return max(
                (
                    (max(ends[stage], ends[last]) if stage in (0, last - 1) else ends[stage])
                    - begin
                    for stage, begin in begins
                    if stage < last
                ),
                default=0.0,
            )
        shared = max((ends[stage] - begin for stage, begin in begins if stage == last), default=0.0)
        return max(
            (
                ends[stage] - begin + (shared if stage in (0, last - 1) else 0.0)
                for stage, begin in begins
                if stage < last
            ),
            default=0.0,
        )

    def _lines(self) -> None:
        """Number the lines (up- and downlinks of devices and sites) and collect capacities."""
        cluster, devices = self.plan.cluster, self.plan.cluster.devices
        for name, limits, rate in (
            ("up", cluster.upload_bytes_per_s, self.rate),
            ("down", cluster.download_bytes_per_s, self.rate.T),
        ):
            limits = fastest_of_rows(rate) if limits is None else limits
            for d, capacity in enumerate(limits.tolist()):
                self._line((name, d), capacity)
        for site, capacity in (devices.site_upload_bytes_per_s or {}).items():
            self._line(("site up", site), capacity)
        for site, capacity in (devices.site_download_bytes_per_s or {}).items():
            self._line(("site down", site), capacity)

    def _line(self, name: tuple[str, int | str], capacity: float) -> None:
        self.line_of[name] = len(self.capacity)
        self.capacity.append(float(capacity))

    def _operations(self) -> CheckerOperations:
        from planner.checker.event_loop import CheckerOperations

        plan, times = self.plan, self.plan.compute_times
        w = plan.workload
        output_bytes = {
            d: w.layers[plan.stage_layers[j][1] - 1].output_bytes * w.microbatch_samples
            for d, j in plan.stage_of.items()
        }
        durations = {"F": times.forward_s, "H": times.head_s, "B": times.backward_s}
        device: list[int] = []
        kinds: list[str] = []
        successor: list[int] = []
        pair: list[int] = []
        message_bytes: list[float] = []
        order: list[int] = []
        order_ptr = [0]
        first_operations: list[int] = []
        for s in plan.schedules:
            operation_of: dict[tuple[str, int, int], int] = {}
            for b, path in enumerate(s.paths):
                head = path[-1] if s.head is Head.LAST else path[0]
                chain = [("F", d) for d in path] + [("H", head)] + [("B", d) for d in path[::-1]]
                first_operations.append(len(device))
                for k, (kind, d) in enumerate(chain):
                    operation_of[kind, b, d] = len(device)
                    device.append(d)
                    kinds.append(kind)
                    if k + 1 == len(chain):
                        successor.append(NOTHING)
                        pair.append(NOTHING)
                        message_bytes.append(0.0)
                        continue
                    next_kind, e = chain[k + 1]
                    successor.append(len(device))
                    pair_index = (
                        self.pairs.setdefault((d, e), len(self.pairs)) if d != e else NOTHING
                    )
                    pair.append(pair_index)
                    # a gradient has the size of the activations that its receiver sent
                    message_bytes.append(
                        output_bytes[e if next_kind == "B" else d] if d != e else 0.0
                    )
            for d, row in enumerate(s.order):
                order += [operation_of[kind, b, d] for kind, b in row]
                order_ptr.append(len(order))
        is_first = np.zeros(len(device), dtype=bool)
        is_first[first_operations] = True
        seconds = [
            durations[kind][d] + times.operation_s for kind, d in zip(kinds, device, strict=True)
        ]
        return CheckerOperations(
            np.array(device, dtype=np.int64),
            np.array(seconds, dtype=np.float64),
            np.array(successor, dtype=np.int64),
            np.array(pair, dtype=np.int64),
            np.array(message_bytes, dtype=np.float64),
            is_first,
            np.array(order, dtype=np.int64),
            np.array(order_ptr, dtype=np.int64),
            np.array(times.update_s, dtype=np.float64),
            float(times.message_s),
        )

    def _links(self) -> CheckerLinks:
        from planner.checker.event_loop import CheckerLinks

        around = self.sites_around
        width = 2 + 2 * max(map(len, around))
        lines = np.full((len(self.pairs), width), NOTHING, dtype=np.int64)
        max_rate = np.zeros(len(self.pairs))
        for (i, j), p in self.pairs.items():
            used: list[tuple[str, int | str]] = [("up", i), ("down", j)]
            used += [("site up", site) for site in around[i] if site not in around[j]]
            used += [("site down", site) for site in around[j] if site not in around[i]]
            line_indices = [self.line_of[name] for name in used if name in self.line_of]
            lines[p, : len(line_indices)] = line_indices
            max_rate[p] = min(
                [float(self.rate[i, j]), *(self.capacity[line] for line in line_indices)]
            )
        pairs = np.array(list(self.pairs), dtype=np.int64).reshape(-1, 2)
        latency = self.latency[pairs[:, 0], pairs[:, 1]]
        return CheckerLinks(np.asarray(latency), max_rate, lines, np.array(self.capacity))

    def _rounds(self) -> CheckerRounds:
        from planner.checker.event_loop import CheckerRounds

        sharded = self.plan.workload.optimizer_shards > 1
        rounds_of: list[list[int]] = [[] for _ in range(self.n)]
        pair_s, round_trip_s = [], []
        loads: list[dict[int, float]] = []
        for g, (stage, _, group) in enumerate(self.groups):
            # with optimizer state in shards, updated parameters are spread after everything else
            for d in () if sharded and group.phase is Phase.SPREAD else group.members:
                rounds_of[d].append(g)
            sent = averaged_bytes(self.plan, stage, group)
            latency = self.latency.between(group.members)
            off = ~np.eye(len(group.members), dtype=bool)
            # members hold the same stage, or have finished the step in both stages that share a
            # matrix, so that no pipeline message is in these queues
            pair_s.append(float((sent / self.rate.between(group.members))[off].max(initial=0.0)))
            fractions = averaged_parts(group)
            latency_s = (latency + latency.T)[off & (fractions + fractions.T > 0)]
            round_trip_s.append(float(latency_s.max(initial=0.0)))
            loads.append(self._load(group.members, sent))
        members = [len(group.members) for _, _, group in self.groups]
        stages = self.plan.assignment.groups
        updating = [d for group in stages for d in group]
        if sharded:
            updating += [d for _, _, group in self.groups for d in group.members]
        all_members = sorted(set(updating))
        to_sum_s, from_sum_s = np.full(self.n, -1.0), np.zeros(self.n)
        precision = self.plan.workload.precision
        scales_loss = Dtype.FP16 in (precision.compute, precision.messages)
        reporting = {group[0] for group in stages}
        if sharded:
            # the devices that update, of each stage or of the sites of a stage the first
            reporting = {
                d
                for rounds in self.plan.averaging
                for d, share in zip(rounds[-1][0].members, rounds[-1][0].shares, strict=True)
                if share > 0
            }
        if (self.plan.clip is not None or scales_loss) and (len(stages) > 1 or sharded):
            # they send their parts to the most central device
            among = self.latency.picked(all_members)
            longest_s = [
                np.delete(among.row(i) + among.T.row(i), i).max() for i in among.first.tolist()
            ]
            root = all_members[int(np.array(longest_s)[among.class_of].argmin())]
            for d in all_members:
                rounds_of[d].append(len(members))
                from_sum_s[d] = 0.0 if d == root else self.latency[root, d]
            for d in reporting | {root}:
                to_sum_s[d] = 0.0 if d == root else self.latency[d, root]
            members.append(len(all_members))
            pair_s.append(0.0)
            loads.append({})
            round_trip_s.append(0.0)
        for g, (_, _, group) in enumerate(self.groups if sharded else ()):
            for d in group.members if group.phase is Phase.SPREAD else ():
                rounds_of[d].append(g)
        return CheckerRounds(
            np.array(members, dtype=np.int64),
            _ends(rounds_of),
            np.array([g for groups in rounds_of for g in groups], dtype=np.int64),
            np.array(pair_s, dtype=np.float64),
            np.array(round_trip_s, dtype=np.float64),
            _ends(loads),
            np.array([line for load in loads for line in load], dtype=np.int64),
            np.array([x for load in loads for x in load.values()], dtype=np.float64),
            to_sum_s,
            from_sum_s,
        )

    def _load(self, members: Sequence[int], sent: Floats) -> dict[int, float]:
        """Bytes of a round over every line that it uses."""
        load: dict[tuple[str, int | str], float] = {}
        for d, out, into in zip(members, sent.sum(axis=1), sent.sum(axis=0), strict=True):
            load["up", d], load["down", d] = float(out), float(into)
        around = [self.sites_around[d] for d in members]
        for site in {site for sites in around for site in sites}:
            inside = np.array([site in sites for sites in around])
            load["site up", site] = float(sent[inside][:, ~inside].sum())
            load["site down", site] = float(sent[~inside][:, inside].sum())
        return {
            self.line_of[name]: size
            for name, size in load.items()
            if size > 0 and name in self.line_of
        }


def _ends(lists: Sequence[Any]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(items) for items in lists)]).astype(np.int64)
