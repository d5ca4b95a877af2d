"""One rank under torchrun: ``python -m planner.executor plan.json --devices a b ...``.

Prints one line a step on the rank of device 0; with ``--events`` JSON lines, which ``planner run``
reads. With ``--impose`` no model is built: operations take the plan's times, messages have the
plan's bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from planner.clock.timeline import from_records
from planner.executor.binding import WAIT_S, join, own_name, patience_s
from planner.executor.calibrate import calibrate
from planner.executor.checkpoint import Checkpoints, resume
from planner.executor.compute import Compute
from planner.executor.data.alike import require_same_data
from planner.executor.elastic import Elastic
from planner.executor.ending import Ending
from planner.executor.evaluate import Evaluation
from planner.executor.handover import hand_over
from planner.executor.helper import Helper
from planner.executor.hf_export import Export, export_trained
from planner.executor.imposed import Imposed, ImposedCompute
from planner.executor.learner import Learner, require_executable
from planner.executor.memory import Need, claims_of, need_of, require_memory
from planner.executor.optimizing import Optimizing
from planner.executor.options import (
    FILES,
    NUMBERS,
    add_training,
    data_of,
    eval_data_of,
    optimizing_of,
)
from planner.executor.pieces import pieces_of
from planner.executor.process import leave, run_rank
from planner.executor.progress import Progress
from planner.executor.ranks import Ranks
from planner.executor.rebalancing import Rebalancing, require_movable
from planner.executor.records import RouteLog, StepRecord, write_records
from planner.executor.report import device_reports, peak_flops
from planner.executor.store import BEGUN
from planner.executor.watch import PATIENCE_S, Watch
from planner.executor.wiring import averaging_of
from planner.executor.work import Work
from planner.executor.worker import Worker
from planner.network.atomic import write_text
from planner.swarm.deciding import Decision, Rule
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.without import require_elastic

EVERY = 100
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of ranks that torchrun has started."""
ALIKE = (
    *("steps", "every", "rest", "impose", "speed", "shrink"),
    *("own_pace", "move", "rebalance", "rebalance_rule", "elastic"),
    *NUMBERS,
)
"""Options that all ranks must be given alike."""
TOGETHER = ("calibrate", "trace", "checkpoint", "resume", *FILES)
"""Given to all ranks or to none; the files may have other names elsewhere."""
NO_MOVES = ("resume", "eval_data", "own_pace")
"""Options for a run whose devices stay in their stages."""
NO_ELASTIC = ("impose", "own_pace", "move", "rebalance", "eval_data", "routes", "record")
"""Options for a run whose devices stay all the time."""
NO_MODEL = ("own_pace", "calibrate", "checkpoint", "resume", "eval_data", "weights", "export")
"""Options for a model that is trained."""
SWITCH_S = 0.0005
"""After so long a thread that computes in Python lets another one in that has a message."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    args = _arguments(argv)
    sys.setswitchinterval(SWITCH_S)
    name = own_name(args.devices)
    watch = Watch(name, Ending())
    return run_rank(name, watch, lambda: _run(args, watch))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m planner.executor", description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--devices", nargs="+", required=True, help="this node's device ids")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--calibrate", type=Path, help="measure first and store it here")
    parser.add_argument("--checkpoint", type=Path, help="folder for checkpoints")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two checkpoints")
    parser.add_argument(
        "--resume", type=Path, help="folder with checkpoints; --steps counts those before too"
    )
    parser.add_argument("--trace", type=Path, help="Perfetto trace of the last step")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        help="seconds for ranks that have not come; default %(default)g",
    )
    parser.add_argument(
        "--patience",
        type=float,
        help=f"seconds of a device's silence that end the run; default {PATIENCE_S:g}, and more "
        "where the plan has long latencies",
    )
    parser.add_argument(
        "--own-pace", action="store_true", help="one stage: take microbatches as fast as possible"
    )
    parser.add_argument(
        "--routes",
        type=Path,
        help="JSON lines of the peers that each microbatch went through, where devices choose: a "
        "file a trainer, {rank} in the name stands for it",
    )
    parser.add_argument(
        "--move",
        nargs="+",
        action="extend",
        default=[],
        metavar="DEVICE:STAGE@STEPS",
        help="where devices choose paths: after so many steps this device goes to this stage, and "
        "takes its state from a device there",
    )
    parser.add_argument(
        "--rebalance",
        type=int,
        metavar="STEPS",
        help="where devices choose paths: after every so many steps a device may go to another "
        "stage, by what all were seen to take",
    )
    parser.add_argument(
        "--rebalance-rule",
        choices=list(Rule),
        default=Rule.PLANNED,
        help="whoever wins most for the rest of the run, or SWARM's Algorithm 2; default "
        "%(default)s",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without a device that is lost, where its stage has another; started again, it "
        "comes back",
    )
    parser.add_argument("--events", action="store_true", help="JSON lines instead of text")
    add_training(parser)
    imposed = parser.add_argument_group("imposed compute: the plan's times and bytes, no model")
    imposed.add_argument("--impose", action="store_true")
    imposed.add_argument("--speed", type=float, default=1.0, help="times are divided by it")
    imposed.add_argument("--shrink", type=float, default=1.0, help="bytes are divided by it")
    imposed.add_argument("--rest", type=int, default=0, help="steps before, each begun together")
    parser.add_argument(
        "--record",
        type=Path,
        help="times of operations and messages, a file a rank: {rank} in the name stands for it",
    )
    return parser.parse_args(argv)


def _torch_device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable GPU; use cpu")
    # several ranks may share a GPU: messages go through host memory anyway
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _run(args: argparse.Namespace, watch: Watch) -> int:
    if not args.impose and (args.rest or args.speed != 1 or args.shrink != 1):
        raise ValueError("--speed, --shrink and --rest are for imposed runs; add --impose")
    for option in NO_MODEL if args.impose else ():
        if getattr(args, option):
            raise ValueError(f"--impose runs no model; leave out --{option.replace('_', '-')}")
    moving = "move" if args.move else None if args.rebalance is None else "rebalance"
    for option in NO_MOVES if moving else ():
        if getattr(args, option):
            raise ValueError(f"--{moving} goes without --{option.replace('_', '-')}; leave one out")
    if args.move and args.rebalance is not None:
        raise ValueError("--move says who moves and --rebalance decides it; leave one out")
    for option in NO_ELASTIC if args.elastic else ():
        if getattr(args, option):
            raise ValueError(f"--elastic goes without --{option.replace('_', '-')}; leave one out")
    if args.every < 1:
        raise ValueError(f"--every is {args.every}; give steps, at least 1")
    if args.steps < 0 or args.rest < 0:
        raise ValueError(f"--steps and --rest must be at least 0, found {args.steps}, {args.rest}")
    for option in ("wait", "patience"):
        if (value := getattr(args, option)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{option} is {value:g}; give seconds above 0")
    optimizing, data, held_out = optimizing_of(args), data_of(args), eval_data_of(args)
    plan = load_plan(args.plan)
    pieces = pieces_of(plan, args.move, args.steps)
    if args.rebalance is not None:
        require_movable(plan, args.rebalance)
    if args.elastic:
        require_elastic(plan)
        if TORCHRUN in os.environ:
            raise ValueError(
                "--elastic: torchrun ends all ranks of a node when one fails; start them with "
                "planner run, or each by itself"
            )
    ranks = join(
        plan,
        args.devices,
        _settings(args),
        watch=watch,
        wait_s=args.wait,
        # imposed times are divided, those of the watch are not: latencies as they are here
        patience_s=args.patience or patience_s(plan, args.speed),
        begun=BEGUN if args.elastic else "",
    )
    # once others can be told that it is refused
    device = _torch_device(args.device)
    first, checkpoints, evaluation, learner, peak, export = 0, None, None, None, None, None
    need = None
    routes = None if args.routes is None else RouteLog(args.routes, plan, ranks.rank)
    imposed = Imposed(args.speed, args.shrink) if args.impose else None
    works: Compute

    def computing(on: TrainingPlan) -> Learner:
        """What this rank computes by a plan, from its beginning."""
        # what is gone on from has its own weights
        weights = args.weights if args.resume is None else None
        return Learner(on, ranks.rank, device, optimizing, data=data, weights=weights)

    def needed(on: TrainingPlan, rank: int) -> Need:
        """What a rank holds by a plan."""
        return need_of(
            on,
            rank,
            averaging_of(on, rank),
            within=averaging_of(on, rank, every_step=True),
            on_gpu=device.type == "cuda",
            calibrates=args.calibrate is not None,
        )

    if imposed is not None:
        works = ImposedCompute(plan, ranks.rank, imposed)
    else:
        require_executable(plan)
        need = max(
            (needed(piece.plan, ranks.rank) for piece in pieces), key=lambda need: need.total
        )
        if not ranks.late:
            require_memory(ranks, claims_of(ranks, need, device))
            peak = peak_flops(plan, ranks, device)
        if args.export is not None:
            export = Export(args.export, plan, args.weights)
        if ranks.rank in plan.stage_of:
            learner = computing(plan)
        if not ranks.late:
            require_same_data(ranks, "--data", None if learner is None else learner.data)
        if args.calibrate is not None and not ranks.late:
            measured = calibrate(plan, ranks, learner, device)
            if measured is not None:
                write_text(args.calibrate, measured.to_json_text())
                Progress(0.0, args.events).calibrated(args.calibrate)
        first, checkpoints = _checkpoints(args, plan, ranks, learner, optimizing, watch)
        works = learner or Helper(plan, ranks.rank)
    work = None if args.impose else Work(plan, peak)
    progress = Progress(plan.predicted.step_s / args.speed, args.events, work)
    if args.elastic:
        assert isinstance(works, Learner | Helper)
        elastic = Elastic(plan, ranks, works, progress, checkpoints, args.wait)
        last = elastic.train(first, args.steps)
        plan, ranks = elastic.plan, elastic.ranks
        if elastic.worker is None:  # it came too late
            watch.finish()
            return 0
        with elastic.at_the_end("the model is not written"):
            if export is not None:
                export_trained(export.of(plan), ranks, learner)
        with elastic.at_the_end():
            _finish(args, plan, ranks, elastic.worker, works, need, device, last, progress)
        return 0
    tickets = ranks.store if args.own_pace else None
    worker = Worker(plan, ranks, works, imposed=imposed, tickets=tickets)
    if imposed is None and held_out is not None:
        evaluation = Evaluation(
            *(plan, ranks, learner, worker.wiring, held_out),
            every=args.eval_every,
            batches=args.eval_batches,
            steps=range(first, args.steps),
        )
    steps: list[StepRecord] = []
    rebalancing = None
    if args.rebalance is not None:

        def fits(on: TrainingPlan, rank: int) -> bool:
            """By the plan's own figures, which all ranks have alike; without a model all do."""
            return imposed is not None or needed(on, rank).total <= float(
                on.cluster.memory_bytes[rank]
            )

        def told(decision: Decision, fits: bool) -> None:
            if ranks.rank == 0:
                progress.moves(decision, fits)

        how = (args.rebalance, Rule(args.rebalance_rule), args.steps)
        rebalancing = Rebalancing(plan, *how, ranks, fits, told)
    with evaluation or nullcontext():
        for part, piece in enumerate(pieces if rebalancing is None else rebalancing.pieces()):
            plan = piece.plan
            if piece.move is not None:
                if imposed is not None:
                    works = ImposedCompute(piece.plan, ranks.rank, imposed)
                elif ranks.rank == piece.taker:
                    works = learner = computing(piece.plan)
                hand_over(ranks, piece.giver, piece.taker, learner, piece.begin)
                if checkpoints is not None:
                    checkpoints = checkpoints.of(piece.plan, learner)
            if part:
                # who has not moved, and whose peers have not, goes on with what it has learnt
                router = worker.router if piece.move is None else None
                worker = Worker(piece.plan, ranks, works, imposed=imposed, part=part, router=router)
            rest, begin = (0, piece.begin) if part else (args.rest, first)
            walk = worker.steps(piece.end - begin, rest, begin)
            watchers = [one.after for one in (routes, rebalancing) if one is not None]
            done = _steps(args, progress, worker, walk, checkpoints, evaluation, watchers)
            steps = [*steps, *done] if args.record is not None else done
    if export is not None:
        export_trained(export.of(plan), ranks, learner)
    if args.record is not None:
        path = Path(str(args.record).replace("{rank}", str(ranks.rank)))
        write_records(path, ranks.rank, steps)
    last = steps[-1] if steps else None
    _finish(args, plan, ranks, worker, works, need, device, last, progress)
    return 0


