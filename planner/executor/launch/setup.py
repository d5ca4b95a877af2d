"""Set-up of a rank before its first step: rendezvous, memory check, model stage."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store

from planner.executor.checkpoint.checkpoint import (
    CheckpointedState,
    CheckpointManager,
    lock_folder,
    require_fresh_folder,
    resume,
)
from planner.executor.comm.comm_plan import stage_averager, tied_averager
from planner.executor.comm.device_backend import HOST
from planner.executor.comm.device_collectives import (
    CollectiveLibrary,
    DeviceCollectives,
    nccl_shares_gpus,
    open_collectives,
)
from planner.executor.comm.device_identity import machine_id
from planner.executor.data.consistency import require_same_data
from planner.executor.data.data_config import DataConfig
from planner.executor.data.microbatches import make_microbatches
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import FAILED, HINT
from planner.executor.launch.arguments import load_secret
from planner.executor.launch.gpu_processes import GpuProcesses
from planner.executor.launch.process import exit_now
from planner.executor.launch.run_config import RunConfig
from planner.executor.rendezvous.file_digest import require_same_files
from planner.executor.rendezvous.rank_assignment import environment_number
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.rendezvous.rendezvous import WAIT_S, heartbeat_timeout_s, rendezvous
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.device_report import peak_flops
from planner.executor.runtime.evaluate import EvaluationData
from planner.executor.runtime.memory import (
    SUM_BYTES,
    MemoryNeed,
    memory_claims,
    memory_need,
    require_memory,
    vector_numel,
)
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.pipeline import FixedPipeline, Pipeline
from planner.executor.runtime.progress import Progress
from planner.executor.runtime.sharded_aggregator import ShardedAggregator
from planner.executor.runtime.sharded_model_stage import ShardedModelStage
from planner.executor.runtime.stage_module import LoadWeights, require_executable
from planner.executor.runtime.stage_runtime import Simulation, StageRuntime
from planner.executor.swarm.microbatch_queue import QueuePipeline
from planner.executor.swarm.stochastic_pipeline import StochasticPipeline, make_router
from planner.executor.tensor_parallel.gpu_group import GpuGroup
from planner.executor.tensor_parallel.gpu_stage import LeaderStage
from planner.executor.tensor_parallel.sharded_gpu_stage import ShardedLeaderStage
from planner.executor.transport.store import STARTED_KEY, StoreAddress
from planner.huggingface.export import Export
from planner.huggingface.weights import load_weights, weight_digests
from planner.profiling.calibrate import calibrate
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_text
from planner.utils.processors import cores
from planner.utils.refusal import Refusal

THREADS = "OMP_NUM_THREADS"
"""Environment variable: threads of a process."""


@dataclass
class RunState:
    """State of a rank that the first step needs.

    Attributes
    ----------
    ranks
        The rank group.
    simulation
        Simulated compute; None if a model is trained.
    model_stage
        This rank's part of the model; None without one.
    runtime
        Runs the operations of this rank.
    progress
        Output of the first rank.
    held_out
        Evaluation data; None for no evaluation.
    peak_memory
        Peak memory of this rank; None with simulated compute.
    first_step
        Number of the first step, after those of a checkpoint.
    export
        Exports the model after the last step; None without ``--export``.
    collectives
        Collectives between GPUs; None without ``--direct``.
    gpu_processes
        Processes of this rank's other GPUs; None if it has one.
    """

    config: RunConfig
    ranks: RankGroup
    device: torch.device
    simulation: Simulation | None
    optimizer: OptimizerConfig
    data: DataConfig
    progress: Progress
    model_stage: ModelStage | None = None
    runtime: StageRuntime = field(init=False)
    held_out: EvaluationData | None = None
    peak_memory: MemoryNeed | None = None
    first_step: int = 0
    checkpoints: CheckpointManager | None = None
    export: Export | None = None
    collectives: DeviceCollectives | None = None
    gpu_processes: GpuProcesses | None = None

    @property
    def compiled(self) -> bool:
        """Whether layers and head are compiled."""
        if self.config.compile is not None:
            return self.config.compile
        return self.device.type == "cuda" and _can_compile()

    def make_model_stage(self, plan: TrainingPlan, *, with_weights: bool = True) -> ModelStage:
        """Create this rank's stage of the model; ``--weights`` are loaded unless it resumes."""
        if plan.gpu_counts[self.ranks.rank] > 1:
            return self._make_leader_stage(plan, with_weights=with_weights)
        stage_type = ShardedModelStage if plan.shards_optimizer else ModelStage
        return stage_type(
            plan,
            self.ranks.rank,
            self.device,
            self.optimizer,
            data=self.data,
            load_weights=self._load_weights(with_weights=with_weights),
            count_microbatches=self.config.elastic,
            compiled=self.compiled,
        )

    def make_aggregator(self, plan: TrainingPlan) -> Aggregator:
        """Create the runtime of a rank without a stage."""
        if not plan.shards_optimizer:
            return Aggregator(plan, self.ranks.rank)
        weights = self._load_weights(with_weights=True)
        return ShardedAggregator(plan, self.ranks.rank, self.optimizer, weights)

    @property
    def checkpointed(self) -> CheckpointedState | None:
        """What a checkpoint has of this rank."""
        runtime = getattr(self, "runtime", None)
        return runtime if isinstance(runtime, ShardedAggregator) else self.model_stage

    def _load_weights(self, *, with_weights: bool) -> LoadWeights | None:
        weights = self.config.weights if with_weights and self.config.resume is None else None
        return None if weights is None else partial(load_weights, weights)

    def _make_leader_stage(self, plan: TrainingPlan, *, with_weights: bool) -> LeaderStage:
        """Start the processes of this rank's other GPUs, and create the stage that leads them."""
        rank = self.ranks.rank
        size = plan.gpu_counts[rank]
        detector = self.ranks.detector

        def fail(reason: str) -> None:
            assert detector is not None
            name = self.ranks.name(rank)
            exit_now(detector.exit_for_own_error(f"device {name!r}: {reason}", FAILED))

        numel = round(vector_numel(plan, plan.stage_of[rank]))
        arguments = self.config.to_arguments()
        self.gpu_processes = GpuProcesses(arguments, rank, size, SUM_BYTES * numel, fail)
        # after the processes have started: it waits for them
        group = GpuGroup(self.gpu_processes.store, 0, size, self.device)
        stage_type = ShardedLeaderStage if plan.shards_optimizer else LeaderStage
        return stage_type(
            plan,
            rank,
            self.device,
            self.optimizer,
            self.data,
            group,
            self.gpu_processes.exchange_file,
            load_weights=self._load_weights(with_weights=with_weights),
            compiled=bool(self.config.compile),
        )

    def stop_gpu_processes(self) -> None:
        """End the processes of this rank's other GPUs, if it has several."""
        if self.gpu_processes is not None:
            assert isinstance(self.model_stage, LeaderStage)
            self.gpu_processes.stop(self.model_stage.stop)

    def memory_need(self, plan: TrainingPlan, rank: int) -> MemoryNeed:
        """Peak memory of a rank in a plan, on its GPU or in the memory where it computes."""
        return memory_need(
            plan,
            rank,
            stage_averager(plan, rank),
            other=tied_averager(plan, rank)
            if plan.averages_tied
            else stage_averager(plan, rank, every_step=True),
            on_gpu=self.device.type == "cuda",
            calibrate=self.config.calibrate is not None,
            uses_collectives=self.config.direct is not None,
            writes_checkpoints=self.config.checkpoint is not None,
            moves_shards=self.config.elastic,
        )

    def make_pipeline(self, plan: TrainingPlan, rank: int, runtime: StageRuntime) -> Pipeline:
        """Create the pipeline of a rank."""
        queue = self.ranks.store if self.config.own_pace else None
        return make_pipeline(plan, rank, runtime, queue=queue, speed=self.config.speed)


