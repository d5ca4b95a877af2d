"""One rank under torchrun: ``python -m planner.executor plan.json --devices a b ...``.

The rank of device 0 prints one line per step; with ``--events``, JSON lines, which ``planner run``
reads. With ``--impose`` compute is simulated: operations take the plan's times, messages have the
plan's bytes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from planner.executor.comm.aggregator import Aggregator
from planner.executor.fault_tolerance.elastic import ElasticRun
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.run_segments import segments_of
from planner.executor.fault_tolerance.shutdown import Shutdown
from planner.executor.huggingface.export import export_trained
from planner.executor.launch.arguments import (
    parse_arguments,
    validate,
    validate_files,
    validate_for_plan,
)
from planner.executor.launch.process import die_with_parent, exit_now, init_process, run_rank
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.rendezvous.rank_assignment import own_name
from planner.executor.runtime.device_report import device_reports
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.setup import RankContext, set_up
from planner.executor.runtime.stage_module import StageModule
from planner.executor.runtime.train_loop import TrainResult, train
from planner.executor.runtime.worker import Worker
from planner.executor.swarm.rebalancing import require_movable
from planner.simulator.timeline import from_records
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import require_elastic

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable of ranks started by torchrun."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    args = parse_arguments(argv, __doc__)
    init_process()
    die_with_parent()
    name = own_name(args.devices)
    detector = FailureDetector(name, Shutdown())
    return run_rank(name, detector, lambda: _run(args, detector))


def _run(args: argparse.Namespace, detector: FailureDetector) -> int:
    validate(args)
    validate_files(args)
    plan = load_plan(args.plan)
    segments = segments_of(plan, args.move, args.steps)
    if args.rebalance is not None:
        require_movable(plan, args.rebalance)
    validate_for_plan(args, plan)
    if args.elastic:
        require_elastic(plan, None if args.checkpoint is None else args.every)
        if TORCHRUN in os.environ:
            raise ValueError(
                "--elastic: torchrun ends all ranks of a node when one fails; start them with "
                "python -m planner.executor.node, or with planner run"
            )
    made = set_up(args, plan, segments, detector)
    if args.elastic:
        return _run_elastic(made, plan, detector)
    done = train(made, plan, segments)
    if made.export is not None:
        export_trained(made.export.of(done.plan), made.ranks, made.stage_module)
    _finish(made, made.ranks, done)
    return 0


def _run_elastic(made: RankContext, plan: TrainingPlan, detector: FailureDetector) -> int:
    assert isinstance(made.works, StageModule | Aggregator)
    how = (made.works, made.progress, made.checkpoints, made.held_out, made.args.wait)
    elastic = ElasticRun(plan, made.ranks, *how)
    last = elastic.train(made.first, made.args.steps)
    if elastic.worker is None:  # it came too late
        detector.finish()
        return 0
    with elastic.at_the_end("the model is not written"):
        if made.export is not None:
            export_trained(made.export.of(elastic.plan), elastic.ranks, made.stage_module)
    with elastic.at_the_end():
        _finish(made, elastic.ranks, TrainResult(elastic.plan, elastic.worker, last))
    return 0


def _finish(made: RankContext, ranks: ProcessGroup, done: TrainResult) -> None:
    """Reports after the last step; a collective call."""
    if made.args.trace is not None:
        _trace(made.args.trace, done.plan, ranks, done.worker, done.last)
    if made.need is not None:
        assert isinstance(made.works, StageModule | Aggregator)
        reports = device_reports(done.plan, ranks, made.works, made.need, made.device, done.worker)
        if ranks.rank == 0:
            made.progress.devices(reports)
    ranks.part()


def _trace(
    path: Path, plan: TrainingPlan, ranks: ProcessGroup, worker: Worker, last: StepRecord | None
) -> None:
    """Timeline of the last step of all ranks, written by rank 0."""
    text = ""
    if last is not None:
        ops = [(*op[:3], op[3] - worker.began_s, op[4] - worker.began_s) for op in last.ops]
        text = json.dumps([last.begin_s - worker.began_s, ops])
    # a rank that joined at the end has run no step
    told = [json.loads(text) for text in ranks.all_gather("trace", text) if text]
    if ranks.rank == 0 and told:
        zero = min(begin for begin, _ in told)
        found = [[*op[:3], op[3] - zero, op[4] - zero] for _, ops in told for op in ops]
        ids = plan.cluster.network.ids
        from_records(ids, found).to_chrome_trace(path)


if __name__ == "__main__":
    exit_now(main())
