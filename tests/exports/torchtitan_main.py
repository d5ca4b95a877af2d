"""``torchtitan.train`` on CPUs with torch 2.13, which release 0.3.0 does not provide for.

Only devices, attention and the call of the pipeline schedule are replaced: FlexAttention has no
backward pass on CPUs, and torch 2.13's ``step`` does not take lists of microbatches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.pipelining import schedules

torch_utils: Any = torch._utils
torch_utils._get_available_device_type = lambda: "cpu"
torch_utils._get_device_module = lambda _: torch.cpu

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def step(self: Any, **lists: Any) -> None:
    """One iteration on lists of microbatches."""
    for stage in self._stages:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(**lists)


def attention(q: Any, k: Any, v: Any, **more: Any) -> Any:
    """Causal attention in place of FlexAttention."""
    kept = {name: more[name] for name in ("scale", "enable_gqa")}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **kept)
    return out, SimpleNamespace(lse=torch.zeros(()))


runtime: Any = schedules._PipelineScheduleRuntime
runtime.step = step
FlexAttention._compiled_flex_attn = staticmethod(attention)
metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu",
    get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
    reset_peak_stats=lambda: None,
)
utils.set_pg_timeouts = lambda **_: None

if __name__ == "__main__":
    from torchtitan.train import main

    main()