def _finish(
    args: argparse.Namespace,
    plan: TrainingPlan,
    ranks: Ranks,
    worker: Worker,
    works: Compute,
    need: Need | None,
    device: torch.device,
    last: StepRecord | None,
    progress: Progress,
) -> None:
    """What is told after the last step; all ranks come here together."""
    if args.trace is not None and last is not None:
        _trace(args.trace, plan, ranks, worker, last)
    if need is not None:
        assert isinstance(works, Learner | Helper)
        reports = device_reports(plan, ranks, works, need, device, worker)
        if ranks.rank == 0:
            progress.devices(reports)
    ranks.part()


def _settings(args: argparse.Namespace) -> str:
    """What all ranks must be told alike: numbers, and what they do together or not at all."""
    said = {name: getattr(args, name) for name in ALIKE}
    said |= {name: getattr(args, name) is not None for name in TOGETHER}
    return " ".join(f"{name}={value}" for name, value in said.items())


def _checkpoints(
    args: argparse.Namespace,
    plan: TrainingPlan,
    ranks: Ranks,
    learner: Learner | None,
    optimizing: Optimizing,
    watch: Watch,
) -> tuple[int, Checkpoints | None]:
    """How many steps were done before, and what writes checkpoints."""

    def written(steps: int) -> None:
        watch.ending.hint = f"; go on after {steps} steps with --resume {args.checkpoint}"

    first, settings = 0, optimizing.to_dict()
    if args.resume is not None and not ranks.late:
        first = resume(args.resume, plan, ranks, learner, settings)
        if first > args.steps or (first == args.steps and args.eval_data is None):
            raise ValueError(
                f"--steps is {args.steps}, but {first} were done; give the number of all steps, "
                "with those that were done, or as many and --eval-data to evaluate alone"
            )
    if args.checkpoint is None:
        return first, None
    more = (plan, ranks, learner, settings, written)
    return first, Checkpoints(args.checkpoint, args.every, *more)


