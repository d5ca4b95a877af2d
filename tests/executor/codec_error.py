"""How far a decoded vector may be off, from the codec's definition."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.executor.comm.codec import BLOCK, WireFormat


def error_bound(vector: Tensor, wire: WireFormat) -> Tensor:
    """Per value: half a level of its block, max |x| / 254 or / 14; half a unit of the digits."""
    if wire is WireFormat.FP32 or not len(vector):
        return torch.zeros_like(vector)
    if wire is WireFormat.BF16:
        return vector.abs() / 256
    if wire is WireFormat.FP16:
        # 11 digits, steps of 2^-24 below its smallest, nothing beyond its largest
        beyond = (vector.abs() - 65504).clamp(min=0)
        return torch.maximum(vector.abs() / 2048, torch.tensor(2.0**-25)) + beyond
    levels = {WireFormat.INT8: 254, WireFormat.INT4: 14}[wire]
    half = [block.abs().max().expand(len(block)) / levels for block in torch.split(vector, BLOCK)]
    return torch.cat(half)
