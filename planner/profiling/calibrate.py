"""Calibration on the actual devices: F, H, B and the optimizer step, the link between ranks, and
the executor's overhead per operation and per message."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any

import torch

from planner.executor.comm.averaging_connections import AveragingConnections
from planner.executor.comm.chunking import Chunking
from planner.executor.comm.codec import WireFormat
from planner.executor.comm.device_backend import HOST, DeviceBackend
from planner.executor.comm.device_identity import gpu_identity, machine_id
from planner.executor.comm.gradient_norm import sum_of_squares
from planner.executor.comm.p2p import ExpectedMessage, Receiver, Sender
from planner.executor.comm.p2p_schedule import Message, P2PSchedule
from planner.executor.comm.sharded_allreduce import ShardedAllReduce
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.pipeline import run_operations
from planner.executor.runtime.records import StepRecord
from planner.executor.tensor_parallel.gpu_stage import LeaderStage
from planner.executor.transport.connections import (
    ChannelKind,
    DuplexChannels,
    as_bytes,
    duplex_channels,
    duplex_keys,
    receive_into,
    send_all,
)
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.utils.processors import cores
from planner.workload.calibration import Calibration
from planner.workload.compute_times import FIELDS
from planner.workload.costs import repeated_share

REPEATS = 5
SMALL_BYTES = 1 << 10
PINGS = 41
"""Round trips of each kind."""
FEWEST_VALUES, MOST_VALUES = 1 << 15, 1 << 23
"""Lengths of the vectors that pairs of ranks average, each four times as long as the last."""
LONG_ROUND_S = 0.1
"""Time of averaging from which longer vectors are not tried."""
AVERAGING_CHUNKING = Chunking(chunks=32, window=8)
SLEEP_CYCLES_PER_S = 2e9
"""Clock of a GPU; a slower one sleeps longer."""
MAX_SLEEP_S = 1.0
EMPTY_OPERATIONS = 999


def calibrate(
    plan: TrainingPlan,
    ranks: RankGroup,
    model_stage: ModelStage | None,
    device: torch.device,
) -> Calibration | None:
    """Measure on every rank; returns the result on rank 0, None on others.

    As many ranks measure at the same time as there are processors, as in training; on GPUs, one per
    GPU. Of ranks that share a GPU it measures how long operations keep it busy: while one launches
    its kernels, those of others run.
    """
    rank = ranks.rank
    # each GPU of a worker has a process of its own
    processes = max(plan.gpu_counts)
    places = _places(ranks, device, processes)
    turns = _turns(places)
    own: dict[str, Any] | None = None
    group = () if model_stage is None else plan.assignment.groups[plan.stage_of[rank]]
    averages = len(group) > 1 and not plan.sync.local_steps
    clipped = plan.needs_norm / plan.workload.optimizer_shards
    for turn in range(max(turns) + 1):
        ranks.barrier(f"calibration/{turn}")
        if turns[rank] == turn and model_stage is not None:
            layers = list(plan.stage_layers[plan.stage_of[rank]])
            measure = partial(measure_compute, shares_gpu=_shares_gpu(places, rank, device))
            if isinstance(model_stage, LeaderStage):
                measure = partial(measure_worker, plan=plan, rank=rank)
            own = {"layers": layers, **measure(model_stage, averages=averages, clipped=clipped)}
    ranks.barrier("calibration/link")
    backend = HOST if model_stage is None else model_stage.backend
    link = Link(0.0, 1e12, 0.0)
    if ranks.world_size > 1:
        together = any(len(g.members) > 1 for e in plan.averaging for r in e for g in r)
        link = measure_link(ranks, backend, together=together)
    name = plan.cluster.network.ids[rank]
    answers = ranks.all_gather("calibration", json.dumps([name, own, measure_operation()]))
    if rank != 0:
        return None
    found = [json.loads(text) for text in answers]
    entries = {name: entry for name, entry, _ in found if entry is not None}
    return Calibration(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        software={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(device),
            "cores": cores(),
            "threads_per_rank": torch.get_num_threads() * processes,
            **({"gpus": len(set(places))} if device.type == "cuda" else {}),
        },
        workload=plan.workload.name,
        microbatch_samples=plan.workload.microbatch_samples,
        times={name: {f: float(entry[f]) for f in FIELDS} for name, entry in entries.items()},
        layers={
            name: (int(entry["layers"][0]), int(entry["layers"][1]))
            for name, entry in entries.items()
        },
        link_latency_s=link.latency_s,
        link_bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        operation_s=statistics.median(seconds for _, _, seconds in found),
        message_s=link.message_s,
        compute=plan.workload.precision.compute,
        sample_flops=plan.workload.forward_flops,
    )


def _places(ranks: RankGroup, device: torch.device, processes: int) -> list[tuple[str, int]]:
    """GPU or machine of every rank, and how many can compute there at a time."""
    own = machine_id(), max(1, cores() // (torch.get_num_threads() * processes))
    if device.type == "cuda":
        own = gpu_identity(device)[1], 1
    answers = ranks.all_gather("calibration/places", json.dumps(own))
    return [(str(place), int(together)) for place, together in map(json.loads, answers)]


def _shares_gpu(places: Sequence[tuple[str, int]], rank: int, device: torch.device) -> bool:
    """Whether other ranks compute on a rank's GPU."""
    return device.type == "cuda" and [name for name, _ in places].count(places[rank][0]) > 1


