"""Set-up of a rank before its first step: rendezvous, memory check, stage module."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from planner.executor.checkpoint.checkpoint import CheckpointManager, require_fresh_folder, resume
from planner.executor.comm.aggregator import Aggregator
from planner.executor.comm.comm_plan import averaging_of, tied_of
from planner.executor.comm.direct import DeviceTransfers, open_device_transfers
from planner.executor.data.consistency import require_same_data
from planner.executor.data.options import Data
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.run_segments import RunSegment
from planner.executor.huggingface.export import Export
from planner.executor.huggingface.weights import weight_digests
from planner.executor.launch.arguments import secret_of, shared_settings
from planner.executor.launch.calibrate import calibrate
from planner.executor.launch.options import Library, data_of, eval_data_of, optimizing_of
from planner.executor.rendezvous.file_digest import require_same_files
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.rendezvous.rank_assignment import heartbeat_timeout_s, join
from planner.executor.rendezvous.store import BEGUN, StoreAddress
from planner.executor.runtime.device_backend import HOST
from planner.executor.runtime.device_report import peak_flops
from planner.executor.runtime.evaluate import EvaluationData, evaluation_data
from planner.executor.runtime.flops_counter import FlopsCounter
from planner.executor.runtime.memory import MemoryNeed, claims_of, memory_need, require_memory
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.progress import Progress
from planner.executor.runtime.simulated_compute import SimulatedCompute, TimeScale
from planner.executor.runtime.stage_module import StageModule, require_executable
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_text


@dataclass
class RankContext:
    """State of a rank before its first step.

    Attributes
    ----------
    args
        Of `planner.executor.launch.arguments.parse_arguments`.
    ranks
        The process group.
    time_scale
        Of simulated compute; None if a model is trained.
    stage_module
        Its part of the model; None if it has none.
    works
        Runs its operations.
    progress
        Output of the first rank.
    held_out
        Evaluation data; None for no evaluation.
    need
        Its peak memory; None if it is not checked.
    first
        Number of steps done before.
    export
        Where the model is exported at the end.
    direct
        Transfers between GPUs without the host; None for none.
    """

    args: argparse.Namespace
    ranks: ProcessGroup
    device: torch.device
    time_scale: TimeScale | None
    optimizing: OptimizerConfig
    data: Data
    progress: Progress
    stage_module: StageModule | None = None
    works: StageModule | Aggregator | SimulatedCompute = field(init=False)
    held_out: EvaluationData | None = None
    need: MemoryNeed | None = None
    first: int = 0
    checkpoints: CheckpointManager | None = None
    export: Export | None = None
    direct: DeviceTransfers | None = None

    def stage_module_of(self, plan: TrainingPlan) -> StageModule:
        """The stage module of this rank in a plan."""
        # a resumed run has its own weights
        weights = self.args.weights if self.args.resume is None else None
        return StageModule(
            plan,
            self.ranks.rank,
            self.device,
            self.optimizing,
            data=self.data,
            weights=weights,
            counted=self.args.elastic,
            compiled=self.args.compile,
        )

    def memory_need(self, plan: TrainingPlan, rank: int) -> MemoryNeed:
        """Peak memory of a rank in a plan."""
        return memory_need(
            plan,
            rank,
            averaging_of(plan, rank),
            other=tied_of(plan, rank)
            if plan.averages_tied
            else averaging_of(plan, rank, every_step=True),
            on_gpu=self.device.type == "cuda",
            calibrates=self.args.calibrate is not None,
            direct=self.args.direct is not None,
        )


def set_up(
    args: argparse.Namespace,
    plan: TrainingPlan,
    segments: Sequence[RunSegment],
    detector: FailureDetector,
) -> RankContext:
    """Meet the other ranks and get ready."""
    optimizing, data, secret = optimizing_of(args), data_of(args), secret_of(args)
    eval_data = eval_data_of(args)
    _start_gpu(args.device)
    ranks = join(
        plan,
        args.devices,
        shared_settings(args),
        detector=detector,
        wait_s=args.wait,
        # simulated times are scaled, timeouts are not
        heartbeat_timeout_s=args.patience or heartbeat_timeout_s(plan, args.speed),
        begun=BEGUN if args.elastic else "",
        secret=secret,
    )
    # after the others can be notified of a refusal
    device = _torch_device(args.device)
    time_scale = TimeScale(args.speed, args.shrink) if args.impose else None
    progress = Progress(plan.predicted.step_s / args.speed, args.events, plan=plan.content_hash)
    made = RankContext(args, ranks, device, time_scale, optimizing, data, progress)
    if time_scale is None:
        _prepare_model(made, plan, segments, detector)
        if eval_data is not None:
            how = {"every": args.eval_every, "batches": args.eval_batches, "stop": args.steps}
            made.held_out = evaluation_data(plan, ranks, made.stage_module, eval_data, **how)
    else:
        made.works = SimulatedCompute(plan, ranks.rank, time_scale)
    return made


def _prepare_model(
    made: RankContext, plan: TrainingPlan, segments: Sequence[RunSegment], detector: FailureDetector
) -> None:
    args, ranks = made.args, made.ranks
    require_executable(plan)
    first = ranks.rank == 0 and not ranks.late
    if first:
        made.progress.phase("all processes are connected; building the model")
    needs = (made.memory_need(segment.plan, ranks.rank) for segment in segments)
    made.need = max(needs, key=lambda need: need.total)
    require_memory(ranks, claims_of(ranks, made.need, made.device))
    peak = None if ranks.late else peak_flops(plan, ranks, made.device)
    made.progress.work = FlopsCounter(plan, peak)
    if args.export is not None:
        made.export = Export(args.export, plan, args.weights)
    if ranks.rank in plan.stage_of:
        made.stage_module = made.stage_module_of(plan)
    if args.direct is not None:
        made.direct = _direct_of(made)
    if args.weights is not None and args.resume is None and not ranks.late:
        require_same_files(ranks, "--weights", _digests(made, plan))
    require_same_data(
        ranks, "--data", None if made.stage_module is None else made.stage_module.data
    )
    if args.calibrate is not None and not ranks.late:
        if first:
            made.progress.phase("measuring forward and backward of every stage")
        measured = calibrate(plan, ranks, made.stage_module, made.device, made.direct)
        if measured is not None:
            write_text(args.calibrate, measured.to_json_text())
            made.progress.calibrated(args.calibrate)
    made.works = made.stage_module or Aggregator(plan, ranks.rank)
    _prepare_checkpoints(made, plan, detector)
    if first:
        made.progress.phase("running the first step")


def _digests(made: RankContext, plan: TrainingPlan) -> dict[str, str]:
    """Digests of the files that this rank has read."""
    if made.stage_module is None:
        return {}
    layers = plan.stage_layers[plan.stage_of[made.ranks.rank]]
    head = made.stage_module.head is not None
    return weight_digests(made.args.weights, require_executable(plan), *layers, head=head)


def _direct_of(made: RankContext) -> DeviceTransfers | None:
    """Transfers to other ranks without the host."""
    stage_module = made.stage_module
    side, device = (
        (HOST, torch.device("cpu")) if stage_module is None else (stage_module.side, made.device)
    )
    store = StoreAddress.of_environment().connect(made.args.wait)
    return open_device_transfers(Library(made.args.direct), made.ranks, device, side, store)


def _prepare_checkpoints(made: RankContext, plan: TrainingPlan, detector: FailureDetector) -> None:
    """Resume if requested, and create the checkpoint manager."""
    args, ranks, settings = made.args, made.ranks, made.optimizing.to_dict()

    def written(steps: int) -> None:
        detector.shutdown_.hint = f"; go on after {steps} steps with --resume {args.checkpoint}"

    if args.resume is not None and not ranks.late:
        made.first = resume(args.resume, plan, ranks, made.stage_module, settings)
        if made.first > args.steps or (made.first == args.steps and args.eval_data is None):
            raise ValueError(
                f"--steps is {args.steps}, but {made.first} were done; give the number of all "
                "steps, with those that were done, or as many and --eval-data to evaluate alone"
            )
        if args.elastic and plan.sync.delayed and made.first:
            raise ValueError(
                f"--elastic: {made.first} steps were done, and the plan takes outer steps a step "
                "late (sync.delayed), so that none goes on from a checkpoint after a loss; go on "
                "without --elastic"
            )
        if args.elastic and made.first % plan.sync.every_steps:
            raise ValueError(
                f"--elastic: {made.first} steps were done, and the plan averages every "
                f"{plan.sync.every_steps}; go on without it up to a checkpoint after an outer step"
            )
    if args.checkpoint is not None:
        again = StoreAddress.of_environment().attempt != "0"
        if not ranks.late and not again:
            require_fresh_folder(args.checkpoint, args.resume)
        more = (plan, ranks, made.stage_module, settings, written)
        made.checkpoints = CheckpointManager(args.checkpoint, args.every, *more)


def _start_gpu(choice: str) -> None:
    """Create the CUDA context before heartbeats begin: it may hold the GIL for seconds."""
    if choice != "cpu" and torch.cuda.is_available():
        # create the context in autograd's thread, too
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        torch.zeros(1, device=_torch_device(choice))


def _torch_device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable GPU; use cpu")
    # several ranks may share a GPU: messages use host memory
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
