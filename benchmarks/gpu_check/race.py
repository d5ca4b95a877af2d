"""Section ``race``: stream synchronization under delayed copies and poisoned memory.

Six devices of a plan are threads that share one GPU. The reference waits for every copy and every
operation. The other runs start each copy late and fill new buffers with NaN, so a missing wait, or
memory that is reused too early, changes the trained parameters.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from common import PLANS

from planner.executor.comm.device_backend import HOST, CudaStreams, GpuBackend, HostBackend
from planner.training_plan.file import load_plan
from tests.executor.devices import train_in_threads

STEPS = 3
SEEDS = 4


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 99


class SynchronousSide(HostBackend):
    """Reference backend: synchronizes the GPU around every copy."""

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def to_device(self, message: torch.Tensor) -> torch.Tensor:
        """Copy to the GPU and wait."""
        copied = message.to(self._where)
        torch.cuda.synchronize()
        return copied

    def to_host(self, made: torch.Tensor) -> Any:
        """Copy to the host and wait."""
        copied = made.detach().contiguous().cpu()
        return lambda: copied

    def record_event(self) -> float:
        """Wait for all operations and return the time."""
        torch.cuda.synchronize()
        return time.monotonic()


class DelayedCuda(CudaStreams):
    """CUDA whose copies start up to a few milliseconds late and whose new memory is poisoned."""

    def __init__(self, where: torch.device, seed: int) -> None:
        super().__init__(where)
        self._where, self._random = where, random.Random(seed)

    def _delay(self, stream: Any) -> None:
        with torch.cuda.device(self._where), torch.cuda.stream(stream):
            cycles = self._random.choice((0, 1, 1)) * self._random.random() * 5e6
            torch.cuda._sleep(int(cycles))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned memory and poison it."""
        return super().pinned(shape, dtype).fill_(_poison(dtype))

    def copy_to_device(self, message: torch.Tensor, stream: Any) -> torch.Tensor:
        """Copy to the GPU, late."""
        self._delay(stream)
        return super().copy_to_device(message, stream)

    def copy_to_host(self, there: torch.Tensor, made: torch.Tensor, stream: Any) -> None:
        """Copy to the host, late."""
        self._delay(stream)
        super().copy_to_host(there, made, stream)


def _train(
    plan: Any,
    where: torch.device,
    backends: list[Any],
) -> tuple[list[float], list[list[torch.Tensor]]]:
    """Train a plan whose devices are threads; return the losses and all parameters."""
    stage_modules, _, losses = train_in_threads(plan, backends, STEPS, where)
    return losses, [[p.detach().cpu().clone() for p in one.parameters] for one in stage_modules]


def _identical(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(
        torch.equal(a, b)
        for x, y in zip(one[1], other[1], strict=True)
        for a, b in zip(x, y, strict=True)
    )


def race(device: str, out: Path) -> dict[str, Any]:
    """Compare training with delayed copies and poisoned memory to the synchronous reference."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    cuda = device == "cuda"
    where = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    def gpu(seed: int) -> Any:
        if cuda:
            return DelayedCuda(where, seed)
        from tests.executor.test_device_backend import LateGpu  # stand-in of the unit tests

        return LateGpu(seed)

    rows: dict[str, Any] = {}
    ok = True
    for name, codec in (("race_fp32", "none"), ("race_fp32", "int8"), ("race_bf16", "none")):
        plan = load_plan(PLANS / "both" / f"{name}.json")
        if codec != "none":
            plan = plan.replace(workload=plan.workload.with_boundary_codec(codec))
        ranks = range(len(plan.cluster))
        synchronous = [SynchronousSide(where) if cuda else HOST for _ in ranks]
        expected = _train(plan, where, synchronous)
        row: dict[str, Any] = {
            "losses": expected[0],
            "waiting_twice_same_bits": _identical(expected, _train(plan, where, synchronous)),
        }
        for seed in range(SEEDS):
            backends = [GpuBackend(gpu(100 * seed + rank)) for rank in ranks]
            found = _train(plan, where, backends)
            key = f"late_{seed}"
            row[key] = _identical(expected, found)
            if not row[key]:
                row[f"{key}_losses"] = found[0]
            # without a reproducible reference, a difference proves nothing
            ok &= row[key] or not row["waiting_twice_same_bits"]
        rows[f"{name}_{codec}"] = row
        print(name, codec, row, flush=True)
    return {"ok": ok, "rows": rows}
