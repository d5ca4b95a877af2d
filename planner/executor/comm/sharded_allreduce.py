"""Sharded all-reduce: reduce-scatter, then all-gather, pipelined by chunks (DeDLOC, 3.2).

Member k of a group reduces share k of the vector. The protocol of a round:

1. Ready: a member that has its gradients notifies the others, and begins when all have notified it.
   Earlier messages would compete with pipeline messages that others still need. Where possible,
   members notify each other ahead (`planner.executor.comm.ready_hint`); where a notification would
   arrive too late, a member begins without it (`Chunking.start_early_s`).
2. Reduce-scatter: each member sends chunk c of share k to member k, for all k. Chunks with the same
   number travel together, so that rates stay in proportion to shares.
3. All-gather: when member k has all contributions to its chunk c, it sends the sum to all.

The phases overlap. A member sends up to a window of chunks beyond the last one that it has gathered
completely, so a gathered chunk is an acknowledgement as well, and reducers hold no more of it than
the window. In hierarchical averaging a round may have one of the phases only; without all-gather,
reducers read no more than a window ahead.
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

from planner.executor.comm.averaging_connections import (
    GATHERED,
    HEADER,
    READY,
    AveragingConnections,
)
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat, decode, encode, message_length
from planner.executor.comm.group_roles import GroupRoles, chunk_ranges, member_ranges
from planner.executor.transport.connections import as_bytes, receive_into
from planner.training_plan.averaging_group import AveragingGroup

TICK_S = 1e-3


class ShardedAllReduce:
    """One member's part of a round.

    Parameters
    ----------
    vector
        ``float32[numel]``, changed in place.
    group
        The rank's group.
    connections
        Its connections, at least to the other members.
    wire
        Format of chunks.
    chunking
        Chunks and window of the group.
    scale
        Factor on sums.
    available_rate
        Called at the start of the round; returns a limit in bytes per second, and the time on the
        monotonic clock until which it holds.
    notified
        Ranks that this one has notified already; None if it notifies none ahead.
    """

    def __init__(
        self,
        vector: Tensor,
        group: AveragingGroup,
        rank: int,
        connections: AveragingConnections,
        wire: WireFormat,
        chunking: Chunking,
        scale: float = 1.0,
        available_rate: Callable[[], tuple[float, float]] = lambda: (math.inf, 0.0),
        notified: Collection[int] | None = None,
    ) -> None:
        # the same memory as tensor, numbers and bytes
        self._vector, self._bytes = vector, as_bytes(vector)
        self._values: NDArray[np.float32] = vector.numpy()
        self._members, self._roles = group.members, GroupRoles.from_group(group, rank)
        self._connections, self._wire, self._chunking = connections, wire, chunking
        self._scale, self._available_rate = scale, available_rate
        self._notified = () if notified is None else notified
        self._start_early_s = chunking.start_early_s if notified is None else None
        parts = member_ranges(group, len(vector))
        self._chunks = [chunk_ranges(part, chunking.chunks) for part in parts]
        self._sizes = [[stop - start for start, stop in chunks] for chunks in self._chunks]
        roles = self._roles
        own_sizes = self._sizes[roles.me]
        self._unready_members = len(roles.others)
        # by chunk: contributions to reduce, and sums to gather, that have not arrived
        self._missing_contributions = [len(roles.contributors) if size else 0 for size in own_sizes]
        self._missing_gathered = [
            sum(self._sizes[k][c] > 0 for k in roles.reducers) for c in range(chunking.chunks)
        ]
        self._is_gathered = [due > 0 for due in self._missing_gathered]
        self._missing_chunks = sum(self._missing_gathered)
        self._gathers_sums = self._missing_chunks > 0
        # without all-gather, only reading no further holds back members that are ahead
        self._unreduced = deque(c for c, size in enumerate(own_sizes) if size)
        self._buffers = connections.buffer_pool(message_length(max(own_sizes), wire))
        self._contributions: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def run(self) -> float:
        """Run the round; returns the time of its end on the monotonic clock."""
        for k in self._roles.others:
            if self._members[k] not in self._notified:
                self._connections.notify_ready(self._members[k])
            self._connections.receivers[self._members[k]].submit(partial(self._receive, k))
        self._connections.wait_until(lambda: not self._unready_members, self._start_early_s)
        window = self._chunking.window if self._gathers_sums else self._chunking.chunks
        contributions = deque(range(min(window, self._chunking.chunks)))
        sums = deque(c for c, size in enumerate(self._sizes[self._roles.me]) if size)
        self._run_rate_limited(contributions, sums, *self._available_rate())
        for c in contributions:
            self._scatter(c)
        for c in sums:
            self._connections.wait_until(partial(self._can_reduce, c))
            self._reduce_and_gather(c)
        self._connections.wait_until(lambda: self._missing_chunks == 0)
        end = time.monotonic()
        self._flush()
        return end

    def _run_rate_limited(
        self, contributions: deque[int], sums: deque[int], bytes_per_s: float, until_s: float
    ) -> None:
        """Scatter and reduce at a limited rate, until a given time."""
        next_send_s = until_s if bytes_per_s <= 0.0 else 0.0
        while (now := time.monotonic()) < until_s:
            self._connections.error_latch.check()
            if now < next_send_s:
                time.sleep(min(next_send_s, until_s) - now)
            elif sums and self._can_reduce(sums[0]):
                next_send_s = now + self._reduce_and_gather(sums.popleft()) / bytes_per_s
            elif contributions:
                next_send_s = now + self._scatter(contributions.popleft()) / bytes_per_s
            else:
                time.sleep(min(TICK_S, until_s - now))

    def _can_reduce(self, c: int) -> bool:
        return not self._missing_contributions[c]

    def _scatter(self, c: int) -> int:
        """Send chunk c, and following ones that nothing acknowledges; returns their bytes."""
        numel = 0
        while c < self._chunking.chunks:
            if self._roles.contributes:
                for k in self._roles.others:
                    if self._sizes[k][c]:
                        self._send_contribution(k, c)
                        numel += self._sizes[k][c]
            if self._is_gathered[c] or not self._gathers_sums:
                break
            c += self._chunking.window
        return message_length(numel, self._wire)

    def _send_contribution(self, k: int, c: int) -> None:
        start, stop = self._chunks[k][c]
        queue = self._connections.send_queues[self._members[k]]
        if self._wire is WireFormat.FP32:
            queue.send(c, self._bytes[4 * start : 4 * stop])
        else:
            part = self._vector[start:stop]
            queue.send_encoded(c, lambda: as_bytes(encode(part, self._wire)))

    def _receive(self, k: int) -> None:
        """Receive everything from member k."""
        connection = self._connections.incoming[self._members[k]]
        header_bytes = memoryview(bytearray(HEADER.size))
        own_sizes = self._sizes[self._roles.me]
        contributions = sum(size > 0 for size in own_sizes) * (k in self._roles.contributors)
        sums = sum(size > 0 for size in self._sizes[k]) * (k in self._roles.reducers)
        for _ in range(1 + contributions + sums):
            receive_into(connection, header_bytes)
            (header,) = HEADER.unpack(header_bytes)
            if header == READY:
                self._count_ready()
            elif header & GATHERED:
                self._receive_gathered(connection, k, header ^ GATHERED)
            else:
                self._receive_contribution(connection, k, header)

    def _count_ready(self) -> None:
        with self._connections.changed:
            self._unready_members -= 1
            if not self._unready_members:
                self._connections.changed.notify_all()

    def _receive_contribution(self, connection: socket.socket, k: int, c: int) -> None:
        if not self._roles.receivers:
            self._connections.wait_until(lambda: c < self._unreduced[0] + self._chunking.window)
        length = message_length(self._sizes[self._roles.me][c], self._wire)
        buffer = self._buffers.acquire()
        receive_into(connection, buffer[:length].data)
        with self._connections.changed:
            self._contributions[k, c] = buffer
            self._missing_contributions[c] -= 1
            if not self._missing_contributions[c]:
                self._connections.changed.notify_all()

    def _receive_gathered(self, connection: socket.socket, k: int, c: int) -> None:
        start, stop = self._chunks[k][c]
        if self._wire is WireFormat.FP32:
            receive_into(connection, self._bytes[4 * start : 4 * stop])
        else:
            message = torch.empty(message_length(stop - start, self._wire), dtype=torch.uint8)
            receive_into(connection, as_bytes(message))
            self._vector[start:stop] = decode(message, stop - start, self._wire)
        with self._connections.changed:
            self._missing_gathered[c] -= 1
            self._missing_chunks -= 1
            complete = not self._missing_gathered[c]
            if not self._missing_chunks:
                self._connections.changed.notify_all()
        if complete:
            self._scatter(c + self._chunking.window)

    def _reduce_and_gather(self, c: int) -> int:
        """Reduce chunk c of this member's share and send the sum to all; returns bytes."""
        start, stop = self._chunks[self._roles.me][c]
        total = self._values[start:stop]
        # a fixed order makes the sum reproducible: this member's first, the others' as listed
        is_empty = not self._roles.contributes
        for k in self._roles.contributors:
            buffer = self._contributions.pop((k, c))
            part = self._decode(buffer, stop - start)
            if is_empty:
                total[:] = part
            else:
                total += part
            is_empty = False
            self._buffers.release(buffer)
        if self._scale != 1.0:
            total *= self._scale
        if not self._roles.receivers:
            with self._connections.changed:
                self._unreduced.popleft()
                self._connections.changed.notify_all()
            return 0
        if self._wire is WireFormat.FP32:
            message = self._bytes[4 * start : 4 * stop]
        else:
            encoded = encode(self._vector[start:stop], self._wire)
            # the reducer uses the encoded sum, too, like all others
            self._vector[start:stop] = decode(encoded, stop - start, self._wire)
            message = as_bytes(encoded)
        for k in self._roles.receivers:
            self._connections.send_queues[self._members[k]].send(c | GATHERED, message)
        return len(message) * len(self._roles.receivers)

    def _decode(self, buffer: NDArray[np.uint8], numel: int) -> NDArray[np.float32]:
        message = buffer[: message_length(numel, self._wire)]
        if self._wire is WireFormat.FP32:
            return message.view(np.float32)
        return decode(torch.from_numpy(message), numel, self._wire).numpy()

    def _flush(self) -> None:
        """Wait until the vector's bytes have been sent, so that it may be changed."""
        remaining = len(self._roles.others)

        def count_flushed() -> None:
            nonlocal remaining
            with self._connections.changed:
                remaining -= 1
                if not remaining:
                    self._connections.changed.notify_all()

        for k in self._roles.others:
            self._connections.send_queues[self._members[k]].run_after(count_flushed)
        self._connections.wait_until(lambda: remaining == 0)
