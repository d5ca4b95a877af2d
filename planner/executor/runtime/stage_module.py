"""Layers of one stage, and its head, in the plan's precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.executor.runtime.model import (
    EMBEDDING,
    PROJECTION,
    Head,
    Stage,
    Stem,
    build_head,
    build_stage,
)
from planner.executor.runtime.precision import TORCH_DTYPES, LowPrecisionModule, set_precision
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.validation import contradictions
from planner.workload.layers import Architecture

META = torch.device("meta")
LoadWeights = Callable[[Architecture, int, int, Mapping[str, Tensor]], None]
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
    w, formats = plan.workload, plan.workload.precision
    message_bytes = float(arch.sequence * arch.hidden * formats.messages.bytes)
    sizes = {
        "layers[0].output_bytes": (
            w.layers[0].output_bytes,
            message_bytes * w.boundary_codec.wire_ratio(formats.messages.bytes),
        ),
        "gradient_bytes_per_parameter": (
            w.gradient_bytes_per_parameter,
            formats.gradients.bytes,
        ),
        "state_bytes_per_parameter": (
            w.state_bytes_per_parameter,
            formats.state_bytes + (w.outer_state_bytes if plan.sync.local_steps else 0.0),
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


def tied_numel(plan: TrainingPlan, stage: int) -> int:
    """Number of a stage's gradients that are tied to another stage's."""
    shares = plan.averages_tied and stage in (0, plan.head_stage)
    return plan.workload.tied_parameters if shares else 0


def averaging_order(names: Sequence[str], *, tied: bool) -> list[str]:
    """Names of a stage's parameters, those first that are tied to another stage's."""
    first = [EMBEDDING if EMBEDDING in names else PROJECTION] if tied else []
    return [*first, *(name for name in names if name not in first)]


def whole_parameters(
    plan: TrainingPlan, stage: int, device: torch.device = META
) -> dict[str, nn.Parameter]:
    """Initial parameters of a stage by name, in the order of averaging; by default their shapes."""
    arch = require_executable(plan)
    layers = build_stage(arch, *plan.stage_layers[stage], plan.seed, device)
    parts: dict[str, nn.Module] = {"stage": layers}
    if stage == plan.head_stage:
        parts["head"] = build_head(arch, plan.seed, layers.stem, device)
    named = dict(nn.ModuleDict(parts).named_parameters())
    order = averaging_order(list(named), tied=tied_numel(plan, stage) > 0)
    return {name: named[name] for name in order}


class StageModule(nn.Module):
    """The module of one rank.

    Parameters
    ----------
    load_weights
        Sets the initial values of layers ``start`` to ``stop``, by name; None to initialise from
        the plan's seed.
    compiled
        Whether layers and head are compiled.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        device: torch.device,
        *,
        load_weights: LoadWeights | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        arch = self._arch = require_executable(plan)
        set_precision(plan, device)
        self.dtype = TORCH_DTYPES[plan.workload.precision.compute]
        layers = plan.stage_layers[plan.stage_of[rank]]
        self.stage = self._build_stage(*layers, plan.seed, device)
        self.head: Head | None = None
        if has_head(plan, rank):
            self.head = self._build_head(plan.seed, device)
        if load_weights is not None:
            load_weights(arch, *layers, dict(self.named_parameters()))
        # gradients are views of one vector, so that averaging needs no copy
        self.tied_numel = tied_numel(plan, plan.stage_of[rank])
        self.gradients = _flatten_gradients([p for _, p in self.named_in_averaging_order()])
        if plan.shards_optimizer and self.dtype is not torch.float32:
            self._keep_rounded_only()
        self.low_precision_stage = LowPrecisionModule(self.stage, self.dtype)
        self.low_precision_head = (
            None if self.head is None else LowPrecisionModule(self.head, self.dtype)
        )
        for part in self._low_precision_parts if compiled else ():
            part.compile()

    def _build_stage(self, start: int, stop: int, seed: int, device: torch.device) -> Stage:
        return build_stage(self._arch, start, stop, seed, device)

    def _build_head(self, seed: int, device: torch.device) -> Head:
        return build_head(self._arch, seed, self.stage.stem, device)

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and rounded weights."""
        return [*self.parameters(), *(w for part in self._low_precision_parts for w in part.cast)]

    def cast_weights(self) -> None:
        """Update the rounded weights from the parameters."""
        for part in self._low_precision_parts:
            part.cast_weights()

    def run_stage(self, inputs: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Activations after the stage or some of its layers, from tokens or activations."""
        return self.low_precision_stage(inputs, start, stop)

    def run_loss(self, activations: Tensor, targets: Tensor) -> Tensor:
        """Loss of the head, summed over tokens."""
        assert self.low_precision_head is not None
        losses = [self.low_precision_head(*chunk) for chunk in self._chunks(activations, targets)]
        return torch.stack(losses).sum()

    def head_loss_and_gradient(
        self, received: Tensor, targets: Tensor, batch_tokens: int, loss_scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Run head and loss forward and backward, chunk by chunk.

        Returns
        -------
        tuple[Tensor, Tensor]
            The microbatch's part of the mean loss, and the scaled gradient of the activations.
        """
        assert self.low_precision_head is not None
        losses, gradients = [], []
        for part, targets_of_part in self._chunks(received, targets):
            activations = part.detach().requires_grad_()
            loss = self.low_precision_head(activations, targets_of_part) / batch_tokens
            scale = None if loss_scale is None else torch.full_like(loss, loss_scale)
            # frees the logits before those of the next chunk are computed
            torch.autograd.backward(loss, scale)
            assert activations.grad is not None
            losses.append(loss.detach())
            gradients.append(activations.grad)
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
        return torch.stack(losses).double().sum(), gradient

    @property
    def _low_precision_parts(self) -> list[LowPrecisionModule]:
        parts = (self.low_precision_stage, self.low_precision_head)
        return [part for part in parts if part is not None]

    def _chunks(self, activations: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Activations and targets, split into chunks of `Architecture.head_tokens` tokens."""
        size = self._arch.head_tokens(len(activations))
        parts = (torch.split(tensor, size, dim=1) for tensor in (activations, targets))
        return zip(*parts, strict=True)

    def named_in_averaging_order(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters by name, tied ones first."""
        named = dict(self.named_parameters())
        names = averaging_order(list(named), tied=self.tied_numel > 0)
        return [(name, named[name]) for name in names]

    def _keep_rounded_only(self) -> None:
        """Give parameters that operations use in rounded form the memory of their gradients.

        There they are after a step, until the next one computes gradients.
        """
        used = {id(p) for m in self.stage.modules() if isinstance(m, Stem) for p in m.parameters()}
        for parameter in self.parameters():
            if id(parameter) not in used:
                assert parameter.grad is not None
                parameter.grad.copy_(parameter.detach())
                parameter.data = parameter.grad


def _flatten_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One vector of which all gradients are views, so that averaging needs no copy."""
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
