"""Discrete-event simulator of a plan's training steps on a cluster.

A device runs its operations in the plan's order, one at a time, while messages are in transit.
Every ordered pair sends one message at a time; the active pairs share a device's up- and downlink
and a site's link max-min fairly. A group averages as soon as its last member is ready, while other
stages still work, and there is no barrier between steps. With ``links="unlimited"`` messages do not
slow each other down and averaging follows the whole pipeline, as in the papers' cost models.

================================  ==================================================================
function                          use
================================  ==================================================================
`simulate`                        timeline of one iteration with the plan's step time, any cluster
`simulate_cycle`                  timelines of all iterations of the cycle
`predict`                         the times that a new plan states in its file
`step_s`                          the step time alone
`first_of_two_steps_s`            a cheap estimate of it, to rank candidates
`steady_step_s`                   the mean over many more steps, to verify it
`steps_by_averaging_s`            steps without and with averaging, if one in H averages
`cycle_steps_s`                   every step of the pass that `step_s` measures, any cluster
`predicted_timeline`              the timeline with the step time that the plan already states
================================  ==================================================================
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.network.cluster import Cluster
from planner.network.error import NetworkError
from planner.simulator.averaging_rounds import bytes_between
from planner.simulator.link_load import link_loads
from planner.simulator.paper_model import averaging_s, closing_ops
from planner.simulator.program import OPERATION_KINDS, Program, compile_plan
from planner.simulator.resources import LinkResources
from planner.simulator.run import Run
from planner.simulator.timeline import Op, Timeline, Transfer, sorted_ops
from planner.training_plan.averaging_group import within
from planner.training_plan.model import Predicted, TrainingPlan
from planner.training_plan.validation import inconsistencies
from planner.utils.validate import choice, count, instance_of
from planner.workload.workload import Workload

MAX_CORES = 1_000_000
PASSES = 3
"""Passes through the cycle that are simulated; the step is measured in the last of them."""


class LinkModel(enum.StrEnum):
    """Model of the links: with or without contention."""

    QUEUED = "queued"
    UNLIMITED = "unlimited"


class SimulationError(ValueError):
    """The plan's order of operations cannot be carried out."""


def simulate(
    plan: TrainingPlan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    schedule: int = 0,
    links: str = LinkModel.QUEUED,
    cores: int | None = None,
) -> Timeline:
    """Predict one iteration on an idle system, and the plan's step time.

    Parameters
    ----------
    plan
        What to run. Its compute times are used, whatever the workload.
    cluster, workload
        Where and what to run, by default the plan's own. A device of the plan is the one of its
        name in the cluster, which may have more; without these names, the one of its index. Both
        directions of a link are kept apart.
    schedule
        Which of the plan's schedules the timeline shows.
    links
        ``"queued"``: messages wait for those before them, links share their capacity.
        ``"unlimited"``: the paper model, in which every message has its pair's whole bandwidth
        and averaging takes eq. 2 of DT-FM after the whole pipeline.
    cores
        Operations that run at full speed at the same time; more slow each other down evenly.

    Returns
    -------
    Timeline
        Its ``step_s`` is the mean time between step ends in the third pass through the plan's
        cycle.

    Raises
    ------
    SimulationError
        The plan contradicts itself, such as by an order of operations that deadlocks, or the
        workload has another number of layers, or another batch.
    ValueError
        There is no such schedule, or less than one core.
    NetworkError
        The cluster lacks a device of the plan, has fewer, or lacks a pair.
    """
    _require_consistent(plan)
    simulation = _Simulation.of(plan, cluster, workload, links, cores)
    schedule = count("schedule", schedule, 0, len(plan.schedules) - 1)
    return simulation.timeline(schedule, simulation.step_s())


