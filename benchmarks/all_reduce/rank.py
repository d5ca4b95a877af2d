"""One rank of ``python -m benchmarks.all_reduce``: averages one vector by several methods."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.device_backend import make_backend
from planner.executor.comm.sharded_allreduce import ShardedAllReduce
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.launch.process import exit_now
from planner.executor.rendezvous.connect import UNIX_SOCKETS, connections_to
from planner.executor.rendezvous.rank_group import TIMEOUT, RankGroup
from planner.executor.transport.connections import ChannelKind, duplex_channels, duplex_keys
from planner.training_plan.averaging_group import AveragingGroup
from planner.utils.argument_parser import OneLineParser

CLEAR_PEAK = "5"
"""Written to ``/proc/self/clear_refs``, makes the largest resident size the present one."""


def main() -> int:
    """Average in turns; rank 0 prints seconds and bytes of all; returns the exit code."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--gpus", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    on_gpus = args.gpus
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    backend = make_backend(device)
    library = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(
        library, store=PrefixStore("gloo", store), rank=rank, world_size=world, timeout=TIMEOUT
    )
    ranks = RankGroup(rank, world, PrefixStore("ours", store))
    group = AveragingGroup.equal(tuple(range(world)))
    chunking = Chunking(args.chunks, args.window)
    vector = torch.empty(args.values, device=device)
    host = backend.host_buffer((args.values,), torch.float32) if on_gpus else vector
    others = set(range(world)) - {rank}
    wanted = duplex_keys(ChannelKind.AVERAGING, others)

    def all_reduce() -> None:
        dist.all_reduce(vector)
        backend.wait_for_event(backend.record_event())

    ways: dict[str, Callable[[], None]] = {"nccl" if on_gpus else "gloo": all_reduce}
    with ExitStack() as stack:
        os.environ[UNIX_SOCKETS] = "1"
        for name, near in (("exchange", "1"), ("exchange, TCP", "0")):
            os.environ[UNIX_SOCKETS] = near
            opened = stack.enter_context(connections_to(ranks, wanted, name))
            peers = AveragingConnections(
                duplex_channels(opened, ChannelKind.AVERAGING, rank), ErrorLatch()
            )

            def exchange(peers: AveragingConnections = peers) -> None:
                if on_gpus:
                    host.copy_(vector)
                ShardedAllReduce(host, group, rank, peers, WireFormat.FP32, chunking).run()
                if on_gpus:
                    vector.copy_(host)
                    backend.wait_for_event(backend.record_event())

            ways[name] = exchange
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(args.repeats + 1):
            for name, method in ways.items():
                found[name].append(_measured(vector, method))
                if not bool((vector == world * (world + 1) / 2).all()):
                    raise SystemExit(f"{name}: the sum is wrong")
    if rank == 0:
        # the first ones also let windows grow
        print(json.dumps({name: rows[1:] for name, rows in found.items()}), flush=True)
    ranks.leave()
    return 0


def _measured(vector: torch.Tensor, method: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the slowest rank, and the most memory that any took beyond what it had."""
    vector.fill_(dist.get_rank() + 1.0)
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123
        file.write(CLEAR_PEAK)
    rss_before = _status("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    method()
    seconds = time.perf_counter() - start
    most = torch.tensor([seconds, _status("VmHWM") - rss_before], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most[0]), float(most[1])


def _status(field: str) -> float:
    """A size of this process in bytes."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith(field))
    return 1024.0 * int(line.split()[1])


if __name__ == "__main__":
    # gloo's threads are sometimes still alive here, and interpreter exit would abort on them
    exit_now(main())
