"""The same training in a single process: what a plan's losses and gradients must equal."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.executor.data.data_config import SYNTHETIC, DataConfig
from planner.executor.data.microbatches import make_microbatches
from planner.executor.runtime.model import build_head, build_stage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.stage_module import require_executable
from planner.network.dtype import Dtype
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.workload import Workload


def train_single(
    plan: TrainingPlan,
    count: int,
    optimizer_config: OptimizerConfig,
    data: DataConfig = SYNTHETIC,
    overflow: int | None = None,
) -> Iterator[tuple[float, list[nn.Parameter]]]:
    """Train the plan's model on the plan's microbatches; yields loss and parameters with gradients.

    Every microbatch goes through the stages of its planned path in that order; what none visits
    in an iteration has a gradient of zero. In bf16, weights of layers and head are rounded where
    they are used, so is what the embedding gives, and what goes from device to device is in the
    format of messages. In fp16 PyTorch's GradScaler scales the loss; in the step ``overflow`` a
    gradient is made infinite.
    """
    arch = require_executable(plan)
    w = plan.workload
    stages = [build_stage(arch, *part, plan.seed) for part in plan.stage_layers]
    head = build_head(arch, plan.seed, stages[0].stem)
    # a tied matrix once
    parameters = list(nn.ModuleList([*stages, head]).parameters())
    optim = optimizer_config.make(parameters)
    batches = make_microbatches(plan, data)
    scaler = torch.amp.GradScaler(
        "cpu", enabled=Dtype.FP16 in (w.precision.compute, w.precision.messages)
    )
    if scaler.is_enabled():
        # as large as if each microbatch's loss were its mean: the batch's is divided by all
        microbatches = w.batch_samples // w.microbatch_samples
        scaler = torch.amp.GradScaler("cpu", 2.0 ** (16 + math.floor(math.log2(microbatches))))
    for step in range(count):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for b, path in enumerate(plan.schedules[plan.cycle[step % len(plan.cycle)]].paths):
            tokens = batches.tokens(step, b)
            x, before = tokens[:, :-1], path[0]
            for d in path:
                x = _sent(x, before, d, plan)
                x = _computed(stages[plan.stage_of[d]], plan, x)
                before = d
            x = _sent(x, before, plan.schedules[0].head_device(b), plan)
            loss = _computed(head, plan, x, tokens[:, 1:]) / (w.batch_samples * arch.sequence)
            torch.autograd.backward(scaler.scale(loss))
            total += float(loss.detach())
        if step == overflow:
            parameters[-1].grad.view(-1)[0] = torch.inf
        scaler.unscale_(optim)
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(parameters, plan.clip)
        yield total, parameters
        optimizer_config.set_lr(optim, step)
        scaler.step(optim)
        scaler.update()


class Lost(NamedTuple):
    """A device, the first step that goes without it, and the first such outer step's step.

    And the first step that it does again, if it comes back.
    """

    device: str
    step: int
    outer: int
    came: int | None = None

    def away(self, step: int, first: int) -> bool:
        """Whether a step from a first one on goes without it."""
        return first <= step and (self.came is None or step < self.came)


def train_apart(
    plan: TrainingPlan, count: int, optimizer_config: OptimizerConfig, lost: Lost | None = None
) -> Iterator[tuple[float, dict[int, list[nn.Parameter]]]]:
    """Train by DiLoCo-SWARM's Algorithm 3; yields loss and parameters by device after each step.

    Every device has a stage and an optimizer of its own; the outer one is PyTorch's. A device's
    loss is divided by the samples that went through it, changes are weighted by such samples.
    Delayed, the outer step follows the inner one of the next step, or the last one. Devices whose
    gradients are averaged in every step are each a model of its own too, with the same gradient.
    What a device that is lost has done since the last outer step is lost with it, but for what such
    others have in their parameters.
    """
    arch = require_executable(plan)
    w, sync = plan.workload, plan.sync
    modules: dict[int, list[nn.Module]] = {}
    for d, stage in plan.stage_of.items():
        built = build_stage(arch, *plan.stage_layers[stage], plan.seed)
        heads = [build_head(arch, plan.seed, built.stem)] if stage == plan.head_stage else []
        modules[d] = [built, *heads]
    held = {d: list(nn.ModuleList(own).parameters()) for d, own in modules.items()}
    inner = {d: optimizer_config.make(own) for d, own in held.items()}
    agreed, outer = [], []
    for group in plan.assignment.groups:
        agreed.append([p.detach().clone().requires_grad_() for p in held[group[0]]])
        rate, momentum = (
            (1.0, 0.0) if sync.outer is None else (sync.outer.learning_rate, sync.outer.momentum)
        )
        outer.append(torch.optim.SGD(agreed[-1], lr=rate, momentum=momentum, nesterov=momentum > 0))
    batches = make_microbatches(plan, SYNTHETIC)
    seen = dict.fromkeys(held, 0)
    left: dict[int, list[Tensor]] = {}
    groups = [g for rounds in plan.averaging for some in rounds for g in some]
    team = {d: (d,) for d in held} | {
        d: g.members for g in groups if g.phase == "within" for d in g.members
    }

    ids = plan.cluster.network.ids
    left_plan = plan if lost is None else remove_devices(plan, [lost.device])
    left_ids = [ids.index(name) for name in left_plan.cluster.network.ids]

    def paths_of(step: int) -> list[tuple[tuple[int, ...], int]]:
        """Devices that a microbatch visits, and the one with its head."""
        own, names = plan, list(range(len(ids)))
        if lost is not None and lost.away(step, lost.step):
            own, names = left_plan, left_ids
        schedule = own.schedules[own.cycle[step % len(own.cycle)]]
        return [
            (tuple(names[d] for d in path), names[schedule.head_device(b)])
            for b, path in enumerate(schedule.paths)
        ]

    def groups_after(step: int) -> list[list[int]]:
        out = lost is not None and lost.away(step, lost.outer)
        gone = {ids.index(lost.device)} if lost is not None and out else set()
        return [[d for d in group if d not in gone] for group in plan.assignment.groups]

    def outer_step() -> None:
        """Take it; where a device has moved on since its change was taken, that is added."""
        for stage, group in enumerate(groups_after(step)):
            outer[stage].step()
            for d in group:
                for k, (new, old) in enumerate(zip(held[d], agreed[stage], strict=True)):
                    if sync.delayed:
                        new.data += old.data - left[d][k]
                    else:
                        new.data.copy_(old.data)
        left.clear()

    def come(d: int) -> None:
        """With what another of its team has, or all agreed on and another's moments."""
        stage = plan.stage_of[d]
        others = [e for e in plan.assignment.groups[stage] if e != d]
        near = [e for e in others if e in team[d]]
        giver = (near or others)[0]
        given = held[giver] if near else agreed[stage]
        for own, other in zip(held[d], given, strict=True):
            own.data.copy_(other.data)
        inner[d].load_state_dict(copy.deepcopy(inner[giver].state_dict()))
        seen[d] = seen[giver] if near else 0

    for step in range(count):
        if lost is not None and step == lost.came:
            come(ids.index(lost.device))
        paths = paths_of(step)
        local = {d: w.microbatch_samples * sum(d in path for path, _ in paths) for d in held}
        for own in held.values():
            for parameter in own:
                parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for b, (path, end) in enumerate(paths):
            tokens = batches.tokens(step, b)
            x, before = tokens[:, :-1], path[0]
            for d in path:
                x = _sent(x, before, d, plan)
                x = _computed(modules[d][0], plan, x)
                before = d
            x = _sent(x, before, end, plan)
            loss = _computed(modules[end][1], plan, x, tokens[:, 1:])
            loss = loss / (w.batch_samples * arch.sequence)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        made = {d: [p.grad.clone() for p in own if p.grad is not None] for d, own in held.items()}
        for d, own in held.items():
            together = sum(local[e] for e in team[d])
            seen[d] += together
            if not together:
                continue
            for k, parameter in enumerate(own):
                total_of = sum((made[e][k] for e in team[d]), torch.zeros_like(parameter))
                parameter.grad = total_of * (w.batch_samples / together)
            optimizer_config.set_lr(inner[d], step)
            inner[d].step()
        if left:
            outer_step()
        if (step + 1) % sync.every_steps == 0:
            for stage, left_of in enumerate(groups_after(step)):
                # one of each team: they have the same, of the samples of all
                holders = sorted({min(set(team[d]) & set(left_of)) for d in left_of})
                samples = sum(seen[d] for d in holders)
                for k, old in enumerate(agreed[stage]):
                    parts = (
                        (old.detach() - held[d][k].detach()) * (seen[d] / samples) for d in holders
                    )
                    old.grad = sum(parts, torch.zeros_like(old))
            left |= {d: [p.detach().clone() for p in own] for d, own in held.items()}
            if not sync.delayed:
                outer_step()
            seen = dict.fromkeys(held, 0)
        yield total, held
    if left:
        outer_step()


