"""The steps of a run; where devices rebalance, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from planner.emulate.simulated_compute import SimulatedCompute
from planner.executor.checkpoint.state_transfer import transfer_state
from planner.executor.launch.setup import RankContext
from planner.executor.rendezvous.process_group import close_older
from planner.executor.runtime.evaluate import Evaluation
from planner.executor.runtime.records import StepRecord, write_records
from planner.executor.runtime.worker import Worker
from planner.executor.swarm.rebalancing import Rebalancing, RunSegment
from planner.swarm.rebalance_policy import RebalanceDecision
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


def train(context: RankContext, plan: TrainingPlan) -> TrainResult:
    """Run all steps; a collective call."""
    config, ranks, held_out = context.config, context.ranks, context.held_out
    pipeline = context.pipeline_of(plan, ranks.rank, context.compute)
    worker = context.worker_of(plan, ranks, pipeline, before=None)
    evaluation = None
    if held_out is not None:
        # without steps to do, evaluate once
        steps_left = range(min(context.first, config.steps - 1), config.steps)
        evaluation = Evaluation(
            plan, ranks, context.stage_module, worker.wiring, held_out, steps_left
        )
    rebalancing = _rebalancing(context, plan)
    segments: Iterable[RunSegment] = (RunSegment(plan, context.first, config.steps),)
    if rebalancing is not None:
        segments = rebalancing.segments()
    steps: list[StepRecord] = []
    # heartbeat connections of segments
    held: list[ExitStack] = []
    with evaluation or nullcontext():
        for part, segment in enumerate(segments):
            if segment.move is not None:
                _move(context, segment)
                # estimates of peers are of the plan before
                pipeline = context.pipeline_of(segment.plan, ranks.rank, context.compute)
            if part:
                held.append(ExitStack())
                own = replace(ranks, held=held[-1])
                worker = context.worker_of(segment.plan, own, pipeline, before=worker)
                close_older(held)
            after = None if rebalancing is None else rebalancing.after
            done = _steps(context, worker, segment, part, evaluation, after)
            steps = [*steps, *done] if config.record is not None else done
    for last in held:
        ranks.held.callback(last.close)
    if config.record is not None:
        path = Path(str(config.record).replace("{rank}", str(ranks.rank)))
        write_records(path, ranks.rank, steps)
    return TrainResult(segment.plan, worker, steps[-1] if steps else None)


def _rebalancing(context: RankContext, plan: TrainingPlan) -> Rebalancing | None:
    """The policy that moves devices during the run."""
    config, rank = context.config, context.ranks.rank
    if config.rebalance is None:
        return None

    def fits(moved: TrainingPlan) -> bool:
        """Whether the device of this rank holds its part of a plan."""
        memory_bytes = float(moved.cluster.memory_bytes[rank])
        return context.need is None or context.memory_need(moved, rank).total <= memory_bytes

    def report(decision: RebalanceDecision, why_not: str) -> None:
        move = decision.move
        if rank == 0:
            context.progress.between_steps(
                decision.said(why_not),
                event="move",
                steps=move.after,
                device=move.device,
                stage=move.stage,
                why_not=why_not,
                before_per_s=decision.before,
                after_per_s=decision.after,
            )

    return Rebalancing(
        plan, config.rebalance, config.rebalance_rule, config.steps, context.ranks, fits, report
    )


def _move(context: RankContext, segment: RunSegment) -> None:
    """Transfer the state of the new stage to the moved device."""
    rank = context.ranks.rank
    if context.need is not None:
        need = context.memory_need(segment.plan, rank)
        context.need = max(context.need, need, key=lambda need: need.total)
    if context.time_scale is not None:
        context.compute = SimulatedCompute(segment.plan, rank, context.time_scale)
    elif rank == segment.taker:
        context.compute = context.stage_module = context.stage_module_of(segment.plan)
    transfer_state(context.ranks, segment.giver, segment.taker, context.stage_module, segment.begin)
    if context.checkpoints is not None:
        context.checkpoints = context.checkpoints.of(segment.plan, context.stage_module)


def _steps(
    context: RankContext,
    worker: Worker,
    segment: RunSegment,
    part: int,
    evaluation: Evaluation | None,
    after: Callable[[StepRecord], None] | None,
) -> list[StepRecord]:
    """Run a segment; rank 0 reports each step."""
    config, progress = context.config, context.progress
    rest = 0 if part else config.rest
    records: list[StepRecord] = []
    for record in worker.steps(segment.end - segment.begin, rest, segment.begin):
        if config.record is None:
            records.clear()
        records.append(record)
        if after is not None:
            after(record)
        if worker.rank == 0:
            progress.step(record, worker.losses)
        _evaluate(context, evaluation, record.step)
        if context.checkpoints is not None and context.checkpoints.due(record.step):
            worker.settle()
            context.checkpoints.maybe_save(record.step)
    if not records:
        _evaluate(context, evaluation, config.steps - 1)
    if worker.rank == 0:
        progress.end(worker.losses)
    return records


def _evaluate(context: RankContext, evaluation: Evaluation | None, step: int) -> None:
    for result in evaluation.after(step) if evaluation is not None else ():
        if context.ranks.rank == 0:
            context.progress.evaluated(result)