def simulate_cycle(
    plan: TrainingPlan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    links: str = LinkModel.QUEUED,
    cores: int | None = None,
) -> tuple[Predicted, tuple[Timeline, ...]]:
    """Predict the mean step over the plan's cycle.

    Parameters
    ----------
    plan, cluster, workload, links, cores
        As in `simulate`.

    Returns
    -------
    Predicted
        ``pipeline_s`` and ``averaging_s`` are the means over ``plan.cycle`` of steps on an idle
        system, ``step_s`` the mean distance of step ends in the third pass through it.
    tuple of Timeline
        One per schedule, on an idle system.

    Raises
    ------
    SimulationError, NetworkError, ValueError
        As in `simulate`.
    """
    _require_consistent(plan)
    simulation = _Simulation.of(plan, cluster, workload, links, cores)
    step_s = simulation.step_s()
    timelines = tuple(simulation.timeline(k, step_s) for k in range(len(plan.schedules)))
    cycle = [timelines[k] for k in plan.cycle]
    pipeline = sum(t.makespan_s for t in cycle) / len(cycle)
    averaging = sum(t.averaging_s for t in cycle) / len(cycle)
    return Predicted(pipeline, averaging, step_s), timelines


def predict(plan: TrainingPlan) -> Predicted:
    """The times of `simulate_cycle` on the plan's own cluster, without its timelines."""
    simulation = _Simulation.of(plan, None, None, LinkModel.QUEUED, None)
    idle_runs = {k: simulation.run([k], True, 1) for k in set(plan.cycle)}
    return Predicted(
        _mean([float(idle_runs[k].times.end.max(initial=0.0)) for k in plan.cycle]),
        _mean([simulation.averaging_s(idle_runs[k]) for k in plan.cycle]),
        simulation.step_s(),
    )


def first_of_two_steps_s(plan: TrainingPlan) -> float:
    """The longest time of a stage in the first of two steps, from its start to its update.

    A cheap estimate of `step_s` (less than half the simulation). If replicas average every H steps,
    the mean over steps with and without averaging.
    """
    simulation = _Simulation.of(plan, None, None, LinkModel.QUEUED, None)
    local_step_s = 0.0 if plan.sync.every_steps == 1 else simulation.first_of_two_s(averages=False)
    return plan.sync.mean_s(local_step_s, simulation.first_of_two_s(averages=True))


def predicted_timeline(plan: TrainingPlan) -> Timeline:
    """The first schedule's timeline as in `simulate`, with the step that the plan predicts."""
    simulation = _Simulation.of(plan, None, None, LinkModel.QUEUED, None)
    return simulation.timeline(0, plan.predicted.step_s)


def step_s(plan: TrainingPlan) -> float:
    """The ``step_s`` of `predict` alone."""
    return _Simulation.of(plan, None, None, LinkModel.QUEUED, None).step_s()


def steady_step_s(plan: TrainingPlan, passes: int = 20) -> float:
    """The mean step over ``passes`` passes through the cycle after the third.

    `step_s` measures the third pass alone.
    """
    simulation = _Simulation.of(plan, None, None, LinkModel.QUEUED, None)
    if plan.sync.delayed:
        return simulation.step_s()  # measures passes after the third already
    local_step_s = (
        0.0 if plan.sync.every_steps == 1 else simulation.steady_s(passes, averages=False)
    )
    return plan.sync.mean_s(local_step_s, simulation.steady_s(passes, averages=True))


def steps_by_averaging_s(plan: TrainingPlan) -> tuple[float, float]:
    """Mean step without and with averaging, for a plan that averages every H steps.

    A step without outer averaging still averages within each inner group.

    The mean of H - 1 of the former and one of the latter is ``step_s``. If averaging is delayed,
    its whole cost is counted in the latter.

    Returns
    -------
    tuple[float, float]
        Mean distances of step ends in the third pass through the cycle, in seconds.
    """
    simulation = _Simulation.of(plan, None, None, LinkModel.QUEUED, None)
    local_step_s, averaging_step_s, covered_steps = simulation.mean_steps_s()
    if covered_steps == plan.sync.every_steps:
        local_step_s = simulation.mean_step_s(averages=False)
    return local_step_s, covered_steps * averaging_step_s - (covered_steps - 1) * local_step_s


