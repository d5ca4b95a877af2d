"""Spreads the owners' fp32 parameters to all devices of their stages, outside of steps."""

from __future__ import annotations

from dataclasses import replace

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.comm_plan import stage_averager, tied_averager
from planner.executor.comm.p2p import Sender
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.sharded_aggregator import ShardedAggregator
from planner.executor.runtime.sharded_model_stage import ShardedModelStage
from planner.executor.transport.connections import ChannelKind, duplex_channels, duplex_keys
from planner.training_plan.model import TrainingPlan


def spread_in_fp32(
    plan: TrainingPlan,
    ranks: RankGroup,
    runtime: ShardedModelStage | ShardedAggregator,
    name: str,
) -> None:
    """Give all devices the fp32 parameters of their stage; a collective call.

    Parameters
    ----------
    name
        Of the connections, used once.
    """
    tied = runtime.tied_numel
    parts = [(slice(tied, None), stage_averager(plan, ranks.rank))]
    if tied:
        parts.append((slice(tied), tied_averager(plan, ranks.rank)))
    peers = {peer for _, averager in parts for peer in averager.peers}
    keys = duplex_keys(ChannelKind.AVERAGING, peers)
    with ranks.error_latch() as error_latch, connections_to(ranks, keys, name) as opened:
        connections = AveragingConnections(
            duplex_channels(opened, ChannelKind.AVERAGING, ranks.rank), error_latch
        )
        nothing_else = Sender({}, error_latch, {})
        runtime.write_parameters()
        for part, averager in parts:
            unrounded = replace(averager, wires=[WireFormat.FP32] * len(averager.wires))
            unrounded.run(
                runtime.gradients, connections, nothing_else, part=part, rounds=slice(-1, None)
            )
        connections.finish()
    runtime.receive_parameters()
