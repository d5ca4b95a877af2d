"""Encoding of activations and their gradients between devices: rounded, or in fewer bits.

Messages encode the values as computed. The receiver computes with the decoded values, also when it
repeats F; gradients are those of the decoded values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.executor.comm.codec import WireFormat, decode, encode, message_length
from planner.executor.runtime.precision import TORCH_DTYPES
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.workload import Workload


class ActivationCodec:
    """Messages of one microbatch between stages.

    Attributes
    ----------
    shape
        ``(samples, tokens, hidden)`` of the values.
    """

    def __init__(self, workload: Workload) -> None:
        arch, codec = workload.architecture, workload.boundary_codec
        assert arch is not None
        self.shape = (workload.microbatch_samples, arch.sequence, arch.hidden)
        self._dtype = TORCH_DTYPES[workload.precision.messages]
        self._wire = None if codec is BoundaryCodec.NONE else WireFormat(codec.value)
        # gradients are of a loss that is divided by the batch's tokens: unless the loss is scaled,
        # fp16 would lose most of them; a power of two changes nothing else
        tokens = workload.batch_samples * arch.sequence
        scales_gradients = self._wire is WireFormat.FP16 and not workload.precision.scales_loss
        self._gradient_scale = 2.0 ** (tokens.bit_length() - 1) if scales_gradients else 1.0

    def encode_message(self, values: Tensor, *, gradient: bool) -> Tensor:
        """Encode ``[samples, tokens, hidden]`` values as a message."""
        if self._wire is None:
            return values.to(self._dtype)
        flat = values.detach().reshape(-1).float()
        return encode(
            flat * self._gradient_scale if gradient and self._gradient_scale != 1 else flat,
            self._wire,
        )

    def decode_message(self, message: Tensor, dtype: torch.dtype, *, gradient: bool) -> Tensor:
        """Decode a message to ``[samples, tokens, hidden]``."""
        if self._wire is None:
            return message.to(dtype)
        values = decode(message, self._numel, self._wire).view(self.shape)
        return (
            values / self._gradient_scale if gradient and self._gradient_scale != 1 else values
        ).to(dtype)

    @property
    def message(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and format of a message."""
        if self._wire is None:
            return self.shape, self._dtype
        return (message_length(self._numel, self._wire),), torch.uint8

    @property
    def _numel(self) -> int:
        samples, tokens, hidden = self.shape
        return samples * tokens * hidden
