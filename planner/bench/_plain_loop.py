"""A plain PyTorch loop over the model of a plan; for ``planner bench overhead``.

What anybody would write: the model as modules one after the other, tokens made beforehand, a
backward pass a microbatch, AdamW. In bf16 under ``torch.autocast``, as most people train.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from planner.executor.data.microbatches import microbatches_of
from planner.executor.data.options import SYNTHETIC
from planner.executor.model import build_head, build_stage
from planner.executor.optimizing import Optimizing
from planner.network.dtype import Dtype
from planner.network.line_parser import LineParser
from planner.training_plan.file import load_plan


def main() -> int:
    """Print seconds and loss of every step as JSON; returns the exit code."""
    parser = LineParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    plan, device = load_plan(args.plan), torch.device(args.device)
    w, arch = plan.workload, plan.workload.architecture
    assert arch is not None
    stage = build_stage(arch, 0, arch.layers, plan.seed).to(device)
    head = build_head(arch, plan.seed, stage.stem).to(device)
    parameters = [*stage.parameters(), *head.parameters()]
    optimizer = Optimizing().make(parameters)
    batches = microbatches_of(plan, SYNTHETIC)
    count = w.batch_samples // w.microbatch_samples
    tokens = [[batches.tokens(t, b).to(device) for b in range(count)] for t in range(args.steps)]
    low = w.precision.compute is Dtype.BF16
    losses, times = [], []
    for step in tokens:
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for one in step:
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                loss = head(stage(one[:, :-1]), one[:, 1:]) / (w.batch_samples * arch.sequence)
            torch.autograd.backward(loss)
            total += loss.detach()
        optimizer.step()
        losses.append(float(total))  # waits for the device
        times.append(time.perf_counter() - begin_s)
    print(json.dumps({"seconds": times, "losses": losses}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
