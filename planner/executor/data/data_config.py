"""Choice of training data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.utils.refusal import Refusal

BUFFER = 1024


@dataclass(frozen=True)
class DataConfig:
    """Training or evaluation data.

    Attributes
    ----------
    text
        A text file, a folder of them, or a re-iterable of texts or lists of tokens; None for
        synthetic text.
    tokenizer
        A ``tokenizer.json``, or a folder with one; None to use bytes as tokens.
    buffer
        Samples that are shuffled together and held in memory; 1 for the order of the text.
    """

    text: Path | Iterable[Any] | None = None
    tokenizer: Path | None = None
    buffer: int = BUFFER

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise Refusal(f"--shuffle is {self.buffer}; give samples, at least 1")
        if self.text is None and self.tokenizer is not None:
            raise Refusal("--tokenizer is for texts; give --data too")


SYNTHETIC = DataConfig()