def _steps(
    args: argparse.Namespace,
    progress: Progress,
    worker: Worker,
    walk: Iterator[StepRecord],
    checkpoints: Checkpoints | None,
    evaluation: Evaluation | None,
    watchers: Sequence[Callable[[StepRecord], None]],
) -> list[StepRecord]:
    """Run all; rank 0 tells of each as it ends."""
    records: list[StepRecord] = []
    for record in walk:
        if args.record is None:
            records.clear()
        records.append(record)
        for watch in watchers:
            watch(record)
        if worker.rank == 0:
            progress.step(record, worker.losses)
        _evaluate(evaluation, record.step, worker.rank, progress)
        if checkpoints is not None and checkpoints.due(record.step):
            worker.settle()
            checkpoints.after(record.step)
    if not records:
        _evaluate(evaluation, args.steps - 1, worker.rank, progress)
    if worker.rank == 0:
        progress.end(worker.losses)
    return records


def _evaluate(evaluation: Evaluation | None, step: int, rank: int, progress: Progress) -> None:
    for found in evaluation.after(step) if evaluation is not None else ():
        if rank == 0:
            progress.evaluated(found)


def _trace(path: Path, plan: TrainingPlan, ranks: Ranks, worker: Worker, last: StepRecord) -> None:
    """The last step of all ranks, each on its clock since the first step, as rank 0 writes it."""
    begin = last.begin_s - worker.began_s
    ops = [(*op[:3], op[3] - worker.began_s, op[4] - worker.began_s) for op in last.ops]
    told = [json.loads(text) for text in ranks.share("trace", json.dumps([begin, ops]))]
    if ranks.rank == 0:
        zero = min(begin for begin, _ in told)
        found = [[*op[:3], op[3] - zero, op[4] - zero] for _, ops in told for op in ops]
        ids = plan.cluster.network.ids
        from_records(ids, found).to_chrome_trace(path)


if __name__ == "__main__":
    leave(main())
