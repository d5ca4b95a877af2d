"""``planner run``: a plan on this machine, a process a device, measured against the prediction."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.checker.dispatch import check
from planner.cli.arguments import count, positive, seconds
from planner.cli.output import INTERRUPTED
from planner.cli.progress import PROGRESS
from planner.executor.data.options import Data
from planner.executor.fault_tolerance.membership_events import MEMBERSHIP_EVENTS, event_line
from planner.executor.launch.options import (
    EVERY,
    add_device,
    add_training,
    data_of,
    eval_data_of,
    optimizing_of,
    words_of,
)
from planner.executor.runtime.flops_counter import summary
from planner.report.figures import samples
from planner.simulator.host_prediction import executable_workload, predict_on_host, require_memory
from planner.swarm.rebalance_policy import RebalanceDecision, RebalanceRule
from planner.training_plan.error import PlanError
from planner.training_plan.file import load_plan
from planner.training_plan.migration import Migration
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import require_elastic
from planner.utils.atomic_write import MADE
from planner.utils.output_files import Output, add_force, require_outputs
from planner.workload.calibration import FORMAT, Calibration
from planner.workload.workload import Workload

WAIT_S, START_S = 60.0, 4.0
"""For ranks to come: altogether, and more for each."""

RESTARTS = 3
"""Of each device, where the others go on without it."""

TOLD = ("tokens_per_s", "mfu", "gradient_norm")
"""Of a step's event, where they are known."""

