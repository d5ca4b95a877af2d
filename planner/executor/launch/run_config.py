"""Options of a run: one definition for command lines, launchers and ranks."""

from __future__ import annotations

import argparse
import enum
import json
import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

from planner.executor.data.data_config import BUFFER, DataConfig
from planner.executor.runtime.optimizer import (
    SETTINGS_OF,
    LRSchedule,
    OptimizerConfig,
    OptimizerKind,
)
from planner.swarm.rebalance_policy import RebalanceRule
from planner.training_plan.choices import Wiring
from planner.training_plan.migration import require_movable
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import require_elastic
from planner.utils.atomic_write import MADE
from planner.utils.output_files import Output, require_outputs
from planner.utils.refusal import Refusal
from planner.workload.calibration import FORMAT

EVERY, EVAL_EVERY, EVAL_BATCHES = 100, 100, 4
FILES = ("data", "tokenizer", "eval_data", "weights", "export")
GIVEN_TO_ALL_OR_NONE = ("calibrate", "trace", "checkpoint", "resume", *FILES)
"""Options given to all ranks or none; file names may differ."""
PER_RANK = (
    *("plan", "devices", "wait", "patience", "device", "secret_file", "bind", "force", "events"),
    "record",
)
"""Options that may differ between ranks."""
MODIFIER_OF = {
    "every": "checkpoint",
    "shuffle": "data",
    "eval_every": "eval_data",
    "eval_batches": "eval_data",
}
"""Options that modify another one."""
CONFLICTS = {
    "rebalance": ("resume", "eval_data", "own_pace"),
    "elastic": ("impose", "own_pace", "rebalance", "record"),
    "direct": ("elastic", "rebalance"),
}
"""Options that exclude each other."""
WITHOUT_TENSOR_PARALLEL = ("elastic", "rebalance", "own_pace", "direct")
"""Options refused where devices have several GPUs."""
NEEDS_MODEL = (
    *("own_pace", "calibrate", "checkpoint", "resume", "eval_data", "weights", "export"),
    *("direct", "compile"),
)
"""Options refused with simulated compute, which has no model."""
OPTIMIZER = tuple(field.name for field in fields(OptimizerConfig))
GROUPS = {
    "training": "training",
    "optimizer": "optimizer",
    "simulated": "simulated compute: the plan's times and bytes, no model",
}
"""Titles of groups of options."""


def _option(default: Any, about: str, *, group: str = "", **argparse_options: Any) -> Any:
    """Declare a field that is an option; ``argparse_options`` is for `argparse`."""
    return field(default=default, metadata={"help": about, "group": group, **argparse_options})


_training, _optimizer, _simulated = (partial(_option, group=name) for name in GROUPS)


