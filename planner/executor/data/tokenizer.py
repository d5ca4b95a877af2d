"""Tokenizers: bytes, or a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.utils.refusal import Refusal

TOKENIZER = "tokenizer.json"


def tokenizer_file(path: Path) -> Path:
    """The file of a tokenizer that is given by its file or by its folder."""
    return path / TOKENIZER if path.is_dir() else path


class Tokenizer(Protocol):
    """Turns text into tokens.

    Attributes
    ----------
    description
        Description, for comparison.
    """

    description: str

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Tokens of a text.

        Returns
        -------
        NDArray[np.int32]
            ``[tokens]``, without special tokens.
        """


class ByteTokenizer:
    """Every byte is a token."""

    description = "bytes"

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """One token per byte."""
        return np.frombuffer(text, np.uint8).astype(np.int32)


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, read by the package tokenizers.

    Parameters
    ----------
    path
        Of the file, or of its folder.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError:
            raise Refusal(
                "--tokenizer needs the package tokenizers; pip install tokenizers"
            ) from None
        path = tokenizer_file(path)
        try:
            content = path.read_bytes()
            self._reader = Reader.from_str(content.decode())
        except OSError as error:
            raise Refusal(f"{path}: cannot be read ({error.strerror}); check the path") from None
        except Exception as error:  # the package raises nothing more special
            raise Refusal(f"{path}: is no tokenizer.json ({error}); give one") from None
        # padding and truncation apply to single texts; samples are cut later
        self._reader.no_truncation()
        self._reader.no_padding()
        self.description = f"tokenizer {hashlib.sha256(content).hexdigest()[:12]}"

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Tokens; invalid UTF-8 is replaced."""
        encoding = self._reader.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.array(encoding.ids, np.int32)
