"""One GPU's part of a stage: parts of all matrices, and of the tokens between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.executor.runtime.model import (
    CPU,
    FeedForward,
    Head,
    Layer,
    Stage,
    Stem,
    build_head,
    seeded,
    swish,
)
from planner.executor.runtime.recompute import recomputed
from planner.executor.runtime.stage_module import StageModule
from planner.executor.tensor_parallel.gpu_group import GpuGroup, vocabulary_loss
from planner.executor.tensor_parallel.shards import (
    Kind,
    Shard,
    local_architecture,
    shard_of,
    words_of,
)
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ShardedStem(Stem):
    """Embedding of some of the words; returns this GPU's tokens."""

    def __init__(self, arch: Architecture, group: GpuGroup) -> None:
        words = words_of(arch, group.index, group.size)
        super().__init__(replace(arch, vocabulary=len(words)))
        self._group, self._words = group, words

    def forward(self, tokens: Tensor) -> Tensor:
        own = (tokens >= self._words.start) & (tokens < self._words.stop)
        rows = self.tokens(torch.where(own, tokens - self._words.start, 0))
        x = self._group.scatter_sum(rows * own[..., None])
        if self.positions is not None:
            begin = self._group.index * x.shape[1]
            x = x + self.positions.weight[begin : begin + x.shape[1]]
        return x


class GatheredLinear(nn.Linear):
    """A linear layer for all tokens, given this GPU's."""

    def __init__(self, inputs: int, outputs: int, group: GpuGroup, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.gathered_linear(x, self)[0]


class ShardedFeedForward(FeedForward):
    """Some of the feed-forward width; takes this GPU's tokens, returns a partial sum for all."""

    def __init__(self, arch: Architecture, group: GpuGroup) -> None:
        super().__init__(arch)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self._group.gathered_linear(x, self.up)[0], approximate="tanh")
        else:
            inner = recomputed(swish, *self._group.gathered_linear(x, self.gate, self.up))
        result: Tensor = self.down(inner)
        return result


class ShardedLayer(Layer):
    """A layer with some of the heads and some of the feed-forward width, for this GPU's tokens."""

    def __init__(self, arch: Architecture, group: GpuGroup) -> None:
        local = local_architecture(arch, group.size)
        super().__init__(local)
        self._group = group
        self.feed_forward = ShardedFeedForward(local, group)
        qkv = self.attention.qkv
        self.attention.qkv = GatheredLinear(
            qkv.in_features, qkv.out_features, group, bias=qkv.bias is not None
        )
        if not group.leads:
            for linear in (self.attention.out, self.feed_forward.down):
                linear.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._group.scatter_sum(self.attention(self.norm1(x)))
        return x + self._group.scatter_sum(self.feed_forward(self.norm2(x)))


class ShardedHead(Head):
    """Output projection to some of the words; the loss is that of all tokens."""

    def __init__(self, arch: Architecture, group: GpuGroup) -> None:
        words = words_of(arch, group.index, group.size)
        super().__init__(replace(arch, vocabulary=len(words)))
        self._group, self._words = group, words

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        (logits,) = self._group.gathered_linear(self.norm(x), self.project)
        return vocabulary_loss(
            self._group, logits.flatten(0, 1), targets.flatten(), self._words.start
        )


class ShardedStageModule(StageModule):
    """The module of one GPU of a worker; `StageModule` of a rank with a single GPU.

    Its gradients are those of this GPU's parts, in the order of its parameters.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        device: torch.device,
        group: GpuGroup,
        *,
        compiled: bool = False,
    ) -> None:
        self._group = group
        super().__init__(plan, rank, device, compiled=compiled)

    def _build_stage(self, start: int, stop: int, seed: int, device: torch.device) -> Stage:
        arch, group = self._arch, self._group
        stem = None
        if start == 0:
            whole_stem = seeded(lambda: Stem(arch), arch, seed, 0, CPU)
            stem = self._part_of(whole_stem, lambda: ShardedStem(arch, group), device)
        layers: list[Layer] = []
        for k in range(start, stop):
            whole = seeded(lambda: Layer(arch), arch, seed, 1 + k, CPU)
            layers.append(self._part_of(whole, lambda: ShardedLayer(arch, group), device))
        return Stage(stem, layers)

    def _build_head(self, seed: int, device: torch.device) -> Head:
        arch, group = self._arch, self._group
        whole = build_head(arch, seed)
        head = self._part_of(whole, lambda: ShardedHead(arch, group), device)
        if arch.tied and self.stage.stem is not None:
            head.project.weight = self.stage.stem.tokens.weight
        return head

    def _part_of(
        self, whole: nn.Module, make: Callable[[], ModuleT], device: torch.device
    ) -> ModuleT:
        """A module with this GPU's parts of another one's parameters."""
        with torch.device("meta"):
            part = make()
        part.to_empty(device=device)
        values = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(self.shard(name).of(values[name]))
        return part

    def shard(self, name: str) -> Shard:
        """This GPU's part of a parameter."""
        return shard_of(self._arch, name, self._group.index, self._group.size)

    def sum_whole_gradients(self) -> None:
        """Sum the gradients of parameters that every GPU has, each of its own tokens."""
        gradients = [
            parameter.grad
            for name, parameter in self.named_parameters()
            if self.shard(name).kind is Kind.WHOLE and parameter.grad is not None
        ]
        if gradients:
            flat = self._group.all_reduce(torch.cat([g.flatten() for g in gradients]))
            sizes = [g.numel() for g in gradients]
            for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _chunks(self, activations: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """This GPU's tokens in chunks, with the targets of all GPUs' tokens in the same chunks."""
        size = max(1, self._arch.head_tokens(len(activations)) // self._group.size)
        # targets of each GPU's tokens, in the order in which tokens are gathered
        by_gpu = torch.chunk(targets, self._group.size, dim=1)
        for k, part in enumerate(torch.split(activations, size, dim=1)):
            chunk = slice(k * size, k * size + part.shape[1])
            yield part, torch.cat([own[:, chunk] for own in by_gpu], dim=1)
