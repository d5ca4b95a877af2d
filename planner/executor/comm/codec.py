"""How a vector travels: as it is, rounded to 16 bits, or as integers with one scale per block.

``int8`` stores ``round(x / s)`` with ``s = max |x| / 127`` of each block of 1024 values: about a
quarter of the bytes, and every value within ``s / 2 = max |x| / 254`` of the true one. ``int4``
does the same with 7 for 127, two values in a byte. ``fp16`` takes what is beyond its largest number
for that number.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from planner.network.dtype import Dtype
from planner.training_plan.choices import Codec

BLOCK = 1024
LARGEST_FP16 = 65504.0
SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Rounded value by value."""
LEVELS = {"int8": 127, "int4": 7}
"""On either side of 0."""


class WireFormat(enum.StrEnum):
    """What is on the wire; sums are made in fp32 from whatever comes."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @classmethod
    def of(cls, codec: Codec, gradients: Dtype) -> WireFormat:
        """As a plan has it: its codec, or else the format of its gradients."""
        return cls(codec.value) if codec is not Codec.NONE else cls(gradients.value)


def message_length(values: int, wire: WireFormat) -> int:
    """Bytes of a message of so many values."""
    if wire in LEVELS:
        return (values if wire is WireFormat.INT8 else -(-values // 2)) + _head(values)
    return (2 if wire in SHORT else 4) * values


def encode(vector: Tensor, wire: WireFormat) -> Tensor:
    """A ``uint8`` message from a ``float32`` vector.

    Parameters
    ----------
    vector
        ``float32[values]``.

    Returns
    -------
    Tensor
        ``uint8[message_length]``.
    """
    if wire is WireFormat.FP32:
        return vector.contiguous().view(torch.uint8)
    if wire in SHORT:
        # beyond its largest number fp16 has infinity, and what follows from it is no number
        held = vector.clamp(-LARGEST_FP16, LARGEST_FP16) if wire is WireFormat.FP16 else vector
        return held.to(SHORT[wire]).view(torch.uint8)
    blocks = _blocks(vector)
    largest = blocks.abs().amax(dim=1)
    # CUDA multiplies by the reciprocal of a scalar: divided by a tensor, the bits are a CPU's
    scale = largest / torch.full_like(largest, LEVELS[wire])
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    rounded = (blocks / steps[:, None]).round_().to(torch.int8)
    levels = rounded.reshape(-1)[: len(vector)].view(torch.uint8)
    return torch.cat(
        [scale.view(torch.uint8), _paired(levels) if wire is WireFormat.INT4 else levels]
    )


def decode(message: Tensor, values: int, wire: WireFormat) -> Tensor:
    """The vector that `encode` was given, up to what rounding takes.

    Returns
    -------
    Tensor
        ``float32[values]``.
    """
    if wire is WireFormat.FP32:
        return message.view(torch.float32)
    if wire in SHORT:
        return message.view(SHORT[wire]).to(torch.float32)
    head = _head(values)
    scale = message[:head].clone().view(torch.float32)
    rest = message[head:]
    levels = (_apart(rest, values) if wire is WireFormat.INT4 else rest.view(torch.int8)).float()
    return (_blocks(levels) * scale[:, None]).reshape(-1)[:values]


def _head(values: int) -> int:
    """Bytes of the scales."""
    return 4 * -(-values // BLOCK)


def _paired(levels: Tensor) -> Tensor:
    """Two levels in a byte, the first one in its lower half."""
    even = torch.nn.functional.pad(levels, (0, len(levels) % 2)) & 15
    return even[::2] | even[1::2] << 4


def _apart(pairs: Tensor, values: int) -> Tensor:
    """What `_paired` was given, as signed numbers."""
    # moved to the upper half and back, a level brings its sign along
    low, high = (pairs << 4).view(torch.int8) >> 4, pairs.view(torch.int8) >> 4
    return torch.stack([low, high], dim=1).reshape(-1)[:values]


def _blocks(vector: Tensor) -> Tensor:
    padding = -len(vector) % BLOCK
    return torch.nn.functional.pad(vector, (0, padding)).view(-1, BLOCK)
