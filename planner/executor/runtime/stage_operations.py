"""Forward, loss and backward of one rank's microbatches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from planner.executor.comm.device_backend import DeviceBackend
from planner.executor.data.microbatches import Microbatches
from planner.executor.runtime.activation_codec import ActivationCodec
from planner.executor.runtime.loss_scaler import LossScaler
from planner.executor.runtime.saved_tensors import SavedTensors
from planner.executor.runtime.stage_module import StageModule
from planner.workload.workload import Workload


class _MicrobatchActivations(NamedTuple):
    """Tensors of a microbatch between F and B: input, first kept activations, and output."""

    received: Tensor | None
    first_kept: Tensor | None
    output: Tensor | None


class StageOperations:
    """Runs F, H and B; gradients are added to those of the module.

    Parameters
    ----------
    data
        Training data; None if this rank reads none.
    scaler
        Scales losses; None without loss scaling.
    recomputed
        Of how many of the first layers B runs the forward pass again.
    """

    def __init__(
        self,
        module: StageModule,
        workload: Workload,
        backend: DeviceBackend,
        data: Microbatches | None,
        scaler: LossScaler | None,
        device: torch.device,
        *,
        recomputed: int,
    ) -> None:
        assert workload.architecture is not None
        self.module, self.backend = module, backend
        self._data, self._scaler, self._device = data, scaler, device
        self._recomputed, self._recomputes_all = recomputed, recomputed == len(module.stage.layers)
        self._batch_tokens = workload.batch_samples * workload.architecture.sequence
        self.activation_codec = ActivationCodec(workload)
        self.saved_tensors = SavedTensors()
        self._counts_memory = False
        self._step = 0
        self._loss: Tensor | None = None

    def begin(self, step: int, *, counts_memory: bool = True) -> None:
        """Start a step; memory is counted in one step only, to avoid the overhead."""
        on_cpu, counted = self._device.type == "cpu", self.saved_tensors.peak_bytes > 0
        self._counts_memory = counts_memory and on_cpu and not counted
        self._step = step
        self._activations: dict[int, _MicrobatchActivations] = {}
        self._head_gradients: dict[int, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}
        self._loss = None
        if self.module.head is not None:
            self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self.backend.begin_step()

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Run F, H or B; returns activations or their gradient as a message."""
        decoded = None if received is None else self.decode_message(kind, received)
        return self.encode_message(kind, self.run_decoded(kind, microbatch, decoded))

    def run_decoded(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Run F, H or B with decoded activations or their gradient, and return such."""
        run = {"F": self._forward, "H": self._run_head, "B": self._backward}[kind]
        if not self._counts_memory:
            return run(microbatch, received)
        with self.saved_tensors.track(self.module.weights):
            output = run(microbatch, received)
        in_flight = [
            t for activations in self._activations.values() for t in activations if t is not None
        ]
        self.saved_tensors.update([*in_flight, *self._head_gradients.values()])
        return output

    def encode_message(self, kind: str, output: Tensor) -> Tensor:
        """Encode the output of an operation."""
        return self.activation_codec.encode_message(output, gradient=kind != "F")

    def decode_message(self, kind: str, message: Tensor) -> Tensor:
        """Decode the message that an operation needs."""
        message = self.backend.to_device(message)
        dtype = self.module.dtype
        return self.activation_codec.decode_message(message, dtype, gradient=kind == "B")

    def tokens(self, step: int, microbatch: int) -> Tensor:
        """``int64[samples, sequence + 1]``: a microbatch and, one further, its targets."""
        assert self._data is not None
        return self.backend.to_device(self._data.tokens(step, microbatch))

    def loss(self) -> float | None:
        """Loss of the step so far; None without a head."""
        return None if self._loss is None else float(self._loss)

    def _forward(self, microbatch: int, received: Tensor | None) -> Tensor:
        input_leaf = None if received is None else received.requires_grad_()
        inputs = input_leaf
        if inputs is None:
            tokens = self.tokens(self._step, microbatch)
            inputs = tokens[:, :-1]
            if self.module.head is not None:
                # the tokens are targets, too
                self._tokens[microbatch] = tokens
        first_kept = None
        if self._recomputed:
            with torch.no_grad():
                output = self.module.run_stage(inputs, 0, self._recomputed)
            if not self._recomputes_all:
                first_kept = output.requires_grad_()
                output = self.module.run_stage(first_kept, self._recomputed)
        else:
            output = self.module.run_stage(inputs)
        # without a graph only H needs the output
        needed = not self._recomputes_all or self.module.head is not None
        self._activations[microbatch] = _MicrobatchActivations(
            input_leaf, first_kept, output if needed else None
        )
        return output.detach()

    def _run_head(self, microbatch: int, received: Tensor | None) -> Tensor:
        microbatch_activations = self._activations[microbatch]
        is_last_stage = received is None
        if received is None:
            assert microbatch_activations.output is not None
            received = microbatch_activations.output.detach()
        if self._recomputes_all:
            self._activations[microbatch] = microbatch_activations._replace(output=None)
        tokens = self._tokens.pop(microbatch, None)
        targets = (self.tokens(self._step, microbatch) if tokens is None else tokens)[:, 1:]
        loss, gradient = self.head_loss_and_gradient(received, targets)
        assert self._loss is not None
        self._loss += loss
        if is_last_stage:  # B is next here; otherwise the gradient is sent away
            self._head_gradients[microbatch] = gradient
        return gradient

    def head_loss_and_gradient(self, received: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `StageModule.head_loss_and_gradient`."""
        loss_scale = None if self._scaler is None else self._scaler.scale
        return self.module.head_loss_and_gradient(received, targets, self._batch_tokens, loss_scale)

    def _backward(self, microbatch: int, received: Tensor | None) -> Tensor:
        input_leaf, first_kept, output = self._activations.pop(microbatch)
        head_gradient = self._head_gradients.pop(microbatch, None)
        gradient = head_gradient if received is None else received
        assert gradient is not None
        if output is not None:
            torch.autograd.backward(output, gradient)
        if self._recomputed:
            if first_kept is not None:
                assert first_kept.grad is not None
                gradient = first_kept.grad
            # freed before other activations are computed
            del first_kept, output, head_gradient, received
            inputs = (
                self.tokens(self._step, microbatch)[:, :-1] if input_leaf is None else input_leaf
            )
            output = self.module.run_stage(inputs, 0, self._recomputed)
            torch.autograd.backward(output, gradient)
        # the first stage sends no gradient
        return (
            gradient.new_empty(0)
            if input_leaf is None or input_leaf.grad is None
            else input_leaf.grad
        )