ABOUT = "run a plan on this machine, one local process a device"
EXAMPLE = "planner run plan.json --steps 10"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Plan, steps, what to train on, what to measure."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    sub.add_argument(
        "--steps",
        type=count,
        default=10,
        help="in all; none, or as many as were done before: only --eval-data is evaluated; default "
        "%(default)s",
    )
    sub.add_argument("--calibrate", type=Path, help="measure F, H, B and store them here")
    sub.add_argument("--calibration", type=Path, help="use times measured before")
    sub.add_argument("--checkpoint", type=Path, help="write checkpoints into this folder")
    sub.add_argument("--every", type=positive, help="steps between two checkpoints; default 100")
    sub.add_argument(
        "--resume",
        type=Path,
        help="go on from the newest checkpoint of this folder; --steps counts those before too",
    )
    sub.add_argument("--trace", type=Path, help="write the executed iteration here")
    sub.add_argument(
        "--routes",
        type=Path,
        help="JSON lines of the peers of each microbatch, where devices choose; {rank} in the name "
        "stands for the trainer's",
    )
    sub.add_argument(
        "--move",
        nargs="+",
        action="extend",
        default=[],
        metavar="DEVICE:STAGE@STEPS",
        help="where devices choose: after so many steps this device goes to this stage",
    )
    sub.add_argument(
        "--rebalance",
        type=positive,
        metavar="STEPS",
        help="where devices choose: after every so many steps a device may go to another stage, by "
        "what all were seen to take",
    )
    sub.add_argument(
        "--rebalance-rule",
        choices=list(RebalanceRule),
        help="whoever wins most for the rest of the run (planned, the default), or SWARM's "
        "Algorithm 2",
    )
    sub.add_argument(
        "--elastic",
        action="store_true",
        help="go on without a device whose process is lost, where its stage has another, and let "
        f"it come back: it is started again, {RESTARTS} times at most",
    )
    add_device(sub)
    sub.add_argument(
        "--patience",
        type=seconds,
        help="seconds of a device's silence that end the run; default 10, and more where the plan "
        "has long latencies",
    )
    add_training(sub)
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Refuse what cannot be written or held, then launch."""
    require_outputs(
        vars(args),
        [
            Output("--trace", args.trace, [".json"], MADE),
            Output("--calibrate", args.calibrate, [".json"], FORMAT),
        ],
    )
    optimizing_of(args)  # what is no value is said before anything starts
    asked = LocalRun(
        args.plan,
        args.steps,
        words_of(args),
        (data_of(args), eval_data_of(args)),
        (args.weights, args.export),
        args.calibrate,
        args.calibration,
        args.trace,
        args.device,
        args.direct,
        args.patience,
        args.checkpoint,
        args.every,
        args.resume,
        args.routes,
        tuple(args.move),
        args.rebalance,
        args.rebalance_rule,
        args.elastic,
        args.compile,
    )
    return launch(asked, as_json=args.json)


@dataclass(frozen=True)
class LocalRun:
    """What to run here.

    Attributes
    ----------
    training
        Options of `planner.executor.launch.options.add_training`, as words.
    texts
        To train on, and to evaluate on.
    weights
        Folders of Hugging Face weights: to start from, and to write at the end.
    calibrate, calibration
        Where measured compute times go, or where they were stored before.
    trace
        Where the executed iteration goes.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    direct
        What carries from GPU to GPU; None: nothing does.
    patience
        Seconds of a device's silence that end the run; None: the executor's own.
    checkpoint, every, resume
        Where checkpoints go and after how many steps, and where they were.
    routes
        Where the paths that devices chose go.
    moves
        Devices that go to another stage, and when.
    rebalance, rebalance_rule
        Steps between two decisions of who goes to another stage, and by which rule.
    elastic
        Whether the others go on where a device is lost.
    compile
        Whether layers and head are compiled.
    """

    plan: Path
    steps: int
    training: list[str]
    texts: tuple[Data, Data | None]
    weights: tuple[Path | None, Path | None]
    calibrate: Path | None
    calibration: Path | None
    trace: Path | None
    device: str
    direct: str | None = None
    patience: float | None = None
    checkpoint: Path | None = None
    every: int | None = None
    resume: Path | None = None
    routes: Path | None = None
    moves: tuple[str, ...] = ()
    rebalance: int | None = None
    rebalance_rule: str | None = None
    elastic: bool = False
    compile: bool = False


def require_same_way(calibration: Calibration, asked: LocalRun) -> None:
    """Refuse times of another way between ranks."""
    measured = calibration.software.get("direct")
    if measured != asked.direct:
        found, wanted = (
            "by hosts" if one is None else f"with --direct {one}"
            for one in (measured, asked.direct)
        )
        raise ValueError(
            f"{asked.calibration}: the link was measured {found}, the run goes {wanted}; measure "
            "again with --calibrate, or run it that way"
        )


def launch(asked: LocalRun, *, as_json: bool) -> int:
    """Launch, relay and compare; returns the exit code."""
    PROGRESS.start("loading PyTorch and checking the plan")
    plan = load_plan(asked.plan)
    # torch is loaded for a run only
    from planner.executor.checkpoint.checkpoint import require_checkpoint, require_fresh_folder
    from planner.executor.data.microbatches import microbatches_of
    from planner.executor.fault_tolerance.run_segments import segments_of
    from planner.executor.huggingface.export import Export
    from planner.executor.huggingface.weights import require_weights
    from planner.executor.launch.arguments import parse_arguments, validate, validate_for_plan
    from planner.executor.launch.calibrate import cores
    from planner.executor.launch.local import run_local, threads
    from planner.executor.rendezvous.address import named_address
    from planner.executor.rendezvous.secret import SECRET_FILE, make_secret
    from planner.executor.runtime.stage_module import require_executable

    # what ranks would refuse, each by itself, is said once
    told = parse_arguments(_words(asked, plan, asked.calibrate), None)
    validate(told)
    validate_for_plan(told, plan)
    named_address()
    arch = require_executable(plan)
    for text in asked.texts:
        if text is not None:
            microbatches_of(plan, text)
    segments_of(plan, asked.moves, asked.steps)
    if asked.resume is not None:
        require_checkpoint(asked.resume)
    if asked.checkpoint is not None:
        require_fresh_folder(asked.checkpoint, asked.resume)
    if asked.elastic:
        require_elastic(plan, None if asked.checkpoint is None else asked.every or EVERY)
    begin, end = asked.weights
    if begin is not None:
        require_weights(begin, arch)
    if end is not None:
        Export(end, plan, begin)
    workload = executable_workload(plan)
    violations = check(plan)
    if violations:
        raise PlanError(f"{asked.plan}: {violations[0]}; make the plan again")
    predicted = None
    if asked.calibration is not None:
        calibration = Calibration.load(asked.calibration)
        require_same_way(calibration, asked)
        predicted = predict_on_host(plan, workload, calibration)
    if not _on_gpus(asked.device):
        require_memory(plan, workload)
    stopped: KeyboardInterrupt | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = asked.calibrate or Path(folder) / "calibration.json"
        steps = _Steps(plan, workload, path, predicted, as_json, asked.steps)
        ids = plan.cluster.network.ids
        try:
            words = _words(asked, plan, None if asked.calibration else path)
            code, reason = run_local(
                [sys.executable, "-m", "planner.executor", *words],
                ids,
                # in its name only: a command line and an environment can be read by others
                threads(len(ids), cores()) | {SECRET_FILE: str(make_secret(Path(folder)))},
                steps.take,
                _warn,
                restarts=RESTARTS if asked.elastic else None,
            )
        except KeyboardInterrupt as error:
            # the steps that were done are told all the same
            code, reason, stopped = INTERRUPTED, "interrupted", error
    PROGRESS.clear()
    _summary(plan, steps, reason, as_json)
    if stopped is not None:
        raise stopped
    return code


def _on_gpus(choice: str) -> bool:
    """Whether ranks compute on GPUs; then they look at all memory themselves."""
    if choice == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


class _Steps:
    """What the ranks tell, as it comes."""

    def __init__(
        self,
        plan: TrainingPlan,
        workload: Workload,
        calibration: Path,
        predicted: list[float] | None,
        as_json: bool,
        of: int,
    ) -> None:
        self.done: list[dict[str, Any]] = []
        self.devices: list[dict[str, Any]] = []
        self.evaluated: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self._plan, self._workload, self._path = plan, workload, calibration
        self._predicted, self._as_json, self._of = predicted, as_json, of
        self._doing = ""
        work = workload.architecture
        tokens = samples(plan) * (0 if work is None else work.sequence)
        self._say(
            f"training {workload.name}: {of} steps of {tokens:,.0f} tokens; planned on "
            f"{plan.network_name or 'its network'}: {plan.predicted.step_s:.3f} s a step"
        )
        if predicted is not None:
            self._say_predicted()
        self._phase(f"starting {len(plan.cluster.network.ids)} processes")

    def take(self, line: str) -> None:
        """A line of a rank's standard output."""
        if not line.startswith('{"event"'):
            _warn(line)
            return
        event = json.loads(line)
        if event["event"] == "calibrated":
            self._predicted = predict_on_host(
                self._plan, self._workload, Calibration.load(self._path)
            )
            self._say_predicted()
        elif event["event"] == "phase":
            self._phase(event["doing"])
        elif event["event"] == "evaluated":
            self.evaluated.append({name: event[name] for name in event if name != "event"})
            self._say(
                f"after {event['steps']} steps, {event['paths']}: held-out loss "
                f"{_number(event['loss'], '.4f')}, perplexity "
                f"{_number(event['perplexity'], '.4g')}"
            )
        elif event["event"] == "move":
            move = Migration(event["device"], event["stage"], event["steps"])
            decision = RebalanceDecision(move, event["before_per_s"], event["after_per_s"])
            self.changes.append(event)
            self._say(decision.said(event["why_not"]))
        elif event["event"] == "loss":
            self._step(event["step"])["loss"] = event["loss"]
            self._say(f"loss of step {event['step']}: {_number(event['loss'], '.4f')}")
        elif event["event"] in MEMBERSHIP_EVENTS:
            self.changes.append(event)
            self._say(event_line(event))
        elif event["event"] == "devices":
            self.devices = event["devices"]
            self._say(summary(self.devices))
        elif not self.done or event["step"] > self.done[-1]["step"]:
            # who tells them may have been lost between telling a step and noting that
            assert self._predicted is not None
            self.done.append(
                {
                    "step": event["step"],
                    "loss": None,
                    "measured_s": event["took_s"],
                    "predicted_s": self._predicted[event["step"] % len(self._predicted)],
                    **{name: event[name] for name in TOLD if name in event},
                }
            )
            # losses come late and belong to the step they are of
            if event["loss_step"] is not None:
                self._step(event["loss_step"])["loss"] = event["loss"]
            done = int(event["step"]) + 1
            self._doing = "ending" if done == self._of else f"step {done + 1} of {self._of}"
            self._say(_line(event, self.done[-1]["predicted_s"]))

    def _step(self, step: int) -> dict[str, Any]:
        # a step may never have been told, where whoever would tell it was lost
        return next((one for one in reversed(self.done) if one["step"] == step), {})

    def _say_predicted(self) -> None:
        assert self._predicted is not None
        mean = sum(self._predicted) / len(self._predicted)
        self._say(f"predicted on this machine: {mean:.3f} s a step")

    def _phase(self, doing: str) -> None:
        self._doing = doing
        PROGRESS.phase(doing)

    def _now(self, doing: str) -> None:
        self._doing = doing
        PROGRESS.start(doing)

    def _say(self, text: str) -> None:
        if not self._as_json:
            PROGRESS.clear()
            print(text, flush=True)
        if self._doing:
            self._now(self._doing)


