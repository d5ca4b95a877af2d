"""Moves optimizer state in shards to its new owners, after devices were lost or joined.

Every part is on several devices of its stage (`TrainingPlan.optimizer_copies`). At the start of a
generation all ranks exchange which parts they hold and need, and derive the same transfers. A rank
discards its old parts only after all ranks have received theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from planner.executor.comm.comm_plan import owned_ranges
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.optimizer_segments import MASTER, MOMENTS
from planner.executor.runtime.sharded_model_stage import OptimizerShard, ShardedModelStage
from planner.executor.runtime.spread_parameters import spread_in_fp32
from planner.executor.transport.connections import (
    ChannelKind,
    Connections,
    as_bytes,
    receive_into,
    send_all,
)
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan


class _Part(NamedTuple):
    """Part of a vector that the plan averages, by the vector's entry in the plan."""

    entry: int
    start: int
    stop: int


class _Transfer(NamedTuple):
    source: int
    target: int
    part: _Part


@dataclass(frozen=True)
class _Holding:
    """What a rank holds and needs.

    Attributes
    ----------
    steps
        Steps that its optimizer has taken.
    moments
        Fields of its optimizer's state.
    """

    held: Sequence[_Part]
    needed: Sequence[_Part]
    steps: int
    moments: Sequence[str]

    @classmethod
    def from_json(cls, text: str) -> _Holding:
        fields = json.loads(text)
        for name in ("held", "needed"):
            fields[name] = [_Part(*part) for part in fields[name]]
        return cls(**fields)


class ShardMover:
    """Holds a rank's share of the optimizer state, and exchanges it for that of another plan.

    Parameters
    ----------
    plan, rank
        Whose share the runtime has.
    has_state
        Whether it is that of the run; a rank that joins late has initial values.
    """

    def __init__(
        self, plan: TrainingPlan, rank: int, runtime: ShardedModelStage, *, has_state: bool
    ) -> None:
        self._runtime, self._stages = runtime, len(plan.stage_layers)
        self._shards: list[tuple[OptimizerShard, list[_Part]]] = []
        if has_state:
            self._shards.append((runtime.shard, self._owned(plan, rank)))

    def move(self, plan: TrainingPlan, ranks: RankGroup) -> None:
        """Hold the share of this rank in another plan, and use its parameters; a collective call.

        Raises
        ------
        PlanError
            No rank has a part of the state.
        """
        own = self._holding(self._owned(plan, ranks.rank))
        texts = ranks.all_gather("shards/held", json.dumps(asdict(own)))
        holdings = [_Holding.from_json(text) for text in texts]
        transfers = list(_transfers(holdings, plan))
        peers = {t.source + t.target - ranks.rank for t in transfers if ranks.rank in t[:2]}
        shard = self._runtime.make_shard(plan, ranks.rank)
        steps = max(holding.steps for holding in holdings)
        moments = max((holding.moments for holding in holdings), key=len)
        with connections_to(ranks, {(ChannelKind.STATE, p) for p in peers}, "shards") as opened:
            for field in (MASTER, *moments):
                vector = self._exchange(field, transfers, ranks.rank, opened)
                shard.read(vector, field, steps)
        # until all have received theirs, others may need what this rank had
        self._shards.append((shard, list(own.needed)))
        ranks.barrier("shards/received")
        del self._shards[:-1]
        self._runtime.use_shard(shard)
        spread_in_fp32(plan, ranks, self._runtime, "shards/spread")

    def _holding(self, needed: Sequence[_Part]) -> _Holding:
        held = [part for _, parts in self._shards for part in parts]
        states = [s for shard, _ in self._shards for s in shard.optimizer.state.values() if s]
        first = states[0] if states else {}
        moments = [field for field in MOMENTS if field in first]
        return _Holding(held, needed, int(first.get("step", 0)), moments)

    def _exchange(
        self, field: str, transfers: Sequence[_Transfer], rank: int, connections: Connections
    ) -> torch.Tensor:
        """A vector with a field of what this rank holds, and of what it needs."""
        # gradients are not needed between steps
        vector = self._runtime.gradients.writable_device_tensor()
        for shard, _ in self._shards:
            shard.write(vector, field)
        # one after the other, in the same order on all ranks
        for source, target, part in transfers:
            values = vector[self._place(part)]
            if rank == source:
                send_all(
                    connections[ChannelKind.STATE, target], as_bytes(values.cpu().contiguous())
                )
            elif rank == target:
                received = torch.empty(part.stop - part.start)
                receive_into(connections[ChannelKind.STATE, source], as_bytes(received))
                values.copy_(received)
        return vector

    def _owned(self, plan: TrainingPlan, rank: int) -> list[_Part]:
        numel, tied = len(self._runtime.gradients.device_tensor), self._runtime.tied_numel
        owned = owned_ranges(plan, rank, numel, tied).items()
        offset = {entry: self._place(_Part(entry, 0, 0)).start for entry, _ in owned}
        return [_Part(e, start - offset[e], stop - offset[e]) for e, (start, stop) in owned]

    def _place(self, part: _Part) -> slice:
        """Where a part is in this rank's vector, in which a tied matrix comes first."""
        offset = 0 if part.entry == self._stages else self._runtime.tied_numel
        return slice(offset + part.start, offset + part.stop)


def _transfers(holdings: Sequence[_Holding], plan: TrainingPlan) -> Iterator[_Transfer]:
    """What each rank needs and does not hold, from the first one that does."""
    for target, own in enumerate(holdings):
        first = [target, *(rank for rank in range(len(holdings)) if rank != target)]
        for entry, start, stop in own.needed:
            while start < stop:
                source, end = next(
                    (
                        (rank, min(stop, part.stop))
                        for rank in first
                        for part in holdings[rank].held
                        if part.entry == entry and part.start <= start < part.stop
                    ),
                    (None, 0),
                )
                if source is None:
                    what = f"stage {entry}" if entry < len(plan.stage_layers) else "a tied matrix"
                    raise PlanError(
                        f"nobody is left that has all optimizer state of {what}; resume from a "
                        "checkpoint"
                    )
                if source != target:
                    yield _Transfer(source, target, _Part(entry, start, end))
                start = end
