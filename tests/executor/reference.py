"""The same training in a single process: what a plan's losses and gradients must equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from planner.executor.data.microbatches import microbatches_of
from planner.executor.data.options import SYNTHETIC, Data
from planner.executor.learner import require_executable
from planner.executor.model import build_head, build_stage
from planner.executor.optimizing import Optimizing
from planner.training_plan.model import TrainingPlan


def train_single(
    plan: TrainingPlan,
    count: int,
    optimizing: Optimizing,
    data: Data = SYNTHETIC,
) -> Iterator[tuple[float, list[nn.Parameter]]]:
    """Train the plan's model on the plan's microbatches; yields loss and parameters with gradients.

    Every microbatch goes through the stages of its planned path in that order; what none visits
    in an iteration has a gradient of zero.
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
            x = tokens[:, :-1]
            for d in path:
                x = stages[plan.stage_of[d]](x)
            loss = head(x, tokens[:, 1:]) / (w.batch_samples * arch.sequence)
            loss.backward()
            total += float(loss.detach())
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(parameters, plan.clip)
        yield total, parameters
        optimizing.set_rate(optim, step)
        optim.step()
