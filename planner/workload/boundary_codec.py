"""Encodings of activations between stages."""

from __future__ import annotations

import enum

SCALE_BYTES = 4 / 1024
"""Bytes per value of a 32-bit scale for every 1024 values, with 8 and 4 bits."""


class BoundaryCodec(enum.StrEnum):
    """``none`` keeps the format of messages; the others change the computation.

    ``bf16`` equals messages in bf16, for workloads that send fp32.
    """

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    def wire_ratio(self, element_bytes: float) -> float:
        """Bytes on the wire over bytes of the values."""
        coded = {
            BoundaryCodec.NONE: element_bytes,
            BoundaryCodec.BF16: 2.0,
            BoundaryCodec.FP16: 2.0,
            BoundaryCodec.INT8: 1.0 + SCALE_BYTES,
            BoundaryCodec.INT4: 0.5 + SCALE_BYTES,
        }[self]
        return coded / element_bytes
