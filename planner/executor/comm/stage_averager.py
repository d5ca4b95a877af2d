"""Averages a stage's gradients in the planned rounds of groups.

Losses of microbatches are already divided by the samples of the whole step, so the sum of the
contributions is the mean over samples, however they are distributed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.device_collectives import DeviceCollectives
from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.comm.p2p import Sender
from planner.executor.comm.sharded_allreduce import ShardedAllReduce
from planner.training_plan.averaging_group import AveragingGroup, has_phases


@dataclass(frozen=True)
class StageAverager:
    """Averaging of one rank.

    Attributes
    ----------
    rounds
        Its group in every round. One round of all members gives the sum, bit for bit equal on all,
        and so do hierarchical and two-frequency rounds. In other rounds every group takes its mean;
        the rounds of a valid plan give the mean of all, up to rounding, which differs by group.
    chunkings, wires
        Chunking and wire format of each round.
    upload_bytes_per_s
        Upload limit of this rank.
    notify_ahead_s
        By peer of the first round, how long before its own readiness this rank notifies it: the
        latency, less the time by which a round that all begin at once ends sooner than planned.
    """

    rank: int
    rounds: Sequence[AveragingGroup]
    chunkings: Sequence[Chunking]
    wires: Sequence[WireFormat]
    devices: int
    upload_bytes_per_s: float
    notify_ahead_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def peers(self) -> set[int]:
        """Ranks with which it averages."""
        return {d for group in self.rounds for d in group.members} - {self.rank}

    def starts_on_device(self, collectives: DeviceCollectives | None) -> bool:
        """Whether the first round needs the vector on the device."""
        if collectives is None or not self.peers:
            return False
        return collectives.supports(self.rounds[0], self.wires[0])

    def prepare(self, buffer: GradientBuffer, collectives: DeviceCollectives | None) -> None:
        """Move a vector to where the first round needs it."""
        if self.peers:
            (buffer.to_device if self.starts_on_device(collectives) else buffer.to_host)()

    def run(
        self,
        buffer: GradientBuffer,
        connections: AveragingConnections,
        sender: Sender,
        notified: Collection[int] | None = None,
        collectives: DeviceCollectives | None = None,
        part: slice = slice(None),
        rounds: slice = slice(None),
    ) -> float:
        """Replace a part of a vector by the sum over all devices of the stage, in place.

        By some of the rounds only, if the vector changes between them.
        """
        end = time.monotonic()
        steps = [*zip(self.rounds, self.chunkings, self.wires, strict=True)][rounds]
        for number, (group, chunking, wire) in enumerate(steps):
            scale = self._scale(number)
            if len(group.members) > 1:
                available_rate = partial(self._available_rate, sender)
                if collectives is not None and collectives.supports(group, wire):
                    end = collectives.run(buffer.to_device()[part], group, wire, scale)
                else:
                    notified_ahead = notified if number == 0 else None
                    vector = buffer.to_host()[part]
                    end = ShardedAllReduce(
                        vector,
                        group,
                        self.rank,
                        connections,
                        wire=wire,
                        chunking=chunking,
                        scale=scale,
                        available_rate=available_rate,
                        notified=notified_ahead,
                    ).run()
            elif scale != 1.0:
                buffer.current[part].mul_(scale)
        return end

    def _available_rate(self, sender: Sender) -> tuple[float, float]:
        """Bytes per second for averaging, and until when: the last pipeline messages go first."""
        size, until_s = sender.in_flight(self.upload_bytes_per_s)
        now = time.monotonic()
        until_s = max(until_s, now + size / self.upload_bytes_per_s)
        busy = size / (until_s - now) if until_s > now else 0.0
        return self.upload_bytes_per_s - busy, until_s

    def _scale(self, number: int) -> float:
        """Factor of a round: means, and for the last round the sum of all."""
        if len(self.rounds) == 1 or has_phases([self.rounds]):
            return 1.0
        last = number == len(self.rounds) - 1
        return (self.devices if last else 1) / len(self.rounds[number].members)
