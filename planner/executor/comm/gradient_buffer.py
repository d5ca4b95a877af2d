"""A vector that is averaged where a round needs it: on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor


class GradientBuffer:
    """A ``float32[values]`` vector on the device, with a copy in host memory if needed.

    Parameters
    ----------
    device
        The vector of the device.
    make_host
        Allocates the host's, at its first use; None if the device's is in host memory itself.
    """

    def __init__(self, device: Tensor, make_host: Callable[[], Tensor] | None = None) -> None:
        self.device, self._make_host = device, make_host
        self._is_on_host = False

    @cached_property
    def host(self) -> Tensor:
        """The vector of the host."""
        return self.device if self._make_host is None else self._make_host()

    @property
    def current(self) -> Tensor:
        """The vector with the current values."""
        return self.host if self._is_on_host else self.device

    def to_host(self) -> Tensor:
        """Move the values to the host, unless they are there."""
        if not self._is_on_host and self.host is not self.device:
            self.host.copy_(self.device)
        self._is_on_host = True
        return self.host

    def to_device(self) -> Tensor:
        """Move the values to the device, unless they are there."""
        if self._is_on_host:
            self.restore_from_host()
        return self.device

    def restore_from_host(self) -> None:
        """Replace the device's values by those that were last on the host."""
        if self.host is not self.device:
            self.device.copy_(self.host)
        self._is_on_host = False

    def overwrite(self) -> Tensor:
        """The device's vector, for new values."""
        self._is_on_host = False
        return self.device
