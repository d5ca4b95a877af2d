"""Floating-point formats."""

from __future__ import annotations

import enum


class Dtype(enum.StrEnum):
    """``bf16``: 8 bits of exponent, 7 of mantissa; ``fp16``: IEEE half precision, 5 and 10;
    ``fp32``: IEEE single precision, not TF32."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        """Bytes of one number."""
        return {Dtype.BF16: 2, Dtype.FP16: 2, Dtype.FP32: 4}[self]