def cycle_steps_s(
    plan: TrainingPlan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    cores: int | None = None,
) -> list[float]:
    """Times between step ends in the third pass through the cycle."""
    simulation = _Simulation.of(plan, cluster, workload, LinkModel.QUEUED, cores)
    every_steps = plan.sync.every_steps
    if every_steps == 1:
        return simulation.third_pass_s(averages=True)
    local_steps_s = simulation.third_pass_s(averages=False)
    averaging_steps_s = simulation.third_pass_s(averages=True)
    if plan.sync.delayed:
        averaging_adds_s = every_steps * (
            simulation.step_s() - sum(local_steps_s) / len(local_steps_s)
        )
        averaging_steps_s = [step_s + averaging_adds_s for step_s in local_steps_s]
    cycle_length = len(local_steps_s)
    return [
        (averaging_steps_s if (t + 1) % every_steps == 0 else local_steps_s)[t % cycle_length]
        for t in range(math.lcm(cycle_length, every_steps))
    ]


@dataclass(frozen=True)
class _Simulation:
    """A plan compiled for given links."""

    plan: TrainingPlan
    cluster: Cluster
    workload: Workload
    program: Program
    queues: bool
    cores: float

    @classmethod
    def of(
        cls,
        plan: TrainingPlan,
        cluster: Cluster | None,
        workload: Workload | None,
        links: str,
        cores: int | None,
    ) -> _Simulation:
        plan = instance_of(TrainingPlan, plan, "plan")
        cluster = plan.cluster if cluster is None else cluster
        cluster = instance_of(Cluster, cluster, "cluster")
        workload = plan.workload if workload is None else workload
        workload = instance_of(Workload, workload, "workload")
        if len(workload.layers) != len(plan.workload.layers):
            raise SimulationError(
                f"the plan has {len(plan.workload.layers)} layers, the workload "
                f"{len(workload.layers)}; give one with as many"
            )
        if plan.workload.batch_samples != workload.batch_samples:
            raise SimulationError(
                f"the plan is for batch_samples {plan.workload.batch_samples}, the workload has "
                f"{workload.batch_samples}; make a plan for this workload"
            )
        # the search may have made microbatches larger
        workload = workload.replace(microbatch_samples=plan.workload.microbatch_samples)
        names = plan.cluster.network.ids
        if set(names) <= set(cluster.network.ids):
            if names != cluster.network.ids:
                cluster = cluster.subset(names)
        elif len(cluster) != len(plan.cluster):
            raise NetworkError(
                f"the plan has {len(plan.cluster)} devices, the network {len(cluster)}, not all of "
                "the same names; give one with the plan's devices"
            )
        cluster.network.require_complete()
        model = choice(LinkModel, "links", links)
        cores = 0 if cores is None else count("cores", cores, most=MAX_CORES)
        program = compile_plan(plan, LinkResources.of(cluster), workload)
        return cls(plan, cluster, workload, program, model is LinkModel.QUEUED, float(cores))

    def run(self, steps: list[int], averages: bool | Sequence[bool], recorded: int = 0) -> Run:
        """Simulate steps on an initially idle system; they average only if links queue."""
        run = Run.planned(
            self.program,
            steps,
            averages=averages if self.queues else False,
            delayed=self.plan.sync.delayed,
            message_s=self.plan.compute_times.message_s,
            queues=self.queues,
            cores=self.cores,
            recorded=recorded,
        )
        if run.stuck is not None:
            self._deadlock(run)
        return run

    def step_s(self) -> float:
        """Mean time between step ends in the third pass through the cycle."""
        cycle = list(self.plan.cycle)
        if not self.queues:
            idle_runs = {k: self.run([k], False, 1) for k in set(cycle)}
            pipeline = sum(float(idle_runs[k].times.end.max(initial=0.0)) for k in cycle) / len(
                cycle
            )
            averaging = max(averaging_s(self.plan, self.cluster, self.workload).values(), default=0)
            inner = tuple(map(within, self.plan.averaging))
            inner_averaging = averaging_s(
                self.plan.replace(averaging=inner), self.cluster, self.workload
            )
            step = pipeline + max(self.plan.compute_times.update_s, default=0)
            if self.plan.sync.delayed:
                averaging = max(averaging - step, 0.0)
            return step + self.plan.sync.mean_s(max(inner_averaging.values(), default=0), averaging)
        return self.plan.sync.mean_s(*self.mean_steps_s())

    def mean_steps_s(self) -> tuple[float, float, int]:
        """Mean step without averaging, with averaging, and how many of H steps the latter covers.

        The count is 1, or 2 if averaging is delayed; the former is 0 if the count is H.
        """
        every_steps, delayed = self.plan.sync.every_steps, self.plan.sync.delayed
        covered_steps = min(every_steps, 2) if delayed else 1
        averaging_step_s = (
            self._delayed_s(covered_steps) if delayed else self.mean_step_s(averages=True)
        )
        local_step_s = 0.0 if every_steps == covered_steps else self.mean_step_s(averages=False)
        return local_step_s, averaging_step_s, covered_steps

    def mean_step_s(self, *, averages: bool) -> float:
        """Mean step of the third pass through the cycle."""
        return _mean(self.third_pass_s(averages=averages))

    def first_of_two_s(self, *, averages: bool) -> float:
        """The longest time of a stage in the first of two steps."""
        plan = self.plan
        first = plan.cycle[0]
        run = self.run([first, first], averages, 1)
        begin, operation_ids = np.full(len(plan.cluster), np.inf), run.operation_ids(first)
        np.minimum.at(
            begin, run.operations.device[operation_ids], run.times.begin[0, operation_ids]
        )
        end = run.times.update_end[0]
        groups = [list(group) for group in plan.assignment.groups]
        return float(max(end[group].max() - begin[group].min() for group in groups))

    def _delayed_s(self, cycle_steps: int) -> float:
        """Mean step if one of ``cycle_steps`` steps averages while the next one runs.

        The pattern of waits needs some passes to become periodic: measured are `PASSES` passes
        after the first `PASSES`.
        """
        pattern_length = math.lcm(len(self.plan.cycle), cycle_steps)
        averages = [(t + 1) % cycle_steps == 0 for t in range(pattern_length)]
        return self._after_third_s(PASSES, averages)

    def third_pass_s(self, *, averages: bool) -> list[float]:
        """Times between step ends in the third pass through the cycle."""
        cycle = list(self.plan.cycle)
        # one more step, whose first messages may slow down the last averaging that is measured
        ends = self.run([*cycle * PASSES, cycle[0]], averages).times.step_end
        return np.diff(ends[-len(cycle) - 2 : -1]).tolist()  # type: ignore[no-any-return]

    def steady_s(self, passes: int, *, averages: bool) -> float:
        """Mean step over ``passes`` passes after the third."""
        return self._after_third_s(passes, [averages] * len(self.plan.cycle))

    def _after_third_s(self, passes: int, averages: Sequence[bool]) -> float:
        """Mean step after the third pass; ``averages`` repeats, and one more step follows."""
        cycle, pattern_length = self.plan.cycle, len(averages)
        count = (PASSES + passes) * pattern_length + 1
        steps = [cycle[t % len(cycle)] for t in range(count)]
        ends = self.run(steps, [averages[t % pattern_length] for t in range(count)]).times.step_end
        return float(ends[-2] - ends[PASSES * pattern_length - 1]) / (passes * pattern_length)

    def timeline(self, schedule: int, step_s: float) -> Timeline:
        """Timeline of one step on an idle system."""
        run = self.run([schedule], True, 1)
        operations, pairs, times = self.program.operations, self.program.pairs, run.times
        operation_ids = run.operation_ids(schedule)
        ops = sorted_ops(
            Op(b, d, OPERATION_KINDS[kind], begin, end)
            for b, d, kind, begin, end in zip(
                operations.microbatch[operation_ids].tolist(),
                operations.device[operation_ids].tolist(),
                operations.kind[operation_ids].tolist(),
                times.begin[0, operation_ids].tolist(),
                times.end[0, operation_ids].tolist(),
                strict=True,
            )
        )
        sent = operation_ids[operations.pair[operation_ids] >= 0]
        sent = sent[np.argsort(times.arrived[0, sent], kind="stable")]
        p = operations.pair[sent]
        transfers = tuple(
            Transfer(b, OPERATION_KINDS[kind], i, j, size, handed, arrived, leaves, departures)
            for b, kind, i, j, size, handed, arrived, leaves, departures in zip(
                operations.microbatch[sent].tolist(),
                operations.kind[operations.successor[sent]].tolist(),
                pairs.source[p].tolist(),
                pairs.destination[p].tolist(),
                operations.message_bytes[sent].tolist(),
                times.enqueued[0, sent].tolist(),
                times.arrived[0, sent].tolist(),
                times.send_begin[0, sent].tolist(),
                times.send_end[0, sent].tolist(),
                strict=True,
            )
        )
        makespan = max((op.end_s for op in ops), default=0.0)
        if self.queues:
            closing, averaging = self._closing(run), self.averaging_s(run)
        else:
            seconds = averaging_s(self.plan, self.cluster, self.workload)
            closing = closing_ops(self.plan, seconds, makespan)
            averaging = max(seconds.values(), default=0.0)
        sizes = self.plan.vector_bytes(self.workload)
        averaged = bytes_between(self.plan.averaging, sizes, self.plan.codec)
        return Timeline(
            self.cluster.network.ids,
            ops,
            transfers,
            closing,
            averaging_s=averaging,
            step_s=step_s,
            loads=link_loads(self.program, LinkResources.of(self.cluster), schedule, averaged),
        )

    def averaging_s(self, run: Run) -> float:
        """The longest averaging of a stage in a step on an idle system, including tied weights."""
        rounds, times = self.program.rounds, run.times
        begin, end = times.round_begin[0], times.round_end[0]
        took: dict[int, float] = {}
        for g in np.flatnonzero(rounds.round == 0).tolist():
            stage = int(rounds.stage[g])
            last = np.isin(rounds.stage, self.plan.last_averaged(stage))
            last_return = float(end[last].max())
            took[stage] = max(took.get(stage, 0.0), last_return - float(begin[g]))
        return self.plan.longest_averaging_s(took)

    def _closing(self, run: Run) -> tuple[Op, ...]:
        """Averaging and updates of a step on an idle system."""
        rounds, times = self.program.rounds, run.times
        begin, end = times.round_begin[0], times.round_end[0]
        ops = []
        for d in range(len(self.cluster)):
            for g in rounds.device_groups[rounds.device_ptr[d] : rounds.device_ptr[d + 1]].tolist():
                # waiting for the gradient norm is not averaging
                if end[g] > begin[g] and rounds.stage[g] < len(self.plan.averaging):
                    ops.append(Op(-1, d, "A", float(begin[g]), float(end[g])))
            if self.plan.compute_times.update_s[d] > 0:
                first, last = times.update_begin[0, d], times.update_end[0, d]
                ops.append(Op(-1, d, "U", float(first), float(last)))
        return sorted_ops(ops)

    def _deadlock(self, run: Run) -> None:
        assert run.stuck is not None
        d, step, place = run.stuck
        kind, b = self.plan.schedules[step].order[d][place]
        raise SimulationError(
            f"deadlock: device {d} ({self.cluster.network.ids[d]}) waits for {kind}{b}, which can "
            "never start; reorder its operations so that no two devices wait for each other"
        )


def _require_consistent(plan: TrainingPlan) -> None:
    """Check the invariants that compiled loops rely on; searched plans always hold them."""
    for line in inconsistencies(instance_of(TrainingPlan, plan, "plan")):
        raise SimulationError(line)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
