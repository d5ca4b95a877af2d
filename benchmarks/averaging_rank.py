"""One rank that only averages, to time a planned averaging on this process's links.

``python -m benchmarks.averaging_rank`` needs ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``; rank 0
prints the seconds of every repetition as one JSON list.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch.distributed.rendezvous import rendezvous

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.sharded_allreduce import ShardedAllReduce
from planner.executor.comm.tcp_tuning import disable_slow_start_after_idle
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.launch.process import exit_now
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import TIMEOUT, RankGroup
from planner.executor.transport.connections import ChannelKind, duplex_channels, duplex_keys
from planner.training_plan.averaging_group import AveragingGroup
from planner.utils.argument_parser import OneLineParser


def main() -> int:
    """Average random vectors; return the exit code."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--shares", required=True, help="JSON list, one share a rank")
    parser.add_argument("--contributes", required=True, help="JSON list of booleans")
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--wire", choices=[w.value for w in WireFormat], default=WireFormat.FP32.value
    )
    parser.add_argument("--chunks", type=int, default=64, help="of a share")
    parser.add_argument("--window", type=int, default=12, help="chunks under way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    ranks = RankGroup(rank, world, store)
    group = AveragingGroup(
        tuple(range(world)), tuple(json.loads(args.shares)), tuple(json.loads(args.contributes))
    )
    chunking = Chunking(args.chunks, args.window)
    wanted = duplex_keys(ChannelKind.AVERAGING, set(range(world)) - {rank})
    with connections_to(ranks, wanted, "averaging") as opened:
        disable_slow_start_after_idle()
        peers = AveragingConnections(
            duplex_channels(opened, ChannelKind.AVERAGING, rank), ErrorLatch()
        )
        seconds = [
            _average(ranks, peers, group, chunking, args, r) for r in range(args.repeats + 1)
        ]
    if rank == 0:
        # the first repetition also grows TCP windows
        print(json.dumps(seconds[1:]), flush=True)
    ranks.leave()
    return 0


def _average(
    ranks: RankGroup,
    peers: AveragingConnections,
    group: AveragingGroup,
    chunking: Chunking,
    args: argparse.Namespace,
    repeat: int,
) -> float:
    """Return the seconds of the slowest rank."""
    vector = _vector(ranks.rank, repeat, args.values)
    ranks.barrier(f"begin/{repeat}")
    start = time.perf_counter()
    ShardedAllReduce(vector, group, ranks.rank, peers, WireFormat(args.wire), chunking).run()
    took = time.perf_counter() - start
    if WireFormat(args.wire) is WireFormat.FP32:
        _require_mean(vector, repeat, group)
    return max(float(t) for t in ranks.all_gather(f"took/{repeat}", repr(took)))


def _vector(rank: int, repeat: int, values: int) -> torch.Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(1000 * repeat + rank))


def _require_mean(found: torch.Tensor, repeat: int, group: AveragingGroup) -> None:
    exact = torch.zeros(len(found), dtype=torch.float64)
    for rank, gives in enumerate(group.contributes):
        if gives:
            exact += _vector(rank, repeat, len(found))
    off = float((found.double() - exact).abs().max())
    allowed = 1e-5 * float(exact.abs().max())
    if off > allowed:
        raise SystemExit(f"the average is off by {off:g}, more than {allowed:g}")


if __name__ == "__main__":
    exit_now(main())
