"""Averaging a stage's gradients in the planned rounds of groups.

Microbatch losses are already divided by the samples of the whole step, so that the sum of the
contributions is the mean over samples, whoever gave how many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from planner.executor.comm.allreduce_links import AllReduceLinks
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.device_allreduce import DeviceAllReduce
from planner.executor.comm.direct import DeviceTransfers
from planner.executor.comm.p2p import Sender
from planner.executor.comm.sharded_allreduce import ShardedAllReduce
from planner.executor.runtime.device_backend import HOST, DeviceBackend
from planner.training_plan.averaging_group import AveragingGroup, is_hierarchical


@dataclass(frozen=True)
class StageAverager:
    """What one rank averages with whom.

    Attributes
    ----------
    rounds
        Its group in every round. One round over all gives the sum, equal on all members bit for
        bit, and so do the rounds of two levels, and those of either of two clocks. In other rounds
        every group takes its mean; a valid plan's rounds give the mean of all.
    paces, wires
        Of each round: how finely it is cut, how vectors are written.
    upload_bytes_per_s
        What this rank can send in all.
    ahead_s
        By rank of the first round, how long before it is ready this one sends word of it: its way,
        less what the round is over sooner than planned when all begin at once.
    """

    rank: int
    rounds: Sequence[AveragingGroup]
    chunkings: Sequence[Chunking]
    wires: Sequence[WireFormat]
    devices: int
    upload_bytes_per_s: float
    ahead_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def peers(self) -> set[int]:
        """The ranks it talks to."""
        return {d for group in self.rounds for d in group.members} - {self.rank}

    def reached(self, direct: DeviceTransfers) -> set[int]:
        """The ranks with which it averages without the host."""
        groups = [group.members for group in self.rounds if direct.reaches(group.members)]
        return {member for members in groups for member in members} - {self.rank}

    def begins_here(self, direct: DeviceTransfers | None) -> bool | None:
        """Whether the first round wants its vector where operations compute; None: there is none."""
        if not self.peers:
            return None
        return direct is not None and direct.reaches(self.rounds[0].members)

    def run(
        self,
        values: Callable[[bool | None], Tensor],
        peers: AllReduceLinks,
        sender: Sender,
        told: Collection[int] | None = None,
        direct: DeviceTransfers | None = None,
        side: DeviceBackend = HOST,
    ) -> float:
        """Replace a vector by the sum over all devices of the stage, in place.

        Parameters
        ----------
        values
            The vector, ``float32[values]``: where operations compute, if asked with True, in host
            memory with False; what was changed in one place is brought along to the other. None:
            where it is.
        """
        end = time.monotonic()
        steps = zip(self.rounds, self.chunkings, self.wires, strict=True)
        for number, (group, chunking, wire) in enumerate(steps):
            scale = self._scale(number)
            if len(group.members) > 1:
                room = partial(self._room, sender)
                if direct is not None and direct.reaches(group.members):
                    how = (peers, direct, side, wire, scale)
                    end = DeviceAllReduce(values(True), group, self.rank, *how).run()
                else:
                    ahead = told if number == 0 else None
                    paced = (peers, wire, chunking, scale, room, ahead)
                    end = ShardedAllReduce(values(False), group, self.rank, *paced).run()
            elif scale != 1.0:
                values(None).mul_(scale)
        return end

    def _room(self, sender: Sender) -> tuple[float, float]:
        """Leave the pipeline's last messages their rate: other devices wait for them."""
        size, until_s = sender.in_flight(self.upload_bytes_per_s)
        now = time.monotonic()
        until_s = max(until_s, now + size / self.upload_bytes_per_s)
        busy = size / (until_s - now) if until_s > now else 0.0
        return self.upload_bytes_per_s - busy, until_s

    def _scale(self, number: int) -> float:
        """What a round's sums are multiplied by: means, and at last the sum of all."""
        if len(self.rounds) == 1 or is_hierarchical([self.rounds]):
            return 1.0
        last = number == len(self.rounds) - 1
        return (self.devices if last else 1) / len(self.rounds[number].members)
