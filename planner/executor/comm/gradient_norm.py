"""The global gradient norm, for clipping and for detecting overflow.

The first device of each stage, or with optimizer state in shards each that has one, sends its sum
of squares to a root, which sends the total to all. All devices thus use the same norm: they clip by
the same factor, and with loss scaling all of them skip the step or none does. The norm itself
depends on the order of summation.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planner.executor.transport.connections import receive_into, send_all
from planner.training_plan.model import TrainingPlan

MESSAGE = struct.Struct("!d")
CHUNK, GPU_CHUNK = 31 << 10, 1 << 24
"""Values squared in double precision at a time: few enough for caches, and for PyTorch not to start
threads, for which thousands of operations wait long where ranks share cores; on GPUs, few launches.
"""
EPSILON = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""


class GradientNorm:
    """Computes the global norm and clips by it, on one rank with a stage."""

    def __init__(self, plan: TrainingPlan, rank: int) -> None:
        self._max_norm, self._rank = math.inf if plan.clip is None else plan.clip, rank
        # with a single stage, each device has all gradients
        self._root, *self._receivers = plan.norm_devices or (rank,)
        reporters = plan.norm_reporters or (rank,)
        self._reports, self._reporters = (
            rank in reporters,
            [d for d in reporters if d != self._root],
        )

    @property
    def peers(self) -> set[int]:
        """Ranks that it exchanges messages with."""
        return set(self._receivers) if self._rank == self._root else {self._root}

    def clip_grad_norm_(
        self,
        parts: Sequence[Tensor],
        connections: Mapping[int, socket.socket],
        counted: Sequence[Tensor] | None = None,
    ) -> float:
        """Clip parts of averaged gradients, ``float32[numel]``, in place; returns the norm.

        Only ``counted`` parts are counted here, by default all.
        """
        own = 0.0
        if self._reports:
            own = math.fsum(map(sum_of_squares, parts if counted is None else counted))
        if self._rank == self._root:
            total = math.fsum([own, *(_receive(connections[d]) for d in self._reporters)])
            for d in self._receivers:
                _send(connections[d], total)
        else:
            if self._reports:
                _send(connections[self._root], own)
            total = _receive(connections[self._root])
        norm = math.sqrt(total)
        # a NaN norm makes all gradients NaN
        if not norm + EPSILON <= self._max_norm:
            for part in parts:
                part.mul_(self._max_norm / (norm + EPSILON))
        return norm


def sum_of_squares(vector: Tensor) -> float:
    """Sum of squares of a vector in double precision, without a copy of the whole vector."""
    chunk = GPU_CHUNK if vector.is_cuda else CHUNK
    parts = [part.double().square_().sum() for part in torch.split(vector, chunk)]
    # one transfer from a GPU
    return math.fsum(torch.stack(parts).tolist()) if parts else 0.0


def _send(connection: socket.socket, value: float) -> None:
    send_all(connection, memoryview(MESSAGE.pack(value)))


def _receive(connection: socket.socket) -> float:
    message = memoryview(bytearray(MESSAGE.size))
    receive_into(connection, message)
    value: float = MESSAGE.unpack(message)[0]
    return value
