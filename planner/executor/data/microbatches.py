"""Tokens of a plan's microbatches."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planner.executor.data.data_config import DataConfig
from planner.executor.data.sources import DataError, IterableSource, Source, TextFiles
from planner.executor.data.stream import Position, Samples
from planner.executor.data.synthetic import Synthetic
from planner.executor.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from planner.training_plan.model import TrainingPlan


class Microbatches(Protocol):
    """Tokens of any microbatch of any step, the same in every process.

    Attributes
    ----------
    description
        Description of the data, for comparison.
    """

    description: str

    def digest(self) -> str:
        """Digest of the data as far as they are compared: equal in every process."""

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """Tokens of one microbatch.

        Returns
        -------
        Tensor
            ``int64[samples, sequence + 1]``; the last column is only a target.
        """

    def position(self, step: int) -> list[int]:
        """Position in the data required for a step and those after it."""

    def seek(self, position: list[int]) -> None:
        """Continue from a `position`."""


def make_microbatches(plan: TrainingPlan, data: DataConfig) -> Microbatches:
    """Microbatches of a plan from some data."""
    arch, w = plan.workload.architecture, plan.workload
    assert arch is not None
    if data.text is None:
        return Synthetic(arch.vocabulary, arch.sequence, w.microbatch_samples, plan.seed)
    tokenizer = ByteTokenizer() if data.tokenizer is None else HuggingFaceTokenizer(data.tokenizer)
    source: Source
    if isinstance(data.text, Path):
        source = TextFiles(data.text, tokenizer, arch.vocabulary)
    else:
        source = IterableSource(data.text, tokenizer, arch.vocabulary)
    microbatches = max(len(s.paths) for s in plan.schedules)
    samples = w.microbatch_samples
    return TextMicrobatches(source, arch.sequence, samples, microbatches, data.buffer, plan.seed)


def require_sample(plan: TrainingPlan, data: DataConfig, option: str) -> None:
    """Refuse data of an option that have no sample of the plan's, before processes start."""
    batches = make_microbatches(plan, data)
    if isinstance(batches, TextMicrobatches):
        try:
            batches.samples.require_one()
        except DataError as error:
            raise DataError(f"{option}: {error}") from None


class TextMicrobatches:
    """Microbatches of a text in its shuffled order.

    Parameters
    ----------
    sequence
        Tokens per sample.
    buffer
        Samples that are shuffled together.
    """

    def __init__(
        self,
        source: Source,
        sequence: int,
        samples: int,
        microbatches: int,
        buffer: int,
        seed: int,
    ) -> None:
        self._source, self.samples = source, Samples(source, sequence, buffer, seed)
        self._microbatch_samples, self._step_samples = samples, samples * microbatches
        self.description = f"{source.description}, {buffer} shuffled"

    def digest(self) -> str:
        """Of the source and the first microbatch, which an iterable must give."""
        first = hashlib.sha256(self.tokens(0, 0).numpy().tobytes())
        return self._source.digest() + first.hexdigest()

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """As `Microbatches.tokens`."""
        self.samples.forget(step * self._step_samples)
        first = step * self._step_samples + microbatch * self._microbatch_samples
        rows = [self.samples.sample(n) for n in range(first, first + self._microbatch_samples)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def position(self, step: int) -> list[int]:
        """As `Microbatches.position`."""
        return list(self.samples.position_for(step * self._step_samples))

    def seek(self, position: list[int]) -> None:
        """As `Microbatches.seek`."""
        self.samples.seek(Position(*position))
