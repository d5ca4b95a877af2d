"""The steps of a run, segment by segment; between segments a device moves to another stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from planner.executor.fault_tolerance.run_segments import RunSegment
from planner.executor.fault_tolerance.state_transfer import transfer_state
from planner.executor.runtime.evaluate import Evaluation
from planner.executor.runtime.records import RouteLog, StepRecord, write_records
from planner.executor.runtime.setup import RankContext
from planner.executor.runtime.simulated_compute import SimulatedCompute
from planner.executor.runtime.worker import Worker
from planner.executor.swarm.rebalancing import Rebalancing
from planner.swarm.rebalance_policy import RebalanceDecision, RebalanceRule
from planner.training_plan.model import TrainingPlan


class TrainResult(NamedTuple):
    """Result of a run.

    Attributes
    ----------
    plan
        Of the last segment.
    last
        Last step; None if there was none.
    """

    plan: TrainingPlan
    worker: Worker
    last: StepRecord | None


def train(made: RankContext, plan: TrainingPlan, segments: Sequence[RunSegment]) -> TrainResult:
    """Run all steps; a collective call."""
    args, ranks = made.args, made.ranks
    microbatch_queue = ranks.store if args.own_pace else None
    time_scale, direct = made.time_scale, made.direct
    worker = Worker(
        plan,
        ranks,
        made.works,
        time_scale=time_scale,
        microbatch_queue=microbatch_queue,
        direct=direct,
    )
    evaluation, held_out = None, made.held_out
    if held_out is not None:
        # without steps to do, evaluate once
        steps_left = range(min(made.first, args.steps - 1), args.steps)
        evaluation = Evaluation(plan, ranks, made.stage_module, worker.wiring, held_out, steps_left)
    routes = None if args.routes is None else RouteLog(args.routes, plan, ranks.rank)
    rebalancing = _rebalancing(made, plan)
    step_callbacks = [one.after for one in (routes, rebalancing) if one is not None]
    steps: list[StepRecord] = []
    with evaluation or nullcontext():
        for part, segment in enumerate(segments if rebalancing is None else rebalancing.segments()):
            if segment.move is not None:
                _move(made, segment)
            if part:
                worker = Worker(
                    segment.plan, ranks, made.works, time_scale=made.time_scale, before=worker
                )
            done = _steps(made, worker, segment, part, evaluation, step_callbacks)
            steps = [*steps, *done] if args.record is not None else done
    if args.record is not None:
        path = Path(str(args.record).replace("{rank}", str(ranks.rank)))
        write_records(path, ranks.rank, steps)
    return TrainResult(segment.plan, worker, steps[-1] if steps else None)


def _rebalancing(made: RankContext, plan: TrainingPlan) -> Rebalancing | None:
    """The policy that moves devices during the run."""
    if made.args.rebalance is None:
        return None

    def fits(on: TrainingPlan) -> bool:
        """Whether the device of this rank holds its part of a plan."""
        memory_bytes = float(on.cluster.memory_bytes[made.ranks.rank])
        return made.need is None or made.memory_need(on, made.ranks.rank).total <= memory_bytes

    def told(decision: RebalanceDecision, why_not: str) -> None:
        if made.ranks.rank == 0:
            made.progress.moves(decision, why_not)

    how = (made.args.rebalance, RebalanceRule(made.args.rebalance_rule), made.args.steps)
    return Rebalancing(plan, *how, made.ranks, fits, told)


def _move(made: RankContext, segment: RunSegment) -> None:
    """Transfer the state of the new stage to the moved device."""
    if made.need is not None:
        now = made.memory_need(segment.plan, made.ranks.rank)
        made.need = max(made.need, now, key=lambda need: need.total)
    if made.time_scale is not None:
        made.works = SimulatedCompute(segment.plan, made.ranks.rank, made.time_scale)
    elif made.ranks.rank == segment.taker:
        made.works = made.stage_module = made.stage_module_of(segment.plan)
    transfer_state(made.ranks, segment.giver, segment.taker, made.stage_module, segment.begin)
    if made.checkpoints is not None:
        made.checkpoints = made.checkpoints.of(segment.plan, made.stage_module)


def _steps(
    made: RankContext,
    worker: Worker,
    segment: RunSegment,
    part: int,
    evaluation: Evaluation | None,
    step_callbacks: Sequence[Callable[[StepRecord], None]],
) -> list[StepRecord]:
    """Run a segment; rank 0 reports each step."""
    args, progress = made.args, made.progress
    rest, begin = (0, segment.begin) if part else (args.rest, made.first)
    records: list[StepRecord] = []
    for record in worker.steps(segment.end - begin, rest, begin):
        if args.record is None:
            records.clear()
        records.append(record)
        for callback in step_callbacks:
            callback(record)
        if worker.rank == 0:
            progress.step(record, worker.losses)
        _evaluate(made, evaluation, record.step)
        if made.checkpoints is not None and made.checkpoints.due(record.step):
            worker.settle()
            made.checkpoints.maybe_save(record.step)
    if not records:
        _evaluate(made, evaluation, args.steps - 1)
    if worker.rank == 0:
        progress.end(worker.losses)
    return records


def _evaluate(made: RankContext, evaluation: Evaluation | None, step: int) -> None:
    for found in evaluation.after(step) if evaluation is not None else ():
        if made.ranks.rank == 0:
            made.progress.evaluated(found)
