"""How far a decoded vector may be off, from the codec's definition."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.executor.codec import BLOCK, Wire


def error_bound(vector: Tensor, wire: Wire) -> Tensor:
    """Per value: half a level of its block, max |x| / 254; half a unit of bf16's 8 digits."""
    if wire is Wire.FP32 or not len(vector):
        return torch.zeros_like(vector)
    if wire is Wire.BF16:
        return vector.abs() / 256
    half = [block.abs().max().expand(len(block)) / 254 for block in torch.split(vector, BLOCK)]
    return torch.cat(half)
