"""One round of averaging: member k sums share k and returns it to everybody (DeDLOC, 3.2).

Shares travel in chunks; all reducers' chunks with the same number travel together, so that
contributions, sums and returns overlap and rates keep in proportion to shares. A member contributes
up to a window of chunks beyond those that came back whole: its reducers need no more memory than
that window, and an answer is at the same time leave to go on.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from planner.executor.codec import decode, encode, message_length
from planner.executor.connections import as_bytes, receive_into, send_all
from planner.executor.pace import Pace
from planner.executor.transport import Failure, Lane
from planner.training_plan.choices import Codec
from planner.training_plan.model import AveragingGroup
from planner.training_plan.shares import Range, share_ranges

HEAD = struct.Struct("!I")
"""In front of a chunk: its number, and `RETURN` if it is a sum."""
RETURN = 1 << 31


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


class Peers:
    """A rank's connections for averaging, with a thread for each direction of each.

    Parameters
    ----------
    connections
        By rank.

    Attributes
    ----------
    to, of
        By rank, what sends to it and what receives from it.
    failure
        Errors of all threads.
    changed
        Guards what threads count; told when something is complete.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self.connections = connections
        self.failure = Failure()
        self.changed = threading.Condition()
        self.failure.on_failure(self._wake)
        self.to = {d: Lane(f"averaging to {d}", self.failure) for d in connections}
        self.of = {d: Lane(f"averaging from {d}", self.failure) for d in connections}

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for the threads; raises what any of them raised.

        Parameters
        ----------
        done
            Asked whenever something is complete.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failure.error is not None or done())
        self.failure.check()

    def finish(self) -> None:
        """Wait until everything has left."""
        for lane in (*self.to.values(), *self.of.values()):
            lane.finish()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


