"""Communication of one rank, derived from the plan before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.executor.comm.averaging import StageAverager
from planner.executor.comm.chunking import chunking_of
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.connections import ChannelKind, duplex_of
from planner.executor.comm.p2p import ExpectedMessage
from planner.executor.runtime.clipping import NormClipper
from planner.executor.runtime.p2p_schedule import P2PSchedule
from planner.executor.runtime.simulated_compute import TimeScale
from planner.executor.swarm.stochastic_pipeline import Neighbourhood
from planner.network.cluster import device_limits
from planner.network.dtype import Dtype
from planner.training_plan.averaging_group import StageAveraging, within
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan


class CommPlan:
    """The plan from the view of one rank.

    Parameters
    ----------
    time_scale
        Scale of simulated compute; None if a model is trained.
    own_pace
        Whether any rank may run any microbatch (DeDLOC, 3.1).
    tells
        Whether losses are sent to rank 0 over connections.

    Attributes
    ----------
    traffic
        P2P schedules, by schedule of the cycle; empty with stochastic wiring.
    places
        Peers of stochastic wiring; None if paths are fixed, or it has no stage.
    averaging
        Its groups; in two-frequency averaging, those of every H-th step.
    within
        In two-frequency averaging, its group in every step; otherwise without rounds.
    tied
        Its groups for a tied matrix, after `averaging`; without rounds if it takes no part.
    clipping
        Its part in the global norm; None without clipping, or if it takes no part.
    tellers
        Ranks that have losses.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        time_scale: TimeScale | None,
        own_pace: bool,
        *,
        tells: bool = True,
    ) -> None:
        self._plan, self._rank, self._time_scale = plan, rank, time_scale or TimeScale()
        used = {} if own_pace else {k: plan.schedules[k] for k in set(plan.cycle)}
        routes = plan.wiring is Wiring.STOCHASTIC
        planned = {} if routes else used
        self.traffic = {k: P2PSchedule(schedule, rank) for k, schedule in planned.items()}
        self.places = Neighbourhood(plan, rank) if routes and rank in plan.stage_of else None
        self.averaging = averaging_of(plan, rank, time_scale)
        self.within = averaging_of(plan, rank, time_scale, every_step=True)
        self.tied = tied_of(plan, rank, time_scale)
        clips = plan.clip is not None and rank in plan.stage_of
        self.clipping = NormClipper(plan, rank) if clips else None
        heads = {s.head_device(b) for s in used.values() for b in range(len(s.paths))}
        everybody = set(plan.stage_of)
        self._tells = tells
        self.tellers = set() if time_scale is not None else everybody if own_pace else heads

    @property
    def connections(self) -> set[tuple[ChannelKind, int]]:
        """Kind and peer of each connection of this rank."""
        beside = {d for t in self.traffic.values() for d in t.peers}
        if self.places is not None:
            beside |= set(self.places.neighbours)
        wanted = duplex_of(ChannelKind.PIPELINE, beside)
        averages = self.averaging.peers | self.within.peers | self.tied.peers
        wanted |= duplex_of(ChannelKind.AVERAGING, averages)
        if self.clipping is not None:
            wanted |= {(ChannelKind.NORM, d) for d in self.clipping.peers}
        if not self._tells:
            return wanted
        if self._rank == 0:
            wanted |= {(ChannelKind.LOSSES, d) for d in self.tellers - {0}}
        elif self._rank in self.tellers:
            wanted.add((ChannelKind.LOSSES, 0))
        return wanted

    def expected(self, walk: Sequence[int]) -> dict[int, Iterator[ExpectedMessage]]:
        """Messages of each source to this rank, in order."""

        def messages(source: int) -> Iterator[ExpectedMessage]:
            for serial, k in enumerate(walk):
                for message in self.traffic[k].incoming.get(source, ()):
                    yield ExpectedMessage(serial, message)

        used = [self.traffic[k] for k in set(walk) & set(self.traffic)]
        return {source: messages(source) for t in used for source in t.incoming}

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


def averaging_of(
    plan: TrainingPlan, rank: int, time_scale: TimeScale | None = None, *, every_step: bool = False
) -> StageAverager:
    """A rank's part in averaging."""
    stage = plan.averaged_stage(rank)
    inner = within(plan.averaging[stage])
    asked = inner if every_step else plan.averaging[stage][len(inner) :]
    return _averaging(plan, rank, time_scale, stage, asked)


def tied_of(plan: TrainingPlan, rank: int, time_scale: TimeScale | None = None) -> StageAverager:
    """A rank's part in averaging a matrix shared by embedding and head."""
    entry = len(plan.stage_layers)
    asked = plan.averaging[entry] if plan.averages_tied else ()
    return _averaging(plan, rank, time_scale, entry, asked)


def _averaging(
    plan: TrainingPlan, rank: int, time_scale: TimeScale | None, entry: int, asked: StageAveraging
) -> StageAverager:
    """Rounds of an entry of the plan's averaging in which a rank takes part."""
    scale = time_scale or TimeScale()
    # with hierarchical averaging a rank may skip some rounds
    rounds = [g for groups in asked for g in groups if rank in g.members]
    if not rounds:
        return StageAverager(rank, (), (), (), 1, 0.0)
    gradient = plan.vector_bytes()[entry]
    # with simulated compute all ranks share the processors of one machine
    crowd = 1.0 if time_scale is None else max(1.0, len(plan.cluster) / (os.cpu_count() or 1))
    chunkings = [
        chunking_of(
            group,
            gradient * group.codec(plan.codec).wire_ratio / scale.shrink,
            plan.cluster,
            speed=scale.speed,
            shrink=scale.shrink,
            crowd=crowd,
        )
        for group in rounds
    ]
    devices = len(plan.averaged_by(entry))
    upload = device_limits(plan.cluster)[0][rank] * scale.speed / scale.shrink
    # a simulated vector has the plan's bytes
    gradients = plan.workload.precision.gradients if time_scale is None else Dtype.FP32
    wires = [WireFormat.of(group.codec(plan.codec), gradients) for group in rounds]
    way_s = plan.cluster.network.latency_s[rank] / scale.speed
    ahead_s = {
        d: float(way_s[d]) - chunking.spare_s
        for group, chunking in zip(rounds[:1], chunkings, strict=False)
        for d in group.members
        if d != rank and chunking.spare_s is not None
    }
    ahead_s = {d: seconds for d, seconds in ahead_s.items() if seconds > 0}
    return StageAverager(rank, rounds, chunkings, wires, devices, float(upload), ahead_s)
