"""One GPU's part of a device's stage, and how the leader's commands reach the other GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.data.data_config import DataConfig
from planner.executor.runtime import outer_optimizer as outer
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.optimizer_segments import MOMENTS
from planner.executor.runtime.stage_module import (
    LoadWeights,
    require_executable,
    whole_parameters,
)
from planner.executor.tensor_parallel.gpu_group import GpuGroup
from planner.executor.tensor_parallel.sharded_module import ShardedStageModule
from planner.executor.tensor_parallel.shards import Kind
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.shares import Range

PARAMETER = "parameter"
OWNED = "owned parameter"
FIELDS = (PARAMETER, *MOMENTS, outer.PARAMETER, outer.MOMENTUM, OWNED)
"""State of a parameter: itself, AdamW's moments, of the outer optimizer, and in fp32 where only a
share of the optimizer state is held."""


class GpuStage(ModelStage):
    """One GPU's part of a stage: parts of parameters, of their moments and of activations.

    Parameters
    ----------
    group
        The GPUs of the worker.
    exchange_file
        File in memory through which the GPUs exchange whole vectors.

    Attributes
    ----------
    exchanged
        That vector: gradients of the whole stage in the order of averaging, or one field of its
        state.
    """

    module: ShardedStageModule

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        device: torch.device,
        optimizer_config: OptimizerConfig,
        data: DataConfig,
        group: GpuGroup,
        exchange_file: Path,
        *,
        compiled: bool = False,
    ) -> None:
        module = ShardedStageModule(plan, rank, device, group, compiled=compiled)
        self.group = group
        whole = whole_parameters(plan, plan.stage_of[rank])
        shapes = {name: parameter.shape for name, parameter in whole.items()}
        sizes = [shape.numel() for shape in shapes.values()]
        self.exchanged = torch.from_file(
            str(exchange_file), shared=True, size=sum(sizes), dtype=torch.float32
        )
        parts = torch.split(self.exchanged, sizes)
        self._whole = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        super().__init__(plan, rank, device, optimizer_config, data=data, module=module)
        # only the leader averages, whole vectors
        self.gradients = GradientBuffer(module.gradients)
        stage, stages = plan.stage_of[rank], len(plan.stage_layers)
        is_last, sends_to_head = stage == stages - 1, plan.head_stage < stages - 1
        self._sends = {"F": not is_last or sends_to_head, "B": stage > 0, "H": sends_to_head}

    def begin_part(self, step: int, scale_exponent: int, counts_memory: bool) -> None:
        """Start of a step, with a loss scale of a power of two."""
        self._step = step
        if self._scaler is not None:
            self._scaler.scale = 2.0**scale_exponent
        self.module.gradients.zero_()
        self.operations.begin(step, counts_memory=counts_memory)

    def run_part(
        self, kind: str, microbatch: int, has_input: bool, whole_input: Tensor | None = None
    ) -> Tensor | None:
        """Run an operation on this GPU's tokens; returns all tokens' output if it is sent.

        Parameters
        ----------
        whole_input
            Activations or gradient of all tokens; only on the leader.
        """
        if has_input and whole_input is None:
            whole_input = self.new_input()
        part = None if whole_input is None else self.group.broadcast_tokens(whole_input)
        del whole_input
        output = self.operations.run_decoded(kind, microbatch, part)
        if not self._sends[kind]:
            return None
        return self.group.gather_tokens(output)

    def new_input(self) -> Tensor:
        """Memory for activations of all tokens."""
        shape = self.operations.activation_codec.shape
        return torch.empty(shape, dtype=self.module.dtype, device=self.device)

    def new_tokens(self) -> Tensor:
        """Memory for the tokens of a microbatch, or their targets."""
        shape = self.operations.activation_codec.shape[:2]
        return torch.empty(shape, dtype=torch.int64, device=self.device)

    def evaluate_stage_part(self, whole_input: Tensor | None = None) -> Tensor:
        """All activations after the stage, from the leader's tokens or activations."""
        is_first = self.module.stage.stem is not None
        if whole_input is None:
            whole_input = self.new_tokens() if is_first else self.new_input()
        receive = self.group.broadcast if is_first else self.group.broadcast_tokens
        with torch.no_grad():
            return self.group.gather_tokens(self.module.run_stage(receive(whole_input)))

    def evaluate_loss_part(
        self, whole_input: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Loss of all tokens, from the leader's activations and targets."""
        part = self.group.broadcast_tokens(self.new_input() if whole_input is None else whole_input)
        with torch.no_grad():
            targets = self.group.broadcast(self.new_tokens() if targets is None else targets)
            return self.module.run_loss(part, targets)

    def collect_gradients(self) -> None:
        """Write gradients into the exchanged vector."""
        self.module.sum_whole_gradients()
        self._write((n, p.grad) for n, p in self.module.named_parameters())
        self.group.barrier()

    def spread_gradients(self) -> None:
        """Read averaged gradients from the exchanged vector."""
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(self.module.shard(name).of(self._whole[name]))
        # before anything else is written there
        self.group.barrier()

    def update_part(self, scale: float, averaged: bool) -> None:
        """Take an optimizer step, with averaged gradients or the device's own, times a factor."""
        if averaged:
            self.spread_gradients()
        else:
            self.module.sum_whole_gradients()
        if scale != 1:
            self.module.gradients.mul_(scale)
        self.optimizer_config.set_lr(self.optimizer, self._step)
        self.optimizer.step()
        self._after_update()

    def write_pseudo_gradient(self, weight: float) -> None:
        """Write the weighted pseudo-gradient into the exchanged vector."""
        assert self.outer is not None
        self.outer.pseudo_gradient(self.module.gradients, weight)
        self._write((name, p.grad) for name, p in self.module.named_parameters())
        self.group.barrier()

    def outer_step_part(self) -> None:
        """Apply the outer step with the mean pseudo-gradient in the exchanged vector."""
        assert self.outer is not None
        self.spread_gradients()
        self.outer.step(self.module.gradients)
        self._after_update()

    def take_snapshot_part(self) -> None:
        """Take a snapshot for the pseudo-gradient."""
        assert self.outer is not None
        self.outer.take_snapshot()

    def write_state(self, field: str) -> None:
        """Write a field of the state into the exchanged vector."""
        self._write(self._fields(field).items())
        self.group.barrier()

    def read_state(self, field: str, optimizer_steps: int) -> None:
        """Read a field of the state from the exchanged vector."""
        parts = {
            name: self.module.shard(name).of(self._whole[name])
            for name, _ in self.module.named_parameters()
        }
        if field in MOMENTS:
            for name, parameter in self.module.named_parameters():
                state = self.optimizer.state[parameter]
                state[field] = parts[name].to(self.device, copy=True)
                state["step"] = torch.tensor(float(optimizer_steps), device=self.device)
        else:
            with torch.no_grad():
                for name, value in self._fields(field).items():
                    value.copy_(parts[name])
        self.module.cast_weights()
        self.group.barrier()

    def sum_held_bytes(self) -> int:
        """Bytes that all GPUs of the worker hold."""
        total = torch.tensor([float(super().held_bytes)], dtype=torch.float64)
        self.group.sum_on_host(total)
        return int(total)

    def _fields(self, field: str) -> Mapping[str, Tensor]:
        """A field of all parameters by name; empty if there is none."""
        if field == PARAMETER:
            return dict(self.module.named_parameters())
        if field not in MOMENTS:
            state = {} if self.outer is None else self.outer.state_dict()
            return {k.removeprefix(field): v for k, v in state.items() if k.startswith(field)}
        state_of = self.optimizer.state
        return {
            name: state_of[parameter][field]
            for name, parameter in self.module.named_parameters()
            if field in state_of[parameter]
        }

    def _write(self, parts: Iterable[tuple[str, Tensor | None]]) -> None:
        for name, part in parts:
            assert part is not None
            shard = self.module.shard(name)
            if shard.kind is not Kind.WHOLE or self.group.leads:
                shard.put(part.detach().to("cpu"), self._whole[name])


def follow(stage: GpuStage) -> None:
    """Carry out the leader's commands until it stops."""
    while command := stage.group.receive_command():
        name, *arguments = command
        getattr(stage, name)(*arguments)


class WorkerGradients(GradientBuffer):
    """Gradients of a whole stage: on the GPUs in parts, in host memory as one vector."""

    def __init__(self, own_part: Tensor, exchanged: Tensor, collect: Callable[[], None]) -> None:
        super().__init__(own_part, lambda: exchanged)
        self._collect = collect

    @property
    def is_on_host(self) -> bool:
        """Whether the values are in host memory."""
        return self._is_on_host

    @property
    def current(self) -> Tensor:
        """The whole vector."""
        return self.to_host()

    def to_host(self) -> Tensor:
        """Collect the values, unless they are in host memory."""
        if not self._is_on_host:
            self._collect()
            self._is_on_host = True
        return self.host_tensor

    def for_update(self, parts: Iterable[Range] | None = None) -> Tensor:
        """The whole vector in host memory, from which the GPUs read."""
        return self.to_host()

    def left_host(self) -> None:
        """The GPUs have read the values."""
        self._is_on_host = False


class LeaderStage(GpuStage):
    """The stage of a device with several GPUs, as its rank runs it: a `StageRuntime`.

    Its state and gradients are those of the whole stage, so that averaging and checkpoints are as
    with one GPU.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        device: torch.device,
        optimizer_config: OptimizerConfig,
        data: DataConfig,
        group: GpuGroup,
        exchange_file: Path,
        *,
        load_weights: LoadWeights | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__(
            *(plan, rank, device, optimizer_config, data, group, exchange_file), compiled=compiled
        )
        if load_weights is not None:
            layers = plan.stage_layers[plan.stage_of[rank]]
            load_weights(require_executable(plan), *layers, self._whole)
            self._spread_loaded()
        self._worker_gradients = WorkerGradients(
            self.module.gradients, self.exchanged, partial(self._all, "collect_gradients")
        )
        self.gradients = self._worker_gradients
        # the next steps exchange other vectors while it is averaged
        self._mean = self.exchanged
        if plan.sync.delayed:
            self._mean = torch.empty_like(self.exchanged)

    @property
    def held_bytes(self) -> int:
        """Bytes that all GPUs of the worker hold, with the vector through which they exchange."""
        separate = self._mean is not self.exchanged
        return int(self._all("sum_held_bytes")) + (self._mean.nbytes if separate else 0)

    def begin(self, step: int, schedule: Schedule, *, counts_memory: bool = True) -> None:
        """Start of a step."""
        exponent = 0 if self._scaler is None else round(math.log2(self._scaler.scale))
        self._worker_gradients.left_host()
        self._all("begin_part", step, exponent, counts_memory)

    def seek(self, position: list[int]) -> None:
        """Continue from a position in the data, on all GPUs."""
        self.group.send_command("seek", position)
        super().seek(position)

    def write_own_gradients(self) -> None:
        """Write this GPU's gradients into the exchanged vector, as all do at the same time."""
        self._write((name, p.grad) for name, p in self.module.named_parameters())

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Run F, H or B on all GPUs; returns the message of all tokens."""
        operations = self.operations
        self.group.send_command("run_part", kind, microbatch, received is not None)
        # no reference to the input of all tokens stays here
        output = self.run_part(
            kind,
            microbatch,
            received is not None,
            None if received is None else operations.decode_message(kind, received),
        )
        if output is None:
            return torch.empty(0, device=self.device)
        return operations.encode_message(kind, output)

    def unscale(self) -> None:
        """Divide the step's gradients by the loss scale."""
        if self._scaler is not None:
            self._worker_gradients.current.mul_(1 / self._scaler.scale)

    def _apply_gradients(self, scale: float | None) -> None:
        averaged = self._worker_gradients.is_on_host
        self._all("update_part", 1.0 if scale is None else scale, averaged)
        self._worker_gradients.left_host()

    def take_snapshot(self) -> None:
        """Take a snapshot for the pseudo-gradient, on all GPUs."""
        self._all("take_snapshot_part")
        self._sample_shares.take_snapshot()

    def pseudo_gradient(self, microbatches: int | None = None) -> Tensor:
        """Weighted pseudo-gradient of the whole stage."""
        weight = self._sample_shares.pseudo_gradient_weight(self._step, microbatches)
        self._all("write_pseudo_gradient", weight)
        if self._mean is not self.exchanged:
            self._mean.copy_(self.exchanged)
        self._outer_step_pending = True
        return self._mean

    def outer_step(self) -> None:
        """Apply the outer step with the mean pseudo-gradient, on all GPUs."""
        if self._mean is not self.exchanged:
            self.exchanged.copy_(self._mean)
        self._all("outer_step_part")
        self._sample_shares.commit_outer_step()
        self._outer_step_pending = False

    def evaluate_stage(self, inputs: Tensor) -> Tensor:
        """Activations after the stage."""
        self.group.send_command("evaluate_stage_part")
        return self.evaluate_stage_part(inputs)

    def evaluate_loss(self, activations: Tensor, targets: Tensor) -> Tensor:
        """Loss, summed over tokens."""
        self.group.send_command("evaluate_loss_part")
        return self.evaluate_loss_part(activations, targets)

    def global_parameters(self) -> Mapping[str, Tensor]:
        """Parameters of the whole stage, in memory that the next exchange replaces."""
        self._gather(PARAMETER if self.outer is None else outer.PARAMETER)
        return self._whole

    def host_state_dict(self) -> dict[str, Tensor]:
        """`state_dict`, which is a copy in host memory."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the parameters and moments of the whole stage, as of a device with one GPU."""
        tensors: dict[str, Tensor] = {}
        for field in FIELDS:
            if self._fields(field):
                self._gather(field)
                tensors |= {_key(field, name): t.clone() for name, t in self._whole.items()}
        # all parameters have taken as many steps
        first: Mapping[str, Any] = next(iter(self.optimizer.state.values()), {})
        if "step" in first:
            step = torch.as_tensor(first["step"]).cpu()
            tensors |= {f"optimizer/step/{name}": step.clone() for name in self._whole}
        if self._scaler is not None:
            tensors |= self._scaler.state_dict()
        if self._outer_step_pending:
            tensors |= {outer.MEAN + name: t.clone() for name, t in self._named_mean().items()}
        return tensors

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict` of the whole stage, on all GPUs."""
        steps = [int(v) for key, v in state_dict.items() if key.startswith("optimizer/step/")]
        for field in FIELDS:
            if not any(key.startswith(_key(field, "")) for key in state_dict):
                continue
            for name, whole in self._whole.items():
                whole.copy_(state_dict[_key(field, name)])
            self._spread(field, steps[0] if steps else 0)
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict)
        if self.outer is None:
            return
        # with a pending outer step, nothing was done since the snapshot
        self._all("take_snapshot_part")
        self._outer_step_pending = any(name.startswith(outer.MEAN) for name in state_dict)
        if self._outer_step_pending:
            for name, part in self._named_mean().items():
                part.copy_(state_dict[outer.MEAN + name])

    def stop(self) -> None:
        """End the processes of the other GPUs."""
        self.group.send_command()

    def _spread_loaded(self) -> None:
        """Let all GPUs begin with the weights in the exchanged vector."""
        self._spread(PARAMETER)
        if self.outer is not None:
            self._spread(outer.PARAMETER)
            self._all("take_snapshot_part")

    def _named_mean(self) -> dict[str, Tensor]:
        """Views of the mean pseudo-gradient, by name."""
        parts = torch.split(self._mean, [whole.numel() for whole in self._whole.values()])
        named = zip(self._whole.items(), parts, strict=True)
        return {name: part.view_as(whole) for (name, whole), part in named}

    def _gather(self, field: str) -> None:
        """Let all GPUs write a field of the state into the exchanged vector."""
        self._all("write_state", field)

    def _spread(self, field: str, optimizer_steps: int = 0) -> None:
        """Let all GPUs read a field of the state from the exchanged vector."""
        self._all("read_state", field, optimizer_steps)

    def _all(self, name: str, *arguments: Any) -> Any:
        """Call a method on all GPUs."""
        self.group.send_command(name, *arguments)
        return getattr(self, name)(*arguments)


def _key(field: str, name: str) -> str:
    """The name of a parameter's field in checkpoints."""
    if field in MOMENTS:
        return f"optimizer/{field}/{name}"
    return f"{PARAMETER}/{name}" if field == PARAMETER else field + name