class Exchange:
    """One member's part of a round.

    Parameters
    ----------
    vector
        ``float32[values]``, changed in place.
    group
        The rank's group.
    rank
        This process.
    peers
        Its connections, to the other members at least.
    codec
        How chunks are written on the wire.
    pace
        The group's chunks and window.
    scale
        What sums are multiplied by.
    """

    def __init__(
        self,
        vector: Tensor,
        group: AveragingGroup,
        rank: int,
        peers: Peers,
        codec: Codec,
        pace: Pace,
        scale: float = 1.0,
    ) -> None:
        self._vector, self._bytes = vector, as_bytes(vector)
        self._members, self._gives = group.members, group.contributes
        self._me = group.members.index(rank)
        self._peers, self._codec, self._pace, self._scale = peers, codec, pace, scale
        parts = share_ranges(len(vector), group.shares)
        self._chunks = [chunk_ranges(part, pace.chunks) for part in parts]
        # starting after this one, so that not all send to the same one first
        n = len(parts)
        self._others = [(self._me + step) % n for step in range(1, n)]
        self._givers = [k for k in sorted(self._others) if self._gives[k]]
        numbers = range(pace.chunks)
        # by chunk: contributions to come, and sums to come back
        self._missing = [len(self._givers) if self._size(self._me, c) else 0 for c in numbers]
        self._due = [sum(self._size(k, c) > 0 for k in self._others) for c in numbers]
        self._open = sum(self._due)
        self._rings = {k: self._ring() for k in self._givers} if any(self._missing) else {}

    def run(self) -> float:
        """Contribute, reduce and collect all chunks.

        Returns
        -------
        float
            Monotonic clock, when the whole vector was there.

        Raises
        ------
        ConnectionLost
            A member is gone.
        """
        for k in self._others:
            self._peers.of[self._members[k]].submit(partial(self._receive, k, self._count(k)))
        for c in range(min(self._pace.window, self._pace.chunks)):
            self._contribute(c)
        for c in range(self._pace.chunks):
            if self._size(self._me, c):
                self._peers.wait_until(lambda c=c: self._missing[c] == 0)  # type: ignore[misc]
                self._reduce(c)
        self._peers.wait_until(lambda: self._open == 0)
        end = time.monotonic()
        self._settle()
        return end

    def _size(self, k: int, c: int) -> int:
        start, stop = self._chunks[k][c]
        return stop - start

    def _ring(self) -> list[Tensor]:
        """Memory for a window of one member's contributions, used in turns.

        A member sends chunk c + window once c came back, so the place of c is free by then.
        """
        largest = max(self._size(self._me, c) for c in range(self._pace.chunks))
        length = message_length(largest, self._codec)
        return [torch.empty(length, dtype=torch.uint8) for _ in range(self._pace.window)]

    def _slot(self, k: int, c: int) -> Tensor:
        length = message_length(self._size(self._me, c), self._codec)
        return self._rings[k][c % self._pace.window][:length]

    def _count(self, k: int) -> int:
        """Messages that member k sends us in this round."""
        numbers = range(self._pace.chunks)
        contributions = sum(self._size(self._me, c) > 0 for c in numbers) * self._gives[k]
        return contributions + sum(self._size(k, c) > 0 for c in numbers)

    def _contribute(self, c: int) -> None:
        if self._gives[self._me]:
            for k in self._others:
                if self._size(k, c):
                    self._peers.to[self._members[k]].submit(partial(self._send_part, k, c))

    def _send_part(self, k: int, c: int) -> None:
        start, stop = self._chunks[k][c]
        if self._codec is Codec.NONE:
            message = self._bytes[4 * start : 4 * stop]
        else:
            message = as_bytes(encode(self._vector[start:stop], self._codec))
        self._send(k, c, message)

    def _send(self, k: int, word: int, message: memoryview) -> None:
        send_all(self._peers.connections[self._members[k]], HEAD.pack(word), message)

    def _receive(self, k: int, count: int) -> None:
        connection = self._peers.connections[self._members[k]]
        head = memoryview(bytearray(HEAD.size))
        for _ in range(count):
            receive_into(connection, head)
            (word,) = HEAD.unpack(head)
            if word & RETURN:
                self._take_sum(connection, k, word ^ RETURN)
            else:
                receive_into(connection, as_bytes(self._slot(k, word)))
                with self._peers.changed:
                    self._missing[word] -= 1
                    if not self._missing[word]:
                        self._peers.changed.notify_all()

    def _take_sum(self, connection: socket.socket, k: int, c: int) -> None:
        start, stop = self._chunks[k][c]
        if self._codec is Codec.NONE:
            receive_into(connection, self._bytes[4 * start : 4 * stop])
        else:
            message = torch.empty(message_length(stop - start, self._codec), dtype=torch.uint8)
            receive_into(connection, as_bytes(message))
            self._vector[start:stop] = decode(message, stop - start, self._codec)
        with self._peers.changed:
            self._due[c] -= 1
            self._open -= 1
            whole = not self._due[c]
            if not self._open:
                self._peers.changed.notify_all()
        if whole and c + self._pace.window < self._pace.chunks:
            self._contribute(c + self._pace.window)

    def _reduce(self, c: int) -> None:
        start, stop = self._chunks[self._me][c]
        total = self._vector[start:stop]
        # a fixed order makes the sum reproducible: this member's first, the others' as listed
        empty = not self._gives[self._me]
        for k in self._givers:
            piece = decode(self._slot(k, c), stop - start, self._codec)
            if empty:
                total.copy_(piece)
            else:
                total.add_(piece)
            empty = False
        if self._scale != 1.0:
            total.mul_(self._scale)
        if self._codec is Codec.NONE:
            message = self._bytes[4 * start : 4 * stop]
        else:
            encoded = encode(total, self._codec)
            # the reducer too takes what everybody else gets
            total.copy_(decode(encoded, stop - start, self._codec))
            message = as_bytes(encoded)
        for k in self._others:
            send = partial(self._send, k, c | RETURN, message)
            self._peers.to[self._members[k]].submit(send)

    def _settle(self) -> None:
        """Wait until the vector's bytes have left, so that it may be changed."""
        left = len(self._others)

        def one_less() -> None:
            nonlocal left
            with self._peers.changed:
                left -= 1
                self._peers.changed.notify_all()

        for k in self._others:
            self._peers.to[self._members[k]].submit(one_less)
        self._peers.wait_until(lambda: left == 0)
