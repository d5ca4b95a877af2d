"""Reports of all devices: peak of their GPUs, and at the end memory and bytes sent."""

from __future__ import annotations

import json
from typing import Any

import torch

from planner.executor.comm.device_identity import gpu_identity
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.aggregator import Aggregator
from planner.executor.runtime.memory import MemoryNeed
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.worker import Worker
from planner.network.gpus import CALLED, GPUS
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan


def peak_flops(plan: TrainingPlan, ranks: RankGroup, device: torch.device) -> float | None:
    """Total peak of all GPUs of a run, each counted once; a collective call.

    The GPUs of a worker are like its first one.
    """
    report = gpu_identity(device) if device.type == "cuda" else ("", "")
    reports = [json.loads(text) for text in ranks.all_gather("gpu", json.dumps(report))]
    workers = {
        gpu: (name, rank) for rank, (name, gpu) in enumerate(reports) if rank in plan.stage_of
    }
    if not all(name in CALLED for name, _ in workers.values()):
        return None
    dtype, counts = plan.workload.precision.compute, plan.gpu_counts
    return sum(counts[rank] * GPUS[CALLED[name]].peak(dtype) for name, rank in workers.values())


def device_reports(
    plan: TrainingPlan,
    ranks: RankGroup,
    runtime: ModelStage | Aggregator,
    need: MemoryNeed,
    device: torch.device,
    worker: Worker,
) -> list[dict[str, Any]]:
    """Memory and bytes sent of all ranks; a collective call.

    In elastic runs, of the devices present at the end, over all generations they were in.
    """
    on_gpu = device.type == "cuda"
    report = {
        "device": ranks.name(ranks.rank),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else runtime.held_bytes,
        "peak_is": "allocated on the GPU" if on_gpu else "tensors kept between operations",
        "planned_bytes": round(need.planned_bytes),
        "expected_bytes": round(need.total_bytes),
        "sent_bytes": worker.sent_bytes,
        "microbatches": worker.microbatches,
    }
    reports = [json.loads(text) for text in ranks.all_gather("report", json.dumps(report))]
    if plan.wiring is Wiring.STOCHASTIC:
        for group in plan.assignment.groups:
            stage_microbatches = sum(reports[d]["microbatches"] for d in group)
            for d in group:
                paths = plan.schedules[0].paths
                reports[d]["part"] = reports[d]["microbatches"] / max(stage_microbatches, 1)
                reports[d]["planned_part"] = sum(d in path for path in paths) / len(paths)
    return reports
