"""Reports of all devices: peak of their GPUs, and at the end memory and bytes sent."""

from __future__ import annotations

import json
from typing import Any

import torch

from planner.executor.comm.device_identity import gpu_of
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.memory import MemoryNeed
from planner.executor.runtime.stage_module import StageModule
from planner.executor.runtime.worker import Worker
from planner.network.gpus import CALLED, GPUS
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan


def peak_flops(plan: TrainingPlan, ranks: ProcessGroup, device: torch.device) -> float | None:
    """Total peak of all GPUs of a run, each counted once; a collective call."""
    own = gpu_of(device) if device.type == "cuda" else ("", "")
    answers = [json.loads(text) for text in ranks.all_gather("gpu", json.dumps(own))]
    names = {gpu: name for rank, (name, gpu) in enumerate(answers) if rank in plan.stage_of}
    if not all(name in CALLED for name in names.values()):
        return None
    dtype = plan.workload.precision.compute
    return sum(GPUS[CALLED[name]].peak(dtype) for name in names.values())


def device_reports(
    plan: TrainingPlan,
    ranks: ProcessGroup,
    works: StageModule | Aggregator,
    need: MemoryNeed,
    device: torch.device,
    worker: Worker,
) -> list[dict[str, Any]]:
    """Memory and bytes sent of all ranks; a collective call."""
    on_gpu = device.type == "cuda"
    own = {
        "device": ranks.name(ranks.rank),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else works.held_bytes,
        "peak_is": "allocated on the GPU" if on_gpu else "tensors kept between operations",
        "planned_bytes": round(need.planned),
        "expected_bytes": round(need.total),
        "sent_bytes": {ranks.name(rank): size for rank, size in sorted(worker.sent_bytes.items())},
        "microbatches": worker.microbatches,
    }
    answers = [json.loads(text) for text in ranks.all_gather("report", json.dumps(own))]
    if plan.wiring is Wiring.STOCHASTIC:
        for group in plan.assignment.groups:
            done = sum(answers[d]["microbatches"] for d in group)
            for d in group:
                paths = plan.schedules[0].paths
                answers[d]["part"] = answers[d]["microbatches"] / max(done, 1)
                answers[d]["planned_part"] = sum(d in path for path in paths) / len(paths)
    return answers
