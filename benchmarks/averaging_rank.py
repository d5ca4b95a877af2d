"""One rank that only averages: times a planned averaging on whatever links the process has.

``python -m benchmarks.averaging_rank`` with ``RANK``, ``WORLD_SIZE`` and ``MASTER_*`` set; rank
0 prints the seconds of every repetition as one JSON list.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch.distributed.rendezvous import rendezvous

from planner.executor.comm.allreduce_links import Peers
from planner.executor.comm.chunking import Pace
from planner.executor.comm.codec import Wire
from planner.executor.comm.connections import Purpose, both_ways, streams_of
from planner.executor.comm.sharded_allreduce import Exchange
from planner.executor.comm.tcp_tuning import kept_warm
from planner.executor.fault_tolerance.error_latch import Failure
from planner.executor.launch.process import leave
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.process_group import TIMEOUT, Ranks
from planner.training_plan.averaging_group import AveragingGroup
from planner.utils.argument_parser import OneLineParser


def main() -> int:
    """Average random vectors; returns the exit code."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--shares", required=True, help="JSON list, one share a rank")
    parser.add_argument("--contributes", required=True, help="JSON list of booleans")
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wire", choices=[w.value for w in Wire], default=Wire.FP32.value)
    parser.add_argument("--chunks", type=int, default=64, help="of a share")
    parser.add_argument("--window", type=int, default=12, help="chunks under way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    ranks = Ranks(rank, world, store)
    group = AveragingGroup(
        tuple(range(world)), tuple(json.loads(args.shares)), tuple(json.loads(args.contributes))
    )
    pace = Pace(args.chunks, args.window)
    wanted = both_ways(Purpose.AVERAGING, set(range(world)) - {rank})
    with connections_to(ranks, wanted, "averaging") as opened, kept_warm():
        peers = Peers(streams_of(opened, Purpose.AVERAGING, rank), Failure())
        seconds = [_average(ranks, peers, group, pace, args, r) for r in range(args.repeats + 1)]
    if rank == 0:
        # the first one also lets windows grow
        print(json.dumps(seconds[1:]), flush=True)
    ranks.part()
    return 0


def _average(
    ranks: Ranks,
    peers: Peers,
    group: AveragingGroup,
    pace: Pace,
    args: argparse.Namespace,
    repeat: int,
) -> float:
    """Seconds of the slowest rank."""
    vector = _vector(ranks.rank, repeat, args.values)
    ranks.meet(f"begin/{repeat}")
    start = time.perf_counter()
    Exchange(vector, group, ranks.rank, peers, Wire(args.wire), pace).run()
    took = time.perf_counter() - start
    if Wire(args.wire) is Wire.FP32:
        _require_mean(vector, repeat, group)
    return max(float(t) for t in ranks.share(f"took/{repeat}", repr(took)))


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
    leave(main())
