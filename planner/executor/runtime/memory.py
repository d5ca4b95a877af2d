"""Memory check before the first step: whether each rank's needs fit.

Ranks of a machine share its memory, ranks on a GPU share that GPU's. All exchange their needs and
compare the same numbers, so that exactly one of them reports an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from planner.executor.comm.codec import WireFormat, message_length
from planner.executor.comm.device_identity import gpu_identity, machine_id
from planner.executor.comm.stage_averager import StageAverager
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.stage_module import has_head, whole_parameters
from planner.network.gpus import USABLE as GPU_USABLE
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.utils.refusal import Refusal
from planner.utils.text import counted
from planner.workload.costs import stage_costs
from planner.workload.host_memory import USABLE, available_bytes
from planner.workload.transformer import SAVED_OF_FFN, SAVED_OF_HEADS, SAVED_OF_NORMS
from planner.workload.working_memory import MESSAGES

SUM_BYTES = 4
"""Bytes of a value in fp32."""
WORKSPACE_BYTES = 2 * 32 * 2**20
"""Of cuBLAS on Hopper GPUs: 32 MiB for forward passes, as much for the thread of backward passes;
less on others (https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces)."""
LARGE_BYTES, SEGMENT_BYTES, UNSPLIT_BYTES = 10 * 2**20, 2 * 2**20, 2**20
"""PyTorch rounds requests of GPU memory from 10 MiB on to multiples of 2 MiB, and gives up to 1 MiB
too much rather than splitting a block."""
EXCHANGED, CHECKPOINT_COPY = "the vector that GPUs exchange", "a copy for checkpoints"


class TooLittleMemoryError(Refusal):
    """A rank needs more memory than available."""


@dataclass(frozen=True)
class MemoryNeed:
    """Peak memory of one rank.

    Attributes
    ----------
    stage_bytes
        Bytes of its stage and microbatches as in the plan, by purpose.
    extra_bytes
        Additional bytes where it computes, by purpose.
    host_bytes
        Host memory of a rank that computes on a GPU, by purpose.
    """

    stage_bytes: Mapping[str, float]
    extra_bytes: Mapping[str, float]
    host_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> float:
        """Bytes of its stage and microbatches."""
        return sum(self.stage_bytes.values())

    @property
    def total_bytes(self) -> float:
        """Bytes where it computes."""
        return self.planned_bytes + sum(self.extra_bytes.values())


def memory_need(
    plan: TrainingPlan,
    rank: int,
    averaging: StageAverager,
    *,
    other: StageAverager | None = None,
    on_gpu: bool = False,
    calibrate: bool = False,
    uses_collectives: bool = False,
    writes_checkpoints: bool = False,
    moves_shards: bool = False,
) -> MemoryNeed:
    """Peak memory of a rank."""
    w, stage = plan.workload, plan.averaged_stage(rank)
    vector = vector_numel(plan, stage) * SUM_BYTES
    parts = (averaging,) if other is None else (averaging, other)
    buffers = max(buffer_bytes(part, round(vector / SUM_BYTES)) for part in parts)
    if rank not in plan.stage_of:
        held = {"sums of others": vector, "averaging": buffers}
        if plan.shards_optimizer:
            group = averaging.rounds[-1]
            share = group.shares[group.members.index(rank)]
            held["optimizer state"] = share * vector / SUM_BYTES * w.precision.optimizer_bytes
            # its share is cut out of the initial parameters
            held["building the model"] = max(vector - buffers, 0.0)
        return MemoryNeed({}, held)
    degree = plan.gpu_counts[rank]
    if degree != w.tensor_parallel:
        w = w.replace(tensor_parallel=degree)
    in_flight = max(s.most_live()[rank] for s in plan.schedules)
    costs = stage_costs(
        w,
        *plan.stage_layers[stage],
        with_head=has_head(plan, rank),
        recomputed=plan.recompute[stage],
    )
    # in both directions, as many as in flight
    queued = in_flight
    if plan.wiring is Wiring.STOCHASTIC:
        # all microbatches in flight may queue at one device
        queued = sum(plan.schedules[0].most_live()[d] for d in plan.assignment.groups[0])
    message = costs.output_bytes if len(plan.stage_layers) > 1 else 0.0
    stage_bytes = {
        "weights, gradients and optimizer": costs.state_bytes,
        f"activations of {counted(in_flight, 'microbatch')}": in_flight * costs.saved_bytes,
        "the largest operation": costs.scratch_bytes,
    }
    extra_bytes: dict[str, float] = {}
    several = degree > 1
    # with delayed outer steps, one is averaged while others are exchanged
    exchanged = (1 + plan.sync.delayed) * vector
    # all state but the gradients; of optimizer state in shards its own, and all parameters
    copied_bytes = w.state_bytes_per_parameter - SUM_BYTES
    if plan.shards_optimizer:
        copied_bytes = copied_bytes / w.optimizer_shards + SUM_BYTES
    copy_bytes = vector / SUM_BYTES * copied_bytes
    if several and not on_gpu:
        extra_bytes[EXCHANGED] = exchanged
        extra_bytes[CHECKPOINT_COPY] = writes_checkpoints * copy_bytes
    if plan.sync.local_steps:
        copies = 2 if plan.sync.outer is not None and plan.sync.outer.momentum else 1
        # delayed: a snapshot of parameters, and a second gradient vector
        copies += (1 if on_gpu or several else 2) * plan.sync.delayed
        extra_bytes["outer step"] = max(copies - w.outer_state_bytes / SUM_BYTES, 0.0) * vector
    if calibrate:
        # another copy of parameters and moments, and one microbatch
        copy = vector / SUM_BYTES * w.precision.state_bytes
        extra_bytes["calibration"] = max(copy - (in_flight - 1) * costs.saved_bytes, 0.0)
    if moves_shards and plan.shards_optimizer:
        # the old share is kept until the new one is there; between steps, without activations
        share = vector / SUM_BYTES * w.precision.optimizer_bytes / w.optimizer_shards
        extra_bytes["moving optimizer state"] = max(share - in_flight * costs.saved_bytes, 0.0)
    if on_gpu:
        # collectives add in 16 bits, on a copy
        rounded = any(wire is WireFormat.BF16 for part in parts for wire in part.wires)
        extra_bytes["averaging"] = uses_collectives * rounded * vector / 2
        extra_bytes["allocator and cuBLAS"] = degree * _allocator_bytes(
            plan, stage, in_flight, degree
        )
        averages = plan.sync.local_steps or any(part.peers for part in parts)
        pinned = _power_of_two(vector if averages and not several else 0.0)
        pinned += (in_flight + queued) * _power_of_two(message)
        host_bytes = {"copies for the network": pinned + buffers}
        if several:
            # each GPU has a part of what is kept there
            stage_bytes, extra_bytes = (
                {purpose: size / degree for purpose, size in on_all.items()}
                for on_all in (stage_bytes, extra_bytes)
            )
            host_bytes[EXCHANGED] = exchanged
        if writes_checkpoints:
            host_bytes[CHECKPOINT_COPY] = copy_bytes
        return MemoryNeed(stage_bytes, extra_bytes, host_bytes)
    extra_bytes["averaging"] = buffers
    extra_bytes["messages"] = max(in_flight + queued - MESSAGES, 0) * message
    return MemoryNeed(stage_bytes, extra_bytes)


def _allocator_bytes(plan: TrainingPlan, stage: int, in_flight: int, degree: int) -> float:
    """Bytes that a GPU's allocator counts beyond those of parameters and activations."""
    w, arch = plan.workload, plan.workload.architecture
    assert arch is not None
    copies = w.precision.optimizer_bytes / SUM_BYTES / w.optimizer_shards
    # parameters in fp32 are kept whole, in addition to the shards
    copies += plan.shards_optimizer and w.precision.compute.bytes == SUM_BYTES
    saved_bytes = w.precision.compute.bytes
    total = float(WORKSPACE_BYTES)
    for parameter in whole_parameters(plan, stage).values():
        numel = parameter.numel() // degree
        total += copies * _rounding(numel * SUM_BYTES)
        total += _rounding(numel * saved_bytes) if saved_bytes < SUM_BYTES else 0
    start, stop = plan.stage_layers[stage]
    token_bytes = w.microbatch_samples * arch.sequence * saved_bytes
    saved = (
        (arch.ffn, SAVED_OF_FFN[arch.kind]),
        (arch.hidden, SAVED_OF_NORMS),
        (arch.attention_size * arch.heads, SAVED_OF_HEADS),
    )
    of_layer = sum(count * _rounding(token_bytes * width // degree) for width, count in saved)
    recomputed = plan.recompute[stage]
    kept = stop - start - recomputed
    return total + (in_flight * kept + max(recomputed - kept, 0)) * of_layer


def _rounding(size: int) -> int:
    """Bytes that a tensor may get beyond its size."""
    left = -size % SEGMENT_BYTES
    return left if size >= LARGE_BYTES and left <= UNSPLIT_BYTES else 0


def vector_numel(plan: TrainingPlan, stage: int) -> float:
    """Number of gradients of a stage."""
    w = plan.workload
    gradient = w.gradient_bytes(plan.stage_layers, plan.head_stage)[stage]
    return gradient / w.precision.gradients.bytes


def _power_of_two(size: float) -> float:
    """Bytes that PyTorch pins for a request."""
    return float(2 ** math.ceil(math.log2(size))) if size > 0 else 0.0


def buffer_bytes(averaging: StageAverager, numel: int) -> float:
    """Contributions that wait to be summed, in the round with most."""
    most = 0
    for group, chunking, wire in zip(
        averaging.rounds, averaging.chunkings, averaging.wires, strict=True
    ):
        contributors = (
            sum(group.sends_contributions)
            - group.sends_contributions[group.members.index(averaging.rank)]
        )
        share = group.shares[group.members.index(averaging.rank)] * group.width
        chunk = message_length(int(share * numel / chunking.chunks) + 1, wire)
        most = max(most, contributors * min(chunking.window + 1, chunking.chunks) * chunk)
    return float(most)


@dataclass(frozen=True)
class MemoryClaim:
    """Memory that a rank needs, and the available memory that it shares with others.

    Attributes
    ----------
    memory
        Identifier shared by the ranks that share the memory.
    usable_share
        Usable part of the available memory.
    parts
        The need by purpose.
    """

    memory: str
    name: str
    need_bytes: float
    available_bytes: float
    usable_share: float
    parts: Mapping[str, float]


def memory_claims(ranks: RankGroup, need: MemoryNeed, device: torch.device) -> list[MemoryClaim]:
    """Claims of a rank on this machine and its GPU; a collective call.

    A rank that joins late claims alone: the memory of the others is no longer free.
    """
    if device.type == "cuda":
        # creating a CUDA context takes memory
        torch.cuda.mem_get_info(device)
    if not ranks.joins_late:
        ranks.barrier("memory/begun")
    parts = {**need.stage_bytes, **need.extra_bytes}
    machine = machine_id()
    machine_name = "this machine's memory"
    if device.type != "cuda":
        return [
            MemoryClaim(machine, machine_name, need.total_bytes, available_bytes(), USABLE, parts)
        ]
    free, _ = torch.cuda.mem_get_info(device)
    name, gpu = gpu_identity(device)
    host_bytes = sum(need.host_bytes.values())
    return [
        MemoryClaim(gpu, name, need.total_bytes, float(free), GPU_USABLE, parts),
        MemoryClaim(machine, machine_name, host_bytes, available_bytes(), USABLE, need.host_bytes),
    ]


def require_memory(ranks: RankGroup, claims: Sequence[MemoryClaim]) -> None:
    """Refuse to start if memory is too small; a collective call, except for a late rank."""
    own = json.dumps([asdict(claim) for claim in claims])
    texts = (
        {ranks.rank: own} if ranks.joins_late else dict(enumerate(ranks.all_gather("memory", own)))
    )
    pools: dict[str, dict[int, MemoryClaim]] = {}
    for rank, text in texts.items():
        for claim in (MemoryClaim(**fields) for fields in json.loads(text)):
            pools.setdefault(claim.memory, {})[rank] = claim
    for pool in pools.values():
        available = min(claim.available_bytes for claim in pool.values())
        total = sum(claim.need_bytes for claim in pool.values())
        first = min(pool)
        if total <= pool[first].usable_share * available:
            continue
        if first == ranks.rank:
            raise TooLittleMemoryError(_refusal(ranks.name(first), pool[first], len(pool), total))
        ranks.barrier("memory/refused")


def _refusal(name: str, claim: MemoryClaim, sharing: int, total: float) -> str:
    parts = [f"{part} {size / 1e9:.3g}" for part, size in claim.parts.items() if size]
    own = f"{claim.need_bytes / 1e9:.3g} GB ({', '.join(parts)})"
    who = f"device {name!r} needs {own}"
    if sharing > 1:
        who += f" and with {sharing - 1} more that share it {total / 1e9:.3g} GB"
    return (
        f"{who} of {claim.name}, which has {claim.available_bytes / 1e9:.3g} GB free, "
        f"{claim.usable_share:.0%} of it to be used; plan for less (--memory-gb, "
        "--recompute all, fewer --microbatch-samples), or start fewer ranks here"
    )