def _turns(places: Sequence[tuple[str, int]]) -> list[int]:
    """When each rank measures: after those before it in the same place."""
    names = [name for name, _ in places]
    return [names[:k].count(name) // together for k, (name, together) in enumerate(places)]


def measure_compute(
    model_stage: ModelStage,
    *,
    averages: bool = False,
    clipped: float = 0.0,
    shares_gpu: bool = False,
) -> dict[str, float]:
    """Median seconds of F, H, B and the optimizer step of one rank, by name of `FIELDS`.

    The optimizer step includes the copies of averaged gradients, and clipping of a part of them.
    """
    samples = _Samples(model_stage.device, shares_gpu=shares_gpu)
    operations = model_stage.operations
    activation_codec = operations.activation_codec
    first = model_stage.module.stage.stem is not None
    message = _message(model_stage)

    gradients = model_stage.gradients

    def exchange() -> None:
        gradients.to_host()
        gradients.to_device()

    vector = gradients.device_tensor[: int(clipped * len(gradients.device_tensor))]
    _time_updates(samples, model_stage, exchange if averages else None, vector)
    for _ in range(REPEATS + 1):
        state: dict[str, torch.Tensor] = {}

        # decoding the input and encoding the output are part of the operation
        def forward(state: dict[str, torch.Tensor] = state) -> None:
            if first:
                state["input"] = operations.tokens(0, 0)[:, :-1]
            else:
                state["input"] = operations.decode_message("F", message).detach().requires_grad_()
            state["output"] = model_stage.module.run_stage(state["input"])
            if model_stage.module.head is None:
                activation_codec.encode_message(state["output"].detach(), gradient=False)

        def head(state: dict[str, torch.Tensor] = state) -> None:
            targets = operations.tokens(0, 0)[:, 1:]
            _, state["gradient"] = operations.head_loss_and_gradient(
                state["output"].detach(), targets
            )

        def backward(state: dict[str, torch.Tensor] = state) -> None:
            head_gradient = state.get("gradient")
            gradient = (
                operations.decode_message("B", message) if head_gradient is None else head_gradient
            )
            torch.autograd.backward(state["output"], gradient)
            if not first and (made := state["input"].grad) is not None:
                activation_codec.encode_message(made, gradient=True)

        samples.time("forward_s", forward)
        if model_stage.module.head is not None:
            samples.time("head_s", head)
        samples.time("backward_s", backward)
    return samples.medians()


def measure_worker(
    stage: ModelStage,
    *,
    plan: TrainingPlan,
    rank: int,
    averages: bool = False,
    clipped: float = 0.0,
) -> dict[str, float]:
    """As `measure_compute`, of all GPUs of a worker together, with their collectives."""
    assert isinstance(stage, LeaderStage)
    samples, message = _Samples(stage.device), _message(stage)
    stages, own = len(plan.stage_layers), plan.stage_of[rank]
    is_last = own == stages - 1
    inputs = {
        "F": None if own == 0 else message,
        "H": None if is_last else message,
        "B": None if is_last and stage.module.head is not None else message,
    }
    fields = {"F": "forward_s", "H": "head_s", "B": "backward_s"}
    exchange = stage.write_own_gradients if averages else None
    vector = stage.exchanged[: int(clipped * len(stage.exchanged))]
    _time_updates(samples, stage, exchange, vector)
    for _ in range(REPEATS + 1):
        stage.begin(0, plan.schedules[0], counts_memory=False)
        for kind in fields if stage.module.head is not None else "FB":
            samples.time(fields[kind], partial(stage.run_op, kind, 0, inputs[kind]))
    seconds = samples.medians()
    # F once more, of some layers. B has more FLOPs than F, whatever noise there was in F
    again = repeated_share(plan.workload, plan.stage_layers[own], plan.recompute[own])
    both_s = seconds["backward_s"]
    seconds["backward_s"] = max(both_s - again * seconds["forward_s"], both_s / (1 + again))
    return seconds


class _Samples:
    """Seconds of operations, by name of `FIELDS`.

    On a shared GPU F, H and B count as long as they keep it busy.
    """

    def __init__(self, device: torch.device, *, shares_gpu: bool = False) -> None:
        self._device, self._shares_gpu = device, shares_gpu
        self._seconds: dict[str, list[float]] = {field: [] for field in FIELDS}

    def time(self, field: str, work: Callable[[], object]) -> None:
        """Time an operation."""
        seconds = self._seconds[field]
        _synchronise(self._device)
        # the first sample compiles; updates wait for copies, so that they cannot be launched ahead
        if self._shares_gpu and len(seconds) > 1 and field != "update_s":
            seconds.append(_busy_s(work, min(2 * seconds[1], MAX_SLEEP_S)))
            return
        start = time.perf_counter()
        work()
        _synchronise(self._device)
        seconds.append(time.perf_counter() - start)

    def medians(self) -> dict[str, float]:
        """Medians without the first samples, which warm up."""
        return {
            field: statistics.median(values[1:]) if len(values) > 1 else 0.0
            for field, values in self._seconds.items()
        }


def _busy_s(work: Callable[[], object], launch_s: float) -> float:
    """Seconds of the GPU for an operation whose kernels wait until all have been launched."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda._sleep(int(launch_s * SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _message(stage: ModelStage) -> torch.Tensor:
    """Random activations as a message."""
    codec = stage.operations.activation_codec
    message = stage.backend.host_buffer(*codec.message)
    message.copy_(codec.encode_message(torch.randn(codec.shape), gradient=False))
    return message


def _time_updates(
    samples: _Samples,
    stage: ModelStage,
    exchange: Callable[[], None] | None,
    clipped: torch.Tensor,
) -> None:
    """Time optimizer steps, with the copies of gradients and clipping of some before them.

    On copies of parameters, so that training starts from untouched weights and moments; before
    other operations, since gradients may replace parameters.
    """
    updated = [p for group in stage.optimizer.param_groups for p in group["params"]]
    copies = [p.detach().clone().requires_grad_() for p in updated]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    probe = stage.optimizer_config.make(copies)

    def update() -> None:
        if exchange is not None:
            exchange()
        if len(clipped):
            sum_of_squares(clipped)
            clipped.mul_(1.0)
        probe.step()
        stage.module.cast_weights()

    for _ in range(REPEATS):
        samples.time("update_s", update)


@dataclass(frozen=True)
class Link:
    """Link between ranks 0 and 1.

    Attributes
    ----------
    bandwidth_bytes_per_s
        In each direction at the same time; if the plan averages, while all ranks do.
    message_s
        Additional time of a message, from the end of its operation to the start of the next one.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    message_s: float


def measure_link(ranks: RankGroup, backend: DeviceBackend, *, together: bool) -> Link:
    """Average in pairs of ranks, ``together`` or the first alone; then time its small messages."""
    link = Link(0.0, 1e12, 0.0)
    takes_part = (peer := ranks.rank ^ 1) < (ranks.world_size if together else 2)
    peers = [peer] if takes_part else []
    wanted = duplex_keys(ChannelKind.PIPELINE, peers)
    with connections_to(ranks, wanted, "calibration") as connections:
        channels = duplex_channels(connections, ChannelKind.PIPELINE, ranks.rank)
        ranks.barrier("calibration/averaging")
        bandwidth = _averaging_bandwidth(channels, ranks.rank, peers) if peers else 1e12
        ranks.barrier("calibration/messages")
        if ranks.rank < 2:
            link = _measure(channels, ranks.rank, backend, bandwidth)
    ranks.barrier("calibration/measured")
    return link


def _averaging_bandwidth(channels: DuplexChannels, rank: int, peers: Sequence[int]) -> float:
    """Bytes per second that a rank sends, and receives, in averaging with another one."""
    group = AveragingGroup.equal(tuple(sorted([rank, *peers])))
    connections = AveragingConnections(channels, ErrorLatch())

    def average(vector: torch.Tensor) -> float:
        start = time.perf_counter()
        ShardedAllReduce(
            vector, group, rank, connections, WireFormat.FP32, AVERAGING_CHUNKING
        ).run()
        return time.perf_counter() - start

    def round_s(values: int) -> float:
        # the mean of both ranks, so that both continue or both stop
        seconds = torch.full((2,), average(torch.zeros(values)))
        average(seconds)
        return float(seconds[0]) / 2

    values = FEWEST_VALUES
    while (took_s := round_s(values)) < LONG_ROUND_S and values < MOST_VALUES:
        values *= 4
    if took_s < LONG_ROUND_S:
        took_s = statistics.median(round_s(values) for _ in range(REPEATS))
    connections.finish()
    # half of the vector is sent to be summed, and half as sums
    return 4 * values / took_s


def measure_operation() -> float:
    """Overhead of the loop per operation, in seconds."""
    path, kinds = (0,), "FHB"
    order = tuple((kind, b) for b in range(EMPTY_OPERATIONS // len(kinds)) for kind in kinds)
    schedule = Schedule("empty", Head.LAST, (path,) * (len(order) // len(kinds)), (order,))
    traffic, no_transport = P2PSchedule(schedule, 0), _Nothing()
    error_latch = ErrorLatch()
    receiver, sender = (
        Receiver({}, {}, no_transport.buffer, error_latch),
        Sender({}, error_latch, {}),
    )
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run_operations(traffic, no_transport, receiver, sender, 0, StepRecord(0, False))
        seconds.append((time.perf_counter() - start) / len(order))
    return statistics.median(seconds)


class _Nothing:
    """Operations that do nothing."""

    def __init__(self, backend: DeviceBackend = HOST) -> None:
        self.backend = backend
        self._made = backend.to_device(torch.zeros(SMALL_BYTES, dtype=torch.uint8))

    def run_op(self, kind: str, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Return the same small tensor."""
        return self._made

    def buffer(self, message: Message) -> torch.Tensor:
        """Memory for a small message."""
        return self.backend.host_buffer((SMALL_BYTES,), torch.uint8)


def _measure(channels: DuplexChannels, rank: int, backend: DeviceBackend, bandwidth: float) -> Link:
    other = 1 - rank
    to, of = channels.outgoing[other], channels.incoming[other]
    values = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
    small = _one_way(
        rank,
        PINGS,
        lambda: send_all(to, as_bytes(values)),
        lambda: receive_into(of, as_bytes(values)),
    )
    latency = max(small - SMALL_BYTES / bandwidth, 1e-9)
    no_transport, error_latch = _Nothing(backend), ErrorLatch()
    message = Message("F", 0, other, rank)
    coming = (ExpectedMessage(step_index, message) for step_index in range(PINGS))
    receiver = Receiver(channels.incoming, {other: coming}, no_transport.buffer, error_latch)
    sender = Sender(channels.outgoing, error_latch, {other: bandwidth}, backend=backend)
    numbers = count()
    ours = _one_way(
        rank,
        PINGS,
        lambda: sender.send(no_transport.run_op("F", 0, None), other),
        lambda: backend.to_device(receiver.receive(next(numbers), message).tensor),
    )
    sender.finish()
    return Link(latency, bandwidth, max(ours - small, 0.0))


def _one_way(
    rank: int, pings: int, send: Callable[[], object], receive: Callable[[], object]
) -> float:
    """Half of the median round-trip time."""
    seconds = []
    for _ in range(pings):
        start = time.perf_counter()
        for step in (send, receive) if rank == 0 else (receive, send):
            step()
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
