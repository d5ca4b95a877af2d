"""Averaging within a group as planned: member k sums share k and returns it to everybody.

Shares travel in chunks: while a reducer sums one chunk, the next is on its way, so that sending,
summing and returning overlap (DeDLOC, section 3.2, lets them run at the same time). All reducers'
chunks with the same number travel together, which keeps their rates in proportion to their shares.

Microbatch losses are already divided by the samples of the whole step, so that the sum of the
contributions is the mean over samples, whoever gave how many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from planner.executor.codec import decode, encode, message_length
from planner.executor.transport import Pending, Transport
from planner.training_plan.choices import Codec
from planner.training_plan.model import AveragingGroup
from planner.training_plan.shares import Range, share_ranges

TAG = 1 << 28
"""Above all tags of the pipeline."""

CHUNK_BYTES = 1 << 15
"""Smallest chunk of the largest share, before encoding: small ones keep unequal flows in step."""

MOST_CHUNKS = 64
"""Of a share; beyond that chunks grow, for each costs a round of messages."""

WINDOW = 4
"""Chunks a contributor has on the way to each reducer."""


def chunk_ranges(part: Range, count: int) -> list[Range]:
    """A slice in ``count`` nearly equal pieces.

    Parameters
    ----------
    part
        ``(start, stop)``.
    count
        Number of pieces.

    Returns
    -------
    list[Range]
        They follow each other.
    """
    start, stop = part
    ends = [start + (stop - start) * c // count for c in range(count + 1)]
    return list(pairwise(ends))


def average_gradients(
    parameters: list[nn.Parameter],
    rounds: Sequence[AveragingGroup],
    peers: int,
    rank: int,
    transport: Transport,
    codec: Codec = Codec.NONE,
) -> None:
    """Replace this rank's gradients by the sum over all peers of its stage.

    Parameters
    ----------
    parameters
        With their gradients.
    rounds
        This rank's group in every round. One round over all gives the sum, equal on all members bit
        for bit. In several rounds every group takes its mean; a valid plan's rounds give the
        mean of all.
    peers
        Devices of the stage.
    rank
        This process.
    transport
        Sends and receives.
    codec
        How vectors are written on the wire.
    """
    if peers == 1:
        # as below: what no microbatch of this iteration visits has a gradient of zero
        for parameter in parameters:
            parameter.grad = _gradient(parameter)
        return
    vector = torch.cat([_gradient(p).reshape(-1) for p in parameters]).cpu()
    for group in rounds:
        if len(group.members) > 1:
            average_vector(vector, group, rank, transport, codec)
        if len(rounds) > 1:
            vector /= len(group.members)
    if len(rounds) > 1:
        vector *= peers
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.grad = vector[start:stop].view_as(parameter).to(parameter.device)
        start = stop


def average_vector(
    vector: Tensor,
    group: AveragingGroup,
    rank: int,
    transport: Transport,
    codec: Codec = Codec.NONE,
) -> None:
    """Replace a ``float32`` vector by the sum over the group's contributors, in place.

    Parameters
    ----------
    vector
        ``float32[values]``, changed in place.
    group
        The rank's group.
    rank
        This process.
    transport
        Sends and receives.
    codec
        How vectors are written on the wire.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2.
    """
    parts = share_ranges(len(vector), group.shares)
    largest = max(stop - start for start, stop in parts)
    count = min(MOST_CHUNKS, max(1, -(-4 * largest // CHUNK_BYTES)))
    chunks = [chunk_ranges(part, count) for part in parts]
    _Exchange(vector, group, group.members.index(rank), transport, codec, chunks).run(count)
    transport.drain()


@dataclass
class _Exchange:
    """One member's part of an averaging; ``chunks[k][c]`` is chunk c of reducer k's share."""

    vector: Tensor
    group: AveragingGroup
    me: int
    transport: Transport
    codec: Codec
    chunks: Sequence[Sequence[Range]]

    def run(self, count: int) -> None:
        """Contribute, reduce and collect all chunks."""
        contributions: deque[dict[int, Pending]] = deque()
        returns: list[dict[int, Pending]] = []
        for c in range(count + WINDOW):
            if c < count:
                contributions.append(self._ask_contributions(c))
                returns.append(self._ask_returns(c))
                self._contribute(c)
            if c >= WINDOW:
                # a window of contributions beyond this chunk keeps the links busy meanwhile
                self._reduce(c - WINDOW, contributions.popleft())
        # only now: waiting for a chunk's way back would empty the links behind it
        for c, returned in enumerate(returns):
            self._collect(c, returned)

    def _others(self) -> list[int]:
        """The other members, starting after this one, so that not all send to the same one."""
        n = len(self.chunks)
        return [(self.me + step) % n for step in range(1, n)]

    def _size(self, k: int, c: int) -> int:
        start, stop = self.chunks[k][c]
        return stop - start

    def _ask(self, k: int, values: int, tag: int) -> Pending:
        length = message_length(values, self.codec)
        return self.transport.receive((length,), self.group.members[k], tag, torch.uint8)

    def _ask_contributions(self, c: int) -> dict[int, Pending]:
        mine = self._size(self.me, c)
        return {
            k: self._ask(k, mine, TAG + 2 * c)
            for k, gives in enumerate(self.group.contributes)
            if gives and k != self.me and mine
        }

    def _ask_returns(self, c: int) -> dict[int, Pending]:
        return {
            k: self._ask(k, size, TAG + 2 * c + 1)
            for k in range(len(self.chunks))
            if k != self.me and (size := self._size(k, c))
        }

    def _contribute(self, c: int) -> None:
        if not self.group.contributes[self.me]:
            return
        for k in self._others():
            if self._size(k, c):
                piece = self.vector[slice(*self.chunks[k][c])]
                message = encode(piece, self.codec)
                self.transport.send(message, self.group.members[k], TAG + 2 * c)

    def _reduce(self, c: int, incoming: dict[int, Pending]) -> None:
        mine = slice(*self.chunks[self.me][c])
        size = self._size(self.me, c)
        if not size:
            return
        total = torch.zeros(size)
        for k in range(len(self.chunks)):  # a fixed order makes the sum reproducible
            if k == self.me and self.group.contributes[k]:
                total += self.vector[mine]
            elif k in incoming:
                total += decode(incoming[k].wait().cpu(), size, self.codec)
        message = encode(total, self.codec)
        for k in self._others():
            self.transport.send(message, self.group.members[k], TAG + 2 * c + 1)
        # the reducer too takes what everybody else gets
        self.vector[mine] = decode(message, size, self.codec)

    def _collect(self, c: int, returned: dict[int, Pending]) -> None:
        for k, pending in returned.items():
            piece = decode(pending.wait().cpu(), self._size(k, c), self.codec)
            self.vector[slice(*self.chunks[k][c])] = piece


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
