"""Samples of a text in a shuffled order known to every process.

All tokens, repeated from the beginning, are cut into samples; blocks of as many samples as the
buffer holds are shuffled separately. A block thus follows from its number and its start, and a
position in the order is a few numbers. The next block is read and tokenized while the previous one
is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.executor.data.sources import START_OF_TEXT, DataError, Source


class Position(NamedTuple):
    """Start of a block.

    Attributes
    ----------
    epoch
        Number of completed passes over the text.
    file, offset
        The piece with its first token.
    token
        Index of that token in the piece.
    """

    block: int
    epoch: int
    file: int
    offset: int
    token: int


START = Position(0, 0, *START_OF_TEXT, 0)


class Samples:
    """Samples of a text by number.

    Parameters
    ----------
    sequence
        Tokens per sample, without the last target, which is the first token of the next sample.
    buffer
        Samples shuffled together and held in memory until `forget`; as many more are prefetched.
    """

    def __init__(self, source: Source, sequence: int, buffer: int, seed: int) -> None:
        self._source, self._sequence, self._buffer, self._seed = source, sequence, buffer, seed
        self._blocks: dict[int, NDArray[np.int32]] = {}
        self._first = 0
        self.seek(START)

    def sample(self, number: int) -> NDArray[np.int32]:
        """Tokens of a sample.

        Returns
        -------
        NDArray[np.int32]
            ``[sequence + 1]``.
        """
        block, index = divmod(number, self._buffer)
        if block not in self._blocks:
            if block < self._position.block:
                self.seek(START)
            while (block_number := self._position.block) <= block:
                rows = self._next_block()
                # earlier samples may be requested later in the step
                if block_number >= min(self._first, block):
                    self._blocks[block_number] = rows
        tokens: NDArray[np.int32] = self._blocks[block][index]
        return tokens

    def require_one(self) -> None:
        """Refuse a text without a sample; reads its first pieces alone."""
        _TokenStream(self._source, START, self._sequence + 1).take(self._sequence)

    def forget(self, number: int) -> None:
        """Free samples before this one."""
        self._first = number // self._buffer
        self._blocks = {k: block for k, block in self._blocks.items() if k >= self._first}

    def position_for(self, number: int) -> Position:
        """Position in the text required for a sample and those after it."""
        block = number // self._buffer
        position = self._block_starts.get(block, self._position)
        return position if position.block <= block else START

    def seek(self, position: Position) -> None:
        """Continue from a position."""
        self._position = position
        self._block_starts: dict[int, Position] = {}
        self._blocks.clear()
        self._next_blocks = _blocks(
            self._source, position, self._sequence, self._buffer, self._seed
        )
        self._prefetcher = ThreadPoolExecutor(1, "prefetch")
        self._next: Future[tuple[NDArray[np.int32], Position]] | None = None

    def _next_block(self) -> NDArray[np.int32]:
        """The next block."""
        block = self._position.block
        # after an error, every call raises it
        self._next = self._next or self._prefetcher.submit(next, self._next_blocks)
        rows, next_position = self._next.result()
        self._next = self._prefetcher.submit(next, self._next_blocks)
        # keep the start of a block as long as the block
        self._block_starts = {k: p for k, p in self._block_starts.items() if k in self._blocks}
        self._block_starts[block] = self._position
        self._position = next_position
        return rows


def _blocks(
    source: Source, position: Position, sequence: int, buffer: int, seed: int
) -> Iterator[tuple[NDArray[np.int32], Position]]:
    """Samples of each block from a position on, and the start of the next one."""
    tokens = _TokenStream(source, position, sequence + 1)
    block = position.block
    while True:
        flat = tokens.take(buffer * sequence)
        starts = np.random.default_rng((seed, block)).permutation(buffer) * sequence
        rows: NDArray[np.int32] = flat[starts[:, None] + np.arange(sequence + 1)]
        block += 1
        yield rows, Position(block, *tokens.index)


class _TokenStream:
    """An endless stream of all tokens from a position on."""

    def __init__(self, source: Source, position: Position, min_tokens: int) -> None:
        self._source, self._min_tokens = source, min_tokens
        self._pieces = self._from(position)
        self._pieces_held: deque[tuple[int, int, int, NDArray[np.int32]]] = deque()
        self._offset, self._available = position.token, -position.token

    def take(self, count: int) -> NDArray[np.int32]:
        """The next ``count`` tokens and the following one, which the next call repeats."""
        while self._available <= count:
            piece = next(self._pieces)
            self._pieces_held.append(piece)
            self._available += len(piece[-1])
        parts, begin, remaining = [], self._offset, count + 1
        for *_, tokens in self._pieces_held:
            parts.append(tokens[begin : begin + remaining])
            begin, remaining = 0, remaining - len(parts[-1])
        flat = np.concatenate(parts)
        self._offset += count
        self._available -= count
        while len(self._pieces_held[0][-1]) <= self._offset:
            self._offset -= len(self._pieces_held.popleft()[-1])
        return flat

    @property
    def index(self) -> tuple[int, int, int, int]:
        """Epoch, file, offset and index of the next token."""
        epoch, file, offset, _ = self._pieces_held[0]
        return epoch, file, offset, self._offset

    def _from(self, position: Position) -> Iterator[tuple[int, int, int, NDArray[np.int32]]]:
        epoch, begin, count = position.epoch, (position.file, position.offset), 0
        complete_pass = begin == START_OF_TEXT
        while True:
            for (file, offset), tokens in self._source.pieces(begin):
                count += len(tokens)
                if len(tokens):
                    yield epoch, file, offset, tokens
            if complete_pass and count < self._min_tokens:
                raise DataError(
                    f"there are {count} tokens, fewer than a sample of {self._min_tokens}; give a "
                    "longer text"
                )
            epoch, begin, count, complete_pass = epoch + 1, START_OF_TEXT, 0, True
