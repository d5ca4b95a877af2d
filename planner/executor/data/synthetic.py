"""A language that nobody speaks, for trying things out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SYMBOLS = 64
SUCCESSORS = 4


class Synthetic:
    """Each of 64 symbols has four likely successors, so that a model has something to learn.

    Parameters
    ----------
    vocabulary, sequence
        Of the model, and of a sample.
    samples
        Of a microbatch.
    seed
        Of the language and its texts.

    Attributes
    ----------
    says
        What it is, for those who compare.
    """

    def __init__(self, vocabulary: int, sequence: int, samples: int, seed: int) -> None:
        self._sequence, self._samples, self._seed = sequence, samples, seed
        self.says = f"synthetic, {samples} a microbatch"
        symbols = min(SYMBOLS, vocabulary)
        self._successors = np.random.default_rng(seed).integers(symbols, size=(symbols, SUCCESSORS))

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """``int64[samples, sequence + 1]``; the last column is only a target."""
        rng = np.random.default_rng((self._seed, step, microbatch))
        shape = (self._samples, self._sequence + 1)
        rows = np.empty(shape, dtype=np.int64)
        rows[:, 0] = rng.integers(len(self._successors), size=self._samples)
        choices = rng.integers(SUCCESSORS, size=shape)
        for t in range(self._sequence):
            rows[:, t + 1] = self._successors[rows[:, t], choices[:, t]]
        return torch.from_numpy(rows)

    def position(self, step: int) -> list[int]:
        """Nothing: every microbatch stands by itself."""
        return []

    def seek(self, position: list[int]) -> None:
        """Nothing."""
