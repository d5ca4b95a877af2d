"""A plan as another trainer runs it: rank mesh, schedule and predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions, require_host
from planner.exports.ranks import nodes_of
from planner.exports.straight import Pipelines, first_schedule, require_trainable
from planner.network.dtype import Dtype
from planner.simulator.simulator import predict
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation, Schedule
from planner.workload.costs import split_costs
from planner.workload.layers import Architecture, Family

DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP32: "float32"}
"""Names of data types in other trainers."""


@dataclass(frozen=True)
class TrainerRank:
    """One process of the trainer.

    Attributes
    ----------
    rank
        Global rank: pipeline parallelism is the outer dimension of the mesh, then data parallelism,
        then tensor parallelism.
    device
        Index of the planned device, which has a process per GPU.
    host, local_rank
        Host of the process, and index of its GPU on that host.
    interface
        Network interface; None: the host's default.
    stage, pipeline
        Coordinates in the mesh.
    """

    rank: int
    device: int
    host: str
    local_rank: int
    interface: str | None
    stage: int
    pipeline: int


@dataclass(frozen=True)
class TrainerPlan:
    """A plan that a trainer with equal, straight pipelines can run.

    Attributes
    ----------
    target
        Name of the format, for error messages.
    pipelines
        Devices of each pipeline, by stage.
    ranks
        Processes in order of rank.
    """

    plan: TrainingPlan
    target: str
    pipelines: Pipelines
    ranks: tuple[TrainerRank, ...]

    @classmethod
    def for_target(
        cls,
        plan: TrainingPlan,
        target: str,
        options: ExportOptions,
        *,
        local_steps: bool = False,
        shards: bool = True,
    ) -> TrainerPlan:
        """Check that the target can run the plan, and assign ranks."""
        pipelines = require_trainable(
            plan, target, recompute=True, local_steps=local_steps, shards=shards
        )
        return cls(plan, target, pipelines, _ranks(plan, pipelines, options))

    @property
    def stages(self) -> int:
        """Pipeline-parallel degree."""
        return len(self.plan.stage_layers)

    @property
    def replicas(self) -> int:
        """Data-parallel degree."""
        return len(self.pipelines)

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel degree."""
        return self.plan.gpu_counts[self.pipelines[0][0]]

    @property
    def recomputes(self) -> bool:
        """Whether all layers are recomputed; plans with some of them are rejected before."""
        return any(self.plan.recompute)

    @property
    def pipeline_samples(self) -> int:
        """Samples of one pipeline per step."""
        return self.plan.workload.batch_samples // self.replicas

    def refuse(self, reason: str, remedy: str) -> ExportError:
        """Return the error for a feature of the plan that the target does not support."""
        return ExportError(f"{self.target} cannot express {reason}; {remedy}")

    def architecture(self) -> Architecture:
        """Return the transformer; raise `ExportError` if the workload is not one."""
        architecture = self.plan.workload.architecture
        if architecture is None:
            raise self.refuse(
                f"workload {self.plan.workload.name!r}, which is not a known transformer",
                "plan a preset or a Hugging Face config.json",
            )
        return architecture

    def llama(self) -> Architecture:
        """Return a LLaMA without features that the trainers do not support, or raise "
        "`ExportError`."""
        arch = self.architecture()
        if arch.kind is not Family.LLAMA:
            raise self.refuse(f"a {arch.kind} model", "plan one of the llama family")
        if arch.tied and self.stages > 1:
            raise self.refuse(
                "a head tied to the embedding across stages",
                "plan a workload with an untied head",
            )
        extra = {
            "biases of queries, keys and values": arch.qkv_bias,
            "norms of queries and keys": arch.qk_norm,
            "an attention window": arch.window is not None,
            "a head size other than hidden / heads": arch.attention_size * arch.heads
            != arch.hidden,
        }
        for feature in (*arch.unexecuted, *(name for name, present in extra.items() if present)):
            raise self.refuse(f"a LLaMA with {feature}", "plan a LLaMA without it")
        return arch

    def compute_dtype(
        self, *, reduces: Sequence[Dtype] = (Dtype.FP32,), scales_loss: bool = False
    ) -> Dtype:
        """Return the data type of both matrix products and activations, or raise `ExportError`."""
        precision = self.plan.workload.precision
        if precision.scales_loss and not scales_loss:
            raise self.refuse(
                "fp16, which needs loss scaling",
                "plan with --precision bf16 or fp32, or use --to megatron",
            )
        if precision.compute is not precision.messages:
            raise self.refuse(
                f"activations computed in {precision.compute} and sent in {precision.messages}",
                "plan the same format for both",
            )
        if precision.gradients not in reduces:
            raise self.refuse(
                f"gradients averaged in {precision.gradients}",
                f"plan gradients in {' or '.join(reduces)}",
            )
        return precision.compute

    def csv_order(self, pipeline: int) -> str:
        """Return a pipeline's schedule as CSV of torch.distributed.pipelining, one row per "
        "stage."""
        schedule, path = first_schedule(self.plan), self.pipelines[pipeline]
        microbatches = [b for b, visited in enumerate(schedule.paths) if visited == path]
        number = {b: k for k, b in enumerate(microbatches)}
        rows = (
            ",".join(f"{stage}{kind}{number[b]}" for kind, b in schedule.order[d] if kind != "H")
            for stage, d in enumerate(path)
        )
        return "".join(f"{row}\n" for row in rows)

    def modules(self, embedding: str, layers: str, norm: str) -> list[list[str]]:
        """Return the module names of each stage; the head is ``lm_head``."""
        stages = [[f"{layers}.{k}" for k in range(*ends)] for ends in self.plan.stage_layers]
        stages[0].insert(0, embedding)
        stages[-1] += [norm, "lm_head"]
        return stages

    def planned_order(self) -> Schedule:
        """Return the plan's schedule with the loss computed right after the last forward pass."""
        schedule = first_schedule(self.plan)
        return replace(schedule, order=tuple(map(_loss_with_forward, schedule.order)))

    def one_f_one_b(self) -> Schedule:
        """Return the plan's paths with a 1F1B schedule (Narayanan et al., 2019)."""
        schedule = first_schedule(self.plan)
        orders: list[tuple[Operation, ...]] = [()] * len(schedule.order)
        for path in self.pipelines:
            microbatches = [b for b, visited in enumerate(schedule.paths) if visited == path]
            for stage, d in enumerate(path):
                last = stage == self.stages - 1
                orders[d] = _one_f_one_b(microbatches, self.stages - stage, last)
        return replace(schedule, name="1f1b", order=tuple(orders))

    def predicted_step_s(self, order: Schedule, *, waits_for_norm: bool) -> float:
        """Predict the step time with the trainer's schedule."""
        plan = self.plan.replace(schedules=(order,), cycle=(0,))
        if waits_for_norm and plan.clip is None:
            plan = plan.replace(clip=1.0)
        return predict(plan).step_s

    def require_memory(self, order: Schedule, chunk: Callable[[int], int]) -> None:
        """Reject a schedule whose activations do not fit in device memory."""
        plan = self.plan
        workload, live = plan.workload, order.most_live()
        costs = split_costs(workload, plan.stage_layers, plan.head_stage, plan.recompute)
        for stage, (start, stop) in enumerate(plan.stage_layers):
            inputs = 0.0
            if self.recomputes:
                inner = range(start + chunk(stage), stop, chunk(stage))
                inputs = sum(workload.held_bytes(k - 1) for k in inner)
                inputs *= workload.microbatch_samples
            for path in self.pipelines:
                d = path[stage]
                need = costs[stage].need_bytes(live[d]) + live[d] * inputs
                available = float(plan.cluster.memory_bytes[d])
                if need > available:
                    raise self.refuse(
                        f"device {plan.cluster.network.ids[d]!r}: its schedule holds {live[d]} "
                        f"microbatches, {need / 1e9:.2f} GB, in {available / 1e9:.2f} GB of memory",
                        "plan more stages or smaller microbatches",
                    )


