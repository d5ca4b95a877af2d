"""How far a decoded vector may be off, from the codec's definition."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.executor.codec import BLOCK
from planner.training_plan.choices import Codec


def error_bound(vector: Tensor, codec: Codec) -> Tensor:
    """Per value: half a level of its block, max |x| / 254; nothing without a codec."""
    if codec is Codec.NONE or not len(vector):
        return torch.zeros_like(vector)
    half = [block.abs().max().expand(len(block)) / 254 for block in torch.split(vector, BLOCK)]
    return torch.cat(half)
