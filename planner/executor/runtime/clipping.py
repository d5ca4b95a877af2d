"""One norm for all gradients of a model, each stage's counted once, and gradients scaled to it.

The first device of each stage tells one device, which the plan says, its sum of squares; that one
tells all the whole. So all scale alike, to the last bit.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from planner.executor.comm.connections import receive_into, send_all
from planner.training_plan.model import TrainingPlan

MESSAGE = struct.Struct("!d")
CHUNK, GPU_CHUNK = 1 << 18, 1 << 24
"""Values that are squared in double precision at a time: as caches hold, and so many that a GPU is
not kept waiting for the next."""
EPSILON = 1e-6
"""Beside the norm, as torch.nn.utils.clip_grad_norm_ has it."""


class NormClipper:
    """A rank's part of it.

    Parameters
    ----------
    plan
        With a largest norm.
    rank
        A device with a stage.
    """

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        assert plan.clip is not None
        self._most, self._rank = plan.clip, rank
        # where there is one stage, each of its devices has all gradients
        self._root, *self._others = plan.awaits_norm or (rank,)
        firsts = plan.tells_norm or (rank,)
        self._tells, self._firsts = rank in firsts, [d for d in firsts if d != self._root]

    @property
    def peers(self) -> set[int]:
        """The ranks it talks to."""
        return set(self._others) if self._rank == self._root else {self._root}

    def run(
        self, vector: Tensor, connections: Mapping[int, socket.socket], copied: int = 0
    ) -> float:
        """Scale averaged gradients in place where all together are too large.

        Parameters
        ----------
        vector
            ``float32[values]``, of this rank's stage, the same on all of its devices.
        """
        own = squares(vector[copied:]) if self._tells else 0.0
        if self._rank == self._root:
            total = math.fsum([own, *(_receive(connections[d]) for d in self._firsts)])
            for d in self._others:
                _send(connections[d], total)
        else:
            if self._tells:
                _send(connections[self._root], own)
            total = _receive(connections[self._root])
        norm = math.sqrt(total)
        # a norm that is no number stays one: scaled, all gradients are none either
        if not norm + EPSILON <= self._most:
            vector.mul_(self._most / (norm + EPSILON))
        return norm


def squares(vector: Tensor) -> float:
    """The sum of squares of a vector, in double precision, made without a copy of it all."""
    most = GPU_CHUNK if vector.is_cuda else CHUNK
    parts = [part.double().square_().sum() for part in torch.split(vector, most)]
    # from a GPU at once
    return math.fsum(torch.stack(parts).tolist()) if parts else 0.0


def _send(connection: socket.socket, value: float) -> None:
    send_all(connection, memoryview(MESSAGE.pack(value)))


def _receive(connection: socket.socket) -> float:
    message = memoryview(bytearray(MESSAGE.size))
    receive_into(connection, message)
    found: float = MESSAGE.unpack(message)[0]
    return found
