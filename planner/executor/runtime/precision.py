"""The plan's formats in PyTorch: fp32 parameters, and modules that compute in another format."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from planner.executor.runtime.model import Stem
from planner.network.dtype import Dtype
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
BF16_CAPABILITY = (8, 0)
"""Smallest compute capability of NVIDIA GPUs with bf16 products in hardware."""


class LowPrecisionModule:
    """A part of the model in the format of compute, with the same structure.

    Weights are rounded once per step, not in every operation. Each gradient is added to that of its
    fp32 parameter as soon as it is computed, and freed. The embedding stays in fp32, since it is
    not multiplied; its output is rounded. In fp32 the original module computes.

    Parameters
    ----------
    module
        With fp32 parameters, whose gradients are allocated.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self._cast: list[tuple[Tensor, nn.Parameter]] = []
        if dtype is not torch.float32:
            # a copy of the modules that shares parameters until they are rounded
            shared = {id(p): p for p in module.parameters()}
            self._module = copy.deepcopy(module, shared)
            self._replace_parameters(self._module)
        self.cast_weights()

    def __call__(self, *inputs: Any) -> Tensor:
        """Output of the module."""
        output: Tensor = self._module(*inputs)
        return output

    def compile(self) -> None:
        """Compile each layer, or a part without layers as a whole, at its first call.

        Layers of equal shapes share one compiled function.
        """
        layers = getattr(self._module, "layers", None)
        for part in (self._module,) if layers is None else layers:
            part.compile(dynamic=False)

    def cast_weights(self) -> None:
        """Update the rounded weights from the parameters."""
        with torch.no_grad():
            for weight, parameter in self._cast:
                weight.copy_(parameter)

    @property
    def cast(self) -> list[Tensor]:
        """Weights in the format of compute, which are held in addition to the parameters."""
        return [weight for weight, _ in self._cast]

    def _replace_parameters(self, module: nn.Module) -> None:
        for part in module.children():
            if isinstance(part, Stem):
                part.register_forward_hook(self._round_output)
            else:
                self._replace_parameters(part)
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.empty_like(parameter, dtype=self._dtype).requires_grad_()
            weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_accumulate_gradient, parameter)
            )
            # no longer a parameter of the copy
            delattr(module, name)
            setattr(module, name, weight)
            self._cast.append((weight, parameter))

    def _round_output(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.to(self._dtype)


def _accumulate_gradient(parameter: nn.Parameter, weight: Tensor) -> None:
    assert parameter.grad is not None and weight.grad is not None
    parameter.grad.add_(weight.grad)
    weight.grad = None


def set_precision(plan: TrainingPlan, device: torch.device) -> None:
    """Set PyTorch's global options so that a device computes in the plan's format."""
    # no TF32 for products in fp32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if plan.workload.precision.compute is not Dtype.BF16 or device.type != "cuda":
        return
    if torch.version.cuda and torch.cuda.get_device_capability(device) < BF16_CAPABILITY:
        raise PlanError(
            f"workload.precision.compute: {torch.cuda.get_device_name(device)} has no bf16 and "
            "would emulate it slowly; plan with --precision fp16"
        )
