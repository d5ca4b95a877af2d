"""A rank of torch's pipeline runtime with a schedule from a file; prints gradient errors."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


def main(path: str, microbatches: int) -> None:
    """Each rank has one layer of a chain, and the whole chain for comparison."""
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(stages)]
    x, y = torch.randn(2 * microbatches, 8), torch.randn(2 * microbatches, 8)
    own, loss = layers[rank], torch.nn.functional.mse_loss
    stage = PipelineStage(own, rank, stages, torch.device("cpu"))
    build: Any = _PipelineScheduleRuntime  # torch says nothing of its types
    runtime = build([stage], microbatches, loss_fn=loss)
    runtime._load_csv(path)
    last: dict[str, Any] = {"target": y, "losses": []} if rank == stages - 1 else {}
    runtime.step(*([x] if rank == 0 else []), **last)
    made = own.weight.grad.clone()
    own.zero_grad()
    torch.autograd.backward(loss(torch.nn.Sequential(*layers)(x), y))
    print(f"off {rank} {(made - own.weight.grad).abs().max().item():g};", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
