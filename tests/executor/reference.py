"""The same training in a single process: what a plan's losses and gradients must equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from planner.executor.data.microbatches import microbatches_of
from planner.executor.data.options import SYNTHETIC, Data
from planner.executor.learner import require_executable
from planner.executor.model import build_head, build_stage
from planner.executor.optimizing import Optimizing
from planner.network.dtype import Dtype
from planner.training_plan.model import TrainingPlan


def train_single(
    plan: TrainingPlan,
    count: int,
    optimizing: Optimizing,
    data: Data = SYNTHETIC,
) -> Iterator[tuple[float, list[nn.Parameter]]]:
    """Train the plan's model on the plan's microbatches; yields loss and parameters with gradients.

    Every microbatch goes through the stages of its planned path in that order; what none visits
    in an iteration has a gradient of zero. In bf16, weights of layers and head are rounded where
    they are used, so is what the embedding gives, and what goes from device to device is in the
    format of messages.
    """
    arch = require_executable(plan)
    w = plan.workload
    stages = [build_stage(arch, *part, plan.seed) for part in plan.stage_layers]
    head = build_head(arch, plan.seed, stages[0].stem)
    # a tied matrix once
    parameters = list(nn.ModuleList([*stages, head]).parameters())
    optim = optimizing.make(parameters)
    batches = microbatches_of(plan, data)
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
            torch.autograd.backward(loss)
            total += float(loss.detach())
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(parameters, plan.clip)
        yield total, parameters
        optimizing.set_rate(optim, step)
        optim.step()


FORMATS = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}


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
    return x.to(FORMATS[plan.workload.precision.messages])
