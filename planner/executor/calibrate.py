"""Measuring F, H, B and the optimizer step on the actual device, and the link between ranks."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from planner.executor.train import Worker
from planner.workload.calibration import Calibration
from planner.workload.compute_times import FIELDS

REPEATS = 5
SMALL_BYTES = 1 << 10
LARGE_BYTES = 1 << 22


def calibrate(worker: Worker, store: Store) -> Calibration | None:
    """Measure on every rank; rank 0 gets all of it, the others None.

    As many ranks measure at the same time as there are processors, as they will when training.

    Parameters
    ----------
    worker
        This rank.
    store
        Shared by all ranks.

    Returns
    -------
    Calibration or None
        On rank 0.
    """
    world = dist.get_world_size()
    together = max(1, cores() // torch.get_num_threads())
    times: dict[str, float] = {}
    for turn in range(-(-world // together)):
        dist.barrier()
        if worker.rank // together == turn:
            times = measure_compute(worker)
    dist.barrier()
    latency, bandwidth = measure_link(worker) if world > 1 else (0.0, 1e12)
    name = worker.plan.cluster.network.ids[worker.rank]
    mine = {"layers": list(worker.plan.stage_layers[worker.stage_index]), **times}
    store.set(f"calibration/{worker.rank}", json.dumps([name, mine]))
    dist.barrier()
    if worker.rank != 0:
        return None
    entries = dict(json.loads(store.get(f"calibration/{r}")) for r in range(world))
    return Calibration(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        software={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(worker.device),
            "cores": cores(),
            "threads_per_rank": torch.get_num_threads(),
        },
        workload=worker.plan.workload.name,
        microbatch_samples=worker.plan.workload.microbatch_samples,
        times={name: {f: float(entry[f]) for f in FIELDS} for name, entry in entries.items()},
        layers={
            name: (int(entry["layers"][0]), int(entry["layers"][1]))
            for name, entry in entries.items()
        },
        link_latency_s=latency,
        link_bandwidth_bytes_per_s=bandwidth,
    )


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_compute(worker: Worker) -> dict[str, float]:
    """Median seconds of F, H, B and the optimizer step of one rank, as `FIELDS` names them.

    Parameters
    ----------
    worker
        This rank.

    Returns
    -------
    dict[str, float]
        Seconds by field.
    """
    tokens = worker.data.tokens(0, 0)
    samples: dict[str, list[float]] = {field: [] for field in FIELDS}

    def timed(field: str, work: Callable[[], None]) -> None:
        _synchronise(worker.device)
        start = time.perf_counter()
        work()
        _synchronise(worker.device)
        samples[field].append(time.perf_counter() - start)

    for _ in range(REPEATS + 1):
        state: dict[str, torch.Tensor] = {}
        received = torch.randn(worker.shape, device=worker.device)

        def forward(state: dict[str, torch.Tensor] = state, x: torch.Tensor = received) -> None:
            first = worker.stage.stem is not None
            inputs = tokens[:, :-1].to(worker.device) if first else x.requires_grad_()
            state["output"] = worker.stage(inputs)

        def head(x: torch.Tensor = received) -> None:
            assert worker.head is not None
            leaf = x.detach().requires_grad_()
            targets = tokens[:, 1:].to(worker.device)
            (worker.head(leaf, targets) / worker.batch_tokens).backward()

        def backward(state: dict[str, torch.Tensor] = state) -> None:
            torch.autograd.backward(state["output"], torch.randn_like(state["output"]))

        timed("forward_s", forward)
        if worker.head is not None:
            timed("head_s", head)
        timed("backward_s", backward)
    worker.optimizer.zero_grad(set_to_none=True)
    # on a copy, so that training starts from untouched weights and moments
    copies = [p.detach().clone().requires_grad_() for p in worker.parameters]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    probe = torch.optim.AdamW(copies)

    def update() -> None:
        probe.step()

    for _ in range(REPEATS):
        timed("update_s", update)
    # the first round warms up
    return {
        field: statistics.median(values[1:]) if len(values) > 1 else 0.0
        for field, values in samples.items()
    }


def measure_link(worker: Worker) -> tuple[float, float]:
    """One-way latency and bandwidth between ranks 0 and 1, from two message sizes.

    Parameters
    ----------
    worker
        This rank.

    Returns
    -------
    tuple[float, float]
        Seconds and bytes per second.
    """
    seconds = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        rounds = [_ping_pong(worker, size) for _ in range(REPEATS + 1)]
        seconds.append(statistics.median(rounds[1:]) / 2)
    dist.barrier()
    small, large = seconds
    bandwidth = (LARGE_BYTES - SMALL_BYTES) / max(large - small, 1e-9)
    return max(small - SMALL_BYTES / bandwidth, 1e-9), bandwidth


def _ping_pong(worker: Worker, size: int) -> float:
    if worker.rank > 1:
        return 0.0
    other = 1 - worker.rank
    message = torch.zeros(size // 4)
    start = time.perf_counter()
    if worker.rank == 0:
        worker.transport.send(message, other, 1)
        worker.transport.receive(message.shape, other, 2).wait()
    else:
        worker.transport.receive(message.shape, other, 1).wait()
        worker.transport.send(message, other, 2)
    worker.transport.drain()
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
