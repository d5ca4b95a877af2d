"""One rank's part of the model: its stage, its head if it has one, its data and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planner.executor.comm.device_backend import HOST, DeviceBackend, make_backend
from planner.executor.comm.p2p_schedule import Message
from planner.executor.data.data_config import SYNTHETIC, DataConfig
from planner.executor.data.microbatches import Microbatches, make_microbatches
from planner.executor.runtime.activation_codec import ActivationCodec, require_planned_sizes
from planner.executor.runtime.loss_scaler import LossScaler
from planner.executor.runtime.model import EMBEDDING, PROJECTION, Head, build_head, build_stage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.outer_optimizer import (
    MEAN,
    CountedWeights,
    OuterSGD,
    PlannedWeights,
    SampleWeights,
)
from planner.executor.runtime.precision import TORCH_DTYPES, LowPrecisionModule, set_precision
from planner.executor.runtime.saved_tensors import SavedTensors
from planner.training_plan.choices import Wiring
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.validation import contradictions
from planner.workload.layers import Architecture

LoadWeights = Callable[[Architecture, int, int, Mapping[str, nn.Parameter]], None]
"""Sets parameters of layers ``start`` to ``stop``, by name."""


def require_executable(plan: TrainingPlan) -> Architecture:
    """Refuse plans that the executor cannot run."""
    arch = plan.workload.architecture
    if arch is None or arch.unexecuted:
        raise PlanError(plan.workload.unexecuted)
    if arch.tied and plan.head_stage != 0 and not plan.averages_tied:
        remedy = "--head first or one stage" if plan.sync.local_steps else "this release"
        raise PlanError(
            "averaging.tied: head and embedding share a matrix and are on two stages that do not "
            f"average it; plan again with {remedy}"
        )
    require_planned_sizes(plan.workload)
    sizes = {
        "gradient_bytes_per_parameter": (
            plan.workload.gradient_bytes_per_parameter,
            plan.workload.precision.gradients.bytes,
        ),
        "state_bytes_per_parameter": (
            plan.workload.state_bytes_per_parameter,
            plan.workload.precision.state_bytes
            + (plan.workload.outer_state_bytes if plan.sync.local_steps else 0.0),
        ),
    }
    for field, (planned, actual) in sizes.items():
        if planned != actual:
            raise PlanError(
                f"workload.{field}: the plan was priced for {planned:g}, in its precision the "
                f"executor has {actual:g}; leave it at that and plan again"
            )
    # load_plan validates files; plans made in memory are validated here
    for problem in contradictions(plan):
        raise PlanError(problem)
    return arch


def has_head(plan: TrainingPlan, rank: int) -> bool:
    """Whether the stage of a rank runs head and loss in any schedule."""
    group = plan.assignment.groups[plan.stage_of[rank]]
    return any(kind == "H" for s in plan.schedules for d in group for kind, _ in s.order[d])


def tied_values(plan: TrainingPlan, stage: int) -> int:
    """Number of a stage's gradients that are tied to another stage's."""
    shares = plan.averages_tied and stage in (0, plan.head_stage)
    return plan.workload.tied_parameters if shares else 0


class _MicrobatchActivations(NamedTuple):
    """Tensors of a microbatch between F and B: input and output of the stage."""

    received: Tensor | None
    output: Tensor | None


class ModelStage:
    """Runs one rank's part of the model; a `StageRuntime`, not a module of PyTorch.

    Parameters
    ----------
    optimizer_config
        Optimizer settings.
    data
        Training data.
    load_weights
        Sets the initial values of layers ``start`` to ``stop``, by name; None to initialise from
        the plan's seed.
    count_samples
        Whether plans with fewer devices may follow, so that samples are counted.
    backend
        Backend of the device; None to create it.
    compiled
        Whether layers and head are compiled.
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
        count_samples: bool = False,
        backend: DeviceBackend | None = None,
        compiled: bool = False,
    ) -> None:
        arch = self._arch = require_executable(plan)
        w = plan.workload
        set_precision(plan, device)
        self.device, self.backend = device, backend or make_backend(device)
        self.dtype = TORCH_DTYPES[w.precision.compute]
        self._scaler = LossScaler(w) if w.precision.scales_loss else None
        self.activation_codec = ActivationCodec(w)
        stage = plan.stage_of[rank]
        self.stage = build_stage(arch, *plan.stage_layers[stage], plan.seed).to(device)
        self.recompute = plan.recompute[stage]
        self.head: Head | None = None
        if has_head(plan, rank):
            self.head = build_head(arch, plan.seed, self.stage.stem).to(device)
        reads_data = self.stage.stem is not None or self.head is not None
        self.data: Microbatches | None = make_microbatches(plan, data) if reads_data else None
        self.batch_tokens = w.batch_samples * arch.sequence
        if load_weights is not None:
            load_weights(arch, *plan.stage_layers[stage], self.named_parameters())
        self.parameters = list(self.named_parameters().values())
        self.low_precision_stage = LowPrecisionModule(self.stage, self.dtype)
        self.low_precision_head = (
            None if self.head is None else LowPrecisionModule(self.head, self.dtype)
        )
        for part in (self.low_precision_stage, self.low_precision_head) if compiled else ():
            if part is not None:
                part.compile()
        self.optimizer_config = optimizer_config
        self.optimizer = optimizer_config.make(self.parameters)
        self.tied_values = tied_values(plan, stage)
        self._gradients = _flatten_gradients(self._parameters_in_averaging_order())
        self._sample_weights: SampleWeights = PlannedWeights(plan, rank)
        if count_samples or plan.wiring is Wiring.STOCHASTIC:
            self._sample_weights = CountedWeights(plan, rank)
        self._gradients_on_host = False
        self.outer = OuterSGD(plan, self.named_parameters()) if plan.sync.local_steps else None
        self.saved_tensors = SavedTensors()
        self._counts_memory = device.type == "cpu"
        self._delayed = plan.sync.delayed
        self._outer_step_pending = False
        self._step = 0
        self._loss: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters, rounded weights, gradients, moments and activations.

        Activations are those of the counted step, on the CPU, without temporaries of operations.
        """
        moments = [torch.as_tensor(v) for s in self.optimizer.state.values() for v in s.values()]
        outer = [] if self.outer is None else self.outer.tensors
        tensors = [*self.weights, self._gradients, *moments, *outer]
        if self.backend is HOST and self._host is not self._gradients:
            tensors.append(self._host)
        return sum(tensor.nbytes for tensor in tensors) + self.saved_tensors.peak_bytes

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and rounded weights."""
        modules = (self.low_precision_stage, self.low_precision_head)
        return [*self.parameters, *(w for part in modules if part for w in part.cast)]

    def begin(self, step: int, schedule: Schedule) -> None:
        """Zero gradients at the start of a step."""
        # count one step only, to avoid the overhead
        self._counts_memory &= not self.saved_tensors.peak_bytes
        self._step = step
        self._activations: dict[int, _MicrobatchActivations] = {}
        self._head_gradients: dict[int, Tensor] = {}
        self._sample_weights.begin(schedule)
        self._tokens: dict[int, Tensor] = {}
        self._loss = None
        if self.head is not None:
            self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._gradients_on_host = False
        self._gradients.zero_()
        self.backend.begin()

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Run F, H or B; returns activations or their gradient as a message."""
        decoded = None if received is None else self.decode_message(kind, received)
        if not self._counts_memory:
            return self._run_and_encode(kind, microbatch, decoded)
        with self.saved_tensors.track(self.weights):
            output = self._run_and_encode(kind, microbatch, decoded)
        in_flight = [
            t for activations in self._activations.values() for t in activations if t is not None
        ]
        self.saved_tensors.update([*in_flight, *self._head_gradients.values()])
        return output

    def _run_and_encode(self, kind: str, microbatch: int, decoded: Tensor | None) -> Tensor:
        if kind == "F":
            return self.activation_codec.encode_message(
                self._forward(microbatch, decoded), gradient=False
            )
        output = (self._run_head if kind == "H" else self._backward)(microbatch, decoded)
        return self.activation_codec.encode_message(output, gradient=True)

    def decode_message(self, kind: str, message: Tensor) -> Tensor:
        """Decode the message that an operation needs."""
        on_device = self.backend.to_device(message)
        return self.activation_codec.decode_message(on_device, self.dtype, gradient=kind == "B")

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """``int64[samples, sequence + 1]``: a microbatch and, one further, its targets."""
        assert self.data is not None
        return self.backend.to_device(self.data.tokens(step, microbatch))

    def buffer(self, message: Message) -> Tensor:
        """Memory for a message with activations or their gradient."""
        return self.backend.host_buffer(*self.activation_codec.message)

    def gradients(self, *, on_device: bool | None = None) -> Tensor:
        """All gradients as one vector."""
        if on_device is not None and on_device is self._gradients_on_host:
            source, target = (
                (self._host, self._gradients) if on_device else (self._gradients, self._host)
            )
            if target is not source:
                target.copy_(source)
            self._gradients_on_host = not on_device
        return self._host if self._gradients_on_host else self._gradients

    def unscale(self) -> None:
        """Divide the step's gradients by the loss scale, before they are averaged.

        So codecs and clipping have the same values to work on as in other formats.
        """
        if self._scaler is not None:
            self._gradients.mul_(1 / self._scaler.scale)

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
            scale = self._sample_weights.gradient_scale(self._step)
            self._sample_weights.commit_step()
            if scale is None:
                return  # without samples there is no gradient
        if self._gradients_on_host:
            self._copy_gradients_to_device()
        if scale is not None:
            self._gradients.mul_(scale)
        self.optimizer_config.set_lr(self.optimizer, self._step)
        self.optimizer.step()
        self._after_update()

    def set_plan(self, plan: TrainingPlan, rank: int) -> None:
        """Continue with another plan of the same stage, after devices were lost or joined."""
        self._sample_weights.set_plan(plan, rank)

    def pseudo_gradient_microbatches(self) -> int:
        """Microbatches of the pseudo-gradient, where they are counted."""
        return self._sample_weights.pseudo_gradient_microbatches

    def take_snapshot(self) -> None:
        """Take a snapshot for the pseudo-gradient."""
        assert self.outer is not None
        self.outer.take_snapshot()
        self._sample_weights.take_snapshot()

    def pseudo_gradient(self, samples: int | None = None) -> Tensor:
        """Weighted pseudo-gradient: change of the parameters since the last outer step."""
        assert self.outer is not None
        # the gradient vector is free now
        self.outer.pseudo_gradient(
            self._gradients, self._sample_weights.pseudo_gradient_weight(self._step, samples)
        )
        self._outer_step_pending = True
        self._gradients_on_host = False
        return self.gradients(on_device=False)

    def outer_step(self) -> None:
        """Apply the outer step with the mean pseudo-gradient."""
        assert self.outer is not None
        self._copy_gradients_to_device()
        self.outer.step(self._gradients)
        self._sample_weights.commit_outer_step()
        self._outer_step_pending = False
        self._after_update()

    def cast_weights(self) -> None:
        """Update the rounded weights from the parameters."""
        for part in (self.low_precision_stage, self.low_precision_head):
            if part is not None:
                part.cast_weights()

    def loss(self) -> float | None:
        """Loss of the step so far."""
        return None if self._loss is None else float(self._loss)

    def state(self) -> dict[str, Tensor]:
        """Parameters and optimizer states: everything needed to continue training.

        With a pending outer step also its mean, which must be known by now.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters().items():
            tensors[f"parameter/{name}"] = parameter
            for field, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{field}/{name}"] = torch.as_tensor(value)
        if self._scaler is not None:
            tensors |= self._scaler.state()
        if self.outer is None:
            return tensors
        mean = self.outer.named(self._host) if self._outer_step_pending else {}
        tensors |= self._sample_weights.state()
        return tensors | self.outer.state() | {MEAN + name: part for name, part in mean.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state` of the same part of the model."""
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        with torch.no_grad():
            for name, parameter in self.named_parameters().items():
                parameter.copy_(state[f"parameter/{name}"])
                end = f"/{name}"
                self.optimizer.state[parameter] = {
                    # a step count, not of the parameter's shape, stays on the CPU unless fused
                    key.split("/")[1]: value.to(parameter.device)
                    if value.dim() or is_fused
                    else value
                    for key, value in state.items()
                    if key.startswith("optimizer/") and key.endswith(end)
                }
        if self._scaler is not None:
            self._scaler.load_state(state)
        if self.outer is not None:
            self.outer.load_state(state)
            self._sample_weights.load_state(state)
            self._outer_step_pending = any(name.startswith(MEAN) for name in state)
            for name, part in (
                self.outer.named(self._host).items() if self._outer_step_pending else ()
            ):
                part.copy_(state[MEAN + name])
        self.cast_weights()

    def restart_from_global(self) -> None:
        """Set parameters to those of the last outer step, without later local steps.

        For state that was transferred from a device of another region.
        """
        with torch.no_grad():
            for name, value in self.global_parameters().items():
                self.named_parameters()[name].copy_(value)
        self._sample_weights.reset_counts()
        if self.outer is not None:
            self.outer.take_snapshot()
        self._after_update()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name; a tied matrix once."""
        return dict(self._parameters_by_name)

    @cached_property
    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        modules = nn.ModuleDict({"stage": self.stage})
        if self.head is not None:
            modules["head"] = self.head
        return dict(modules.named_parameters())

    def _parameters_in_averaging_order(self) -> list[nn.Parameter]:
        """All parameters, tied ones first."""
        if not self.tied_values:
            return self.parameters
        named_parameters = self.named_parameters()
        tied = named_parameters[EMBEDDING if EMBEDDING in named_parameters else PROJECTION]
        return [tied, *(p for p in self.parameters if p is not tied)]

    def global_parameters(self) -> Mapping[str, Tensor]:
        """Parameters common to all devices of the stage: current ones, or those of the last outer
        step."""
        return self.named_parameters() if self.outer is None else self.outer.global_parameters()

    @cached_property
    def _host(self) -> Tensor:
        """Host memory for averaging, allocated at first use."""
        if self.backend is not HOST:
            return self.backend.host_buffer(tuple(self._gradients.shape), self._gradients.dtype)
        # if delayed, gradients are computed while it is averaged
        return self._gradients.clone() if self._delayed else self._gradients

    def _copy_gradients_to_device(self) -> None:
        if self._host is not self._gradients:
            self._gradients.copy_(self._host)

    def _after_update(self) -> None:
        self.cast_weights()
        self.backend.wait_for_event(self.backend.record_event())

    def _forward(self, microbatch: int, received: Tensor | None) -> Tensor:
        input_leaf = None if received is None else received.requires_grad_()
        inputs = input_leaf
        if inputs is None:
            tokens = self.tokens(self._step, microbatch)
            inputs = tokens[:, :-1]
            if self.head is not None:
                # the tokens are targets, too
                self._tokens[microbatch] = tokens
        with torch.set_grad_enabled(not self.recompute):
            output = self.run_stage(inputs)
        # without a graph only H needs the output
        needed = not self.recompute or self.head is not None
        self._activations[microbatch] = _MicrobatchActivations(
            input_leaf, output if needed else None
        )
        return output.detach()

    def run_stage(self, inputs: Tensor) -> Tensor:
        """Activations after the stage, from tokens or activations."""
        return self.low_precision_stage(inputs)

    def run_loss(self, activations: Tensor, targets: Tensor) -> Tensor:
        """Loss of the head, summed over tokens."""
        assert self.low_precision_head is not None
        losses = [self.low_precision_head(*chunk) for chunk in self._chunks(activations, targets)]
        return torch.stack(losses).sum()

    def _chunks(self, activations: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Activations and targets, split into chunks of `Architecture.head_tokens` tokens."""
        size = self._arch.head_tokens(len(activations))
        parts = (torch.split(tensor, size, dim=1) for tensor in (activations, targets))
        return zip(*parts, strict=True)

    def _run_head(self, microbatch: int, received: Tensor | None) -> Tensor:
        microbatch_activations = self._activations[microbatch]
        is_last_stage = received is None
        if received is None:
            assert microbatch_activations.output is not None
            received = microbatch_activations.output.detach()
        if self.recompute:
            self._activations[microbatch] = microbatch_activations._replace(output=None)
        tokens = self._tokens.pop(microbatch, None)
        targets = (self.tokens(self._step, microbatch) if tokens is None else tokens)[:, 1:]
        loss, gradient = self.head_loss_and_gradient(received, targets)
        assert self._loss is not None
        self._loss += loss
        if is_last_stage:  # B is next here; otherwise the gradient is sent away
            self._head_gradients[microbatch] = gradient
        return gradient

    def head_loss_and_gradient(self, received: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run head and loss forward and backward, chunk by chunk.

        Returns
        -------
        tuple[Tensor, Tensor]
            The microbatch's part of the mean loss, and the gradient of the activations.
        """
        assert self.low_precision_head is not None
        scale = self.loss_scale
        losses, gradients = [], []
        for part, targets_of_part in self._chunks(received, targets):
            activations = part.detach().requires_grad_()
            loss = self.low_precision_head(activations, targets_of_part) / self.batch_tokens
            # frees the logits before those of the next chunk are computed
            torch.autograd.backward(loss, None if scale is None else torch.full_like(loss, scale))
            assert activations.grad is not None
            losses.append(loss.detach())
            gradients.append(activations.grad)
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
        return torch.stack(losses).double().sum(), gradient

    def _backward(self, microbatch: int, received: Tensor | None) -> Tensor:
        input_leaf, output = self._activations.pop(microbatch)
        if self.recompute:
            inputs = (
                self.tokens(self._step, microbatch)[:, :-1] if input_leaf is None else input_leaf
            )
            output = self.run_stage(inputs)
        assert output is not None
        head_gradient = self._head_gradients.pop(microbatch, None)
        gradient = head_gradient if received is None else received
        torch.autograd.backward(output, gradient)
        self._sample_weights.count_microbatch()
        # the first stage sends no gradient
        return (
            output.new_empty(0)
            if input_leaf is None or input_leaf.grad is None
            else input_leaf.grad
        )


def _flatten_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One vector of which all gradients are views, so that averaging needs no copy."""
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
