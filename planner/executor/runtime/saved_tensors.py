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
    peak_bytes
        Largest number of bytes so far.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._weights: set[int] = set()
        # by storage: number of references and bytes
        self._storages: dict[int, tuple[int, int]] = {}

    @contextmanager
    def track(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Count graphs created in the block until they are freed."""
        self._weights = {_storage_key(tensor) for tensor in weights}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: _SavedTensor(self, t), lambda h: h.tensor
        ):
            yield

    def update(self, other_tensors: Iterable[Tensor] = ()) -> int:
        """Bytes saved now."""
        sizes = {key: size for key, (_, size) in self._storages.items()}
        sizes |= {_storage_key(t): t.untyped_storage().nbytes() for t in other_tensors}
        total = sum(size for key, size in sizes.items() if key not in self._weights)
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def add(self, tensor: Tensor) -> None:
        """A graph saves a tensor."""
        references, size = self._storages.get(
            _storage_key(tensor), (0, tensor.untyped_storage().nbytes())
        )
        self._storages[_storage_key(tensor)] = (references + 1, size)
        self.update()

    def release(self, tensor: Tensor) -> None:
        """A graph has freed a tensor."""
        references, size = self._storages.pop(_storage_key(tensor))
        if references > 1:
            self._storages[_storage_key(tensor)] = (references - 1, size)


class _SavedTensor:
    """Reference of a graph to a saved tensor."""

    def __init__(self, tracker: SavedTensors, tensor: Tensor) -> None:
        self.tracker, self.tensor = tracker, tensor
        tracker.add(tensor)

    def __del__(self) -> None:
        self.tracker.release(self.tensor)


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
