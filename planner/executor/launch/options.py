"""Options of training, shared by ``python -m planner.executor`` and ``planner run``."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from planner.executor.data.options import BUFFER, Data
from planner.executor.runtime.optimizer import OptimizerConfig, OptimizerKind, RateSchedule

OPTIMIZING = tuple(field.name for field in fields(OptimizerConfig))
"""Options that are fields of `OptimizerConfig`."""
FILES = ("data", "tokenizer", "eval_data", "weights", "export")
"""Options given to all ranks or none; file names may differ."""
NUMBERS = (*OPTIMIZING, "shuffle", "eval_every", "eval_batches")
"""Options with the same value on all ranks."""
TRAINING = (*NUMBERS, *FILES)


EVERY = 100
"""Default number of steps between two checkpoints."""
EVAL_EVERY, EVAL_BATCHES = 100, 4
ALONE = {
    "every": ("checkpoint", EVERY),
    "shuffle": ("data", BUFFER),
    "eval_every": ("eval_data", EVAL_EVERY),
    "eval_batches": ("eval_data", EVAL_BATCHES),
}
"""Options that modify another one, with that one and their default."""


class Library(enum.StrEnum):
    """Library of transfers between GPUs; gloo does the same in host memory, for tests."""

    NCCL = "nccl"
    GLOO = "gloo"


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add options for devices and transfers between them."""
    parser.add_argument(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="where ranks compute; auto: CUDA where there is one; default %(default)s",
    )
    parser.add_argument(
        "--direct",
        choices=[one.value for one in Library],
        help="send between ranks of one machine from GPU to GPU, by NCCL; each rank needs its own "
        "GPU (gloo: the same on the CPU, for tests); default: through host memory",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compile layers and head with torch.compile: faster steps after a slow first one; "
        "rounding differs in the last bits; default: not",
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add options for data, weights and optimizer."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--data", type=Path, help="text file, or folder of them, to train on; default: synthetic"
    )
    group.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json of Hugging Face; default: bytes"
    )
    group.add_argument(
        "--shuffle",
        type=int,
        default=BUFFER,
        help="samples of the text that are shuffled together; default %(default)s",
    )
    group.add_argument(
        "--eval-data", type=Path, help="text file or folder to evaluate on; default: none"
    )
    group.add_argument(
        "--eval-every",
        type=int,
        default=EVAL_EVERY,
        help="steps between two evaluations, the last is after all steps; default %(default)s",
    )
    group.add_argument(
        "--eval-batches",
        type=int,
        default=EVAL_BATCHES,
        help="batches of an evaluation, each as large as a step's; default %(default)s",
    )
    group.add_argument(
        "--weights", type=Path, help="folder of Hugging Face weights to start from (safetensors)"
    )
    group.add_argument(
        "--export", type=Path, help="write the trained model into this folder, for Hugging Face"
    )
    group = parser.add_argument_group("optimizer")
    usual = OptimizerConfig()
    group.add_argument(
        "--optimizer",
        choices=[o.value for o in OptimizerKind],
        default="adamw",
        help="AdamW, or plain gradient descent; default %(default)s",
    )
    group.add_argument(
        "--schedule",
        choices=[s.value for s in RateSchedule],
        default=usual.schedule.value,
        help="of the learning rate after its warm-up; default %(default)s",
    )
    group.add_argument(
        "--schedule-steps",
        type=int,
        help="cosine: steps until the lowest learning rate; default --steps",
    )
    group.add_argument(
        "--warmup",
        type=int,
        default=usual.warmup,
        help="steps in which the learning rate rises; default %(default)s",
    )
    for name, about in (
        ("learning_rate", "the highest"),
        ("min_lr_ratio", "cosine: the lowest learning rate over the highest"),
        ("weight_decay", "AdamW's, of matrices; norms and biases have none"),
        ("beta1", "AdamW's"),
        ("beta2", "AdamW's"),
        ("eps", "AdamW's"),
    ):
        group.add_argument(
            _option(name),
            type=float,
            default=getattr(usual, name),
            help=f"{about}; default %(default)g",
        )


def optimizing_of(args: argparse.Namespace) -> OptimizerConfig:
    """Optimizer settings."""
    said = {name: getattr(args, name) for name in OPTIMIZING}
    if said["schedule_steps"] is None:
        said["schedule_steps"] = args.steps
    return OptimizerConfig(**said)


def data_of(args: argparse.Namespace) -> Data:
    """Training data."""
    # evaluation alone may use the tokenizer
    tokenizer = args.tokenizer if args.data is not None or args.eval_data is None else None
    return Data(args.data, tokenizer, args.shuffle)


def eval_data_of(args: argparse.Namespace) -> Data | None:
    """Evaluation data, in the order of the text."""
    for name in ("eval_every", "eval_batches"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"{_option(name)} is {value}; give at least 1")
    return None if args.eval_data is None else Data(args.eval_data, args.tokenizer, 1)


def words_of(args: argparse.Namespace) -> list[str]:
    """The options of `add_training` as command-line words."""
    said: Mapping[str, Any] = {name: getattr(args, name) for name in TRAINING}
    return [
        word
        for name, value in said.items()
        if value is not None
        for word in (_option(name), str(value))
    ]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
