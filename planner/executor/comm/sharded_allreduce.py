"""One round of averaging: member k reduces share k, and returns it to all members (DeDLOC, 3.2).

In hierarchical averaging a round does a part of it: sending shares, or returning them, or all of it
for a slice of the vector.

A round begins when its last member is ready, of which members notify each other: earlier messages
would compete with pipeline messages that others still need. Word is sent ahead where possible
(`planner.executor.comm.ready_hint`); where it would arrive too late, a member does not wait for it
(`Chunking.early_s`). Shares are sent in chunks; the chunks of all reducers with the same number
travel together, so that contributions, sums and returns overlap and rates stay in proportion to
shares. A member sends up to a window of chunks beyond those returned completely: a return is an
acknowledgement as well, and reducers hold no more of it than the window. Where nothing is returned,
they read no further than that.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.executor.comm.allreduce_links import HEAD, READY, RETURN, AllReduceLinks
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat, decode, encode, message_length
from planner.executor.comm.connections import as_bytes, receive_into
from planner.executor.comm.group_roles import GroupRoles, chunk_ranges, ranges_of
from planner.training_plan.averaging_group import AveragingGroup

TICK_S = 1e-3


class ShardedAllReduce:
    """One member's part of a round.

    Parameters
    ----------
    vector
        ``float32[values]``, changed in place.
    group
        The rank's group.
    peers
        Its connections, at least to the other members.
    wire
        Format of chunks.
    chunking
        Chunks and window of the group.
    scale
        Factor on sums.
    room
        Called at the start of the round: bytes per second that may be sent, and until when on the
        monotonic clock; afterwards there is no limit.
    told
        Ranks that already have word of this one; None if no word is sent ahead.
    """

    def __init__(
        self,
        vector: Tensor,
        group: AveragingGroup,
        rank: int,
        peers: AllReduceLinks,
        wire: WireFormat,
        chunking: Chunking,
        scale: float = 1.0,
        room: Callable[[], tuple[float, float]] = lambda: (math.inf, 0.0),
        told: Collection[int] | None = None,
    ) -> None:
        # the same memory as tensor, numbers and bytes
        self._vector, self._bytes = vector, as_bytes(vector)
        self._values: NDArray[np.float32] = vector.numpy()
        self._members, self._roles = group.members, GroupRoles.of(group, rank)
        self._peers, self._wire, self._chunking, self._scale = peers, wire, chunking, scale
        self._room = room
        self._told = () if told is None else told
        self._early_s = chunking.early_s if told is None else None
        parts = ranges_of(group, len(vector))
        self._chunks = [chunk_ranges(part, chunking.chunks) for part in parts]
        self._sizes = [[stop - start for start, stop in chunks] for chunks in self._chunks]
        roles = self._roles
        own_sizes = self._sizes[roles.me]
        self._unready = len(roles.others)
        # by chunk: missing contributions, and missing returns
        self._missing = [len(roles.givers) if size else 0 for size in own_sizes]
        self._due = [
            sum(self._sizes[k][c] > 0 for k in roles.reducers) for c in range(chunking.chunks)
        ]
        self._answered = [due > 0 for due in self._due]
        self._open = sum(self._due)
        self._answers = self._open > 0
        # without returns, only reading no further holds back members that are ahead
        self._unsummed = deque(c for c, size in enumerate(own_sizes) if size)
        self._memory = peers.memory(message_length(max(own_sizes), wire))
        self._parts: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def run(self) -> float:
        """Contribute, reduce and collect all chunks."""
        for k in self._roles.others:
            if self._members[k] not in self._told:
                self._peers.tell(self._members[k])
            self._peers.of[self._members[k]].submit(partial(self._receive, k))
        self._peers.wait_until(lambda: not self._unready, self._early_s)
        window = self._chunking.window if self._answers else self._chunking.chunks
        contributions = deque(range(min(window, self._chunking.chunks)))
        sums = deque(c for c, size in enumerate(self._sizes[self._roles.me]) if size)
        self._begin_slowly(contributions, sums, *self._room())
        for c in contributions:
            self._scatter(c)
        for c in sums:
            self._peers.wait_until(partial(self._complete, c))
            self._reduce(c)
        self._peers.wait_until(lambda: self._open == 0)
        end = time.monotonic()
        self._settle()
        return end

    def _begin_slowly(
        self, contributions: deque[int], sums: deque[int], bytes_per_s: float, until_s: float
    ) -> None:
        """Contribute and reduce at a limited rate, until a given time."""
        free_s = until_s if bytes_per_s <= 0.0 else 0.0
        while (now := time.monotonic()) < until_s:
            self._peers.failure.check()
            if now < free_s:
                time.sleep(min(free_s, until_s) - now)
            elif sums and self._complete(sums[0]):
                free_s = now + self._reduce(sums.popleft()) / bytes_per_s
            elif contributions:
                free_s = now + self._scatter(contributions.popleft()) / bytes_per_s
            else:
                time.sleep(min(TICK_S, until_s - now))

    def _complete(self, c: int) -> bool:
        return not self._missing[c]

    def _scatter(self, c: int) -> int:
        """Send chunk c, and whatever needs no answer to it; returns bytes."""
        values = 0
        while c < self._chunking.chunks:
            if self._roles.gives:
                for k in self._roles.others:
                    if self._sizes[k][c]:
                        self._send_part(k, c)
                        values += self._sizes[k][c]
            if self._answered[c] or not self._answers:
                break
            c += self._chunking.window
        return message_length(values, self._wire)

    def _send_part(self, k: int, c: int) -> None:
        start, stop = self._chunks[k][c]
        queue = self._peers.to[self._members[k]]
        if self._wire is WireFormat.FP32:
            queue.send(c, self._bytes[4 * start : 4 * stop])
        else:
            part = self._vector[start:stop]
            queue.send_made(c, lambda: as_bytes(encode(part, self._wire)))

    def _receive(self, k: int) -> None:
        """Receive everything from member k."""
        connection = self._peers.incoming[self._members[k]]
        head = memoryview(bytearray(HEAD.size))
        own_sizes = self._sizes[self._roles.me]
        contributions = sum(size > 0 for size in own_sizes) * (k in self._roles.givers)
        sums = sum(size > 0 for size in self._sizes[k]) * (k in self._roles.reducers)
        for _ in range(1 + contributions + sums):
            receive_into(connection, head)
            (word,) = HEAD.unpack(head)
            if word == READY:
                self._count_ready()
            elif word & RETURN:
                self._take_sum(connection, k, word ^ RETURN)
            else:
                self._take_part(connection, k, word)

    def _count_ready(self) -> None:
        with self._peers.changed:
            self._unready -= 1
            if not self._unready:
                self._peers.changed.notify_all()

    def _take_part(self, connection: socket.socket, k: int, c: int) -> None:
        if not self._roles.takers:
            self._peers.wait_until(lambda: c < self._unsummed[0] + self._chunking.window)
        length = message_length(self._sizes[self._roles.me][c], self._wire)
        piece = self._memory.take()
        receive_into(connection, piece[:length].data)
        with self._peers.changed:
            self._parts[k, c] = piece
            self._missing[c] -= 1
            if not self._missing[c]:
                self._peers.changed.notify_all()

    def _take_sum(self, connection: socket.socket, k: int, c: int) -> None:
        start, stop = self._chunks[k][c]
        if self._wire is WireFormat.FP32:
            receive_into(connection, self._bytes[4 * start : 4 * stop])
        else:
            message = torch.empty(message_length(stop - start, self._wire), dtype=torch.uint8)
            receive_into(connection, as_bytes(message))
            self._vector[start:stop] = decode(message, stop - start, self._wire)
        with self._peers.changed:
            self._due[c] -= 1
            self._open -= 1
            complete = not self._due[c]
            if not self._open:
                self._peers.changed.notify_all()
        if complete:
            self._scatter(c + self._chunking.window)

    def _reduce(self, c: int) -> int:
        """Sum chunk c of this member's share and return it; returns bytes."""
        start, stop = self._chunks[self._roles.me][c]
        total = self._values[start:stop]
        # a fixed order makes the sum reproducible: this member's first, the others' as listed
        empty = not self._roles.gives
        for k in self._roles.givers:
            piece = self._parts.pop((k, c))
            part = self._decode(piece, stop - start)
            if empty:
                total[:] = part
            else:
                total += part
            empty = False
            self._memory.give_back(piece)
        if self._scale != 1.0:
            total *= self._scale
        if not self._roles.takers:
            with self._peers.changed:
                self._unsummed.popleft()
                self._peers.changed.notify_all()
            return 0
        if self._wire is WireFormat.FP32:
            message = self._bytes[4 * start : 4 * stop]
        else:
            encoded = encode(self._vector[start:stop], self._wire)
            # the reducer uses the encoded sum, too, like all others
            self._vector[start:stop] = decode(encoded, stop - start, self._wire)
            message = as_bytes(encoded)
        for k in self._roles.takers:
            self._peers.to[self._members[k]].send(c | RETURN, message)
        return len(message) * len(self._roles.takers)

    def _decode(self, piece: NDArray[np.uint8], values: int) -> NDArray[np.float32]:
        message = piece[: message_length(values, self._wire)]
        if self._wire is WireFormat.FP32:
            return message.view(np.float32)
        return decode(torch.from_numpy(message), values, self._wire).numpy()

    def _settle(self) -> None:
        """Wait until the vector's bytes have been sent, so that it may be changed."""
        left = len(self._roles.others)

        def one_less() -> None:
            nonlocal left
            with self._peers.changed:
                left -= 1
                if not left:
                    self._peers.changed.notify_all()

        for k in self._roles.others:
            self._peers.to[self._members[k]].after_all(one_less)
        self._peers.wait_until(lambda: left == 0)
