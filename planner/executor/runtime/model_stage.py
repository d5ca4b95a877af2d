"""One rank's part of the model: its module, its data and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from planner.executor.comm.device_backend import HOST, DeviceBackend, make_backend
from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.comm.p2p_schedule import Message
from planner.executor.data.data_config import SYNTHETIC, DataConfig
from planner.executor.data.microbatches import Microbatches, make_microbatches
from planner.executor.runtime.loss_scaler import LossScaler
from planner.executor.runtime.optimizer import OptimizerConfig, state_tensors
from planner.executor.runtime.outer_optimizer import (
    MEAN,
    CountedSampleShares,
    OuterSGD,
    PlannedSampleShares,
)
from planner.executor.runtime.stage_module import LoadWeights, StageModule
from planner.executor.runtime.stage_operations import StageOperations
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule


class ModelStage(StageRuntime):
    """Trains one rank's part of the model: a `StageRuntime`; the module itself is `StageModule`.

    Parameters
    ----------
    optimizer_config
        Optimizer settings.
    data
        Training data.
    load_weights
        Sets the initial values of layers ``start`` to ``stop``, by name; None to initialise from
        the plan's seed.
    count_microbatches
        Whether plans with fewer devices may follow, so that microbatches are counted.
    backend
        Backend of the device; None to create it.
    compiled
        Whether layers and head are compiled.
    module
        The module; None to build it.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        device: torch.device,
        optimizer_config: OptimizerConfig,
        *,
        data: DataConfig = SYNTHETIC,
        load_weights: LoadWeights | None = None,
        count_microbatches: bool = False,
        backend: DeviceBackend | None = None,
        compiled: bool = False,
        module: StageModule | None = None,
    ) -> None:
        # first, since it selects the GPU
        self.device, self.backend = device, backend or make_backend(device)
        if module is None:
            module = StageModule(plan, rank, device, load_weights=load_weights, compiled=compiled)
        self.module = module
        w = plan.workload
        self._scaler = LossScaler(w) if w.precision.scales_loss else None
        reads_data = module.stage.stem is not None or module.head is not None
        self.data: Microbatches | None = make_microbatches(plan, data) if reads_data else None
        recomputed = plan.recompute[plan.stage_of[rank]]
        self.operations = StageOperations(
            module, w, self.backend, self.data, self._scaler, device, recomputed=recomputed
        )
        self.parameters = list(module.parameters())
        self.optimizer_config = optimizer_config
        self.optimizer = self._make_optimizer(plan, rank)
        self.tied_numel, vector = module.tied_numel, module.gradients
        # if outer steps are delayed, gradients are computed while the host's vector is averaged
        separate = self.backend is not HOST or plan.sync.delayed
        shape, dtype = tuple(vector.shape), vector.dtype
        make_host = partial(self.backend.host_buffer, shape, dtype) if separate else None
        self.gradients = GradientBuffer(vector, make_host)
        counted = count_microbatches or plan.wiring is Wiring.STOCHASTIC
        self._sample_shares = (CountedSampleShares if counted else PlannedSampleShares)(plan, rank)
        self.outer: OuterSGD | None = None
        if plan.sync.local_steps:
            self.outer = OuterSGD(plan, dict(module.named_parameters()))
        self._outer_step_pending = False
        self._step = 0

    def _make_optimizer(self, plan: TrainingPlan, rank: int) -> torch.optim.Optimizer:
        return self.optimizer_config.make(self.parameters)

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters, rounded weights, gradients, moments and activations.

        Activations are those of the counted step, on the CPU, without temporaries of operations.
        """
        tensors = [*self._state_tensors, self.gradients.device_tensor]
        if self.backend is HOST and self.gradients.host_tensor is not self.gradients.device_tensor:
            tensors.append(self.gradients.host_tensor)
        return sum(tensor.nbytes for tensor in tensors) + self.operations.saved_tensors.peak_bytes

    @property
    def _state_tensors(self) -> list[Tensor]:
        """Parameters, rounded weights, moments and state of the outer optimizer."""
        outer = [] if self.outer is None else self.outer.tensors
        return [*self.module.weights, *state_tensors(self.optimizer), *outer]

    def begin(self, step: int, schedule: Schedule) -> None:
        """Zero gradients at the start of a step."""
        self._step = step
        self._sample_shares.begin(schedule)
        self.gradients.writable_device_tensor().zero_()
        self.operations.begin(step)

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Run F, H or B; returns activations or their gradient as a message."""
        output = self.operations.run_op(kind, microbatch, received)
        if kind == "B":
            self._sample_shares.count_microbatch()
        return output

    def loss(self) -> float | None:
        """Loss of the step so far."""
        return self.operations.loss()

    def buffer(self, message: Message) -> Tensor:
        """Memory for a message with activations or their gradient."""
        return self.backend.host_buffer(*self.operations.activation_codec.message)

    def unscale(self) -> None:
        """Divide the step's gradients by the loss scale, before they are averaged.

        So codecs and clipping have the same values to work on as in other formats.
        """
        if self._scaler is not None:
            self.gradients.device_tensor.mul_(1 / self._scaler.scale)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None without loss scaling."""
        return None if self._scaler is None else self._scaler.scale

    def update(self, norm: float | None = None) -> None:
        """Take an optimizer step, with averaged gradients or with this device's own.

        With loss scaling, only if the global norm is finite: the same on all ranks.
        """
        if self._scaler is not None:
            assert norm is not None
            overflow = not math.isfinite(norm)
            self._scaler.update(overflow=overflow)
            if overflow:
                return
        scale = None
        if self.outer is not None:
            scale = self._sample_shares.gradient_scale(self._step)
            self._sample_shares.commit_step()
            if scale is None:
                return  # without samples there is no gradient
        self._apply_gradients(scale)

    def _apply_gradients(self, scale: float | None) -> None:
        """Take an optimizer step with the gradients, times a factor."""
        gradients = self.gradients.to_device()
        if scale is not None:
            gradients.mul_(scale)
        self.optimizer_config.set_lr(self.optimizer, self._step)
        self.optimizer.step()
        self._after_update()

    def set_plan(self, plan: TrainingPlan, rank: int) -> None:
        """Continue with another plan of the same stage, after devices were lost or joined."""
        self._sample_shares.set_plan(plan, rank)

    def pseudo_gradient_microbatches(self) -> int:
        """Microbatches of the pseudo-gradient, where they are counted."""
        return self._sample_shares.pseudo_gradient_microbatches

    def take_snapshot(self) -> None:
        """Take a snapshot for the pseudo-gradient."""
        assert self.outer is not None
        self.outer.take_snapshot()
        self._sample_shares.take_snapshot()

    def pseudo_gradient(self, microbatches: int | None = None) -> Tensor:
        """Weighted pseudo-gradient: change of the parameters since the last outer step."""
        assert self.outer is not None
        # the gradient vector is free now
        self.outer.pseudo_gradient(
            self.gradients.writable_device_tensor(),
            self._sample_shares.pseudo_gradient_weight(self._step, microbatches),
        )
        self._outer_step_pending = True
        return self.gradients.to_host()

    def outer_step(self) -> None:
        """Apply the outer step with the mean pseudo-gradient."""
        assert self.outer is not None
        self.gradients.restore_from_host()
        self.outer.step(self.gradients.device_tensor)
        self._sample_shares.commit_outer_step()
        self._outer_step_pending = False
        self._after_update()

    def evaluate_stage(self, inputs: Tensor) -> Tensor:
        """Activations after the stage, with no backward pass to follow."""
        with torch.no_grad():
            return self.module.run_stage(inputs)

    def evaluate_loss(self, activations: Tensor, targets: Tensor) -> Tensor:
        """Loss of the head, summed over tokens, with no backward pass to follow."""
        with torch.no_grad():
            return self.module.run_loss(activations, targets)

    def seek(self, position: list[int]) -> None:
        """Continue from a position in the data."""
        assert self.data is not None
        self.data.seek(position)

    def host_state_dict(self) -> dict[str, Tensor]:
        """A copy of `state_dict` in host memory."""
        return {name: value.to("cpu", copy=True) for name, value in self.state_dict().items()}

    @property
    def parameter_names(self) -> list[str]:
        """Names of its parameters."""
        return [name for name, _ in self.module.named_parameters()]

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and optimizer states: everything needed to continue training.

        With a pending outer step also its mean, which must be known by now.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter
            for field, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{field}/{name}"] = torch.as_tensor(value)
        if self._scaler is not None:
            tensors |= self._scaler.state_dict()
        if self.outer is None:
            return tensors
        mean = self.outer.named(self.gradients.host_tensor) if self._outer_step_pending else {}
        tensors |= self._sample_shares.state_dict()
        return (
            tensors | self.outer.state_dict() | {MEAN + name: part for name, part in mean.items()}
        )

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict` of the same part of the model."""
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state_dict[f"parameter/{name}"])
                end = f"/{name}"
                self.optimizer.state[parameter] = {
                    # a step count, not of the parameter's shape, stays on the CPU unless fused
                    key.split("/")[1]: value.to(parameter.device)
                    if value.dim() or is_fused
                    else value
                    for key, value in state_dict.items()
                    if key.startswith("optimizer/") and key.endswith(end)
                }
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict)
        if self.outer is not None:
            self.outer.load_state_dict(state_dict)
            self._sample_shares.load_state_dict(state_dict)
            self._outer_step_pending = any(name.startswith(MEAN) for name in state_dict)
            if self._outer_step_pending:
                for name, part in self.outer.named(self.gradients.host_tensor).items():
                    part.copy_(state_dict[MEAN + name])
        self.module.cast_weights()

    def joining_state(self) -> dict[str, Tensor]:
        """What a device that joins the stage receives from another one."""
        return self.state_dict()

    def load_joining_state(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `joining_state`."""
        self.load_state_dict(state_dict)

    def restart_from_global(self) -> None:
        """Set parameters to those of the last outer step, without later local steps.

        For state that was transferred from a device of another region.
        """
        with torch.no_grad():
            global_parameters = self.global_parameters()
            for name, parameter in self.module.named_parameters():
                parameter.copy_(global_parameters[name])
        self._sample_shares.reset_counts()
        if self.outer is not None:
            self.outer.take_snapshot()
        self._after_update()

    def global_parameters(self) -> Mapping[str, Tensor]:
        """Parameters common to all devices of the stage: current ones, or those of the last outer
        step."""
        if self.outer is None:
            return dict(self.module.named_parameters())
        return self.outer.global_parameters()

    def _after_update(self) -> None:
        self.module.cast_weights()
        self.backend.wait_for_event(self.backend.record_event())
