"""One rank of the tests: trains by a plan and stores losses and first gradients as plain arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store

from planner.executor.launch.setup import make_pipeline
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.rendezvous.rendezvous import rendezvous
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.worker import Worker
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan


def main(words: Sequence[str]) -> int:
    path, out, steps, chunking, told, *devices = words
    settings = json.loads(told)
    overflow = settings.pop("overflow", None)
    optimizer_config = OptimizerConfig(**settings)
    torch.set_num_threads(1)
    plan = load_plan(path)
    ranks = rendezvous(plan, devices)
    queue = ranks.store if chunking == "own" else None
    if ranks.rank not in plan.stage_of:
        help_others(plan, ranks, Path(out), int(steps), queue)
        return 0
    model_stage = ModelStage(plan, ranks.rank, torch.device("cpu"), optimizer_config)
    pipeline = make_pipeline(plan, ranks.rank, model_stage, queue=queue)
    worker = Worker(plan, ranks, model_stage, pipeline)
    gradients: list[np.ndarray] = []
    step = model_stage.optimizer.step

    def keeping_gradients() -> None:
        gradients.append(np.concatenate([p.grad.numpy().ravel() for p in model_stage.parameters]))
        step()

    model_stage.optimizer.step = keeping_gradients  # type: ignore[assignment,method-assign]
    if overflow is not None and overflow[0] == ranks.rank:
        _overflow_in(overflow[1], model_stage)
    records = list(worker.steps(int(steps)))
    losses = worker.losses
    np.savez(
        Path(out) / f"{ranks.rank}.npz",
        # rank 0 alone is told
        losses=[] if losses is None else [losses.loss(t) for t in range(int(steps))],
        given=[sum(kind == "F" for _, _, kind, _, _ in record.ops) for record in records],
        sent=[size for *_, size, left, _ in records[0].messages if left is not None],
        routes=[(r.step, b, *path) for r in records for b, path in r.routes],
        first=gradients[0],
        last=gradients[-1],
        updates=len(gradients),
        scales=[record.loss_scale or 0.0 for record in records],
        norms=[
            np.nan if record.gradient_norm is None else record.gradient_norm for record in records
        ],
        parameters=np.concatenate([p.detach().numpy().ravel() for p in model_stage.parameters]),
        # those that another sees alike
        agreed=np.concatenate(
            [p.detach().numpy().ravel() for p in model_stage.global_parameters().values()]
        ),
    )
    ranks.leave()
    return 0


def _overflow_in(step: int, model_stage: ModelStage) -> None:
    """Make one gradient of this rank infinite in a step, before gradients are averaged."""
    steps, unscale = count(), model_stage.unscale

    def unscale_overflown() -> None:
        if next(steps) == step:
            grad = model_stage.parameters[-1].grad
            assert grad is not None
            grad.view(-1)[0] = torch.inf
        unscale()

    model_stage.unscale = unscale_overflown  # type: ignore[method-assign]


def help_others(
    plan: TrainingPlan, ranks: RankGroup, out: Path, steps: int, queue: Store | None
) -> None:
    """A rank without a stage; what it summed last is where a learner's gradients are."""
    aggregator = Aggregator(plan, ranks.rank)
    pipeline = make_pipeline(plan, ranks.rank, aggregator, queue=queue)
    worker = Worker(plan, ranks, aggregator, pipeline)
    records = list(worker.steps(steps))
    losses = worker.losses
    np.savez(
        out / f"{ranks.rank}.npz",
        losses=[] if losses is None else [losses.loss(t) for t in range(steps)],
        given=[len([op for op in record.ops if op[2] in "FHB"]) for record in records],
        last=aggregator.gradients.current.numpy().copy(),
    )
    ranks.leave()
