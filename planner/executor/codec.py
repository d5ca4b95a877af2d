"""How a vector travels: as it is, rounded to bf16, or as 8-bit integers with one scale per block.

``int8`` stores ``round(x / s)`` with ``s = max |x| / 127`` of each block of 1024 values: about a
quarter of the bytes, and every value within ``s / 2 = max |x| / 254`` of the true one.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from planner.network.dtype import Dtype
from planner.training_plan.choices import Codec

BLOCK = 1024
LEVELS = 127


class Wire(enum.StrEnum):
    """What is on the wire; sums are made in fp32 from whatever comes."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"

    @classmethod
    def of(cls, codec: Codec, gradients: Dtype) -> Wire:
        """As a plan has it: its codec, or else the format of its gradients."""
        return cls(codec.value) if codec is not Codec.NONE else cls(gradients.value)


def message_length(values: int, wire: Wire) -> int:
    """Bytes of a message of so many values.

    Parameters
    ----------
    values
        Elements of the vector.
    wire
        How they are written.

    Returns
    -------
    int
        Bytes.
    """
    if wire is not Wire.INT8:
        return Dtype(wire.value).bytes * values
    return values + 4 * -(-values // BLOCK)


def encode(vector: Tensor, wire: Wire) -> Tensor:
    """A ``uint8`` message from a ``float32`` vector.

    Parameters
    ----------
    vector
        ``float32[values]``.
    wire
        How they are written.

    Returns
    -------
    Tensor
        ``uint8[message_length]``.
    """
    if wire is Wire.FP32:
        return vector.contiguous().view(torch.uint8)
    if wire is Wire.BF16:
        return vector.to(torch.bfloat16).view(torch.uint8)
    blocks = _blocks(vector)
    scale = blocks.abs().amax(dim=1) / LEVELS
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = (blocks / steps[:, None]).round().to(torch.int8)
    return torch.cat([scale.view(torch.uint8), levels.reshape(-1)[: len(vector)].view(torch.uint8)])


def decode(message: Tensor, values: int, wire: Wire) -> Tensor:
    """The vector that `encode` was given, up to what rounding takes.

    Parameters
    ----------
    message
        ``uint8``, as `encode` made it.
    values
        Elements of the vector.
    wire
        How they are written.

    Returns
    -------
    Tensor
        ``float32[values]``.
    """
    if wire is Wire.FP32:
        return message.view(torch.float32)
    if wire is Wire.BF16:
        return message.view(torch.bfloat16).to(torch.float32)
    head = 4 * -(-values // BLOCK)
    scale = message[:head].clone().view(torch.float32)
    levels = message[head:].view(torch.int8).to(torch.float32)
    return (_blocks(levels) * scale[:, None]).reshape(-1)[:values]


def _blocks(vector: Tensor) -> Tensor:
    padding = -len(vector) % BLOCK
    return torch.nn.functional.pad(vector, (0, padding)).view(-1, BLOCK)