def make_pipeline(
    plan: TrainingPlan,
    rank: int,
    runtime: StageRuntime,
    *,
    queue: Store | None = None,
    speed: float = 1.0,
) -> Pipeline:
    """Create the pipeline of a rank: a queue of microbatches, stochastic, or as planned."""
    if queue is not None:
        return QueuePipeline(plan, rank, runtime, queue)
    if plan.wiring is Wiring.STOCHASTIC:
        return StochasticPipeline(plan, rank, runtime, make_router(plan, rank, speed))
    return FixedPipeline(plan, rank, runtime)


def set_up(
    config: RunConfig,
    plan: TrainingPlan,
    detector: FailureDetector,
    simulation: Simulation | None = None,
) -> RunState:
    """Join the other ranks and prepare the first step; a collective call."""
    optimizer, data = config.optimizer_config(), config.training_data()
    eval_data = config.evaluation_data()
    secret = load_secret(config.bind, config.secret_file)
    gpu = first_gpu(plan, config.devices)
    _start_gpu(config.device, gpu)
    ranks = rendezvous(
        plan,
        config.devices,
        config.shared_settings(),
        detector=detector,
        wait_s=config.wait or WAIT_S,
        # simulated times are scaled, timeouts are not
        heartbeat_timeout_s=config.patience or heartbeat_timeout_s(plan, config.speed),
        elastic_key=STARTED_KEY if config.elastic else "",
        secret=secret,
    )
    # only now, so that the other ranks are notified of a refusal
    size = plan.gpu_counts[ranks.rank]
    _share_processors(ranks, size)
    if size > 1 and simulation is None:
        torch_device(config.device, gpu + size - 1, shared=nccl_shares_gpus())
    device = torch_device(config.device, gpu, shared=True)
    planned_s = plan.predicted.step_s / config.speed
    progress = Progress(planned_s, config.events, plan=plan.content_hash)
    state = RunState(config, ranks, device, simulation, optimizer, data, progress)
    if simulation is not None:
        state.runtime = simulation.make_runtime(plan, ranks.rank)
        return state
    _prepare_model(state, plan, detector)
    if eval_data is not None:
        reads = state.model_stage is not None and state.model_stage.data is not None
        own = make_microbatches(plan, eval_data) if reads else None
        require_same_data(ranks, "--eval-data", own)
        state.held_out = EvaluationData(own, config.eval_every, config.eval_batches, config.steps)
    return state


