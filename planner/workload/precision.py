"""Formats of compute, messages, gradients and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from planner.network.dtype import Dtype
from planner.utils.validate import choice, mapping

OPTIMIZER_MOMENTS = 2
"""Of AdamW, each in the format of the parameters."""
OUTER_COPIES = 2
"""What an outer optimizer keeps, in the format of the parameters: those of the last outer step, and
its momentum."""


@dataclass(frozen=True)
class Precision:
    """The format of each kind of number; an input of a plan, since it changes what is computed.

    Attributes
    ----------
    compute
        Of matrix products and of activations between F and B. Whatever it is, norms, softmax and
        loss sum in fp32.
    messages
        Of activations and their gradients between devices.
    gradients
        Of what averaging sends; sums are made in fp32.
    parameters
        Of parameters and optimizer state, fp32: smaller updates than bf16 can hold would be lost.
    """

    compute: Dtype = Dtype.BF16
    messages: Dtype = Dtype.BF16
    gradients: Dtype = Dtype.FP32
    parameters: Dtype = Dtype.FP32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = choice(Dtype, f"precision.{field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if self.parameters is not Dtype.FP32:
            raise ValueError(
                f"precision.parameters is {self.parameters}; parameters and optimizer state are "
                "kept in fp32 so far"
            )

    @classmethod
    def of(cls, value: Precision | Mapping[str, str] | str) -> Precision:
        """From a word: ``bf16`` computes and sends activations in 16 bits, ``fp32`` all in 32."""
        if isinstance(value, Precision):
            return value
        if isinstance(value, str):
            word = choice(Dtype, "precision", value)
            return cls(compute=word, messages=word)
        given = mapping("precision", value)
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"precision has no field {name!r}; it has {', '.join(known)}")
        return cls(**given)

    @classmethod
    def of_bytes(cls, activation: float, gradient: float) -> Precision:
        """What plan files mean that do not say it: the formats of so many bytes."""
        narrow = Dtype.BF16
        activations = narrow if activation <= narrow.bytes else Dtype.FP32
        return cls(activations, activations, narrow if gradient <= narrow.bytes else Dtype.FP32)

    @property
    def state_bytes(self) -> float:
        """Of one parameter: itself, its gradient as it is summed, and AdamW's two moments."""
        kept = (1 + OPTIMIZER_MOMENTS) * self.parameters.bytes
        return float(kept + Dtype.FP32.bytes)

    def outer_state_bytes(self, *, delayed: bool = False) -> float:
        """Of one parameter, beside `state_bytes`, where averages are rare."""
        return float((OUTER_COPIES + delayed) * self.parameters.bytes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}
