"""Command of NeMo Automodel on CPUs: its CUDA calls are replaced."""

from __future__ import annotations

import types
from typing import Any

import torch


class CpuTorch(types.ModuleType):
    """The torch module with CPU devices only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        """The CPU, whatever is asked for."""
        return torch.device("cpu")


cuda: Any = torch.cuda
for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
    setattr(cuda, name, lambda *_, **__: None)
cuda.max_memory_allocated = cuda.memory_allocated = lambda *_: 0
cuda.current_device = lambda: torch.device("cpu")

from nemo_automodel._transformers import auto_model  # noqa: E402

auto_model.torch = CpuTorch("torch")

if __name__ == "__main__":
    from nemo_automodel.cli.app import main

    main()