def _ranks(
    plan: TrainingPlan, pipelines: Pipelines, options: ExportOptions
) -> tuple[TrainerRank, ...]:
    """Return the processes in order of rank."""
    where: dict[int, tuple[str, int]] = {}
    for host, devices in nodes_of(plan, options).items():
        require_host(host)
        where |= {d: (host, local) for local, d in enumerate(devices)}
    degree = plan.gpu_counts[pipelines[0][0]]
    planned = plan.cluster.devices.interfaces
    ranks: list[TrainerRank] = []
    for stage in range(len(plan.stage_layers)):
        for pipeline, path in enumerate(pipelines):
            d = path[stage]
            interface = options.interface or (planned[d] if planned else None) or None
            host, local = where[d]
            ranks += [
                TrainerRank(len(ranks) + k, d, host, local * degree + k, interface, stage, pipeline)
                for k in range(degree)
            ]
    return tuple(ranks)


def _loss_with_forward(order: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Move each H directly after its F."""
    heads = {b for kind, b in order if kind == "H"}
    moved: list[Operation] = []
    for kind, b in order:
        if kind != "H":
            moved.append((kind, b))
        if kind == "F" and b in heads:
            moved.append(("H", b))
    return tuple(moved)


def _one_f_one_b(microbatches: Sequence[int], flight: int, last: bool) -> tuple[Operation, ...]:
    """Return the 1F1B order of a stage with at most ``flight`` microbatches in flight."""
    ops: list[Operation] = []
    done = 0
    for k, b in enumerate(microbatches):
        ops.append(("F", b))
        if last:
            ops.append(("H", b))
        if k + 1 >= flight:
            ops.append(("B", microbatches[done]))
            done += 1
    ops += [("B", b) for b in microbatches[done:]]
    return tuple(ops)
