"""The loop over all steps of a run, in segments between which devices may move."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from planner.executor.checkpoint.state_transfer import transfer_state
from planner.executor.launch.setup import RunState
from planner.executor.rendezvous.rank_group import close_older
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
    plan, worker
        Those of the last segment.
    last
        Record of the last step; None if there was none.
    """

    plan: TrainingPlan
    worker: Worker
    last: StepRecord | None


def train(state: RunState, plan: TrainingPlan) -> TrainResult:
    """Run all steps; a collective call."""
    config, ranks = state.config, state.ranks
    pipeline = state.make_pipeline(plan, ranks.rank, state.runtime)
    make_worker = partial(Worker, simulation=state.simulation, collectives=state.collectives)
    worker = make_worker(plan, ranks, state.runtime, pipeline)
    rebalancing = _rebalancing(state, plan)
    segments: Iterable[RunSegment] = (RunSegment(plan, state.first_step, config.steps),)
    if rebalancing is not None:
        segments = rebalancing.segments()
    records: list[StepRecord] = []
    # connections of segments after the first that stay open beyond them
    segment_resources: list[ExitStack] = []
    with _evaluation(state, plan) or nullcontext() as evaluation:
        for number, segment in enumerate(segments):
            if segment.move is not None:
                _move(state, segment)
                # the router's estimates are about the peers of the previous plan
                pipeline = state.make_pipeline(segment.plan, ranks.rank, state.runtime)
            if number:
                segment_resources.append(ExitStack())
                segment_ranks = replace(ranks, resources=segment_resources[-1])
                worker = make_worker(
                    segment.plan,
                    segment_ranks,
                    state.runtime,
                    pipeline,
                    previous=worker,
                    segment=number,
                )
                close_older(segment_resources)
            segment_records = _run_segment(state, worker, segment, evaluation, rebalancing)
            records = [*records, *segment_records] if config.record else segment_records
    for resources in segment_resources:
        ranks.resources.callback(resources.close)
    if config.record is not None:
        path = Path(str(config.record).replace("{rank}", str(ranks.rank)))
        write_records(path, ranks.rank, records)
    return TrainResult(segment.plan, worker, records[-1] if records else None)


def _evaluation(state: RunState, plan: TrainingPlan) -> Evaluation | None:
    if state.held_out is None:
        return None
    steps = state.config.steps
    # without steps to do, evaluate once
    steps_left = range(min(state.first_step, steps - 1), steps)
    return Evaluation(plan, state.ranks, state.model_stage, state.held_out, steps_left)


def _rebalancing(state: RunState, plan: TrainingPlan) -> Rebalancing | None:
    """The policy that moves devices to other stages; None without ``--rebalance``."""
    config, rank = state.config, state.ranks.rank
    if config.rebalance is None:
        return None

    def fits(moved: TrainingPlan) -> bool:
        """Whether the device of this rank holds its part of a plan."""
        memory_bytes = float(moved.cluster.memory_bytes[rank])
        return (
            state.peak_memory is None or state.memory_need(moved, rank).total_bytes <= memory_bytes
        )

    def report(decision: RebalanceDecision, why_not: str) -> None:
        move = decision.move
        if rank == 0:
            state.progress.between_steps(
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
        plan, config.rebalance, config.rebalance_rule, config.steps, state.ranks, fits, report
    )


def _move(state: RunState, segment: RunSegment) -> None:
    """Transfer the state of the new stage to the device that has moved."""
    rank = state.ranks.rank
    if state.peak_memory is not None:
        need = state.memory_need(segment.plan, rank)
        state.peak_memory = max(state.peak_memory, need, key=lambda need: need.total_bytes)
    if state.simulation is not None:
        state.runtime = state.simulation.make_runtime(segment.plan, rank)
    elif rank == segment.target:
        # the weights are transferred, not loaded
        stage = state.make_model_stage(segment.plan, with_weights=False)
        state.runtime = state.model_stage = stage
    transfer_state(state.ranks, segment.source, segment.target, state.model_stage, segment.begin)
    if state.checkpoints is not None:
        state.checkpoints.set_plan(segment.plan, state.model_stage)
    if (flops := state.progress.flops) is not None:
        state.progress.set_plan(segment.plan, flops.peak_flops)


def _run_segment(
    state: RunState,
    worker: Worker,
    segment: RunSegment,
    evaluation: Evaluation | None,
    rebalancing: Rebalancing | None,
) -> list[StepRecord]:
    """Run the steps of a segment; returns all records with ``--record``, else the last one."""
    config, progress, checkpoints = state.config, state.progress, state.checkpoints
    isolated_steps = config.rest if segment.begin == state.first_step else 0
    records: list[StepRecord] = []
    for record in worker.steps(
        segment.end - segment.begin, first=segment.begin, isolated_steps=isolated_steps
    ):
        if config.record is None:
            records.clear()
        records.append(record)
        if rebalancing is not None:
            rebalancing.record_step(record)
        if worker.rank == 0:
            progress.step(record, worker.losses)
        _evaluate(state, evaluation, record.step)
        if checkpoints is not None:
            if checkpoints.due(record.step):
                worker.wait_for_averaging()
            checkpoints.after_step(record.step)
    if checkpoints is not None:
        # before another segment changes the plan
        checkpoints.finish()
    if not records:
        _evaluate(state, evaluation, config.steps - 1)
    if worker.rank == 0:
        progress.end(worker.losses)
    return records


def _evaluate(state: RunState, evaluation: Evaluation | None, step: int) -> None:
    """Evaluate after a step, if an evaluation is due; rank 0 reports the results."""
    for result in evaluation.after(step) if evaluation is not None else ():
        if state.ranks.rank == 0:
            state.progress.evaluated(result)
