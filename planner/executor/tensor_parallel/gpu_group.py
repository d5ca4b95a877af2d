"""The GPUs of a worker: collectives between them, differentiable where a layer needs it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    ReduceOp,
    ReduceScatterOptions,
    Store,
)

from planner.executor.comm.device_collectives import CollectiveLibrary, make_process_group
from planner.executor.runtime.cross_entropy import blocks, write_gradient

GRACE_S = 2.0
"""Wait of the thread that watches a worker's processes before it ends the rank: if the rank fails
for the same reason, that says more."""
TOKENS = 1
"""Dimension of tokens in activations ``[samples, tokens, hidden]``."""
COMMAND_BYTES = 256
"""Length of a command's message: a method's name and its arguments in JSON."""


class LeaderLostError(RuntimeError):
    """The leader, or another process of the worker, has ended."""


class GpuGroup:
    """The GPUs of a worker, from the view of one of them; the first leads.

    Activations are exchanged on the GPUs (NCCL) or, on CPUs, in host memory (gloo); commands and
    gradients always in host memory.

    Parameters
    ----------
    store
        Through which the processes of the worker find each other.
    index, size
        Of this GPU, and the number of GPUs.
    device
        Where this process computes.
    """

    def __init__(self, store: Store, index: int, size: int, device: torch.device) -> None:
        self.index, self.size = index, size
        gloo, nccl = CollectiveLibrary.GLOO, CollectiveLibrary.NCCL
        with self._lost_leader():
            self._host = make_process_group(gloo, PrefixStore("host", store), index, size)
        self._device = self._host
        if device.type == "cuda":
            self._device = make_process_group(nccl, PrefixStore("device", store), index, size)

    def __deepcopy__(self, memo: dict[int, Any]) -> GpuGroup:
        """The group itself: modules in the format of compute share it."""
        return self

    @property
    def leads(self) -> bool:
        """Whether this process is the rank of the plan's device."""
        return self.index == 0

    def _wait(self, collective: Callable[..., Any], *arguments: Any) -> None:
        self._start(collective, *arguments)()

    def _start(self, collective: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        """Start a collective; returns what waits for it and holds its tensors until then."""
        with self._lost_leader():
            work = collective(*arguments)

        def finish(held: Any = arguments) -> None:
            with self._lost_leader():
                work.wait()

        return finish

    @contextmanager
    def _lost_leader(self) -> Iterator[None]:
        """Leave it to the leader to report the errors of collectives between processes."""
        try:
            yield
        except RuntimeError as error:
            if not self.leads:
                raise LeaderLostError(str(error)) from None
            # the thread that watches the other processes ends this one, and says which is gone
            time.sleep(2 * GRACE_S)
            raise

    def send_command(self, *command: Any) -> None:
        """Send a command from the leader to the other GPUs."""
        message = bytearray(json.dumps(command).encode().ljust(COMMAND_BYTES))
        assert len(message) == COMMAND_BYTES, command
        self._wait(self._host.broadcast, torch.frombuffer(message, dtype=torch.uint8), 0)

    def receive_command(self) -> list[Any]:
        """Receive a command of the leader."""
        message = torch.zeros(COMMAND_BYTES, dtype=torch.uint8)
        self._wait(self._host.broadcast, message, 0)
        command: list[Any] = json.loads(message.numpy().tobytes())
        return command

    def barrier(self) -> None:
        """Wait until all GPUs have called this."""
        self._wait(self._host.allreduce, [torch.zeros(1)])

    def sum_on_host(self, tensor: Tensor) -> None:
        """Replace a tensor in host memory by the sum over all GPUs."""
        self._wait(self._host.allreduce, [tensor])

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """The tensor, replaced by its sum (or maximum) over all GPUs."""
        options = AllreduceOptions()
        options.reduceOp = op
        self._wait(self._device.allreduce, [tensor], options)
        return tensor

    def gather_tokens(self, part: Tensor) -> Tensor:
        """Activations of all tokens, from those of each GPU's tokens."""
        return self.start_gather_tokens(part)()

    def start_gather_tokens(self, part: Tensor) -> Callable[[], Tensor]:
        """As `gather_tokens`, while the caller goes on; the result is called for."""
        parts = part.new_empty((self.size, *part.shape))
        finish = self._start(self._device._allgather_base, parts.view(-1), part.reshape(-1))

        def gathered() -> Tensor:
            finish()
            return parts.transpose(0, TOKENS).flatten(TOKENS, TOKENS + 1)

        return gathered

    def gathered_linear(self, part: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """Outputs of linear layers for all tokens, from this GPU's; differentiable.

        The gathered input is not kept for the backward pass, which gathers it again.
        """
        parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
        outputs: tuple[Tensor, ...] = _GATHERED_LINEAR(self, part, *parameters)
        return outputs

    def scatter_sum(self, partial: Tensor) -> Tensor:
        """This GPU's tokens of the sum over all GPUs; differentiable."""
        part: Tensor = _SCATTER_SUM(self, partial)
        return part

    def tokens_of(self, whole: Tensor) -> Tensor:
        """This GPU's tokens."""
        count = whole.shape[TOKENS] // self.size
        return whole.narrow(TOKENS, self.index * count, count)

    def broadcast(self, whole: Tensor) -> Tensor:
        """The leader's tensor; others give one of its shape."""
        whole = whole.contiguous()
        self._wait(self._device.broadcast, whole, 0)
        return whole

    def broadcast_tokens(self, whole: Tensor) -> Tensor:
        """This GPU's tokens of the leader's activations; others give a tensor of that shape."""
        return self.tokens_of(self.broadcast(whole)).clone()

    def sum_tokens(self, whole: Tensor) -> Tensor:
        """This GPU's tokens of the sum of all GPUs' activations."""
        return self.start_sum_tokens(whole)()

    def start_sum_tokens(self, whole: Tensor) -> Callable[[], Tensor]:
        """As `sum_tokens`, while the caller goes on; the result is called for."""
        samples, tokens, *rest = whole.shape
        parts = whole.reshape(samples, self.size, tokens // self.size, *rest).transpose(0, TOKENS)
        total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        finish = self._start(
            self._device._reduce_scatter_base,
            total.view(-1),
            parts.reshape(-1),
            ReduceScatterOptions(),
        )

        def summed() -> Tensor:
            finish()
            return total

        return summed


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: GpuGroup, part: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group, ctx.has_bias = group, [bias is not None for bias in biases]
        ctx.save_for_backward(part, *weights)
        inputs = group.gather_tokens(part)
        return tuple(F.linear(inputs, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, *weights = ctx.saved_tensors
        gathered = ctx.group.start_gather_tokens(part)
        # meanwhile
        of_inputs = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            of_inputs += gradient @ weight
        inputs = gathered().flatten(0, 1)
        del gathered
        of_part = ctx.group.start_sum_tokens(of_inputs)
        del of_inputs
        # meanwhile
        of_parameters: list[Tensor | None] = []
        for gradient, has_bias in zip(gradients, ctx.has_bias, strict=True):
            rows = gradient.flatten(0, 1)
            of_parameters += [rows.t() @ inputs, rows.sum(0) if has_bias else None]
        return None, of_part(), *of_parameters


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: GpuGroup, partial: Tensor) -> Tensor:
        ctx.group = group
        return group.sum_tokens(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.group.gather_tokens(gradient)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: GpuGroup, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        largest = group.all_reduce(logits.max(dim=1).values.float(), ReduceOp.MAX)
        totals = [
            (part - most[:, None]).exp_().sum(dim=1) for part, most in blocks(logits, largest)
        ]
        log_total = largest + torch.log(group.all_reduce(torch.cat(totals)))
        own = (targets >= first) & (targets < first + logits.shape[1])
        column = torch.where(own, targets - first, 0)
        chosen = torch.where(own, logits.gather(1, column[:, None])[:, 0].float(), 0.0)
        ctx.save_for_backward(logits, log_total, own, column)
        return (log_total - group.all_reduce(chosen)).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        logits, *others = ctx.saved_tensors
        for part, log_total, own, column in blocks(logits, *others):
            probabilities = (part - log_total[:, None]).exp_()
            write_gradient(part, probabilities, column, gradient, own)
        return None, logits, None, None


# what is compiled ends before a collective, and begins again after it
_GATHERED_LINEAR, _SCATTER_SUM, _VOCABULARY_LOSS = (
    torch.compiler.disable(function.apply)  # type: ignore[no-untyped-call]
    for function in (_GatheredLinear, _ScatterSum, _VocabularyLoss)
)


def vocabulary_loss(group: GpuGroup, logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Cross-entropy, summed over tokens, where each GPU has the logits of some of the words.

    Parameters
    ----------
    logits
        ``[tokens, words]`` of this GPU's words.
    first
        The first of them.
    """
    loss: Tensor = _VOCABULARY_LOSS(group, logits, targets, first)
    return loss
