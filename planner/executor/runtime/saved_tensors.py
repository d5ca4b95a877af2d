"""Counts the bytes saved for backward passes, where no allocator does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedTensors:
    """Bytes of activations saved for backward passes; shared storages count once.

    Attributes
    ----------
    most
        Largest number of bytes so far.
    """

    def __init__(self) -> None:
        self.most = 0
        self._weights: set[int] = set()
        # by storage: number of references and bytes
        self._held: dict[int, tuple[int, int]] = {}

    @contextmanager
    def counting(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Count graphs created in the block until they are freed."""
        self._weights = {_place(tensor) for tensor in weights}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Held(self, t), lambda h: h.tensor):
            yield

    def bytes(self, others: Iterable[Tensor] = ()) -> int:
        """Bytes saved now."""
        sizes = {place: size for place, (_, size) in self._held.items()}
        sizes |= {_place(t): t.untyped_storage().nbytes() for t in others}
        total = sum(size for place, size in sizes.items() if place not in self._weights)
        self.most = max(self.most, total)
        return total

    def add(self, tensor: Tensor) -> None:
        """A graph saves a tensor."""
        holders, size = self._held.get(_place(tensor), (0, tensor.untyped_storage().nbytes()))
        self._held[_place(tensor)] = (holders + 1, size)
        self.bytes()

    def drop(self, tensor: Tensor) -> None:
        """A graph has freed a tensor."""
        holders, size = self._held.pop(_place(tensor))
        if holders > 1:
            self._held[_place(tensor)] = (holders - 1, size)


class _Held:
    """Reference of a graph to a saved tensor."""

    def __init__(self, kept: SavedTensors, tensor: Tensor) -> None:
        self.kept, self.tensor = kept, tensor
        kept.add(tensor)

    def __del__(self) -> None:
        self.kept.drop(self.tensor)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
