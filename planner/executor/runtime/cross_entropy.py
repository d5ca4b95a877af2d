"""Cross-entropy of many words, without their logits in fp32.

Logits stay in the format of compute. They are converted block by block, and in the backward pass
replaced by their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.workload.working_memory import block_rows


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32, summed over tokens.

    Parameters
    ----------
    logits
        ``[tokens, words]``; overwritten by the backward pass.
    targets
        ``int64[tokens]``, each one of the words.
    """
    if torch.compiler.is_compiling():
        # the compiler fuses the conversion
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    loss: Tensor = _CrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return loss


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of logits, and of what belongs to them."""
    rows = block_rows(tensors[0].shape[1])
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def write_gradient(
    logits: Tensor,
    probabilities: Tensor,
    targets: Tensor,
    factor: Tensor,
    own: Tensor | None = None,
) -> None:
    """Replace a block of logits by the gradient of their loss, times a factor.

    Parameters
    ----------
    probabilities
        ``float32[rows, words]``, changed in place.
    own
        Rows whose target is one of these words; None for all.
    """
    rows = torch.arange(len(targets), device=targets.device)
    probabilities[rows, targets] -= 1 if own is None else own.to(probabilities.dtype)
    torch.mul(probabilities, factor, out=logits)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        losses = [
            F.cross_entropy(part.float(), words, reduction="sum")
            for part, words in blocks(logits, targets)
        ]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        for part, words in blocks(logits, targets):
            write_gradient(part, part.softmax(1, dtype=torch.float32), words, gradient)
        return logits, None
