"""Communication of one rank, derived from the plan before anything runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import numpy as np

from planner.executor.comm.chunking import choose_chunking
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.gradient_norm import GradientNorm
from planner.executor.comm.group_roles import member_ranges
from planner.executor.comm.stage_averager import StageAverager
from planner.executor.comm.time_scale import TimeScale
from planner.executor.transport.connections import ChannelKind, duplex_keys
from planner.network.cluster import device_limits
from planner.network.dtype import Dtype
from planner.training_plan.averaging_group import StageAveraging, within
from planner.training_plan.model import TrainingPlan
from planner.training_plan.shares import Range


class CommPlan:
    """The plan from the view of one rank.

    Parameters
    ----------
    pipeline_peers
        Ranks with which it exchanges messages of the pipeline.
    loss_ranks
        Ranks that send losses to rank 0 over connections.
    time_scale
        Scale of simulated compute; None if a model is trained.

    Attributes
    ----------
    averager
        Averages over its groups; in two-frequency averaging, those of every H-th step.
    region_averager
        In two-frequency averaging, over its group in every step; otherwise without rounds.
    tied_averager
        Averages a tied matrix, after `averager`; without rounds if it takes no part.
    gradient_norm
        Its part in the global norm; None where none is needed, or if it takes no part.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        pipeline_peers: Collection[int] = (),
        loss_ranks: Collection[int] = (),
        time_scale: TimeScale | None = None,
    ) -> None:
        self._plan, self._rank, self._time_scale = plan, rank, time_scale or TimeScale()
        self._pipeline_peers, self._loss_ranks = set(pipeline_peers), set(loss_ranks)
        self.averager = stage_averager(plan, rank, time_scale)
        self.region_averager = stage_averager(plan, rank, time_scale, every_step=True)
        self.tied_averager = tied_averager(plan, rank, time_scale)
        has_norm = plan.needs_norm and rank in plan.stage_updated_by
        self.gradient_norm = GradientNorm(plan, rank) if has_norm else None

    @property
    def connection_keys(self) -> set[tuple[ChannelKind, int]]:
        """Kind and peer of each connection of this rank."""
        wanted = duplex_keys(ChannelKind.PIPELINE, self._pipeline_peers)
        averages = self.averager.peers | self.region_averager.peers | self.tied_averager.peers
        wanted |= duplex_keys(ChannelKind.AVERAGING, averages)
        if self.gradient_norm is not None:
            wanted |= {(ChannelKind.NORM, d) for d in self.gradient_norm.peers}
        if self._rank == 0:
            wanted |= {(ChannelKind.LOSSES, d) for d in self._loss_ranks - {0}}
        elif self._rank in self._loss_ranks:
            wanted.add((ChannelKind.LOSSES, 0))
        return wanted

    def bandwidth_delay_bytes(self) -> Mapping[int, float]:
        """By rank, bandwidth-delay product of the connection."""
        network = self._plan.cluster.network
        latency, bandwidth, me = network.latency_s, network.bandwidth_bytes_per_s, self._rank
        return {
            d: float(latency[me, d] + latency[d, me])
            * float(max(bandwidth[me, d], bandwidth[d, me]))
            / self._time_scale.shrink
            for d in range(len(network))
            if d != me
        }

    def round_trips_s(self) -> Mapping[int, float]:
        """By rank, round-trip time in this run."""
        latency, me = self._plan.cluster.network.latency_s, self._rank
        both = (latency[me] + latency[:, me]) / self._time_scale.speed
        return {d: float(seconds) for d, seconds in enumerate(both) if d != me}

    def rates(self) -> Mapping[int, float]:
        """By rank, bytes per second of the link in this run."""
        cluster, me = self._plan.cluster, self._rank
        up, down = device_limits(cluster)
        limit = np.minimum(up[me], down)
        row = np.minimum(cluster.network.bandwidth_bytes_per_s[me], limit)
        scale = self._time_scale.speed / self._time_scale.shrink
        return {d: float(rate) * scale for d, rate in enumerate(row) if d != me}


def stage_averager(
    plan: TrainingPlan, rank: int, time_scale: TimeScale | None = None, *, every_step: bool = False
) -> StageAverager:
    """A rank's part in averaging."""
    stage = plan.averaged_stage(rank)
    inner_rounds = within(plan.averaging[stage])
    rounds = inner_rounds if every_step else plan.averaging[stage][len(inner_rounds) :]
    return _stage_averager(plan, rank, time_scale, stage, rounds)


def tied_averager(
    plan: TrainingPlan, rank: int, time_scale: TimeScale | None = None
) -> StageAverager:
    """A rank's part in averaging a matrix shared by embedding and head."""
    entry = len(plan.stage_layers)
    rounds = plan.averaging[entry] if plan.averages_tied else ()
    return _stage_averager(plan, rank, time_scale, entry, rounds)


def owned_ranges(plan: TrainingPlan, rank: int, numel: int, tied_numel: int) -> dict[int, Range]:
    """Parts of a stage's vector that a rank updates and spreads, with optimizer state in shards.

    Parameters
    ----------
    numel, tied_numel
        Length of the vector, and of its first part, which is averaged with another stage.

    Returns
    -------
    dict[int, Range]
        By entry of the plan's averaging.
    """
    lengths = {plan.averaged_stage(rank): (tied_numel, numel - tied_numel)}
    if tied_numel:
        lengths[len(plan.stage_layers)] = (0, tied_numel)
    owned = {}
    for entry, (offset, length) in lengths.items():
        group = next(g for g in plan.averaging[entry][-1] if rank in g.members)
        start, stop = member_ranges(group, length)[group.members.index(rank)]
        owned[entry] = (offset + start, offset + stop)
    return owned


def _stage_averager(
    plan: TrainingPlan,
    rank: int,
    time_scale: TimeScale | None,
    entry: int,
    planned_rounds: StageAveraging,
) -> StageAverager:
    """Rounds of an entry of the plan's averaging in which a rank takes part."""
    scale = time_scale or TimeScale()
    # with hierarchical averaging a rank may skip some rounds
    rounds = [group for groups in planned_rounds for group in groups if rank in group.members]
    if not rounds:
        return StageAverager(rank, (), (), (), 1, 0.0)
    gradient = plan.vector_bytes()[entry]
    # with simulated compute all ranks share the processors of one machine
    ranks_per_core = (
        1.0 if time_scale is None else max(1.0, len(plan.cluster) / (os.cpu_count() or 1))
    )
    chunkings = [
        choose_chunking(
            group,
            gradient * group.wire_ratio(plan.codec) / scale.shrink,
            plan.cluster,
            speed=scale.speed,
            shrink=scale.shrink,
            ranks_per_core=ranks_per_core,
        )
        for group in rounds
    ]
    devices = len(plan.averaged_by(entry))
    upload = device_limits(plan.cluster)[0][rank] * scale.speed / scale.shrink
    # a simulated vector has the plan's bytes
    gradients = plan.workload.precision.gradients if time_scale is None else Dtype.FP32
    wires = [
        WireFormat.from_codec(group.codec(plan.codec), group.dtype or gradients) for group in rounds
    ]
    latency_s = plan.cluster.network.latency_s[rank] / scale.speed
    notify_ahead_s = {
        d: float(latency_s[d]) - chunking.slack_s
        for group, chunking in zip(rounds[:1], chunkings, strict=False)
        for d in group.members
        if d != rank and chunking.slack_s is not None
    }
    notify_ahead_s = {d: seconds for d, seconds in notify_ahead_s.items() if seconds > 0}
    return StageAverager(rank, rounds, chunkings, wires, devices, float(upload), notify_ahead_s)
