"""A rank before its first step: met with the others, with memory for its part, and its part."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from planner.executor.checkpoint.checkpoint import Checkpoints, require_free, resume
from planner.executor.comm.aggregator import Aggregator
from planner.executor.comm.comm_plan import averaging_of, tied_of
from planner.executor.comm.direct import Direct, open_direct
from planner.executor.data.consistency import require_same_data
from planner.executor.data.options import Data
from planner.executor.fault_tolerance.failure_detector import Watch
from planner.executor.fault_tolerance.run_segments import Piece
from planner.executor.huggingface.export import Export
from planner.executor.huggingface.weights import weight_digests
from planner.executor.launch.arguments import told_alike, trust_of
from planner.executor.launch.calibrate import calibrate
from planner.executor.launch.options import Library, data_of, eval_data_of, optimizing_of
from planner.executor.rendezvous.file_digest import require_same_files
from planner.executor.rendezvous.process_group import Ranks
from planner.executor.rendezvous.rank_assignment import join, patience_s
from planner.executor.rendezvous.store import BEGUN, StoreAddress
from planner.executor.runtime.device_backend import HOST
from planner.executor.runtime.device_report import peak_flops
from planner.executor.runtime.evaluate import HeldOut, held_out_of
from planner.executor.runtime.flops_counter import Work
from planner.executor.runtime.memory import Need, claims_of, need_of, require_memory
from planner.executor.runtime.optimizer import Optimizing
from planner.executor.runtime.progress import Progress
from planner.executor.runtime.simulated_compute import Imposed, ImposedCompute
from planner.executor.runtime.stage_module import Learner, require_executable
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_text


@dataclass
class Prepared:
    """What a rank begins its steps with.

    Attributes
    ----------
    args
        Of `planner.executor.launch.arguments.arguments`.
    ranks
        This process among all.
    device
        Where it computes.
    imposed
        What an imposed run divides by; None: a model is trained.
    optimizing, data
        Of the model.
    learner
        Its part of the model; None: it has none, or there is no model.
    works
        What its operations do.
    progress
        What the first rank tells.
    held_out
        What is evaluated on, and when; None: nothing is.
    need
        What it will hold; None: nothing that counts.
    first
        Steps that were done before.
    checkpoints
        What writes them.
    export
        Where the model goes in the end.
    direct
        What reaches others without the host; None: nothing does.
    """

    args: argparse.Namespace
    ranks: Ranks
    device: torch.device
    imposed: Imposed | None
    optimizing: Optimizing
    data: Data
    progress: Progress
    learner: Learner | None = None
    works: Learner | Aggregator | ImposedCompute = field(init=False)
    held_out: HeldOut | None = None
    need: Need | None = None
    first: int = 0
    checkpoints: Checkpoints | None = None
    export: Export | None = None
    direct: Direct | None = None

    def learner_of(self, plan: TrainingPlan) -> Learner:
        """What this rank computes by a plan, from its beginning.

        Parameters
        ----------
        plan
            In which it has a stage.

        Returns
        -------
        Learner
            New.
        """
        # what is gone on from has its own weights
        weights = self.args.weights if self.args.resume is None else None
        return Learner(
            plan,
            self.ranks.rank,
            self.device,
            self.optimizing,
            data=self.data,
            weights=weights,
            counted=self.args.elastic,
            compiled=self.args.compile,
        )

    def need_of(self, plan: TrainingPlan, rank: int) -> Need:
        """What a rank holds by a plan.

        Parameters
        ----------
        plan, rank
            Which.

        Returns
        -------
        Need
            In bytes.
        """
        return need_of(
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


def prepare(
    args: argparse.Namespace, plan: TrainingPlan, pieces: Sequence[Piece], watch: Watch
) -> Prepared:
    """Meet the others, and get ready.

    Parameters
    ----------
    args
        Of `planner.executor.launch.arguments.arguments`.
    plan
        Which the run begins with.
    pieces
        Of the run, as far as they are known.
    watch
        Of this process.

    Returns
    -------
    Prepared
        For the first step.

    Raises
    ------
    ValueError
        This rank cannot do what it is told to.
    """
    optimizing, data, secret = optimizing_of(args), data_of(args), trust_of(args)
    eval_data = eval_data_of(args)
    _start_gpu(args.device)
    ranks = join(
        plan,
        args.devices,
        told_alike(args),
        watch=watch,
        wait_s=args.wait,
        # imposed times are divided, those of the watch are not: latencies as they are here
        patience_s=args.patience or patience_s(plan, args.speed),
        begun=BEGUN if args.elastic else "",
        secret=secret,
    )
    # once others can be told that it is refused
    device = _torch_device(args.device)
    imposed = Imposed(args.speed, args.shrink) if args.impose else None
    progress = Progress(plan.predicted.step_s / args.speed, args.events, plan=plan.content_hash)
    made = Prepared(args, ranks, device, imposed, optimizing, data, progress)
    if imposed is None:
        _prepare_model(made, plan, pieces, watch)
        if eval_data is not None:
            how = {"every": args.eval_every, "batches": args.eval_batches, "stop": args.steps}
            made.held_out = held_out_of(plan, ranks, made.learner, eval_data, **how)
    else:
        made.works = ImposedCompute(plan, ranks.rank, imposed)
    return made


def _prepare_model(
    made: Prepared, plan: TrainingPlan, pieces: Sequence[Piece], watch: Watch
) -> None:
    args, ranks = made.args, made.ranks
    require_executable(plan)
    first = ranks.rank == 0 and not ranks.late
    if first:
        made.progress.phase("all processes are connected; building the model")
    needs = (made.need_of(piece.plan, ranks.rank) for piece in pieces)
    made.need = max(needs, key=lambda need: need.total)
    require_memory(ranks, claims_of(ranks, made.need, made.device))
    peak = None if ranks.late else peak_flops(plan, ranks, made.device)
    made.progress.work = Work(plan, peak)
    if args.export is not None:
        made.export = Export(args.export, plan, args.weights)
    if ranks.rank in plan.stage_of:
        made.learner = made.learner_of(plan)
    if args.direct is not None:
        made.direct = _direct_of(made)
    if args.weights is not None and args.resume is None and not ranks.late:
        require_same_files(ranks, "--weights", _digests(made, plan))
    require_same_data(ranks, "--data", None if made.learner is None else made.learner.data)
    if args.calibrate is not None and not ranks.late:
        if first:
            made.progress.phase("measuring forward and backward of every stage")
        measured = calibrate(plan, ranks, made.learner, made.device, made.direct)
        if measured is not None:
            write_text(args.calibrate, measured.to_json_text())
            made.progress.calibrated(args.calibrate)
    made.works = made.learner or Aggregator(plan, ranks.rank)
    _prepare_checkpoints(made, plan, watch)
    if first:
        made.progress.phase("running the first step")


def _digests(made: Prepared, plan: TrainingPlan) -> dict[str, str]:
    """Of the files that this rank has read."""
    if made.learner is None:
        return {}
    layers = plan.stage_layers[plan.stage_of[made.ranks.rank]]
    head = made.learner.head is not None
    return weight_digests(made.args.weights, require_executable(plan), *layers, head=head)


def _direct_of(made: Prepared) -> Direct | None:
    """What reaches others from where this rank computes."""
    learner = made.learner
    side, device = (HOST, torch.device("cpu")) if learner is None else (learner.side, made.device)
    store = StoreAddress.of_environment().connect(made.args.wait)
    return open_direct(Library(made.args.direct), made.ranks, device, side, store)


def _prepare_checkpoints(made: Prepared, plan: TrainingPlan, watch: Watch) -> None:
    """How many steps were done before, and what writes checkpoints."""
    args, ranks, settings = made.args, made.ranks, made.optimizing.to_dict()

    def written(steps: int) -> None:
        watch.ending.hint = f"; go on after {steps} steps with --resume {args.checkpoint}"

    if args.resume is not None and not ranks.late:
        made.first = resume(args.resume, plan, ranks, made.learner, settings)
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
            require_free(args.checkpoint, args.resume)
        more = (plan, ranks, made.learner, settings, written)
        made.checkpoints = Checkpoints(args.checkpoint, args.every, *more)


def _start_gpu(choice: str) -> None:
    """Create the CUDA context before heartbeats begin: this may hold the GIL for seconds."""
    if choice != "cpu" and torch.cuda.is_available():
        # autograd's own thread begins with a product, and the context is there all the same
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        torch.zeros(1, device=_torch_device(choice))


def _torch_device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable GPU; use cpu")
    # several ranks may share a GPU: messages go through host memory anyway
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