def _share_processors(ranks: RankGroup, processes: int) -> None:
    """Divide this machine's processors among its ranks, unless a variable has the threads.

    A collective call, except for a rank that joins late.
    """
    here = machine_id()
    texts = ranks.all_gather("processors", json.dumps([here, processes]), keep=True)
    sharing = sum(count for machine, count in map(json.loads, texts) if machine == here)
    if THREADS not in os.environ:
        threads = max(1, cores() // max(sharing, 1))
        torch.set_num_threads(threads)
        os.environ[THREADS] = str(threads)  # for the processes of this rank's other GPUs


def _prepare_model(state: RunState, plan: TrainingPlan, detector: FailureDetector) -> None:
    config, ranks = state.config, state.ranks
    require_executable(plan)
    first = ranks.rank == 0 and not ranks.joins_late
    if first:
        state.progress.phase("all processes are connected; building the model")
    state.peak_memory = state.memory_need(plan, ranks.rank)
    require_memory(ranks, memory_claims(ranks, state.peak_memory, state.device))
    if not config.elastic:  # else in every generation
        state.progress.set_plan(plan, peak_flops(plan, ranks, state.device))
    if config.export is not None:
        inner = config.steps % plan.sync.every_steps
        if first and inner:
            _warn(
                f"--export: the model is that of the last outer step, after {config.steps - inner} "
                f"of {config.steps} steps; make --steps a multiple of {plan.sync.every_steps}"
            )
        state.export = Export(config.export, plan, config.weights, config.tokenizer)
    if ranks.rank in plan.stage_of:
        state.model_stage = state.make_model_stage(plan)
    if config.direct is not None:
        state.collectives = _open_collectives(state, plan, CollectiveLibrary(config.direct))
    if config.weights is not None and config.resume is None and not ranks.joins_late:
        require_same_files(ranks, "--weights", _digests(state, plan))
    model_stage = state.model_stage
    require_same_data(ranks, "--data", None if model_stage is None else model_stage.data)
    if config.calibrate is not None and not ranks.joins_late:
        if first:
            state.progress.phase("measuring forward and backward of every stage")
        measured = calibrate(plan, ranks, model_stage, state.device)
        if measured is not None:
            write_text(config.calibrate, measured.to_json_text())
            state.progress.calibrated(str(config.calibrate))
    state.runtime = model_stage or state.make_aggregator(plan)
    _prepare_checkpoints(state, plan, detector)
    if first:
        state.progress.phase("running the first step")


def _digests(state: RunState, plan: TrainingPlan) -> dict[str, str]:
    """Digests of the files that this rank has read."""
    weights, model_stage = state.config.weights, state.model_stage
    if model_stage is None or weights is None:
        return {}
    layers = plan.stage_layers[plan.stage_of[state.ranks.rank]]
    head = model_stage.module.head is not None
    return weight_digests(weights, require_executable(plan), *layers, head=head)


def _open_collectives(
    state: RunState, plan: TrainingPlan, library: CollectiveLibrary
) -> DeviceCollectives:
    """Collectives between the GPUs of a machine."""
    model_stage = state.model_stage
    backend, device = (
        (HOST, torch.device("cpu")) if model_stage is None else (model_stage.backend, state.device)
    )
    store = StoreAddress.from_environment().connect(state.config.wait or WAIT_S)
    return open_collectives(library, plan, state.ranks, device, backend, store)


def _prepare_checkpoints(state: RunState, plan: TrainingPlan, detector: FailureDetector) -> None:
    """Resume if requested, and create the checkpoint manager."""
    config, ranks, settings = state.config, state.ranks, state.optimizer.to_dict()

    def on_checkpoint(steps: int) -> None:
        folder = config.checkpoint
        detector.shutdown.hint = f"{HINT}{steps} steps with --resume {folder}"

    if config.resume is not None and not ranks.joins_late:
        state.first_step = resume(
            config.resume, plan, ranks, state.checkpointed, settings, config.steps
        )
        steps_done = state.first_step
        config.require_steps_left(steps_done)
        if config.elastic and plan.sync.delayed and steps_done:
            raise Refusal(
                f"--elastic: {steps_done} steps were done, and the plan takes outer steps a step "
                "late (sync.delayed), so that none continues from a checkpoint after a loss; "
                "continue without --elastic"
            )
        if config.elastic and steps_done % plan.sync.every_steps:
            raise Refusal(
                f"--elastic: {steps_done} steps were done, and the plan averages every "
                f"{plan.sync.every_steps}; continue without it up to a checkpoint after an outer "
                "step"
            )
    if config.checkpoint is not None:
        is_restart = StoreAddress.from_environment().attempt != "0"
        if not ranks.joins_late:
            if not is_restart:
                require_fresh_folder(config.checkpoint, config.resume)
            if ranks.rank == 0:
                ranks.resources.callback(os.close, lock_folder(config.checkpoint))
            if ranks.rank == 0 and config.steps % config.every:
                last = f"the last step, {config.steps}"
                _warn(f"--every {config.every}: no checkpoint is written after {last}")
        state.checkpoints = CheckpointManager(
            config.checkpoint,
            config.every,
            plan,
            ranks,
            state.checkpointed,
            settings,
            on_checkpoint,
            _can_write_beside(state),
        )
        if state.first_step and config.checkpoint == config.resume:
            on_checkpoint(state.first_step)


def _can_write_beside(state: RunState) -> bool:
    """Whether all ranks with a stage compute on GPUs, so that their hosts can write checkpoints
    beside; a collective call, except for a rank that joins late."""
    own = "none" if state.model_stage is None else state.device.type
    types = state.ranks.all_gather("checkpoint/device_type", own, keep=True)
    return set(types) <= {"cuda", "none"}


def _warn(line: str) -> None:
    print(f"planner.executor: {line}", file=sys.stderr, flush=True)


def _start_gpu(choice: str, gpu: int) -> None:
    """Create the CUDA context before heartbeats begin: it may hold the GIL for seconds."""
    if choice != "cpu" and torch.cuda.is_available():
        # autograd's thread has no context yet; cuBLAS creates one there and warns, harmlessly
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        torch.zeros(1, device=torch_device(choice, gpu, shared=True))


def _can_compile() -> bool:
    """Whether Triton is here, and the C compiler that it calls."""
    found = [shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")]
    return importlib.util.find_spec("triton") is not None and any(found)


def first_gpu(plan: TrainingPlan, devices: Sequence[str]) -> int:
    """Number of this rank's first GPU on its node, whose devices are given in order."""
    local_rank, ids = environment_number("LOCAL_RANK", 0), plan.cluster.network.ids
    if max(plan.gpu_counts) == 1:
        return local_rank
    # devices without a stage compute nothing
    before = [d for name in devices[:local_rank] if (d := ids.index(name)) in plan.stage_of]
    return sum(plan.gpu_counts[d] for d in before)


def torch_device(choice: str, gpu: int, *, shared: bool) -> torch.device:
    """Where a process computes; ``shared`` if its GPU may be that of other processes."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refusal("--device cuda: this machine has no usable GPU; use cpu")
    many = torch.cuda.device_count()
    if gpu >= many and not shared:
        raise Refusal(
            f"--device {choice}: the devices here need at least {gpu + 1} GPUs of their own, and "
            f"this machine has {many}; start fewer devices, use cpu, or plan with fewer GPUs a "
            "worker (--tensor-parallel)"
        )
    # several ranks may share a GPU: messages use host memory
    return torch.device("cuda", gpu % many)