FORMATS = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


def _computed(module: nn.Module, plan: TrainingPlan, *inputs: Tensor) -> Tensor:
    """A module's output with its weights in the format of compute."""
    compute = FORMATS[plan.workload.precision.compute]
    stem = getattr(module, "stem", None)
    x = inputs[0]
    if stem is not None:
        x = stem(x)
        module.stem = None
    rounded = {name: p.to(compute) for name, p in module.named_parameters()}
    made: Tensor = torch.func.functional_call(module, rounded, (x.to(compute), *inputs[1:]))
    if stem is not None:
        module.stem = stem
    return made


def _sent(x: Tensor, source: int, destination: int, plan: TrainingPlan) -> Tensor:
    """Activations as another device gets them, and their gradients as they come back."""
    if source == destination or not x.is_floating_point():
        return x
    if plan.workload.boundary_codec is BoundaryCodec.NONE:
        return x.to(FORMATS[plan.workload.precision.messages])
    made: Tensor = _Coded.apply(x, plan.workload)  # type: ignore[no-untyped-call]
    return made


class _Coded(torch.autograd.Function):
    """Values of a message, and gradients of the one that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, workload: Workload) -> Tensor:
        """What arrives."""
        ctx.workload = workload
        return _rounded(x, workload.boundary_codec, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """As if what arrived were what was sent."""
        w = ctx.workload
        # the largest power of two that is not above the tokens of the batch
        lift = 1
        while 2 * lift <= w.batch_samples * w.architecture.sequence:
            lift *= 2
        return _rounded(gradient, w.boundary_codec, float(lift)), None


def _rounded(x: Tensor, codec: BoundaryCodec, lift: float) -> Tensor:
    """Block by block, value by value."""
    if codec is BoundaryCodec.BF16:
        return x.bfloat16().to(x.dtype)
    if codec is BoundaryCodec.FP16:
        return ((x.float() * lift).half().float() / lift).to(x.dtype)
    levels = {BoundaryCodec.INT8: 127, BoundaryCodec.INT4: 7}[codec]
    found = []
    for block in torch.split(x.detach().float().flatten(), 1024):
        step = block.abs().max() / levels
        found.append(block if step == 0 else (block / step).round() * step)
    return torch.cat(found).view_as(x).to(x.dtype)
