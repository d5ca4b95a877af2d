"""Which part of each parameter a GPU of a worker holds."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from planner.workload.layers import Architecture


class Kind(enum.Enum):
    """How a parameter is divided among the GPUs of a worker."""

    WHOLE = "on every GPU; gradients are of each GPU's tokens"
    FIRST = "on the first GPU alone: biases that are added once"
    PARTS = "in parts along one dimension"


class Shard(NamedTuple):
    """A GPU's part of a parameter: entries along a dimension."""

    kind: Kind
    dimension: int = 0
    entries: Tensor | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The part of the whole parameter."""
        return whole if self.entries is None else whole.index_select(self.dimension, self.entries)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the part into the whole parameter."""
        if self.entries is None:
            whole.copy_(part)
        else:
            whole.index_copy_(self.dimension, self.entries, part)


def local_architecture(arch: Architecture, size: int) -> Architecture:
    """The part of each layer's heads and feed-forward width that a GPU computes."""
    return replace(
        arch,
        heads=arch.heads // size,
        kv_heads=arch.kv_heads // size,
        ffn=arch.ffn // size,
        head_size=arch.attention_size,
    )


def words_of(arch: Architecture, index: int, size: int) -> range:
    """The words whose rows of embedding and output projection a GPU holds."""
    count = -(-arch.vocabulary // size)
    return range(min(index * count, arch.vocabulary), min((index + 1) * count, arch.vocabulary))


def shard_of(arch: Architecture, name: str, index: int, size: int) -> Shard:
    """A GPU's part of a parameter, by the end of its name."""
    module, end = name.rsplit(".", 2)[-2:]
    if module in ("out", "down"):
        if end == "bias":
            return Shard(Kind.FIRST)
        width = arch.ffn if module == "down" else arch.heads * arch.attention_size
        return Shard(Kind.PARTS, 1, _part(0, width, index, size))
    if module in ("gate", "up"):
        return Shard(Kind.PARTS, 0, _part(0, arch.ffn, index, size))
    if module == "qkv":
        widths = [n * arch.attention_size for n in (arch.heads, arch.kv_heads, arch.kv_heads)]
        return Shard(Kind.PARTS, 0, torch.cat(list(_parts(widths, index, size))))
    if module in ("tokens", "project"):
        words = words_of(arch, index, size)
        return Shard(Kind.PARTS, 0, torch.arange(words.start, words.stop))
    return Shard(Kind.WHOLE)


def _parts(widths: list[int], index: int, size: int) -> Iterator[Tensor]:
    """Entries of a GPU in matrices that lie one after the other."""
    begin = 0
    for width in widths:
        yield _part(begin, width, index, size)
        begin += width


def _part(begin: int, width: int, index: int, size: int) -> Tensor:
    count = width // size
    return torch.arange(begin + index * count, begin + (index + 1) * count)
