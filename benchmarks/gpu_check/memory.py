"""Sections ``memory`` and ``memory_compiled``: measured memory of stages against what is expected.

On a GPU the measured value is the allocator's peak. On a CPU, where there is no allocator peak, it
is the bytes that the stage keeps between operations. A section is ok if no stage exceeds its
expected bytes. Message and averaging buffers are left out on both sides, because the stages run
alone in this process; so are the workspaces of cuBLAS, which are allocated once per process.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from common import PLANS, write_result

from planner.executor.comm.comm_plan import stage_averager, tied_averager
from planner.executor.runtime.memory import WORKSPACE_BYTES, memory_need
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.training_plan.file import load_plan

STEPS = 2
COMPILED = {
    "cuda": ("*_bf16_none", "llama_gqa_bf16_all", "gpt2_bf16_all"),
    "cpu": ("gpt2_bf16_none",),
}


def memory(device: str, out: Path) -> dict[str, Any]:
    """Measure both stages of seven architectures, by operation."""
    return _memory(device, out, "memory", ("*",), compiled=False)


def memory_compiled(device: str, out: Path) -> dict[str, Any]:
    """Measure some of them with compiled layers and head."""
    return _memory(device, out, "memory_compiled", COMPILED[device], compiled=True)


def _memory(
    device: str, out: Path, section: str, patterns: tuple[str, ...], *, compiled: bool
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    paths = [
        p for pattern in patterns for p in sorted((PLANS / device).glob(f"mem_{pattern}.json"))
    ]
    for path in paths:
        if compiled:  # else each architecture counts against the recompile limit of the last one
            torch._dynamo.reset()
        plan = load_plan(path)
        for rank in range(len(plan.cluster)):
            name = f"{path.stem.removeprefix('mem_')}_{rank}"
            try:
                rows[name] = _measure(plan, rank, device, compiled=compiled)
            except Exception as error:
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(name, rows[name], flush=True)
            write_result(section, out, {"ok": True, "rows": rows})
    most = max((row.get("ratio", 9.0) for row in rows.values()), default=9.0)
    least = min((row.get("ratio", 0.0) for row in rows.values()), default=0.0)
    return {"ok": most <= 1.0, "most": most, "least": least, "rows": rows}


def _measure(plan: Any, rank: int, device: str, *, compiled: bool) -> dict[str, Any]:
    """Run two steps of one stage on random messages and measure its memory."""
    cuda = device == "cuda"
    where = torch.device("cuda", 0) if cuda else torch.device("cpu")
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if cuda else 0

    def peak_mb() -> float:
        """Return the peak since the last call."""
        if not cuda:
            return 0.0
        peak = torch.cuda.max_memory_allocated() - base
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e6

    with torch.device(where):
        model_stage = ModelStage(plan, rank, where, OptimizerConfig(), compiled=compiled)
    schedule = plan.schedules[0]
    peaks = {"built": peak_mb()}
    shape, dtype = model_stage.operations.activation_codec.message
    stage = plan.stage_of[rank]
    last = stage == len(plan.stage_layers) - 1
    # F needs activations except on the first stage, H except where it follows F on the same
    # device, and B needs gradients except where it follows H
    needs_message = {
        "F": stage > 0,
        "H": not last,
        "B": not (last and model_stage.module.head is not None),
    }
    for step in range(STEPS):
        model_stage.begin(step, schedule)
        for kind, microbatch in schedule.order[rank]:
            message = torch.randn(shape).to(dtype) if needs_message[kind] else None
            model_stage.run_op(kind, microbatch, message)
            peaks[kind] = max(peaks.get(kind, 0.0), peak_mb())
        model_stage.update()
        peaks["update"] = max(peaks.get("update", 0.0), peak_mb())
    tied = tied_averager(plan, rank) if plan.averages_tied else None
    need = memory_need(plan, rank, stage_averager(plan, rank), other=tied, on_gpu=cuda)
    beyond = {name: value / 1e6 for name, value in need.extra_bytes.items()}
    absent = beyond.get("messages", 0.0) + beyond.get("averaging", 0.0)
    # the workspaces of earlier stages are still there
    expected = need.total_bytes / 1e6 - absent - (WORKSPACE_BYTES / 1e6 if cuda else 0.0)
    kept_mb = model_stage.held_bytes / 1e6
    return {
        "peaks_mb": {name: round(value, 1) for name, value in peaks.items()} if cuda else None,
        "kept_mb": round(kept_mb, 1),
        "planned_mb": round(need.planned_bytes / 1e6, 1),
        "beyond_mb": {name: round(value, 1) for name, value in beyond.items()},
        "expected_mb": round(expected, 1),
        "reserved_mb": round(torch.cuda.max_memory_reserved() / 1e6, 1) if cuda else None,
        "ratio": round((max(peaks.values()) if cuda else kept_mb) / expected, 4),
    }
