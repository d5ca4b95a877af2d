"""Bytes of encoded gradients over those of fp32."""

from __future__ import annotations

from planner.training_plan.choices import Codec

WIRE_RATIO = {
    Codec.NONE: 1.0,
    # one byte a value, and one 4-byte scale per 1024 values, instead of 4 bytes a value
    Codec.INT8: 1028 / 4096,
}
