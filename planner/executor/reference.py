"""The same training in a single process: what a plan's losses and gradients must equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from planner.executor.data import Microbatches
from planner.executor.model import build_head, build_stage
from planner.executor.train import make_optimizer, require_executable
from planner.plan import TrainingPlan


def train_single(
    plan: TrainingPlan,
    count: int,
    *,
    learning_rate: float,
    data: Path | None = None,
    optimizer: str = "adamw",
) -> Iterator[tuple[float, list[nn.Parameter]]]:
    """Train the plan's model on the plan's microbatches; yields loss and parameters with gradients.

    Only for straight paths: every microbatch goes through all layers in order.
    """
    arch = require_executable(plan)
    w = plan.workload
    model = build_stage(arch, 0, arch.layers, plan.seed)
    head = build_head(arch, plan.seed)
    parameters = [*model.parameters(), *head.parameters()]
    optim = make_optimizer(optimizer, parameters, learning_rate)
    batches = Microbatches(arch.vocabulary, arch.sequence, w.microbatch_samples, plan.seed, data)
    for step in range(count):
        optim.zero_grad(set_to_none=True)
        total = 0.0
        for b in range(w.batch_samples // w.microbatch_samples):
            tokens = batches.tokens(step, b)
            loss = head(model(tokens[:, :-1]), tokens[:, 1:]) / (w.batch_samples * arch.sequence)
            loss.backward()
            total += float(loss.detach())
        yield total, parameters
        optim.step()
