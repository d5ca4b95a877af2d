"""Recomputation of cheap functions in the backward pass, instead of saving their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TensorFunction = Callable[..., Tensor]


def recomputed(function: TensorFunction, *inputs: Tensor) -> Tensor:
    """Value of a function that saves its inputs only."""
    if torch.compiler.is_compiling():
        # the compiler chooses which tensors are saved for the backward pass
        return function(*inputs)
    value: Tensor = _RecomputeFunction.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return value


class _RecomputeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: TensorFunction, *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(needs)
            for x, needs in zip(ctx.saved_tensors, needs_grad, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        differentiable = [x for x in inputs if x.requires_grad]
        results = iter(torch.autograd.grad(output, differentiable, gradients))
        return None, *(next(results) if needs else None for needs in needs_grad)
