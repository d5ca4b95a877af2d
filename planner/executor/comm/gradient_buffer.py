"""A vector that is averaged where a round needs it: on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from torch import Tensor

from planner.training_plan.shares import Range


class GradientBuffer:
    """A ``float32[numel]`` vector on the device, with a copy in host memory if needed.

    Parameters
    ----------
    device_tensor
        The vector on the device.
    make_host
        Allocates the host's, at its first use; None if the device's is in host memory itself.
    """

    def __init__(
        self, device_tensor: Tensor, make_host: Callable[[], Tensor] | None = None
    ) -> None:
        self.device_tensor, self._make_host = device_tensor, make_host
        self._is_on_host = False
        # ranges of the device's vector that are valid; None for all
        self._parts: list[Range] | None = None

    @cached_property
    def host_tensor(self) -> Tensor:
        """The vector in host memory."""
        return self.device_tensor if self._make_host is None else self._make_host()

    @property
    def current(self) -> Tensor:
        """The vector with the current values."""
        return self.host_tensor if self._is_on_host else self.device_tensor

    def to_host(self) -> Tensor:
        """Move the values to the host, unless they are there."""
        if not self._is_on_host:
            self._copy(self.host_tensor, self.device_tensor)
        self._is_on_host = True
        return self.host_tensor

    def to_device(self) -> Tensor:
        """Move the values to the device, unless they are there.

        If only parts are valid there, the caller writes the others.
        """
        if self._is_on_host:
            self.restore_from_host()
        self._parts = None
        return self.device_tensor

    def for_update(self, parts: Iterable[Range] | None = None) -> Tensor:
        """Move the values, or the parts that this rank updates, to where the optimizer needs them.

        Of parts, only these move back to the host.
        """
        if self._is_on_host:
            self._parts = None if parts is None else list(parts)
            self._copy(self.device_tensor, self.host_tensor)
            self._is_on_host = False
        return self.device_tensor

    def restore_from_host(self) -> None:
        """Replace the device's values by those that were last on the host."""
        self._parts = None
        self._copy(self.device_tensor, self.host_tensor)
        self._is_on_host = False

    def writable_device_tensor(self) -> Tensor:
        """The vector on the device, whose values will be replaced."""
        self._is_on_host, self._parts = False, None
        return self.device_tensor

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if target is source:
            return
        for start, stop in [(0, len(target))] if self._parts is None else self._parts:
            target[start:stop].copy_(source[start:stop])
