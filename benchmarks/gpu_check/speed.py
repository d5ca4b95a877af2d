"""Sections ``speed`` and ``speed_llama``: where the time of a step goes, in one process."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import PEAK_FLOPS, local_steps, peak_flops, plan_path, step_flops, write_result

from planner.executor.comm.gradient_norm import sum_of_squares
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.training_plan.file import load_plan


def speed(device: str, out: Path) -> dict[str, Any]:
    """Measure a GPT of 1.4B parameters on one device, eager and compiled."""
    return _speed(device, out, "speed", "speed_gpt13")


def speed_llama(device: str, out: Path) -> dict[str, Any]:
    """Measure a model of the size of Llama 3.2 1B, eager and compiled."""
    return _speed(device, out, "speed_llama", "speed_llama1b")


def _speed(device: str, out: Path, section: str, name: str) -> dict[str, Any]:
    plan = load_plan(plan_path(device, name))
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    rows: dict[str, Any] = {}
    for variant in ("eager", "compiled"):
        # weights are initialized on the device, because their values do not matter here
        with torch.device(where):
            model_stage = ModelStage(
                plan, 0, where, OptimizerConfig(), compiled=variant == "compiled"
            )
        measurement = _Measurement(model_stage, plan)
        row = rows[variant] = measurement.steps()
        row |= measurement.operations()
        row |= measurement.clipping()
        if device == "cuda":
            with contextlib.suppress(RuntimeError):  # CUPTI may not be permitted here
                row |= measurement.profile()
        print(variant, row, flush=True)
        write_result(section, out, {"ok": True, "rows": rows})
        del model_stage, measurement
        gc.collect()
    return {"ok": True, "rows": rows}


class _Measurement:
    """Measurements of one stage that holds a whole model."""

    def __init__(self, model_stage: Any, plan: Any) -> None:
        self._model_stage, self._plan, self._step = model_stage, plan, 0
        self._cuda = next(iter(model_stage.parameters)).is_cuda
        self._peak = (
            (peak_flops(torch.cuda.get_device_name()) or PEAK_FLOPS) if self._cuda else None
        )

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def steps(self, warmup: int = 3, count: int = 4) -> dict[str, Any]:
        """Measure whole steps."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        measured = list(local_steps(self._model_stage, self._plan, warmup + count, self._step))
        self._step += warmup + count
        step_s = statistics.median(seconds for seconds, _ in measured[warmup:])
        flops = step_flops(self._plan)
        return {
            "step_s": step_s,
            "tokens_per_s": flops["tokens"] / step_s,
            "mfu_6n_causal": None if self._peak is None else flops["causal"] / step_s / self._peak,
            "mfu_planner": None if self._peak is None else flops["planner"] / step_s / self._peak,
            "loss": measured[-1][1],
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if self._cuda else None,
            "with_warmup_s": time.perf_counter() - began,
        }

    def operations(self) -> dict[str, Any]:
        """Measure each kind of operation: its launch, and until the device has finished it."""
        model_stage, schedule = self._model_stage, self._plan.schedules[0]
        model_stage.begin(self._step, schedule)
        launched: dict[str, list[float]] = {}
        ended: dict[str, list[float]] = {}
        for kind, microbatch in schedule.order[0]:
            self._synchronize()
            start = time.perf_counter()
            model_stage.run_op(kind, microbatch, None)
            launched.setdefault(kind, []).append(time.perf_counter() - start)
            self._synchronize()
            ended.setdefault(kind, []).append(time.perf_counter() - start)
        start = time.perf_counter()
        model_stage.optimizer.step()
        update_host_s = time.perf_counter() - start
        model_stage.module.cast_weights()
        self._synchronize()
        update_s = time.perf_counter() - start
        self._step += 1
        return {
            "launch_ms": {kind: 1e3 * statistics.median(s) for kind, s in launched.items()},
            "until_ended_ms": {kind: 1e3 * statistics.median(s) for kind, s in ended.items()},
            "update_ms": 1e3 * update_s,
            "update_host_ms": 1e3 * update_host_s,
        }

    def clipping(self) -> dict[str, Any]:
        """Measure the gradient norm, and torch's norm of the same vector for comparison."""
        found = {}
        for name, norm in (
            ("clipping_norm_ms", sum_of_squares),
            ("vector_norm_ms", lambda v: float(torch.linalg.vector_norm(v, dtype=torch.float64))),
        ):
            for _ in range(2):  # the second is kept
                start = time.perf_counter()
                norm(self._model_stage.gradients.current)
                found[name] = 1e3 * (time.perf_counter() - start)
        return found

    def profile(self) -> dict[str, Any]:
        """Profile one step: number of kernels, and how long they keep the GPU busy."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            ((step_s, _),) = local_steps(self._model_stage, self._plan, 1, self._step)
        self._step += 1
        averages = profiler.key_averages()
        print(averages.table(sort_by="self_cuda_time_total", row_limit=30))
        # operators repeat the times of their kernels
        kernels = [e for e in averages if e.device_type == DeviceType.CUDA]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        return {
            "profiled_step_s": step_s,
            "gpu_busy_s": sum(e.self_device_time_total for e in kernels) / 1e6,
            "kernels": sum(e.count for e in kernels),
            "top": [
                [e.key[:70], e.count, round(e.self_device_time_total / 1e3, 2)]
                for e in kernels[:14]
            ],
        }