def _warn(line: str) -> None:
    PROGRESS.clear()
    print(line, file=sys.stderr, flush=True)


def _number(value: float | None, shape: str) -> str:
    """A number that an event tells; it has none where the run has diverged."""
    return "not finite" if value is None else format(value, shape)


def _line(event: dict[str, Any], predicted_s: float) -> str:
    loss, of = _number(event["loss"], "8.4f"), event["loss_step"]
    loss = "no loss yet" if of is None else f"loss {loss} (of step {of})"
    return (
        f"step {event['step']:4d}   {loss}   measured {event['took_s']:7.3f} s   predicted "
        f"{predicted_s:7.3f} s   {event['tokens_per_s']:.0f} tokens/s"
        + (f"   MFU {event['mfu']:.1%}" if "mfu" in event else "")
        + (f"   norm {event['gradient_norm']:.3g}" if "gradient_norm" in event else "")
    )


def _summary(plan: TrainingPlan, told: _Steps, failed: str | None, as_json: bool) -> None:
    steps = told.done
    if as_json:
        data = {
            "plan": plan.content_hash,
            "planned_step_s": plan.predicted.step_s,
            "steps": steps,
            "evaluated": told.evaluated,
            **({"changes": told.changes} if told.changes else {}),
            "devices": told.devices,
            "failed": failed,
        }
        print(json.dumps(data, allow_nan=False, indent=1))
    if as_json or failed is not None:
        return
    # the first step also warms up caches and connections
    kinds = dict.fromkeys(_kind(plan, int(s["step"])) for s in steps[1:])
    for kind in sorted(kinds):
        mine = [s for s in steps[1:] if _kind(plan, int(s["step"])) == kind]
        middle = float(np.median([s["measured_s"] for s in mine]))
        predicted = mine[0]["predicted_s"]
        words = [] if len(set(plan.cycle)) == 1 else [plan.schedules[kind[0]].name]
        if plan.sync.every_steps > 1:
            alone = "that average within regions" if plan.two_frequency else "without averaging"
            words.append("that average" if kind[1] else alone)
        what = f" ({', '.join(words)})" if words else ""
        print(
            f"median of steps {steps[1]['step']} to {steps[-1]['step']}{what}: measured "
            f"{middle:.3f} s, predicted on this machine {predicted:.3f} s "
            f"({middle / predicted - 1:+.0%}), planned on "
            f"{plan.network_name or 'its network'} {plan.predicted.step_s:.3f} s"
            + (" in the mean" if plan.sync.every_steps > 1 else "")
        )


