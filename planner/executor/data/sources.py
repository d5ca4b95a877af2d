"""Where text comes from, piece after piece, from any place on: files, or what Python gives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.executor.data.tokenizer import Tokenizer

Place = tuple[int, int]
"""Where a piece begins: number of the file and byte in it, or number of the item and 0."""
BEGIN = (0, 0)
PIECE_BYTES = 1 << 16


class DataError(ValueError):
    """Data that cannot be trained on."""


class Source(Protocol):
    """Pieces of text, tokenized by themselves.

    Attributes
    ----------
    says
        What it is, for those who compare.
    """

    says: str

    def pieces(self, begin: Place) -> Iterator[tuple[Place, NDArray[np.int32]]]:
        """Place and tokens of each piece, from the one that begins at ``begin`` to the end."""


class TextFiles:
    """A text file, or all files of a folder and those below it, sorted by name.

    Parameters
    ----------
    path
        File or folder.
    tokenizer
        Makes tokens.
    vocabulary
        Tokens that the model knows.

    Raises
    ------
    DataError
        There is no such file, or nothing in the folder.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _text(p))
        if not self._paths:
            raise DataError(f"{path}: is no text file or folder of them; check the path")
        size = sum(p.stat().st_size for p in self._paths)
        self.says = f"{len(self._paths)} files, {size} bytes, {tokenizer.says}"

    def pieces(self, begin: Place) -> Iterator[tuple[Place, NDArray[np.int32]]]:
        """Some ten thousand bytes each, up to the end of a line where there is one."""
        first, offset = begin
        for number in range(first, len(self._paths)):
            with self._paths[number].open("rb") as file:
                file.seek(offset)
                while text := file.read(PIECE_BYTES):
                    if len(text) == PIECE_BYTES:
                        text = text[: _cut(text)]
                    tokens = self._tokenizer.encode(text)
                    _require_known(tokens, self._vocabulary, str(self._paths[number]))
                    yield (number, offset), tokens
                    offset += len(text)
                    file.seek(offset)
            offset = 0


class Items:
    """Texts or lists of tokens, as an iterable gives them.

    Parameters
    ----------
    items
        Of ``str``, ``bytes`` or whole numbers; can be gone through again and gives the same then.
    tokenizer
        Makes tokens of texts.
    vocabulary
        Tokens that the model knows.

    Raises
    ------
    DataError
        It can be gone through once only.
    """

    def __init__(self, items: Iterable[Any], tokenizer: Tokenizer, vocabulary: int) -> None:
        if iter(items) is items:
            raise DataError(
                "data: an iterator can be gone through once only; give what makes a new one each "
                "time, such as a list or a data set"
            )
        self._items, self._tokenizer, self._vocabulary = items, tokenizer, vocabulary
        self.says = f"items, {tokenizer.says}"

    def pieces(self, begin: Place) -> Iterator[tuple[Place, NDArray[np.int32]]]:
        """An item each."""
        for number, item in enumerate(islice(self._items, begin[0], None), begin[0]):
            yield (number, 0), self._tokens(number, item)

    def _tokens(self, number: int, item: str | bytes | Sequence[int]) -> NDArray[np.int32]:
        if isinstance(item, (str, bytes)):
            text = item.encode() if isinstance(item, str) else item
            tokens: NDArray[Any] = self._tokenizer.encode(text)
        else:
            tokens = np.asarray(item)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise DataError(
                f"data: item {number} is neither text nor a list of whole numbers; give one of them"
            )
        _require_known(tokens, self._vocabulary, f"data: item {number}")
        return tokens.astype(np.int32)


def _require_known(tokens: NDArray[Any], vocabulary: int, what: str) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise DataError(
            f"{what} has tokens from {tokens.min()} to {tokens.max()}, the model knows 0 to "
            f"{vocabulary - 1}; use a model with a larger vocabulary, or its own --tokenizer"
        )


def _text(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and os.access(path, os.R_OK)


def _cut(text: bytes) -> int:
    """After the last line, else before the last character, which may be half there."""
    line = text.rfind(b"\n") + 1
    if line:
        return line
    end = len(text)
    while end > 1 and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    return max(end - 1, 1)
