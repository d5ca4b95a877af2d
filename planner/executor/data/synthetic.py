"""A synthetic language for experiments."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

SYMBOLS = 64
SUCCESSORS = 4
SYNTHETIC = "synthetic (2)"
"""Name and version of the language."""


class Synthetic:
    """64 symbols with four likely successors each, so that there is something to learn.

    Parameters
    ----------
    vocabulary, sequence
        Of the model, and of a sample.
    seed
        Of the language and its texts.

    Attributes
    ----------
    description
        Description, for comparison.
    """

    def __init__(self, vocabulary: int, sequence: int, samples: int, seed: int) -> None:
        self._sequence, self._samples, self._seed = sequence, samples, seed
        self.description = f"{SYNTHETIC}, {samples} a microbatch"
        symbols = min(SYMBOLS, vocabulary)
        rng = np.random.default_rng(seed)
        self._successors = rng.integers(symbols, size=(symbols, SUCCESSORS)).tolist()

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """``int64[samples, sequence + 1]``; the last column is only a target."""
        # creating a NumPy generator per microbatch would dominate the time
        rng = random.Random((self._seed << 64) | (step << 32) | microbatch)
        firsts = rng.choices(range(len(self._successors)), k=self._samples)
        return torch.tensor([self._text(first, rng) for first in firsts], dtype=torch.int64)

    def _text(self, first: int, rng: random.Random) -> list[int]:
        successors, random_bytes = self._successors, rng.randbytes(self._sequence)
        return list(
            accumulate(
                random_bytes,
                lambda symbol, byte: successors[symbol][byte % SUCCESSORS],
                initial=first,
            )
        )

    def digest(self) -> str:
        """Return nothing: samples follow from the description and the plan."""
        return ""

    def position(self, step: int) -> list[int]:
        """Return an empty position: microbatches are independent."""
        return []

    def seek(self, position: list[int]) -> None:
        """Do nothing: microbatches depend on their numbers alone."""