def _kind(plan: TrainingPlan, step: int) -> tuple[int, bool]:
    """Its schedule, and whether it averages."""
    return plan.cycle[step % len(plan.cycle)], plan.sync.due(step)


def _words(asked: LocalRun, plan: TrainingPlan, calibrate: Path | None) -> list[str]:
    """What the executor is told."""
    ids = plan.cluster.network.ids
    words = [
        *(str(asked.plan), "--events"),
        *("--devices", *ids),
        *("--steps", str(asked.steps)),
        "--force",  # what may not be written over was refused before
        *asked.training,
        # processes that share a few processors are slow to start
        *("--wait", str(WAIT_S + START_S * len(ids))),
    ]
    if asked.elastic:
        words.append("--elastic")
    if asked.compile:
        words.append("--compile")
    if asked.moves:
        words += ["--move", *asked.moves]
    for flag, value in (
        ("--calibrate", calibrate),
        ("--trace", asked.trace),
        ("--device", asked.device),
        ("--direct", asked.direct),
        ("--patience", asked.patience),
        ("--rebalance", asked.rebalance),
        ("--rebalance-rule", asked.rebalance_rule),
        ("--checkpoint", asked.checkpoint),
        ("--every", asked.every),
        ("--resume", asked.resume),
        ("--routes", asked.routes),
    ):
        if value is not None:
            words += [flag, str(value)]
    return words
