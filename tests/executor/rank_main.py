"""One rank of the tests: trains by a plan and stores losses and first gradients as plain arrays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from planner.executor.binding import join
from planner.executor.train import Worker
from planner.training_plan.file import load_plan


def main() -> None:
    path, out, steps, pace, *devices = sys.argv[1:]
    torch.set_num_threads(1)
    plan = load_plan(path)
    rank = join(plan, devices)
    tickets = dist.distributed_c10d._get_default_store() if pace == "own" else None
    worker = Worker(plan, rank, torch.device("cpu"), learning_rate=1e-3, tickets=tickets)
    gradients: list[np.ndarray] = []
    step = worker.optimizer.step

    def keeping_gradients() -> None:
        gradients.append(np.concatenate([p.grad.numpy().ravel() for p in worker.parameters]))
        step()

    worker.optimizer.step = keeping_gradients  # type: ignore[assignment,method-assign]
    reports = list(worker.steps(int(steps)))
    np.savez(
        Path(out) / f"{rank}.npz",
        losses=[report.loss for report in reports],
        given=[sum(kind == "F" for _, _, kind, _, _ in report.records) for report in reports],
        first=gradients[0],
        last=gradients[-1],
    )
    dist.barrier()
    dist.destroy_process_group()


main()
