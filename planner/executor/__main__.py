"""One rank under torchrun: ``python -m planner.executor plan.json --devices a b ...``.

The rank of device 0 prints one line per step; with ``--events``, JSON lines, which ``planner run``
reads. With ``--impose`` compute is simulated: operations take the plan's times, messages have the
plan's bytes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from planner.emulate.simulated_compute import ComputeSimulation
from planner.executor.comm.time_scale import TimeScale
from planner.executor.elastic.elastic_run import ElasticRun
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import Shutdown
from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.process import die_with_parent, exit_now, init_process, run_rank
from planner.executor.launch.run_config import RunConfig
from planner.executor.launch.setup import RunState, set_up
from planner.executor.launch.train_loop import TrainResult, train
from planner.executor.rendezvous.rank_assignment import local_device_name
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.rendezvous.rendezvous import WAIT_S
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.device_report import device_reports
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.sharded_aggregator import ShardedAggregator
from planner.executor.runtime.sharded_model_stage import ShardedModelStage
from planner.executor.runtime.spread_parameters import spread_in_fp32
from planner.executor.runtime.worker import Worker
from planner.huggingface.export import export_trained
from planner.simulator.timeline import from_records
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.utils.refusal import Refusal

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable of ranks started by torchrun."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    config = parse_arguments(argv, __doc__)
    init_process()
    die_with_parent()
    name = local_device_name(config.devices)
    detector = FailureDetector(name, Shutdown())
    return run_rank(name, detector, lambda: _run(config, detector))


def _run(config: RunConfig, detector: FailureDetector) -> int:
    config.validate()
    config.validate_files()
    plan = load_plan(config.plan)
    config.validate_for_plan(plan)
    if config.elastic and TORCHRUN in os.environ:
        raise Refusal(
            "--elastic: torchrun ends all ranks of a node when one fails; start them with "
            "python -m planner.executor.node, or with planner run"
        )
    scale = TimeScale(config.speed, config.shrink)
    state = set_up(config, plan, detector, ComputeSimulation(scale) if config.impose else None)
    if config.elastic:
        return _run_elastic(state, plan, detector)
    result = train(state, plan)
    if state.export is not None:
        _spread_rounded(state, plan, state.ranks)
        export_trained(state.export.for_plan(result.plan), state.ranks, state.model_stage)
    _finish(state, state.ranks, result)
    return 0


def _run_elastic(state: RunState, plan: TrainingPlan, detector: FailureDetector) -> int:
    assert isinstance(state.runtime, ModelStage | Aggregator)
    elastic = ElasticRun(
        plan,
        state.ranks,
        state.runtime,
        state.progress,
        state.checkpoints,
        state.held_out,
        state.config.wait or WAIT_S,
        state.device,
        state.make_pipeline,
    )
    last = elastic.train(state.first_step, state.config.steps)
    if elastic.worker is None:  # all steps were done before it could join
        detector.stop_watching()
        return 0
    with elastic.after_last_step("the model is not written"):
        if state.export is not None:
            _spread_rounded(state, elastic.plan, elastic.ranks)
            export_trained(state.export.for_plan(elastic.plan), elastic.ranks, state.model_stage)
    with elastic.after_last_step():
        _finish(state, elastic.ranks, TrainResult(elastic.plan, elastic.worker, last))
    return 0


def _spread_rounded(state: RunState, plan: TrainingPlan, ranks: RankGroup) -> None:
    """Give all devices the fp32 parameters of which they use rounded ones; a collective call."""
    if any(group.dtype for rounds in plan.averaging for group in rounds[-1]):
        assert isinstance(state.runtime, ShardedModelStage | ShardedAggregator)
        spread_in_fp32(plan, ranks, state.runtime, "export/spread")


def _finish(state: RunState, ranks: RankGroup, result: TrainResult) -> None:
    """Reports after the last step; a collective call."""
    trace, need, runtime = state.config.trace, state.peak_memory, state.runtime
    if trace is not None:
        _trace(trace, result.plan, ranks, result.worker, result.last)
    if need is not None:
        assert isinstance(runtime, ModelStage | Aggregator)
        reports = device_reports(result.plan, ranks, runtime, need, state.device, result.worker)
        if ranks.rank == 0:
            state.progress.devices(reports)
    state.stop_gpu_processes()
    ranks.leave()


def _trace(
    path: Path, plan: TrainingPlan, ranks: RankGroup, worker: Worker, last: StepRecord | None
) -> None:
    """Timeline of the last step of all ranks, written by rank 0."""
    text = ""
    if last is not None:
        ops = [(*op[:3], op.start_s - worker.began_s, op.end_s - worker.began_s) for op in last.ops]
        text = json.dumps([last.begin_s - worker.began_s, ops])
    # a rank that joined at the end has run no step
    timelines = [json.loads(text) for text in ranks.all_gather("trace", text) if text]
    if ranks.rank == 0 and timelines:
        start_s = min(begin_s for begin_s, _ in timelines)
        records = [
            [*op[:3], op[3] - start_s, op[4] - start_s] for _, ops in timelines for op in ops
        ]
        ids = plan.cluster.network.ids
        from_records(ids, records).to_chrome_trace(path)


if __name__ == "__main__":
    exit_now(main())
