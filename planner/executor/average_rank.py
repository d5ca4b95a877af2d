"""One rank that only averages: times a planned averaging on whatever links the process has.

``python -m planner.executor.average_rank`` with ``RANK``, ``WORLD_SIZE`` and ``MASTER_*`` set; rank
0 prints the seconds of every repetition as one JSON list.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.executor.averaging import average_vector
from planner.executor.transport import Transport
from planner.training_plan.model import AveragingGroup


def main() -> int:
    """Average random vectors; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", required=True, help="JSON list, one share a rank")
    parser.add_argument("--contributes", required=True, help="JSON list of booleans")
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    group = AveragingGroup(
        tuple(range(world)), tuple(json.loads(args.shares)), tuple(json.loads(args.contributes))
    )
    transport = Transport(torch.device("cpu"))
    seconds = []
    for repeat in range(args.repeats + 1):
        given = [_vector(r, repeat, args.values) for r in range(world)]
        vector = given[rank].clone()
        dist.barrier()
        start = time.perf_counter()
        average_vector(vector, group, rank, transport)
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        _require_mean(vector, given, group)
        seconds.append(float(elapsed))
    if rank == 0:
        # the first one also opens connections
        print(json.dumps(seconds[1:]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _vector(rank: int, repeat: int, values: int) -> torch.Tensor:
    return torch.randn(values, generator=torch.Generator().manual_seed(1000 * repeat + rank))


def _require_mean(found: torch.Tensor, given: list[torch.Tensor], group: AveragingGroup) -> None:
    parts = [v for v, gives in zip(given, group.contributes, strict=True) if gives]
    exact = torch.stack(parts).double().sum(0)
    off = float((found.double() - exact).abs().max())
    allowed = 1e-5 * float(exact.abs().max())
    if off > allowed:
        raise SystemExit(f"the average is off by {off:g}, more than {allowed:g}")


if __name__ == "__main__":
    sys.exit(main())
