"""Devices of a plan as threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from planner.executor.comm.device_backend import DeviceBackend
from planner.executor.comm.p2p import Sender
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.pipeline import FixedPipeline, PipelineConnections
from planner.executor.runtime.records import StepRecord
from planner.executor.transport.connections import Connection
from planner.training_plan.model import TrainingPlan

CPU = torch.device("cpu")
LONG_S = 60
"""Nothing here takes as long, on a busy machine either."""


def all_run(
    run: Callable[[int], None],
    devices: int,
    ends: Iterable[socket.socket],
    error_latch: ErrorLatch,
) -> None:
    """Run every device to its end, and close what they were connected by.

    Parameters
    ----------
    run
        What a device does.
    devices
        N.
    ends
        Sockets.
    error_latch
        Of all.
    """

    def guarded(device: int) -> None:
        try:
            run(device)
        except Exception as error:
            error_latch.fail(error)
            raise

    threads = [threading.Thread(target=guarded, args=(d,), daemon=True) for d in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        if thread.is_alive():
            error_latch.check()
        assert not thread.is_alive()
    error_latch.check()
    for end in ends:
        end.close()


def train_in_threads(
    plan: TrainingPlan,
    backends: Sequence[DeviceBackend],
    steps: int = 2,
    where: torch.device = CPU,
) -> tuple[list[ModelStage], list[list[StepRecord]], list[float]]:
    """Train a plan whose devices are threads; return their modules, records and each step's loss.

    Gradients are summed as they are found where they are averaged.
    """
    ranks, schedule = range(len(plan.cluster)), plan.schedules[0]
    stage_modules = [
        ModelStage(plan, rank, where, OptimizerConfig(), backend=backends[rank]) for rank in ranks
    ]
    pipelines = [FixedPipeline(plan, rank, stage_modules[rank]) for rank in ranks]
    sending: dict[tuple[int, int], Connection] = {}
    receiving: dict[tuple[int, int], Connection] = {}
    for rank in ranks:
        for peer in pipelines[rank].peers:
            ends = [Connection(fileno=end.detach()) for end in socket.socketpair()]
            sending[rank, peer], receiving[peer, rank] = ends
    records: list[list[StepRecord]] = [[] for _ in ranks]
    # each device's own: two threads that add to one sum may lose a part
    losses: list[list[float]] = [[] for _ in ranks]
    error_latch = ErrorLatch()
    gradients: dict[int, Tensor] = {}
    barriers = {group: threading.Barrier(len(group)) for group in plan.assignment.groups}

    def average(rank: int) -> None:
        group = plan.assignment.groups[plan.stage_of[rank]]
        buffer = stage_modules[rank].gradients
        gradients[rank] = buffer.current if len(group) == 1 else buffer.to_host()
        barriers[group].wait(LONG_S)
        total = torch.stack([gradients[member] for member in group]).sum(0)
        barriers[group].wait(LONG_S)
        if len(group) > 1:
            gradients[rank].copy_(total)

    def train(rank: int) -> None:
        if where.type == "cuda":
            torch.cuda.set_device(where)
        outgoing = {peer: end for (own, peer), end in sending.items() if own == rank}
        incoming = {peer: end for (own, peer), end in receiving.items() if own == rank}
        model_stage, pipeline = stage_modules[rank], pipelines[rank]
        sender = Sender(
            outgoing, error_latch, dict.fromkeys(outgoing, 1e9), backend=model_stage.backend
        )
        pipeline.open(PipelineConnections(incoming, sender, error_latch), [0] * steps)
        for step in range(steps):
            record = StepRecord(step, False)
            records[rank].append(record)
            model_stage.begin(step, schedule)
            pipeline.run(step, 0, record, lambda end: None)
            average(rank)
            model_stage.update()
            losses[rank].append(model_stage.loss() or 0.0)
        sender.finish()

    all_run(train, len(ranks), [*sending.values(), *receiving.values()], error_latch)
    return stage_modules, records, [sum(each) for each in zip(*losses, strict=True)]
