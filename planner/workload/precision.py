"""Formats of compute, messages, gradients and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from planner.network.dtype import Dtype
from planner.utils.validate import choice, mapping

OPTIMIZER_MOMENTS = 2
"""Moments of AdamW, in the format of the parameters."""
OUTER_COPIES = 2
"""Copies kept by an outer optimizer, in the format of the parameters: parameters of the last outer
step, and momentum."""


@dataclass(frozen=True)
class Precision:
    """The format of each kind of number; an input of a plan, since it changes the computation.

    Attributes
    ----------
    compute
        Matrix products, and activations between F and B. Norms, softmax and loss use fp32.
    messages
        Activations and their gradients between devices. With ``compute`` or ``messages`` in fp16
        the loss is scaled (`scales_loss`).
    gradients
        Messages of averaging; sums are accumulated in fp32.
    parameters
        Parameters and optimizer state: fp32, because bf16 would lose small updates.
    """

    compute: Dtype = Dtype.BF16
    messages: Dtype = Dtype.BF16
    gradients: Dtype = Dtype.FP32
    parameters: Dtype = Dtype.FP32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = choice(Dtype, f"precision.{field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if self.gradients is Dtype.FP16:
            raise ValueError(
                "precision.gradients is fp16; averaged gradients would underflow: give fp32 or bf16"
            )
        if self.parameters is not Dtype.FP32:
            raise ValueError(
                f"precision.parameters is {self.parameters}; parameters and optimizer state are "
                "kept in fp32 so far"
            )

    @classmethod
    def parse(cls, value: Precision | Mapping[str, str] | str) -> Precision:
        """By name: ``bf16`` or ``fp16`` computes and sends activations in 16 bits; ``fp32`` uses 32
        for all."""
        if isinstance(value, Precision):
            return value
        if isinstance(value, str):
            dtype = choice(Dtype, "precision", value)
            return cls(compute=dtype, messages=dtype)
        formats = mapping("precision", value)
        names = [field.name for field in fields(cls)]
        for name in formats:
            if name not in names:
                raise ValueError(f"precision has no field {name!r}; it has {', '.join(names)}")
        return cls(**formats)

    @classmethod
    def of_bytes(cls, activation: float, gradient: float) -> Precision:
        """The formats of plan files that state bytes only."""
        narrow = Dtype.BF16
        activations = narrow if activation <= narrow.bytes else Dtype.FP32
        return cls(activations, activations, narrow if gradient <= narrow.bytes else Dtype.FP32)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow in fp16 without dynamic loss scaling."""
        return Dtype.FP16 in (self.compute, self.messages)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes per parameter that the optimizer updates: the parameter and AdamW's moments."""
        return float((1 + OPTIMIZER_MOMENTS) * self.parameters.bytes)

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter: `optimizer_bytes` and the accumulated gradient."""
        return self.optimizer_bytes + Dtype.FP32.bytes

    def outer_state_bytes(self, *, delayed: bool = False) -> float:
        """Additional bytes per parameter with an outer optimizer."""
        return float((OUTER_COPIES + delayed) * self.parameters.bytes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}
