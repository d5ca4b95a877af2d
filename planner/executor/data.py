"""Microbatches that every process can make for itself: from a text file, or synthetic text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SYMBOLS = 64
SUCCESSORS = 4


class Microbatches:
    """Tokens ``[samples, sequence + 1]`` of any microbatch of any step, the same everywhere.

    Parameters
    ----------
    path
        A text file, read as bytes; None: a random language in which each of 64 symbols has four
        likely successors, so that a model has something to learn.
    """

    def __init__(
        self, vocabulary: int, sequence: int, samples: int, seed: int, path: Path | None = None
    ) -> None:
        self.sequence, self.samples, self.seed = sequence, samples, seed
        self._successors: NDArray[np.int64] | None = None
        if path is None:
            symbols = min(SYMBOLS, vocabulary)
            self._successors = np.random.default_rng(seed).integers(
                symbols, size=(symbols, SUCCESSORS)
            )
            return
        self._text = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64)
        if vocabulary < 256:
            raise ValueError(
                f"{path}: bytes need a vocabulary of at least 256, found {vocabulary}; use a model "
                "with a larger one"
            )
        if len(self._text) <= sequence + 1:
            raise ValueError(
                f"{path}: holds {len(self._text)} bytes, fewer than a sample of {sequence + 1}; "
                "give a longer text"
            )

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """Tokens of one microbatch.

        Parameters
        ----------
        step
            Iteration, from 0.
        microbatch
            Its number in the iteration.

        Returns
        -------
        Tensor
            ``int64[samples, sequence + 1]``; the last column is only a target.
        """
        rng = np.random.default_rng((self.seed, step, microbatch))
        shape = (self.samples, self.sequence + 1)
        if self._successors is None:
            starts = rng.integers(len(self._text) - self.sequence, size=self.samples)
            rows = np.stack([self._text[s : s + self.sequence + 1] for s in starts])
            return torch.from_numpy(rows)
        rows = np.empty(shape, dtype=np.int64)
        rows[:, 0] = rng.integers(len(self._successors), size=self.samples)
        choices = rng.integers(SUCCESSORS, size=shape)
        for t in range(self.sequence):
            rows[:, t + 1] = self._successors[rows[:, t], choices[:, t]]
        return torch.from_numpy(rows)
