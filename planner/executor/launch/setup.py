"""Set-up of a rank before its first step: rendezvous, memory check, stage module."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store

from planner.emulate.simulated_compute import CommonStart, SimulatedCompute
from planner.executor.checkpoint.checkpoint import CheckpointManager, require_fresh_folder, resume
from planner.executor.comm.comm_plan import averaging_of, tied_of
from planner.executor.comm.device_backend import HOST
from planner.executor.comm.device_collectives import DeviceCollectives, Library, open_collectives
from planner.executor.comm.time_scale import TimeScale
from planner.executor.data.consistency import require_same_data
from planner.executor.data.options import Data
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.launch.arguments import secret_of
from planner.executor.launch.run_config import RunConfig
from planner.executor.rendezvous.file_digest import require_same_files
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.rendezvous.rank_assignment import WAIT_S, heartbeat_timeout_s, join
from planner.executor.rendezvous.store import BEGUN, StoreAddress
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.device_report import peak_flops
from planner.executor.runtime.evaluate import EvaluationData, evaluation_data
from planner.executor.runtime.flops_counter import FlopsCounter
from planner.executor.runtime.memory import MemoryNeed, claims_of, memory_need, require_memory
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.pipeline import FixedPipeline, Pipeline
from planner.executor.runtime.progress import Progress
from planner.executor.runtime.stage_module import StageModule, require_executable
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.executor.runtime.worker import Worker
from planner.executor.swarm.microbatch_queue import QueuePipeline
from planner.executor.swarm.stochastic_pipeline import StochasticPipeline, router_of
from planner.huggingface.export import Export
from planner.huggingface.weights import load_weights, weight_digests
from planner.profiling.calibrate import calibrate
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_text


@dataclass
class RankContext:
    """State of a rank before its first step.

    Attributes
    ----------
    ranks
        The process group.
    time_scale
        Of simulated compute; None if a model is trained.
    stage_module
        Its part of the model; None if it has none.
    compute
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
    collectives
        Averages between GPUs without the host; None for none.
    """

    config: RunConfig
    ranks: ProcessGroup
    device: torch.device
    time_scale: TimeScale | None
    optimizer: OptimizerConfig
    data: Data
    progress: Progress
    stage_module: StageModule | None = None
    compute: StageModule | Aggregator | SimulatedCompute = field(init=False)
    held_out: EvaluationData | None = None
    need: MemoryNeed | None = None
    first: int = 0
    checkpoints: CheckpointManager | None = None
    export: Export | None = None
    collectives: DeviceCollectives | None = None

    @property
    def compiled(self) -> bool:
        """Whether layers and head are compiled."""
        if self.config.compile is not None:
            return self.config.compile
        return self.device.type == "cuda" and _has_compilers()

    def stage_module_of(self, plan: TrainingPlan) -> StageModule:
        """The stage module of this rank in a plan."""
        # a resumed run has its own weights
        weights = self.config.weights if self.config.resume is None else None
        return StageModule(
            plan,
            self.ranks.rank,
            self.device,
            self.optimizer,
            data=self.data,
            load_weights=None if weights is None else partial(load_weights, weights),
            counted=self.config.elastic,
            compiled=self.compiled,
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
            calibrates=self.config.calibrate is not None,
            direct=self.config.direct is not None,
        )

    def pipeline_of(self, plan: TrainingPlan, rank: int, compute: StageRuntime) -> Pipeline:
        """How a rank of a plan runs its operations."""
        queue = self.ranks.store if self.config.own_pace else None
        return make_pipeline(plan, rank, compute, queue=queue, speed=self.config.speed)

    def worker_of(
        self, plan: TrainingPlan, ranks: ProcessGroup, pipeline: Pipeline, before: Worker | None
    ) -> Worker:
        """The worker of this rank of a plan."""
        scale = self.time_scale
        return Worker(
            plan,
            ranks,
            self.compute,
            pipeline=pipeline,
            time_scale=scale,
            start=None if scale is None else CommonStart(plan, ranks, scale),
            before=before,
            collectives=self.collectives,
        )


def make_pipeline(
    plan: TrainingPlan,
    rank: int,
    compute: StageRuntime,
    *,
    queue: Store | None = None,
    speed: float = 1.0,
) -> Pipeline:
    """How a rank runs its operations; from a queue of microbatches if a store for it is given."""
    if queue is not None:
        return QueuePipeline(plan, rank, compute, queue)
    if plan.wiring is Wiring.STOCHASTIC:
        return StochasticPipeline(plan, rank, compute, router_of(plan, rank, speed))
    return FixedPipeline(plan, rank, compute)


def set_up(config: RunConfig, plan: TrainingPlan, detector: FailureDetector) -> RankContext:
    """Meet the other ranks and get ready."""
    optimizer, data = config.optimizer_config(), config.training_data()
    eval_data = config.evaluation_data()
    secret = secret_of(config.bind, config.secret_file)
    _start_gpu(config.device)
    ranks = join(
        plan,
        config.devices,
        config.shared_settings(),
        detector=detector,
        wait_s=config.wait or WAIT_S,
        # simulated times are scaled, timeouts are not
        heartbeat_timeout_s=config.patience or heartbeat_timeout_s(plan, config.speed),
        begun=BEGUN if config.elastic else "",
        secret=secret,
    )
    # after the others can be notified of a refusal
    device = _torch_device(config.device)
    time_scale = TimeScale(config.speed, config.shrink) if config.impose else None
    planned_s = plan.predicted.step_s / config.speed
    progress = Progress(planned_s, config.events, plan=plan.content_hash)
    context = RankContext(config, ranks, device, time_scale, optimizer, data, progress)
    if time_scale is not None:
        context.compute = SimulatedCompute(plan, ranks.rank, time_scale)
        return context
    _prepare_model(context, plan, detector)
    if eval_data is not None:
        context.held_out = evaluation_data(
            plan,
            ranks,
            context.stage_module,
            eval_data,
            every=config.eval_every,
            batches=config.eval_batches,
            stop=config.steps,
        )
    return context


def _prepare_model(context: RankContext, plan: TrainingPlan, detector: FailureDetector) -> None:
    config, ranks = context.config, context.ranks
    require_executable(plan)
    first = ranks.rank == 0 and not ranks.late
    if first:
        context.progress.phase("all processes are connected; building the model")
    context.need = context.memory_need(plan, ranks.rank)
    require_memory(ranks, claims_of(ranks, context.need, context.device))
    peak = None if ranks.late else peak_flops(plan, ranks, context.device)
    context.progress.work = FlopsCounter(plan, peak)
    if config.export is not None:
        context.export = Export(config.export, plan, config.weights)
    if ranks.rank in plan.stage_of:
        context.stage_module = context.stage_module_of(plan)
    if config.direct is not None:
        context.collectives = _open_collectives(context, plan, Library(config.direct))
    if config.weights is not None and config.resume is None and not ranks.late:
        require_same_files(ranks, "--weights", _digests(context, plan))
    stage_module = context.stage_module
    require_same_data(ranks, "--data", None if stage_module is None else stage_module.data)
    if config.calibrate is not None and not ranks.late:
        if first:
            context.progress.phase("measuring forward and backward of every stage")
        measured = calibrate(plan, ranks, stage_module, context.device)
        if measured is not None:
            write_text(config.calibrate, measured.to_json_text())
            context.progress.calibrated(str(config.calibrate))
    context.compute = stage_module or Aggregator(plan, ranks.rank)
    _prepare_checkpoints(context, plan, detector)
    if first:
        context.progress.phase("running the first step")


def _digests(context: RankContext, plan: TrainingPlan) -> dict[str, str]:
    """Digests of the files that this rank has read."""
    weights, stage_module = context.config.weights, context.stage_module
    if stage_module is None or weights is None:
        return {}
    layers = plan.stage_layers[plan.stage_of[context.ranks.rank]]
    head = stage_module.head is not None
    return weight_digests(weights, require_executable(plan), *layers, head=head)


def _open_collectives(
    context: RankContext, plan: TrainingPlan, library: Library
) -> DeviceCollectives:
    """Collectives between the GPUs of a machine."""
    stage_module = context.stage_module
    backend, device = (
        (HOST, torch.device("cpu"))
        if stage_module is None
        else (stage_module.backend, context.device)
    )
    store = StoreAddress.of_environment().connect(context.config.wait or WAIT_S)
    return open_collectives(library, plan, context.ranks, device, backend, store)


def _prepare_checkpoints(
    context: RankContext, plan: TrainingPlan, detector: FailureDetector
) -> None:
    """Resume if requested, and create the checkpoint manager."""
    config, ranks, settings = context.config, context.ranks, context.optimizer.to_dict()

    def written(steps: int) -> None:
        folder = config.checkpoint
        detector.shutdown_.hint = f"; continue after {steps} steps with --resume {folder}"

    if config.resume is not None and not ranks.late:
        context.first = resume(
            config.resume, plan, ranks, context.stage_module, settings, config.steps
        )
        done = context.first
        if done > config.steps or (done == config.steps and config.eval_data is None):
            raise ValueError(
                f"--steps is {config.steps}, but {done} were done; give the number of all "
                "steps, with those that were done, or as many and --eval-data to evaluate alone"
            )
        if config.elastic and plan.sync.delayed and done:
            raise ValueError(
                f"--elastic: {done} steps were done, and the plan takes outer steps a step "
                "late (sync.delayed), so that none continues from a checkpoint after a loss; "
                "continue without --elastic"
            )
        if config.elastic and done % plan.sync.every_steps:
            raise ValueError(
                f"--elastic: {done} steps were done, and the plan averages every "
                f"{plan.sync.every_steps}; continue without it up to a checkpoint after an outer "
                "step"
            )
    if config.checkpoint is not None:
        again = StoreAddress.of_environment().attempt != "0"
        if not ranks.late and not again:
            require_fresh_folder(config.checkpoint, config.resume)
        context.checkpoints = CheckpointManager(
            config.checkpoint,
            config.every,
            plan,
            ranks,
            context.stage_module,
            settings,
            written,
        )


def _start_gpu(choice: str) -> None:
    """Create the CUDA context before heartbeats begin: it may hold the GIL for seconds."""
    if choice != "cpu" and torch.cuda.is_available():
        # create the context in autograd's thread, too
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        torch.zeros(1, device=_torch_device(choice))


def _has_compilers() -> bool:
    """Whether Triton is here, and the C compiler that it calls."""
    found = [shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")]
    return importlib.util.find_spec("triton") is not None and any(found)


def _torch_device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable GPU; use cpu")
    # several ranks may share a GPU: messages use host memory
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
