"""Device on which a rank computes, host or GPU: transfers, events and times of operations.

On a GPU only the consumer of a result waits for its operation: messages enter and leave by copies
on separate streams, to and from pinned memory, while the next operation computes. The host is one
operation ahead of the GPU and no further, so that it learns in time when each has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any
"""A point in the work of the device, which it may not have reached; a CUDA event or a time."""


class DeviceBackend(Protocol):
    """Memory and time of the device that computes.

    Attributes
    ----------
    max_pending
        Number of operations that may be issued before the previous one has ended.
    """

    max_pending: int

    def begin_step(self) -> None:
        """Start of a step, when no operation is pending."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory for a message; thread-safe."""

    def to_device(self, message: Tensor) -> Tensor:
        """Make a message in host memory available to later operations."""

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy the result of the operations so far to host memory."""

    def record_event(self) -> Event:
        """Record an event after all operations issued so far."""

    def wait_for_event(self, event: Event) -> float:
        """Wait for an event of this step; returns its time on the monotonic clock."""


class HostBackend:
    """Operations compute in host memory and have ended when they return."""

    max_pending = 0

    def begin_step(self) -> None:
        """No operation can be pending."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `DeviceBackend`."""
        return torch.empty(shape, dtype=dtype)

    def to_device(self, message: Tensor) -> Tensor:
        """Return the same memory."""
        return message

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return the same memory, made contiguous."""
        return lambda: tensor.detach().contiguous()

    def record_event(self) -> float:
        """The current time."""
        return time.monotonic()

    def wait_for_event(self, event: Event) -> float:
        """The time of the event."""
        return float(event)


HOST: DeviceBackend = HostBackend()


class CudaEvent:
    """An event for which any thread may wait.

    The current GPU of a new thread is the first one; waiting without setting it would create a CUDA
    context there.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        """Wait for the event."""
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def elapsed_time(self, other: CudaEvent) -> float:
        """Milliseconds between two events that have occurred."""
        with torch.cuda.device(self._device):
            return float(self._event.elapsed_time(other._event))


class CudaStreams:
    """A GPU by ``torch.cuda``; becomes this thread's current one."""

    def __init__(self, device: torch.device) -> None:
        # leaving a stream resets the current GPU of the thread
        torch.cuda.set_device(device)
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """Create a stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def compute_stream(self) -> torch.cuda.Stream:
        """The thread's current stream of this GPU."""
        return torch.cuda.current_stream(self._device)

    def wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Make later work of one stream wait for earlier work of another."""
        stream.wait_stream(other)

    def event(self, stream: torch.cuda.Stream, *, timing: bool) -> CudaEvent:
        """Record an event behind all work of a stream; threads that wait for copies sleep."""
        event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=timing, blocking=not timing
        )
        event.record(stream)
        return CudaEvent(event, self._device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory, which pending copies no longer read."""
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        return tensor.is_pinned()

    def copy_to_device(self, message: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Copy pinned memory to GPU memory on a stream."""
        with torch.cuda.stream(stream):
            return message.to(self._device, non_blocking=True)

    def copy_to_host(self, host_tensor: Tensor, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy to pinned memory on a stream."""
        with torch.cuda.stream(stream):
            host_tensor.copy_(tensor, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the memory of a tensor until a stream has used it."""
        tensor.record_stream(stream)


class GpuBackend:
    """Operations run on a GPU's current stream; copies have one stream per direction."""

    max_pending = 1

    def __init__(self, gpu: CudaStreams) -> None:
        self._gpu = gpu
        self._d2h_stream, self._h2d_stream = gpu.stream(), gpu.stream()
        self.begin_step()

    def begin_step(self) -> None:
        """Start counting a step's time: a GPU's event times have few digits."""
        self._start_event = self.record_event()
        self._start_event.synchronize()
        self._start_s = time.monotonic()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory from an allocator that keeps it while a copy reads it."""
        return self._gpu.pinned(shape, dtype)

    def to_device(self, message: Tensor) -> Tensor:
        """See `DeviceBackend`; earlier operations do not delay it."""
        gpu, compute_stream = self._gpu, self._gpu.compute_stream()
        if not gpu.is_pinned(message):
            message = self.host_buffer(tuple(message.shape), message.dtype).copy_(message)
        on_device = gpu.copy_to_device(message, self._h2d_stream)
        gpu.wait(compute_stream, self._h2d_stream)
        gpu.record_stream(on_device, compute_stream)
        return on_device

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See `DeviceBackend`; later operations do not delay it."""
        tensor = tensor.detach().contiguous()
        host_tensor = self.host_buffer(tuple(tensor.shape), tensor.dtype)
        self._gpu.wait(self._d2h_stream, self._gpu.compute_stream())
        self._gpu.copy_to_host(host_tensor, tensor, self._d2h_stream)
        # free it then, although sending takes longer
        self._gpu.record_stream(tensor, self._d2h_stream)
        copied = self._gpu.event(self._d2h_stream, timing=False)

        def ready() -> Tensor:
            copied.synchronize()
            return host_tensor

        return ready

    def record_event(self) -> Event:
        """An event behind all operations."""
        return self._gpu.event(self._gpu.compute_stream(), timing=True)

    def wait_for_event(self, event: Event) -> float:
        """See `DeviceBackend`."""
        event.synchronize()
        # the event precedes the start of the step slightly
        event_s = self._start_s + float(self._start_event.elapsed_time(event)) / 1e3
        return min(event_s, time.monotonic())


def make_backend(device: torch.device) -> DeviceBackend:
    """The backend of a device."""
    return GpuBackend(CudaStreams(device)) if device.type == "cuda" else HOST
