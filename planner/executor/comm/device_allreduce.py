"""A round of averaging from GPU to GPU, among members that reach each other without the host.

As in `sharded_allreduce`, member k reduces share k and returns it, in the same order: bit for bit
equal in fp32, bf16 and fp16; in int8 and int4 blocks begin at pieces. No word of readiness is
needed: a member that is not ready has no memory for a piece, so nothing is sent to it.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from planner.executor.comm.allreduce_links import AllReduceLinks
from planner.executor.comm.codec import BLOCK, WireFormat, decode, encode, message_length
from planner.executor.comm.direct import DeviceTransfers
from planner.executor.comm.group_roles import GroupRoles, chunk_ranges, ranges_of
from planner.executor.runtime.device_backend import DeviceBackend
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.shares import Range

PIECE_VALUES = BLOCK << 14
"""Values of a share in one message: 64 MiB in fp32."""
HELD = 2
"""Pieces of each contributor that wait to be summed."""


def split_share(part: Range, most: int = PIECE_VALUES) -> list[Range]:
    """A share in nearly equal pieces."""
    start, stop = part
    return chunk_ranges(part, math.ceil((stop - start) / most)) if stop > start else []


class DeviceAllReduce:
    """One member's part of a round.

    Parameters
    ----------
    vector
        ``float32[values]`` on the device, changed in place.
    group
        The rank's group.
    peers
        Its connections, at least to the other members.
    wire
        Format of pieces.
    scale
        Factor on sums.
    most
        Values of a piece.
    """

    def __init__(
        self,
        vector: Tensor,
        group: AveragingGroup,
        rank: int,
        peers: AllReduceLinks,
        direct: DeviceTransfers,
        side: DeviceBackend,
        wire: WireFormat,
        scale: float = 1.0,
        most: int = PIECE_VALUES,
    ) -> None:
        self._vector, self._members = vector, group.members
        self._roles = GroupRoles.of(group, rank)
        self._peers, self._direct, self._side = peers, direct, side
        self._wire, self._scale = wire, scale
        self._pieces = [split_share(part, most) for part in ranges_of(group, len(vector))]
        self._parts: dict[tuple[int, int], Tensor] = {}
        self._summed = 0
        self._sums: dict[int, Tensor] = {}
        self._taken: Counter[int] = Counter()
        self._open = sum(len(self._pieces[k]) for k in self._roles.reducers)
        self._leaving = len(self._roles.others)

    def run(self) -> float:
        """Contribute, reduce and collect all pieces."""
        # from here on only this round uses the vector
        self._side.made(self._vector)()
        for k in self._roles.others:
            member = self._members[k]
            self._peers.of[member].submit(partial(self._receive, k))
            self._peers.to[member].do(partial(self._send, k))
        for c in range(len(self._pieces[self._roles.me])):
            self._peers.wait_until(partial(self._complete, c))
            self._reduce(c)
        self._peers.wait_until(lambda: not self._open)
        end = time.monotonic()
        self._peers.wait_until(lambda: not self._leaving)
        return end

    def _complete(self, c: int) -> bool:
        return all((k, c) in self._parts for k in self._roles.givers)

    def _send(self, k: int, connection: socket.socket) -> None:
        """Send everything for member k."""
        member = self._members[k]
        if self._roles.gives:
            for start, stop in self._pieces[k]:
                part = self._vector[start:stop]
                self._direct.send(connection, member, self._written(part))
        if k in self._roles.takers:
            for c in range(len(self._pieces[self._roles.me])):
                self._peers.wait_until(partial(self._sums.__contains__, c))
                self._direct.send(connection, member, self._sums[c])
                self._let_go(c)
        with self._peers.changed:
            self._leaving -= 1
            self._peers.changed.notify_all()

    def _receive(self, k: int) -> None:
        """Receive everything from member k."""
        member = self._members[k]
        connection = self._peers.incoming[member]
        if k in self._roles.givers:
            for c, part in enumerate(self._pieces[self._roles.me]):
                self._peers.wait_until(lambda c=c: c < self._summed + HELD)  # type: ignore[misc]
                piece = self._room(part)
                self._direct.receive(connection, member, piece)
                with self._peers.changed:
                    self._parts[k, c] = piece
                    self._peers.changed.notify_all()
        for part in self._pieces[k] if k in self._roles.reducers else ():
            self._take_sum(connection, member, part)
            with self._peers.changed:
                self._open -= 1
                self._peers.changed.notify_all()

    def _let_go(self, c: int) -> None:
        """Free a sum once all receivers have it."""
        with self._peers.changed:
            self._taken[c] += 1
            if self._taken[c] == len(self._roles.takers):
                del self._sums[c]

    def _take_sum(self, connection: socket.socket, member: int, part: Range) -> None:
        total = self._vector[part[0] : part[1]]
        if self._wire is WireFormat.FP32:
            self._direct.receive(connection, member, total)
            return
        message = self._room(part)
        self._direct.receive(connection, member, message)
        self._side.run_beside(lambda: total.copy_(decode(message, len(total), self._wire)))

    def _reduce(self, c: int) -> None:
        """Sum piece c of this member's share, and return it."""
        start, stop = self._pieces[self._roles.me][c]
        total = self._vector[start:stop]
        # a fixed order makes the sum reproducible: this member's first, the others' as listed
        empty = not self._roles.gives
        for k in self._roles.givers:
            piece = self._side.to_device(self._parts.pop((k, c)))
            part = (
                piece if self._wire is WireFormat.FP32 else decode(piece, stop - start, self._wire)
            )
            if empty:
                total.copy_(part)
            else:
                total += part
            empty = False
        if self._scale != 1.0:
            total *= self._scale
        self._side.made(total)()
        written = self._written(total)
        if self._roles.takers and self._wire is not WireFormat.FP32:
            # the reducer uses the encoded sum, too, like all others
            self._side.run_beside(lambda: total.copy_(decode(written, len(total), self._wire)))
        with self._peers.changed:
            self._summed += 1
            if self._roles.takers:
                self._sums[c] = written
            self._peers.changed.notify_all()

    def _written(self, part: Tensor) -> Tensor:
        """Encode a part of the vector."""
        if self._wire is WireFormat.FP32:
            return part
        found: list[Tensor] = []
        self._side.run_beside(lambda: found.append(encode(part, self._wire)))
        return found[0]

    def _room(self, part: Range) -> Tensor:
        """Memory for an encoded piece: fp32 numbers, or bytes."""
        values = part[1] - part[0]
        if self._wire is WireFormat.FP32:
            return self._side.device_buffer((values,), torch.float32)
        return self._side.device_buffer((message_length(values, self._wire),), torch.uint8)
