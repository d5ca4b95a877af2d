"""Sources of text, readable piece by piece from any position: files, or Python iterables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.executor.data.tokenizer import ByteTokenizer, Tokenizer
from planner.executor.rendezvous.file_digest import file_digest
from planner.utils.input_files import is_utf_16
from planner.utils.refusal import Refusal

PiecePosition = tuple[int, int]
"""Start of a piece: number of the file and byte in it, or number of the item and 0."""
START_OF_TEXT = (0, 0)
PIECE_BYTES = 1 << 16


class DataError(Refusal):
    """Unusable training data."""


class Source(Protocol):
    """Pieces of text, tokenized separately.

    Attributes
    ----------
    description
        Description, for comparison.
    """

    description: str

    def digest(self) -> str:
        """Digest of what can be read without a pass over the text."""

    def pieces(self, begin: PiecePosition) -> Iterator[tuple[PiecePosition, NDArray[np.int32]]]:
        """Place and tokens of each piece, from the one at ``begin`` to the end."""


class TextFiles:
    """A text file, or all files below a folder, sorted by name.

    Hidden files and folders are ignored.

    Parameters
    ----------
    vocabulary
        Vocabulary size of the model.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        texts = (p for p in path.rglob("*") if _is_text_file(p, path))
        self._paths = [path] if path.is_file() else sorted(texts)
        if not self._paths:
            raise DataError(
                f"{path}: is no text file or folder of them, hidden ones left out; check the path"
            )
        # with bytes as tokens, a file that was named explicitly may hold any bytes
        self._allows_any_bytes = path.is_file() and isinstance(tokenizer, ByteTokenizer)
        for file_path in self._paths:  # binary files are often recognised by their first bytes
            with file_path.open("rb") as file:
                text = file.read(PIECE_BYTES)
            self._require_utf8(
                text[: _complete_length(text)] if len(text) == PIECE_BYTES else text, file_path, 0
            )
        size = sum(p.stat().st_size for p in self._paths)
        self.description = f"{len(self._paths)} files, {size} bytes, {tokenizer.description}"

    def digest(self) -> str:
        """As `Source.digest`."""
        return file_digest(*self._paths)

    def pieces(self, begin: PiecePosition) -> Iterator[tuple[PiecePosition, NDArray[np.int32]]]:
        """Pieces of about 64 KiB, up to the end of a line if there is one."""
        first, offset = begin
        for number in range(first, len(self._paths)):
            with self._paths[number].open("rb") as file:
                file.seek(offset)
                while text := file.read(PIECE_BYTES):
                    if len(text) == PIECE_BYTES:
                        text = text[: _complete_length(text)]
                    self._require_utf8(text, self._paths[number], offset)
                    tokens = self._tokenizer.encode(text)
                    _require_in_vocabulary(tokens, self._vocabulary, str(self._paths[number]))
                    yield (number, offset), tokens
                    offset += len(text)
                    file.seek(offset)
            offset = 0

    def _require_utf8(self, text: bytes, path: Path, offset: int) -> None:
        if not self._allows_any_bytes:
            require_utf8(text, path, offset)


class IterableSource:
    """Texts or lists of tokens from an iterable.

    Parameters
    ----------
    items
        Of ``str``, ``bytes`` or whole numbers; must give the same when iterated again.
    tokenizer
        Tokenizes texts.
    vocabulary
        Vocabulary size of the model.
    """

    def __init__(self, items: Iterable[Any], tokenizer: Tokenizer, vocabulary: int) -> None:
        if iter(items) is items:
            raise DataError(
                "data: an iterator can be gone through once only; give what makes a new one each "
                "time, such as a list or a data set"
            )
        self._items, self._tokenizer, self._vocabulary = items, tokenizer, vocabulary
        self.description = f"items, {tokenizer.description}"

    def digest(self) -> str:
        """As `Source.digest`: nothing."""
        return ""

    def pieces(self, begin: PiecePosition) -> Iterator[tuple[PiecePosition, NDArray[np.int32]]]:
        """One piece per item."""
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
        _require_in_vocabulary(tokens, self._vocabulary, f"data: item {number}")
        return tokens.astype(np.int32)


def _require_in_vocabulary(tokens: NDArray[Any], vocabulary: int, source: str) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise DataError(
            f"{source} has tokens from {tokens.min()} to {tokens.max()}, the model knows 0 to "
            f"{vocabulary - 1}; use a model with a larger vocabulary, or its own --tokenizer"
        )


def _is_text_file(path: Path, folder: Path) -> bool:
    """Whether to read a file; hidden ones, or those in hidden folders such as ``.git``, are
    ignored."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.is_file() and os.access(path, os.R_OK)


def require_utf8(text: bytes, path: Path, offset: int) -> None:
    """Refuse a piece that is not UTF-8 or contains zero bytes."""
    error_index, problem = text.find(b"\0"), "has a byte of 0 and is no text"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if not 0 <= error_index < error.start:
            error_index, problem = error.start, "is not UTF-8 text"
    if offset == 0 and is_utf_16(text):
        error_index, problem = 0, "is not UTF-8 text but UTF-16"
    if error_index >= 0:
        raise DataError(
            f"{path}: {problem} (byte {offset + error_index}); save it as UTF-8, or take it out of "
            "the data"
        )


def _complete_length(text: bytes) -> int:
    """Cut after the last line, else before the last, possibly incomplete, character."""
    line = text.rfind(b"\n") + 1
    if line:
        return line
    end = len(text)
    while end > 1 and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    return max(end - 1, 1)
