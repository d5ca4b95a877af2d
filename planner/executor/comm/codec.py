"""Encoding of vectors: unchanged, rounded to 16 bits, or as integers with a scale per block.

``int8`` stores ``round(x / s)`` with ``s = max |x| / 127`` for each block of 1024 values: about a
quarter of the bytes, with an error up to ``s / 2 = max |x| / 254``. ``int4`` uses 7 instead of 127,
with two values per byte. ``fp16`` clamps finite values to its largest number. All formats keep
infinity and NaN as such or as NaN, so that no member misses an overflow.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from planner.network.dtype import Dtype
from planner.training_plan.choices import Codec

BLOCK = 1024
LARGEST_FP16 = 65504.0
HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""16-bit formats, rounded value by value."""
LEVELS = {"int8": 127, "int4": 7}
"""Levels on either side of 0."""


class WireFormat(enum.StrEnum):
    """Format on the wire; sums are computed in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @classmethod
    def from_codec(cls, codec: Codec, gradients: Dtype) -> WireFormat:
        """From a plan: its codec, or else the gradients' format."""
        return cls(codec.value) if codec is not Codec.NONE else cls(gradients.value)


def message_length(numel: int, wire: WireFormat) -> int:
    """Bytes of a message with so many values."""
    if wire in LEVELS:
        return (numel if wire is WireFormat.INT8 else -(-numel // 2)) + _scale_bytes(numel)
    return (2 if wire in HALF_PRECISION else 4) * numel


def encode(vector: Tensor, wire: WireFormat) -> Tensor:
    """Encode a ``float32[numel]`` vector.

    Returns
    -------
    Tensor
        ``uint8[message_length]``.
    """
    if wire is WireFormat.FP32:
        return vector.contiguous().view(torch.uint8)
    if wire in HALF_PRECISION:
        clamped = vector
        if wire is WireFormat.FP16:
            # beyond its largest number fp16 is infinite, and sums become NaN
            clamped = vector.clamp(-LARGEST_FP16, LARGEST_FP16)
            clamped = torch.where(vector.isinf(), vector, clamped)
        return clamped.to(HALF_PRECISION[wire]).view(torch.uint8)
    blocks = _blocks(vector)
    largest = blocks.abs().amax(dim=1)
    # CUDA multiplies by the reciprocal of a scalar: divided by a tensor, the bits are a CPU's
    scale = largest / torch.full_like(largest, LEVELS[wire])
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    rounded = (blocks / steps[:, None]).round_().to(torch.int8)
    levels = rounded.reshape(-1)[: len(vector)].view(torch.uint8)
    return torch.cat(
        [scale.view(torch.uint8), _pack_int4(levels) if wire is WireFormat.INT4 else levels]
    )


def decode(message: Tensor, numel: int, wire: WireFormat) -> Tensor:
    """Decode a message, up to rounding.

    Returns
    -------
    Tensor
        ``float32[numel]``.
    """
    if wire is WireFormat.FP32:
        return message.view(torch.float32)
    if wire in HALF_PRECISION:
        return message.view(HALF_PRECISION[wire]).to(torch.float32)
    scale_bytes = _scale_bytes(numel)
    scale = message[:scale_bytes].clone().view(torch.float32)
    payload = message[scale_bytes:]
    levels = (
        _unpack_int4(payload, numel) if wire is WireFormat.INT4 else payload.view(torch.int8)
    ).float()
    return (_blocks(levels) * scale[:, None]).reshape(-1)[:numel]


def _scale_bytes(numel: int) -> int:
    """Bytes of the scales."""
    return 4 * -(-numel // BLOCK)


def _pack_int4(levels: Tensor) -> Tensor:
    """Pack two levels per byte, the first in the lower half."""
    even = torch.nn.functional.pad(levels, (0, len(levels) % 2)) & 15
    return even[::2] | even[1::2] << 4


def _unpack_int4(packed: Tensor, numel: int) -> Tensor:
    """Inverse of `_pack_int4`, as signed numbers."""
    # shift to the upper half and back to extend the sign
    low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
    return torch.stack([low, high], dim=1).reshape(-1)[:numel]


def _blocks(vector: Tensor) -> Tensor:
    padding = -len(vector) % BLOCK
    return torch.nn.functional.pad(vector, (0, padding)).view(-1, BLOCK)