def _rate(name: str, about: str) -> Any:
    default = getattr(OptimizerConfig(), name)
    return _optimizer(default, f"{about}; default {default:g}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of a run; their help texts, shown by `add_options`, describe them.

    Attributes
    ----------
    plan
        Plan file.
    devices
        Devices of this node.
    secret_file, bind
        Authentication, and the address to listen on.
    force
        Whether existing files are overwritten.
    """

    plan: Path
    devices: tuple[str, ...]
    secret_file: Path | None = None
    bind: str | None = None
    force: bool = False
    steps: int = _option(
        10,
        "steps in total, with those before --resume; with 0, or as many as the checkpoint has, "
        "only --eval-data is evaluated; default %(default)s",
    )
    calibrate: Path | None = _option(None, "file to write measured compute times to")
    checkpoint: Path | None = _option(None, "folder to write checkpoints to")
    every: int = _option(EVERY, "steps between checkpoints; default %(default)s")
    resume: Path | None = _option(
        None, "resume from the latest checkpoint in this folder; --steps includes the steps before"
    )
    trace: Path | None = _option(None, "Chrome trace of the last executed iteration to write")
    device: str = _option(
        "auto",
        "where ranks compute; auto: CUDA where there is one; default %(default)s",
        choices=["auto", "cpu", "cuda"],
    )
    direct: str | None = _option(
        None,
        "average between GPUs of one machine by collectives of NCCL; each rank needs its own GPU "
        "(gloo: the same on the CPU, for tests); default: through host memory",
        choices=["nccl", "gloo"],
    )
    compile: bool | None = _option(
        None,
        "compile layers and head with torch.compile: faster steps after a slow first one; "
        "rounding differs in the last bits; default: on GPUs where Triton and a C compiler are",
        action=argparse.BooleanOptionalAction,
    )
    wait: float | None = _option(None, "seconds to wait for ranks that have not joined; default 60")
    patience: float | None = _option(
        None, "heartbeat timeout in seconds; default 10, more for plans with long latencies"
    )
    own_pace: bool = _option(
        False, "plans of one stage: devices take microbatches as fast as they can"
    )
    rebalance: int | None = _option(
        None,
        "stochastic wiring: every STEPS steps, decide from measured times whether a device moves "
        "to another stage",
        metavar="STEPS",
    )
    rebalance_rule: RebalanceRule = _option(
        RebalanceRule.PLANNED,
        "choose the move with the largest gain for the rest of the run, or use SWARM's Algorithm "
        "2; default %(default)s",
    )
    elastic: bool = _option(
        False, "continue without a lost device if its stage has another one; restarted, it rejoins"
    )
    events: bool = _option(False, "JSON lines instead of text")
    record: Path | None = _option(
        None,
        "times of operations and messages, one file per rank: {rank} in its name becomes the rank",
    )
    data: Path | None = _training(
        None, "text file, or folder of them, to train on; default: synthetic"
    )
    tokenizer: Path | None = _training(None, "tokenizer.json of Hugging Face; default: bytes")
    shuffle: int = _training(
        BUFFER, "samples of the text that are shuffled together; default %(default)s"
    )
    eval_data: Path | None = _training(None, "text file or folder to evaluate on; default: none")
    eval_every: int = _training(
        EVAL_EVERY,
        "steps between two evaluations, the last is after all steps; default %(default)s",
    )
    eval_batches: int = _training(
        EVAL_BATCHES, "batches of an evaluation, each as large as a step's; default %(default)s"
    )
    weights: Path | None = _training(
        None, "folder of Hugging Face weights to start from (safetensors)"
    )
    export: Path | None = _training(
        None, "write the trained model into this folder, for Hugging Face"
    )
    optimizer: OptimizerKind = _optimizer(
        OptimizerKind.ADAMW, "AdamW, or plain gradient descent; default %(default)s"
    )
    schedule: LRSchedule = _optimizer(
        LRSchedule.CONSTANT, "of the learning rate after its warm-up; default %(default)s"
    )
    schedule_steps: int | None = _optimizer(
        None, "cosine: steps until the lowest learning rate; default --steps"
    )
    warmup: int = _optimizer(0, "steps in which the learning rate rises; default %(default)s")
    learning_rate: float = _rate("learning_rate", "the highest")
    min_lr_ratio: float = _rate("min_lr_ratio", "cosine: the lowest learning rate over the highest")
    weight_decay: float = _rate("weight_decay", "AdamW's, of matrices; norms and biases have none")
    beta1: float = _rate("beta1", "AdamW's")
    beta2: float = _rate("beta2", "AdamW's")
    eps: float = _rate("eps", "AdamW's")
    impose: bool = _simulated(False, "sleep instead of computing")
    speed: float = _simulated(1.0, "times are divided by it")
    shrink: float = _simulated(1.0, "bytes are divided by it")
    rest: int = _simulated(
        0, "number of warm-up steps before the first one; all ranks start each of them together"
    )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, **values: Any) -> RunConfig:
        """From parsed options; fields that the parser lacks have their default."""
        parsed = {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}
        return cls(**(parsed | values))

    def to_arguments(self) -> list[str]:
        """The command line of a rank with these options."""
        arguments = [str(self.plan), "--devices", *self.devices]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.default is MISSING or value == option.default:
                continue
            option_name = flag(f"no_{option.name}" if value is False else option.name)
            arguments += [option_name] if isinstance(value, bool) else [option_name, str(value)]
        return arguments

    def optimizer_config(self) -> OptimizerConfig:
        """Optimizer settings."""
        values = {name: getattr(self, name) for name in OPTIMIZER}
        if values["schedule_steps"] is None:
            values["schedule_steps"] = self.steps
        return OptimizerConfig(**values)

    def training_data(self) -> DataConfig:
        """Training data."""
        # evaluation alone may use the tokenizer
        evaluates_only = self.data is None and self.eval_data is not None
        return DataConfig(self.data, None if evaluates_only else self.tokenizer, self.shuffle)

    def evaluation_data(self) -> DataConfig | None:
        """Evaluation data, in the order of the text."""
        return None if self.eval_data is None else DataConfig(self.eval_data, self.tokenizer, 1)

    def validate(self) -> None:
        """Raise `Refusal` for invalid values and combinations of options."""
        for name in ("eval_every", "eval_batches", "every"):
            if (value := getattr(self, name)) < 1:
                raise Refusal(f"{flag(name)} is {value}; give at least 1")
        for name in ("steps", "rest"):
            if (value := getattr(self, name)) < 0:
                raise Refusal(f"{flag(name)} is {value}; give 0 or more")
        for name in ("wait", "patience"):
            if (limit := getattr(self, name)) is not None and not 0 < limit < math.inf:
                raise Refusal(f"{flag(name)} is {limit:g}; give seconds above 0")
        if not self.impose and (self.rest or self.speed != 1 or self.shrink != 1):
            raise Refusal("--speed, --shrink and --rest are for imposed runs; add --impose")
        for name in NEEDS_MODEL if self.impose else ():
            if self._is_set(name):
                raise Refusal(f"--impose runs no model; leave out {flag(name)}")
        for name, conflicting in CONFLICTS.items():
            for other in conflicting if self._is_set(name) else ():
                if self._is_set(other):
                    raise Refusal(f"{flag(name)} conflicts with {flag(other)}; leave one out")
        for name, modified in MODIFIER_OF.items():
            if self._is_set(name) and not self._is_set(modified):
                raise Refusal(f"{flag(name)} is for {flag(modified)}; add that, or leave it out")
        for option, (value, names) in SETTINGS_OF.items():
            for name in names if getattr(self, option) != value else ():
                if self._is_set(name):
                    raise Refusal(
                        f"{flag(name)} is for {flag(option)} {value}; add that, or leave it out"
                    )
        for name, source in product(("checkpoint", "export"), ("data", "eval_data")):
            folder, text = getattr(self, name), getattr(self, source)
            if folder and text and folder.resolve().is_relative_to(text.resolve()):
                raise Refusal(
                    f"{flag(name)} {folder}: is in the folder of {flag(source)}, of which all "
                    "files are read; name a folder elsewhere"
                )
        self.optimizer_config(), self.training_data(), self.evaluation_data()

    def validate_for_plan(self, plan: TrainingPlan) -> None:
        """Raise `Refusal` for options that the plan does not support."""
        if self.rebalance is not None:
            require_movable(plan, self.rebalance)
        if max(plan.gpu_counts) > 1 and not self.impose:
            self._validate_for_workers(plan)
        if self.elastic:
            require_elastic(plan, None if self.checkpoint is None else self.every)
        if plan.shards_optimizer and self.rebalance is not None:
            raise Refusal(
                "--rebalance: each device holds optimizer state that others have not, in "
                f"{plan.workload.optimizer_shards} shards; leave it out, or plan with "
                "--optimizer-shards 1"
            )
        if self.direct is not None and plan.wiring is Wiring.STOCHASTIC:
            raise Refusal(
                "--direct: messages' order must be planned, found wiring 'stochastic'; leave it out"
            )

    def _validate_for_workers(self, plan: TrainingPlan) -> None:
        """Raise `Refusal` for what devices of several GPUs do not support."""
        degree = max(plan.gpu_counts)
        for name in WITHOUT_TENSOR_PARALLEL:
            if self._is_set(name):
                raise Refusal(
                    f"{flag(name)}: is not supported with devices of {degree} GPUs (tensor "
                    "parallelism); leave it out, or plan with --tensor-parallel 1"
                )
        if plan.wiring is Wiring.STOCHASTIC:
            raise Refusal(
                f"{plan.workload.name}: devices of {degree} GPUs (tensor parallelism) do not "
                "choose paths; plan without --wiring stochastic, or with --tensor-parallel 1"
            )

    def validate_files(self) -> None:
        """Refuse outputs that would overwrite other files."""
        require_outputs(
            vars(self),
            [
                Output("--trace", self.trace, [".json"], MADE),
                Output("--calibrate", self.calibrate, [".json"], FORMAT),
            ],
        )

    def require_steps_left(self, steps_done: int) -> None:
        """Refuse a number of steps that a checkpoint has reached, unless to evaluate it."""
        if steps_done > self.steps or (steps_done == self.steps and self.eval_data is None):
            raise Refusal(
                f"--steps is {self.steps} in total, and the checkpoint is after {steps_done}; "
                f"give more than {steps_done}, or {steps_done} with --eval-data to evaluate alone"
            )

    def shared_settings(self) -> str:
        """Settings that all ranks must have in common, as JSON."""
        names = [f.name for f in fields(self) if f.name not in (*PER_RANK, *GIVEN_TO_ALL_OR_NONE)]
        shared = {name: getattr(self, name) for name in names}
        shared |= {name: getattr(self, name) is not None for name in GIVEN_TO_ALL_OR_NONE}
        return json.dumps(shared, default=str)

    def _is_set(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not False and value != getattr(type(self), name)


def add_options(parser: argparse.ArgumentParser, exclude: Collection[str] = ()) -> None:
    """Add the options of `RunConfig` to a parser."""
    groups: dict[str, Any] = {"": parser}
    types = get_type_hints(RunConfig)
    for option in fields(RunConfig):
        argparse_options = dict(option.metadata)
        if not argparse_options or option.name in exclude:
            continue
        name = argparse_options.pop("group")
        if name not in groups:
            groups[name] = parser.add_argument_group(GROUPS[name])
        # the type of an optional value comes before None
        kind = (get_args(types[option.name]) or (types[option.name],))[0]
        if option.default is False:
            argparse_options["action"] = "store_true"
        elif kind is not bool:
            argparse_options["type"] = kind
            if issubclass(kind, enum.Enum):
                argparse_options["choices"] = list(kind)
        groups[name].add_argument(flag(option.name), default=option.default, **argparse_options)


def flag(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"
